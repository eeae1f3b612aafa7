"""The loads of one replay, one after the other: each with a fresh store, on an empty directory, with the kernel's cache dropped if so asked.

What cannot work is said before anything runs: a budget that holds not even one request, a disk without room. The report is whole after
each load, and after Ctrl-C: then `partial` is true and the run that was stopped counts what was done.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Protocol

from flatcake_client.replay.contents import BODY_EVERY, Contents
from flatcake_client.replay.device import Device, drop_caches, file_system
from flatcake_client.replay.driver import Engine, Run, pages_slots
from flatcake_client.replay.maximum import ideal_blocks, oracle_blocks
from flatcake_client.replay.metrics import run_document, summarise
from flatcake_client.replay.options import Options
from flatcake_client.replay.queues import OneQueue
from flatcake_client.replay.system import Budget, Pages, System, counted_since, open_adapter
from flatcake_client.replay.systems import FlatCakeOptions, FlatCakeSystem, NoSystem
from flatcake_client.replay.workload import Workload, shape
from flatcake_client.scheduler import Queues, TwoQueues
from flatcake_transport.profiles import PROFILES, generate
from flatcake_transport.trace import read_trace
from flatcake_transport.units import approximate_size
from flatcake_transport.window import aligned_buffer

FORMAT: Final = "flatcake-replay/1"
SPARE_BYTES: Final = 1 << 30  # of the disk, left to others
SETTLE_TIMEOUT_S: Final = 30.0


class Watcher(Protocol):
    """Whom the sweep tells how far it is."""

    def load(self, load: float, requests: int) -> None: ...
    def request(self) -> None: ...
    def saved(self, document: dict[str, Any]) -> None: ...


class Sweep:
    """Runs once; `stop` may be called from a signal handler."""

    def __init__(self, options: Options, command: Sequence[str] = ()) -> None:
        """Reads the trace and checks what was asked for.

        Raises: ValueError: it makes no sense, or does not fit. OSError: the trace cannot be read.
        """
        self._options, self._command = options, list(command)
        self._run: Run | None = None
        self._stopped = threading.Event()
        self.workload = _workload(options)
        self._plane_bytes = _plane_bytes(options, self.workload)
        self._engine = Engine(
            options.prefill_tokens_per_s,
            options.workers,
            options.timeout_s,
            all_prefetched=options.adapter is not None,
            stores=options.system != "none" or options.adapter is not None,
        )
        self._check_budget()
        self._slots = pages_slots(self.workload, self._engine, options.pages_bytes, self._block_bytes)

    @property
    def _block_bytes(self) -> int:
        return self._options.planes * self._plane_bytes

    def stop(self) -> None:
        self._stopped.set()
        run = self._run
        if run is not None:
            run.stop()

    def run(self, watcher: Watcher) -> dict[str, Any]:
        """All loads. The document of docs/replay.md.

        Raises: ValueError: the system refuses its budget, or there is no memory for the pages. Unavailable: it does not start.
        """
        options = self._options
        try:
            memory = aligned_buffer(self._slots * self._block_bytes)
        except OSError as error:
            raise ValueError(f"--pages-bytes {options.pages_bytes}: {error.strerror}; give less") from error
        pages = memory.reshape(self._slots, options.planes, self._plane_bytes)
        document = self._document()
        for load in options.loads:
            if self._stopped.is_set():
                break
            document["runs"].append(self._run_load(load, pages, watcher))
            document["partial"] = self._stopped.is_set() or len(document["runs"]) < len(options.loads)
            watcher.saved(document)
        document["partial"] = self._stopped.is_set() or len(document["runs"]) < len(options.loads)
        watcher.saved(document)
        return document

    def _run_load(self, load: float, pages: Pages, watcher: Watcher) -> dict[str, Any]:
        options, workload = self._options, self.workload
        every = 1 if options.verify_all else BODY_EVERY
        contents = Contents(options.planes, self._plane_bytes, body_every=every)
        with tempfile.TemporaryDirectory(
            prefix=".flatcake-replay-", dir=options.ssd_dir, ignore_cleanup_errors=True
        ) as at:
            budget = Budget(
                options.memory_bytes, options.ssd_bytes, Path(at), workload.block_tokens, self._plane_bytes,
                options.planes, pages,
            )  # fmt: skip
            dropped = options.drop_caches and drop_caches()
            system = self._open(budget)
            try:
                count = options.prefetches or system.prefetches_max
                queues = self._queues(count)
                run = Run(
                    workload, system, self._engine, pages, contents, queues, load=load, prefetches=count,
                    done=lambda _: watcher.request(),
                )  # fmt: skip
                self._run = run
                if self._stopped.is_set():
                    run.stop()
                run.warm_up()
                before = system.stats()
                watcher.load(load, len(workload.requests))
                device = Device(options.ssd_dir)
                whole = run.run()
                counts = device.counts()
                if whole:
                    system.settle(SETTLE_TIMEOUT_S)
                stats = counted_since(before, system.stats())
                settings = dict(system.settings) | {"caches_dropped": dropped, "prefetches": count}
            finally:
                self._run = None
                system.close()
        summary = summarise(run.records, workload.block_tokens, len(workload.requests))
        found = run_document(summary, stats, load=load, device=counts, settings=settings) | {"partial": not whole}
        if options.each_request:
            found["records"] = [asdict(record) for record in run.records]
        return found

    def _open(self, budget: Budget) -> System:
        options = self._options
        if options.adapter is not None:
            return open_adapter(options.adapter, budget)
        if options.system == "none":
            return NoSystem()
        told = FlatCakeOptions(
            options.ablation, options.endpoint, options.agent_context_tokens, options.short_reply_tokens
        )
        return FlatCakeSystem(budget, told, run_name=f"replay-{os.getpid()}-{budget.ssd_dir.name}")

    def _queues(self, prefetches: int) -> Queues[int]:
        if self._options.adapter is not None:
            return OneQueue(prefetches, in_order=False)
        return OneQueue(prefetches, in_order=True) if self._options.ablation == "one-queue" else TwoQueues(prefetches)

    def _check_budget(self) -> None:
        options, longest = self._options, self.workload.blocks_max * self._block_bytes
        if options.system == "none":
            return
        if options.ssd_bytes < longest:
            raise ValueError(
                f"--ssd-bytes {options.ssd_bytes} cannot hold one request: the longest has {self.workload.blocks_max} blocks, "
                f"{approximate_size(longest)}; give more, or less --max-tokens or --kv-bytes-per-token"
            )
        if not options.ssd_dir.is_dir():
            raise ValueError(f"--ssd-dir {options.ssd_dir} is no directory: give one on the disk to use")
        free = shutil.disk_usage(options.ssd_dir).free
        if not options.endpoint and free < options.ssd_bytes + SPARE_BYTES:
            raise ValueError(
                f"--ssd-dir {options.ssd_dir} has {approximate_size(free)} free, --ssd-bytes and 1 GiB to spare need "
                f"{approximate_size(options.ssd_bytes + SPARE_BYTES)}: give another directory, or less"
            )

    def _document(self) -> dict[str, Any]:
        options, workload = self._options, self.workload
        chains = [planned.numbers for planned in workload.requests]
        sessions = [planned.asked.session for planned in workload.requests]
        capacity = (options.memory_bytes + options.ssd_bytes) // self._block_bytes
        working_set = workload.stored_blocks
        fits = working_set <= capacity
        best = ideal_blocks(chains, workload.different_blocks)
        oracle = best if fits else oracle_blocks(chains, sessions, workload.different_blocks, capacity)
        return {
            "format": FORMAT,
            "partial": True,
            "command": self._command,
            "trace": {
                "name": options.trace.name if options.trace else f"profile {options.profile}",
                "requests": len(workload.requests),
                "sessions": len(set(sessions)),
                "input_tokens": workload.input_tokens,
                "block_tokens": workload.block_tokens,
                "blocks_max": workload.blocks_max,
                "different_blocks": working_set,
                "working_set_bytes": working_set * self._block_bytes,
                "duration_s": workload.requests[-1].arrival_s,
                "shaping": asdict(options.shaping),
            },
            "system": options.system,
            "ablation": options.ablation,
            "budget": {
                "memory_bytes": options.memory_bytes,
                "ssd_bytes": options.ssd_bytes,
                "block_bytes": self._block_bytes,
                "planes": options.planes,
                "plane_bytes": self._plane_bytes,
                "pages_bytes": self._slots * self._block_bytes,
            },
            "engine": {
                "prefill_tokens_per_s": options.prefill_tokens_per_s,
                "workers": options.workers,
                "kv_bytes_per_token": options.kv_bytes_per_token,
            },
            "machine": {"cpus": os.cpu_count(), "file_system": file_system(options.ssd_dir)},
            "holds_working_set": fits,
            "ideal_hit": sum(best) * workload.block_tokens / workload.input_tokens,
            "oracle_hit": sum(oracle) * workload.block_tokens / workload.input_tokens,
            "runs": [],
        }


def _workload(options: Options) -> Workload:
    if options.trace is None:
        profile = PROFILES[options.profile]
        requests = generate(profile, sessions=options.profile_sessions, seed=options.shaping.seed)
    else:
        if not options.trace.exists():
            raise ValueError(f"{options.trace} does not exist: give a trace, or --profile NAME")
        requests = read_trace(options.trace, spread_s=options.spread_s)
    return shape(requests, options.shaping)


def _plane_bytes(options: Options, workload: Workload) -> int:
    block_bytes = options.kv_bytes_per_token * workload.block_tokens
    if block_bytes % options.planes:
        raise ValueError(f"blocks of {block_bytes} bytes do not divide into {options.planes} --planes")
    return block_bytes // options.planes


def on_signal(sweep: Sweep) -> Callable[[int, object], None]:
    """A handler for SIGINT and SIGTERM. Again and again is fine: a terminal and a parent may both send it."""
    return lambda _number, _frame: sweep.stop()
