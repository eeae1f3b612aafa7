"""LMCache as a system of `flatcake replay`: its storage manager in this process, L1 in memory, L2 `fs_native` with O_DIRECT.

That manager is what `lmcache server` runs behind its RPC; engines talk to the same four calls: reserve and finish a write, prefetch
and read. One block is one object. Objects come to L1 first and are copied into the engine's pages from there, as LMCache
does; a restore goes in batches, some ahead, so that the disk reads one batch while another is copied.

bench/peers/README.md says why each setting is what it is. Invariants: batches under way in all restores never want more of L1 than
a share of it, so prefetches do not fail for each other's sake; one that found no room all the same is asked again until the
deadline; what the L1 has no room for is put again until the deadline.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flatcake_client.replay.system import Asked, Budget, Found, Ledger, Pages, Slots, SystemStats

GIB, MIB = 1 << 30, 1 << 20
BATCH_BYTES = 64 * MIB
AHEAD = 3  # batches of one restore that are read while another is copied
L1_SHARE = 0.35  # of L1 for reads under way: what eviction keeps free of it
PAUSE_S = 0.005
MODEL = "replay"


@dataclass(frozen=True, slots=True)
class Settings:
    """What LMCache is started with. Pure: `for_budget` decides."""

    memory_bytes: int
    ssd_bytes: int
    ssd_path: Path
    block_bytes: int
    num_workers: int = 8
    l1_trigger_watermark: float = 0.6
    l1_eviction_ratio: float = 0.2
    l2_trigger_watermark: float = 0.9
    l2_eviction_ratio: float = 0.1
    prefetch_max_in_flight: int = 16
    store_policy: str = (
        "default"  # "skip_l1": memory is a buffer only, its blocks leave it as soon as they are on the SSD
    )

    @classmethod
    def for_budget(cls, budget: Budget) -> Settings:
        """Raises: ValueError: the memory holds too few blocks to read through."""
        if budget.memory_bytes < 8 * budget.block_bytes:
            raise ValueError(
                f"memory of {budget.memory_bytes} bytes: LMCache reads through it and needs 8 blocks at least"
            )
        return cls(budget.memory_bytes, budget.ssd_bytes, budget.ssd_dir.resolve() / "lmcache", budget.block_bytes)

    @property
    def batch_blocks(self) -> int:
        """Of one prefetch: several of them fit the share of L1."""
        share = int(self.memory_bytes * L1_SHARE) // (AHEAD + 1)
        return max(1, min(BATCH_BYTES, share) // self.block_bytes)

    @property
    def batches_at_once(self) -> int:
        return max(1, int(self.memory_bytes * L1_SHARE) // (self.batch_blocks * self.block_bytes))

    def adapter_spec(self) -> dict[str, Any]:
        """The value of `--l2-adapter`, as `lmcache server` takes it."""
        return {
            "type": "fs_native",
            "base_path": str(self.ssd_path),
            "num_workers": self.num_workers,
            "use_odirect": True,
            "max_capacity_gb": self.ssd_bytes / GIB,
            "eviction": {
                "eviction_policy": "LRU",
                "trigger_watermark": self.l2_trigger_watermark,
                "eviction_ratio": self.l2_eviction_ratio,
            },
        }


def open_system(budget: Budget) -> LMCache:
    """Raises: ValueError: a budget it cannot work with, or a store policy that it does not have."""
    settings = Settings.for_budget(budget)
    policy = os.environ.get("FLATCAKE_PEER_LMCACHE", settings.store_policy)
    if policy not in ("default", "skip_l1"):
        raise ValueError(f"FLATCAKE_PEER_LMCACHE={policy}: default or skip_l1")
    return LMCache(replace(settings, store_policy=policy))


class LMCache:
    """A `System`. Thread-safe: the storage manager is, and the counters have a lock of their own."""

    name = "lmcache"
    prefetches_max = 8  # LMCache's own default of prefetches in flight

    def __init__(self, settings: Settings) -> None:
        os.environ["LMCACHE_LOG_LEVEL"] = "CRITICAL"  # each refused prefetch is a warning; we count them
        os.environ["LMCACHE_TRACK_USAGE"] = "false"
        self._settings = settings
        settings.ssd_path.mkdir(parents=True, exist_ok=True)
        self._library = Library(settings)
        self._counts = Counts()
        self._ledger = Ledger(int(settings.ssd_bytes * settings.l2_trigger_watermark) // settings.block_bytes)
        self._room = threading.BoundedSemaphore(settings.batches_at_once)
        self._lookups = threading.Lock()

    @property
    def settings(self) -> Mapping[str, Any]:
        return asdict(self._settings) | {"ssd_path": str(self._settings.ssd_path), "version": self._library.version}

    def lookup(self, asked: Asked) -> Found:
        """L1 is asked through the manager, L2 through a client of its own for the files: nothing is loaded yet."""
        keys = self._library.keys(asked.keys)
        known = self._ledger.known(keys)
        media = self._where(keys)
        blocks = next((i for i, medium in enumerate(media) if medium is None), len(keys))
        self._ledger.miss(known, (key for key, medium in zip(keys, media, strict=True) if medium is None))
        sizes = {medium: media[:blocks].count(medium) * self._settings.block_bytes for medium in ("memory", "ssd")}
        return Found(blocks, sizes, keys[:blocks])

    def _where(self, keys: Sequence[Any]) -> list[str | None]:
        """Each key's medium: memory first; None: nowhere."""
        media: list[str | None] = [None] * len(keys)
        if not keys:
            return media
        for i in self._library.in_l1(keys):
            media[i] = "memory"
        missing = [i for i, medium in enumerate(media) if medium is None]
        with self._lookups:  # the client answers whoever drains it
            for i, there in zip(missing, self._library.in_l2([keys[i] for i in missing]), strict=True):
                media[i] = "ssd" if there else None
        return media

    def restore(self, asked: Asked, found: Found, pages: Pages, slots: Slots, timeout_s: float) -> int:
        del asked
        deadline_s = time.monotonic() + timeout_s
        keys, step = found.pin, self._settings.batch_blocks
        waiting: deque[tuple[int, Any]] = deque()
        starts = iter(range(0, found.blocks, step))
        usable, whole = 0, True
        while True:
            while whole and len(waiting) <= AHEAD and (start := self._admit(starts, waiting, deadline_s)) is not None:
                waiting.append((start, self._library.prefetch(keys[start : start + step])))
            if not waiting:
                break
            start, handle = waiting.popleft()
            wanted = keys[start : start + step]
            try:
                count = self._land(wanted, handle, pages, slots[start:], deadline_s, copy=whole)
            finally:
                self._room.release()
            usable += count if whole else 0
            whole = whole and count == len(wanted)
        self._counts.restored(cancelled=usable < found.blocks and time.monotonic() >= deadline_s)
        return usable

    def _admit(self, starts: Iterator[int], waiting: deque[tuple[int, Any]], deadline_s: float) -> int | None:
        """The next batch's start, when L1 has room for it; waits only where nothing of ours is under way."""
        left_s = max(0.0, deadline_s - time.monotonic())
        if not (self._room.acquire(blocking=False) or (not waiting and self._room.acquire(timeout=left_s))):
            return None
        start = next(starts, None)
        if start is None:
            self._room.release()
        return start

    def _land(
        self, keys: Sequence[Any], handle: Any, pages: Pages, slots: Slots, deadline_s: float, *, copy: bool
    ) -> int:
        """The prefix of one batch that is in the pages. A prefetch that found no room in L1 is asked again."""
        done = 0
        while True:
            hits, memory = self._library.wait(handle, deadline_s)
            if hits:
                ready = keys[done : done + hits]
                copied = self._library.read(ready, self._places(pages, slots[done : done + hits]) if copy else [])
                self._counts.read(memory * self._settings.block_bytes, (copied - memory) * self._settings.block_bytes)
                done += copied
            if done == len(keys) or not copy or time.monotonic() >= deadline_s:
                return done
            media = self._where(keys[done : done + 1])
            if media[0] is None:
                return done  # gone: nothing to wait for
            self._counts.no_room()
            time.sleep(PAUSE_S)
            handle = self._library.prefetch(keys[done:])

    def store(self, asked: Asked, first_block: int, pages: Pages, slots: Slots, timeout_s: float) -> int:
        """One batch after the other through L1; its write to L2 goes on behind our back."""
        deadline_s = time.monotonic() + timeout_s
        keys = self._library.keys(asked.keys)[first_block:]
        places = self._places(pages, slots[first_block : len(asked.keys)])
        step, kept = self._settings.batch_blocks, 0
        for start in range(0, len(keys), step):
            waiting = list(range(start, min(start + step, len(keys))))
            while waiting:
                taken = self._library.write([keys[i] for i in waiting], [places[i] for i in waiting])
                refused = [i for i, was_taken in zip(waiting, taken, strict=True) if not was_taken]
                there = self._where([keys[i] for i in refused])  # refused, too, is what L1 has already
                done = set(waiting) - {i for i, medium in zip(refused, there, strict=True) if medium is None}
                kept += len(done)
                self._ledger.accept(keys[i] for i in done)
                waiting = [i for i in waiting if i not in done]
                if waiting and time.monotonic() >= deadline_s:
                    self._counts.refused(len(waiting), retried=0)
                    break
                if waiting:
                    self._counts.refused(0, retried=len(waiting))
                    time.sleep(PAUSE_S)
        return kept

    def _places(self, pages: Pages, slots: Slots) -> list[int]:
        places: list[int] = (pages.ctypes.data + slots.astype(np.int64) * self._settings.block_bytes).tolist()
        return places

    def settle(self, timeout_s: float) -> None:
        """Until all that L1 took is on the SSD, or has been dropped from both."""
        deadline_s = time.monotonic() + timeout_s
        waiting = self._ledger.kept()
        while waiting and time.monotonic() < deadline_s:
            with self._lookups:
                there = self._library.in_l2(waiting)
            waiting = [key for key, is_there in zip(waiting, there, strict=True) if not is_there]
            media = self._where(waiting)
            waiting = [key for key, medium in zip(waiting, media, strict=True) if medium == "memory"]
            time.sleep(0.1)

    def stats(self) -> SystemStats:
        return self._counts.stats(self._ledger)

    def close(self) -> None:
        self._library.close()
        shutil.rmtree(self._settings.ssd_path, ignore_errors=True)


