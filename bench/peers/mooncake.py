"""Mooncake Store as a system of `flatcake replay`: a master of its own, the store's client, its SSD offload over TCP.

    embedded    the store's client lives in this process and holds memory and SSD (Mooncake's "mode A"); the default
    client      `mooncake_client --enable_offload` holds them in a process of its own; this one reads over TCP

Both are Mooncake's own deployments; which to run: FLATCAKE_PEER_MOONCAKE. bench/peers/README.md says why each setting is what it
is, and what was seen without it. One block is one object, put from and read into the engine's pages in place.

Invariants: batches under way never hold more than the staging has room for, so none fails for that; what the store refuses
because its memory is full is put again until the deadline; both processes end with `close`, or with this process at the latest.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from flatcake_client.replay.system import Asked, Budget, Found, Ledger, Pages, Slots, SystemStats

Deployment = Literal["embedded", "client"]

PACKAGE = "mooncake-transfer-engine-non-cuda"
MIB = 1 << 20
BATCH_BYTES = 64 * MIB  # a call's: from 64 to 256 MiB made no difference that could be told from noise
READERS = 4  # calls under way: one waits for the disk while another is copied; more gained nothing on two cores
STAGING_BYTES = 1280 * MIB  # Mooncake's default
STAGING_USABLE = 0.9  # what vLLM's Mooncake connector fills of it; the rest is lost to alignment and fragments
BUCKET_BYTES, BUCKET_KEYS = 256 * MIB, 500  # Mooncake's defaults
LOCAL_BUFFER_BYTES = 16 * MIB  # for calls without registered memory, of which there are none
TCP_SLICE_BYTES = MIB
PAUSE_S = 0.05
START_TIMEOUT_S, END_TIMEOUT_S = 60.0, 20.0
NO_SPACE, BUFFER_OVERFLOW, NOT_FOUND, LEASE_EXPIRED = -200, -10, -704, -707


@dataclass(frozen=True, slots=True)
class Settings:
    """What Mooncake is started with. Pure: `for_budget` decides, the commands and the environment follow from it."""

    deployment: Deployment
    memory_bytes: int
    ssd_bytes: int
    ssd_path: Path
    staging_bytes: int
    block_bytes: int
    lease_ms: int = 1000
    eviction_high_watermark: float = 0.7
    eviction_ratio: float = 0.35
    heartbeat_s: int = 1
    gc_ttl_ms: int = 60_000
    client_threads: int = 8

    @classmethod
    def for_budget(cls, budget: Budget, deployment: Deployment) -> Settings:
        """Raises: ValueError: blocks are larger than what Mooncake groups on its SSD, or the memory holds too few."""
        if budget.block_bytes > BUCKET_BYTES:
            raise ValueError(f"blocks of {budget.block_bytes} bytes: Mooncake's buckets hold {BUCKET_BYTES}")
        if budget.memory_bytes < 8 * budget.block_bytes:
            raise ValueError(
                f"memory of {budget.memory_bytes} bytes: Mooncake stages writes in it and needs 8 blocks at least"
            )
        return cls(
            deployment,
            budget.memory_bytes,
            budget.ssd_bytes,
            budget.ssd_dir.resolve() / "mooncake",
            STAGING_BYTES,
            budget.block_bytes,
        )

    @property
    def batch_blocks(self) -> int:
        return max(1, BATCH_BYTES // self.block_bytes)

    @property
    def batches_at_once(self) -> int:
        """So many that the staging has room for all."""
        return max(1, min(READERS, int(self.staging_bytes * STAGING_USABLE) // (self.batch_blocks * self.block_bytes)))

    @property
    def bucket_bytes(self) -> int:
        """What goes to the SSD as one file, and from it. Objects wait in memory until a bucket is full: one that an eviction
        does not fill is never written, and puts are refused for ever. So four of them fit what an eviction picks."""
        evicted_bytes = int(self.memory_bytes * self.eviction_ratio)
        return max(self.block_bytes, min(BUCKET_BYTES, self.ssd_bytes // 16, evicted_bytes // 4))

    def master_command(self, binary: Path, rpc_port: int, metrics_port: int) -> list[str]:
        return [
            str(binary),
            "--rpc_address=127.0.0.1",
            f"--rpc_port={rpc_port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={metrics_port}",
            "--enable_offload=true",
            "--offload_on_evict=true",
            f"--default_kv_lease_ttl={self.lease_ms}",
            f"--eviction_high_watermark_ratio={self.eviction_high_watermark}",
            f"--eviction_ratio={self.eviction_ratio}",
            "--logtostderr",
        ]

    def client_command(self, binary: Path, rpc_port: int, client_port: int) -> list[str]:
        return [
            str(binary),
            f"--master_server_address=127.0.0.1:{rpc_port}",
            "--host=127.0.0.1",
            f"--port={client_port}",
            "--protocol=tcp",
            "--metadata_server=P2PHANDSHAKE",
            f"--global_segment_size={self.memory_bytes}",
            "--enable_offload=true",
            f"--threads={self.client_threads}",
            "--logtostderr",
        ]

    def environment(self) -> dict[str, str]:
        """Of the process that holds memory and SSD: this one, or `mooncake_client`; and of TCP on both sides."""
        return {
            "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(self.ssd_path),
            "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": "bucket_storage_backend",
            "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(self.staging_bytes),
            "MOONCAKE_OFFLOAD_USE_URING": "true",
            "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": str(self.heartbeat_s),
            "MOONCAKE_OFFLOAD_CLIENT_BUFFER_GC_TTL_MS": str(self.gc_ttl_ms),
            "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": str(self.ssd_bytes),
            "MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES": str(self.bucket_bytes),
            "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": str(BUCKET_KEYS),
            "MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE": str(self.ssd_bytes),
            "MOONCAKE_OFFLOAD_BUCKET_MAX_PHYSICAL_BYTES": str(self.ssd_bytes),
            "MOONCAKE_OFFLOAD_BUCKET_EVICTION_POLICY": "lru",
            "MOONCAKE_OFFLOAD_ENABLE_DISK_WATERMARK_EVICTION": "false",
            "MC_TCP_SLICE_SIZE": str(TCP_SLICE_BYTES),
            "MC_TCP_BIND_ADDRESS": "127.0.0.1",
            "MC_LOG_LEVEL": "ERROR",
            "GLOG_minloglevel": "3",
        }


def open_system(budget: Budget) -> Mooncake:
    """Raises: ValueError: a budget it cannot work with, or it does not start; the message ends with its log."""
    wanted = os.environ.get("FLATCAKE_PEER_MOONCAKE", "embedded")
    deployment: Deployment | None = next((one for one in get_args(Deployment) if one == wanted), None)
    if deployment is None:
        raise ValueError(f"FLATCAKE_PEER_MOONCAKE={wanted}: embedded or client")
    return Mooncake(Settings.for_budget(budget, deployment), budget.pages)


class Mooncake:
    """A `System`. Thread-safe: Mooncake's client is, and its counters have a lock of their own."""

    name = "mooncake"
    prefetches_max = READERS  # measured: see bench/peers/README.md

    def __init__(self, settings: Settings, pages: Pages) -> None:
        os.environ.update(
            settings.environment()
        )  # the library reads this process's own; its log level when it is loaded
        from mooncake.store import MooncakeDistributedStore

        self._settings = settings
        self._counts = Counts()
        self._ledger = Ledger(settings.ssd_bytes // settings.block_bytes)
        self._pool = ThreadPoolExecutor(settings.batches_at_once, thread_name_prefix="mooncake")
        settings.ssd_path.mkdir(parents=True, exist_ok=True)
        self._processes = Processes(settings)
        self._store: Any = MooncakeDistributedStore()
        self._address = pages.ctypes.data
        try:
            self._processes.start_master()
            self._open(pages)
        except BaseException:
            self.close()
            raise

    @property
    def settings(self) -> Mapping[str, Any]:
        return asdict(self._settings) | {"ssd_path": str(self._settings.ssd_path), "version": version(PACKAGE)}

    def _open(self, pages: Pages) -> None:
        embedded = self._settings.deployment == "embedded"
        if not embedded:
            self._processes.start_client()
        result = self._store.setup(
            f"127.0.0.1:{free_port()}",
            "P2PHANDSHAKE",
            self._settings.memory_bytes if embedded else 0,
            LOCAL_BUFFER_BYTES,
            "tcp",
            "",
            f"127.0.0.1:{self._processes.rpc_port}",
            enable_ssd_offload=embedded,
            ssd_offload_path=str(self._settings.ssd_path) if embedded else "",
        )
        if result != 0:
            raise ValueError(f"mooncake's client does not start ({result}):\n{self._processes.log_tail()}")
        if self._store.register_buffer(self._address, pages.nbytes) != 0:
            raise ValueError(f"mooncake does not register pages of {pages.nbytes} bytes")
        self._await_space()

    def _await_space(self) -> None:
        """Until a put is taken: with a client of its own its memory comes a moment after it."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s and self._processes.alive():
            if self._store.put("ready", b"ready") == 0:
                return
            time.sleep(PAUSE_S)
        raise ValueError(f"mooncake takes no objects:\n{self._processes.log_tail()}")

    def lookup(self, asked: Asked) -> Found:
        names = key_names(asked.keys)
        known = self._ledger.known(names)
        stored = self._store.batch_is_exist(names)
        usable = next((i for i, there in enumerate(stored) if there != 1), len(names))
        replicas = self._store.batch_get_replica_desc(names[:usable]) if usable else {}
        media = [medium_of(replicas.get(name, ())) for name in names[:usable]]
        blocks = next((i for i, medium in enumerate(media) if medium is None), usable)
        media += [
            "?" if there == 1 else None for there in stored[usable:]
        ]  # behind the prefix: there or not, that is all
        self._ledger.miss(known, (name for name, medium in zip(names, media, strict=True) if medium is None))
        sizes = {medium: media[:blocks].count(medium) * self._settings.block_bytes for medium in ("memory", "ssd")}
        return Found(blocks, sizes, (names[:blocks], media[:blocks]))

    def restore(self, asked: Asked, found: Found, pages: Pages, slots: Slots, timeout_s: float) -> int:
        """Batches go out in order, some at once; each is read again until the deadline where only room or time was missing."""
        del asked
        deadline_s = time.monotonic() + timeout_s
        names, media = found.pin
        step = self._settings.batch_blocks
        tasks = [
            self._pool.submit(self._read, names[i : i + step], self._places(pages, slots[i : min(i + step, found.blocks)]), deadline_s)
            for i in range(0, found.blocks, step)
        ]  # fmt: skip
        usable, whole = 0, True
        for task in tasks:  # all of them: when this returns nothing may write to the pages any more
            count, wanted = task.result()
            usable += count if whole else 0
            whole = whole and count == wanted
        self._counts.restored(
            media[:usable], self._settings.block_bytes, cancelled=not whole and time.monotonic() >= deadline_s
        )
        return usable

    def _read(self, names: Sequence[str], places: list[int], deadline_s: float) -> tuple[int, int]:
        """The prefix of one batch that is in place, and how much it should be."""
        size = self._settings.block_bytes
        done = 0
        while done < len(names) and time.monotonic() < deadline_s:
            results = self._store.batch_get_into(names[done:], places[done:], [size] * (len(names) - done))
            good = next((i for i, result in enumerate(results) if result != size), len(results))
            done += good
            if done == len(names):
                break
            self._counts.failed_read(results[good])
            if results[good] not in (BUFFER_OVERFLOW, LEASE_EXPIRED):
                break  # gone: nothing to wait for
            time.sleep(PAUSE_S)
        return done, len(names)

    def store(self, asked: Asked, first_block: int, pages: Pages, slots: Slots, timeout_s: float) -> int:
        """One batch after the other; what is refused for lack of memory is put again until the deadline."""
        deadline_s = time.monotonic() + timeout_s
        names = key_names(asked.keys)[first_block:]
        places = self._places(pages, slots[first_block : len(asked.keys)])
        size, step, kept = self._settings.block_bytes, self._settings.batch_blocks, 0
        for start in range(0, len(names), step):
            waiting = list(range(start, min(start + step, len(names))))
            while waiting:
                results = self._store.batch_put_from(
                    [names[i] for i in waiting], [places[i] for i in waiting], [size] * len(waiting)
                )
                taken = [names[i] for i, result in zip(waiting, results, strict=True) if result == 0]
                kept += len(taken)
                self._ledger.accept(taken)
                refused = [(i, result) for i, result in zip(waiting, results, strict=True) if result != 0]
                waiting = [i for i, result in refused if result == NO_SPACE]
                late = time.monotonic() >= deadline_s
                self._counts.refused(
                    len(refused) if late else len(refused) - len(waiting), retried=0 if late else len(waiting)
                )
                if late:
                    break
                if waiting:
                    time.sleep(PAUSE_S)
        return kept

    def _places(self, pages: Pages, slots: Slots) -> list[int]:
        places: list[int] = (pages.ctypes.data + slots.astype(np.int64) * self._settings.block_bytes).tolist()
        return places

    def settle(self, timeout_s: float) -> None:
        """Objects wait in memory until it fills: there is nothing under way but what the next heartbeats write."""
        time.sleep(min(timeout_s, 2.0 * self._settings.heartbeat_s))

    def stats(self) -> SystemStats:
        return self._counts.stats(self._settings.staging_bytes, self._ledger)

    def close(self) -> None:
        self._pool.shutdown()
        with contextlib.suppress(Exception):
            self._store.unregister_buffer(self._address)
        self._store.close()
        self._store = None  # its threads end with the object; before the master does, or they wait for it
        self._processes.close()


class Counts:
    """What the adapter saw, under a lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read = {"memory": 0, "ssd": 0}
        self._cancelled = self._rejected = self._retried = 0
        self._failed: dict[str, int] = {}

    def refused(self, blocks: int, *, retried: int) -> None:
        with self._lock:
            self._rejected += blocks
            self._retried += retried

    def failed_read(self, result: int) -> None:
        with self._lock:
            self._failed[str(result)] = self._failed.get(str(result), 0) + 1

    def restored(self, media: Sequence[str], block_bytes: int, *, cancelled: bool) -> None:
        with self._lock:
            for medium in self._read:
                self._read[medium] += media.count(medium) * block_bytes
            self._cancelled += cancelled

    def stats(self, staging_bytes: int, ledger: Ledger) -> SystemStats:
        with self._lock:
            return SystemStats(
                bytes_read=dict(self._read),
                cancelled_restores=self._cancelled,
                rejected_blocks=self._rejected,
                lost_blocks=ledger.lost,
                dropped_blocks=ledger.dropped,
                staging_bytes=staging_bytes,
                more={"puts_retried": self._retried, "reads_failed_by_code": dict(self._failed)},
            )


class Processes:
    """The master and, where it has one, the client, on loopback ports of their own; they die with us at the latest."""

    def __init__(self, settings: Settings) -> None:
        import mooncake

        self._settings = settings
        self._binaries = Path(str(mooncake.__file__)).parent
        self._log_path = settings.ssd_path.parent / "mooncake.log"
        self._running: list[subprocess.Popen[bytes]] = []
        self.rpc_port = free_port()

    def start_master(self) -> None:
        self._start(self._settings.master_command(self._binaries / "mooncake_master", self.rpc_port, free_port()))
        self._await_port(self.rpc_port)

    def start_client(self) -> None:
        port = free_port()
        self._start(self._settings.client_command(self._binaries / "mooncake_client", self.rpc_port, port))
        self._await_port(port)

    def _start(self, command: list[str]) -> None:
        """With setpriv, where the system has it, so that a killed replay leaves nobody behind."""
        guard = ["setpriv", "--pdeathsig", "TERM", "--"] if shutil.which("setpriv") else []
        environment = os.environ | self._settings.environment()
        with self._log_path.open("ab") as log:
            self._running.append(
                subprocess.Popen([*guard, *command], stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
            )

    def _await_port(self, port: int) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s and self.alive():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
                return
            time.sleep(PAUSE_S)
        raise ValueError(f"mooncake does not listen on port {port}:\n{self.log_tail()}")

    def alive(self) -> bool:
        return all(process.poll() is None for process in self._running)

    def log_tail(self) -> str:
        return self._log_path.read_text(errors="replace")[-2000:] if self._log_path.exists() else ""

    def close(self) -> None:
        for process in reversed(self._running):
            process.terminate()
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(END_TIMEOUT_S)
        self._running.clear()
        self._log_path.unlink(missing_ok=True)
        for path in self._settings.ssd_path.glob("*"):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._settings.ssd_path.rmdir()


def key_names(keys: NDArray[np.uint8]) -> list[str]:
    whole = np.ascontiguousarray(keys).tobytes().hex()
    width = 2 * keys.shape[1]
    return [whole[i : i + width] for i in range(0, len(whole), width)]


def medium_of(replicas: Sequence[Any]) -> str | None:
    """Where an object would be read from: memory first."""
    if any(replica.is_memory_replica() for replica in replicas):
        return "memory"
    return "ssd" if any(replica.is_local_disk_replica() for replica in replicas) else None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