class Library:
    """LMCache's own calls, and nothing else: the only place that imports it."""

    def __init__(self, settings: Settings) -> None:
        import torch
        from lmcache.lmcache_fs import LMCacheFSClient
        from lmcache.v1.distributed import api, config
        from lmcache.v1.distributed.l2_adapters import native_connector_l2_adapter
        from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
        from lmcache.v1.distributed.storage_manager import StorageManager

        self._block_bytes = settings.block_bytes
        self._api: Any = api
        self._layout = api.MemoryLayoutDesc([torch.Size([settings.block_bytes])], [torch.uint8])
        self._name_of = native_connector_l2_adapter._object_key_to_string  # noqa: SLF001 - the name of the object's file
        spec = argparse.Namespace(l2_adapter=[json.dumps(settings.adapter_spec())])
        self._manager: Any = StorageManager(
            config.StorageManagerConfig(
                config.L1ManagerConfig(
                    config.L1MemoryManagerConfig(settings.memory_bytes, use_lazy=False, shm_name="")
                ),
                config.EvictionConfig("LRU", settings.l1_trigger_watermark, settings.l1_eviction_ratio),
                parse_args_to_l2_adapters_config(spec),
                store_policy=settings.store_policy,
                prefetch_max_in_flight=settings.prefetch_max_in_flight,
            )
        )
        self._files: Any = LMCacheFSClient(str(settings.ssd_path), 1, "", True, 0)

    @property
    def version(self) -> str:
        from importlib.metadata import version

        return version("lmcache")

    def keys(self, keys: Any) -> list[Any]:
        return [self._api.ObjectKey(key.tobytes(), MODEL, 0) for key in keys]

    def _spec(self, keys: Sequence[Any], **options: Any) -> Any:
        return self._api.PrefetchTaskSpec([self._api.GroupedObjectKeys(list(keys), 0, self._layout)], **options)

    def in_l1(self, keys: Sequence[Any]) -> list[int]:
        """Which of them are in L1, by position."""
        spec = self._spec(keys, fetching_policy="full", lock_mode=self._api.PrefetchLockMode.NO_LOCK)
        handle = self._manager.submit_prefetch_task(spec, skip_l2=True)
        self._manager.wait_prefetch_status(handle, 10.0)
        result = self._manager.query_prefetch_status(handle)
        return [] if result is None else list(result.hit_cells[0].get_indices_list())

    def in_l2(self, keys: Sequence[Any]) -> list[bool]:
        """Whether each has a file. One caller at a time."""
        if not keys:
            return []
        wanted = int(self._files.submit_batch_exists([self._name_of(key) for key in keys]))
        while True:
            for number, good, _error, results in self._files.drain_completions():
                if int(number) == wanted:
                    return list(results) if good and results is not None else [False] * len(keys)
            time.sleep(0.0005)

    def prefetch(self, keys: Sequence[Any]) -> Any:
        return self._manager.submit_prefetch_task(self._spec(keys))

    def wait(self, handle: Any, deadline_s: float) -> tuple[int, int]:
        """Objects of the prefix that are in L1 and locked, and how many of them were there before.

        Waits past the deadline, too, for a prefetch under way: its buffers are LMCache's, and its locks must be released.
        """
        del deadline_s
        while not self._manager.wait_prefetch_status(handle, 60.0):
            pass
        result = self._manager.query_prefetch_status(handle)
        if result is None:
            return 0, 0
        return result.hit_cells[0].popcount(), result.l1_hit_cells[0].popcount()

    def read(self, keys: Sequence[Any], places: Sequence[int]) -> int:
        """Copy locked objects to the places and unlock them; no places: only unlock. How many were copied."""
        copied = 0
        if not places:
            self._manager.finish_read_prefetched(list(keys))
            return 0
        with self._manager.read_prefetched_results(list(keys)) as objects:
            if objects is None:
                return 0  # it has unlocked them itself
            for place, one in zip(places, objects, strict=True):
                ctypes.memmove(place, one.data_ptr, self._block_bytes)
                copied += 1
        self._manager.finish_read_prefetched(list(keys))
        return copied

    def write(self, keys: Sequence[Any], places: Sequence[int]) -> list[bool]:
        """Which of them L1 took."""
        objects = self._manager.reserve_write(list(keys), self._layout)
        for key, place in zip(keys, places, strict=True):
            if key in objects:
                ctypes.memmove(objects[key].data_ptr, place, self._block_bytes)
        self._manager.finish_write(list(objects))
        return [key in objects for key in keys]

    def close(self) -> None:
        self._files.close()
        self._manager.close()


class Counts:
    """What the adapter saw, under a lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read = {"memory": 0, "ssd": 0}
        self._cancelled = self._rejected = self._retried = self._no_room = 0

    def refused(self, blocks: int, *, retried: int) -> None:
        with self._lock:
            self._rejected += blocks
            self._retried += retried

    def no_room(self) -> None:
        with self._lock:
            self._no_room += 1

    def read(self, memory_bytes: int, ssd_bytes: int) -> None:
        with self._lock:
            self._read["memory"] += memory_bytes
            self._read["ssd"] += max(0, ssd_bytes)

    def restored(self, *, cancelled: bool) -> None:
        with self._lock:
            self._cancelled += cancelled

    def stats(self, ledger: Ledger) -> SystemStats:
        with self._lock:
            return SystemStats(
                bytes_read=dict(self._read),
                cancelled_restores=self._cancelled,
                rejected_blocks=self._rejected,
                lost_blocks=ledger.lost,
                dropped_blocks=ledger.dropped,
                staging_bytes=0,
                more={"puts_retried": self._retried, "prefetches_without_room": self._no_room},
            )
