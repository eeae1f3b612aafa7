"""Memory to memory, and memory to paged slots: the path of the arena, and the last step of every restore.

    memory span <-> memory span        memory span <-> paged span

Host copies are cut into tasks of a few MiB, shared by a small pool and by whoever waits: one core does not reach the
memory's bandwidth, and a caller that works along needs no thread to be woken for a small copy. Copies below
`inline_bytes` are done in `submit`: waking anybody would cost more. Moves with an end on a device go to that
device's side stream (movers/device.py).

Invariant: sizes, slots and kinds of all moves are checked in `submit`, before the first byte moves.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from flatcake_transport.checksum import granule_checksums
from flatcake_transport.errors import Unavailable
from flatcake_transport.mover import Checks, MemorySpan, Move, MoverStats, PagedSpan, Region, Transfer
from flatcake_transport.movers.device import DeviceCopies
from flatcake_transport.movers.pool import Batch, Task, Workers
from flatcake_transport.paged import (
    Bytes,
    HostCopy,
    check_span,
    contiguous_bytes,
    host_array,
    on_device,
)

# 0.2 ms of copying: large beside taking a task, small beside a layer, and still in the cache for its checksums.
TASK_BYTES: Final = 2 << 20
# One part of a restore, or buffer of a store: a core copies it sooner than the disk brings the next, and threads that take turns at the
# interpreter for two halves of it cost a fifth of the whole (0.24 s of CPU a GB restored for 0.19).
INLINE_BYTES: Final = 4 << 20
THREADS_MAX: Final = 8  # memory bandwidth is reached before that


class MemoryMover:
    """A `Mover` within memory, host or CUDA. Thread-safe.

    Args:
        threads: threads of its own for host copies, besides the one that waits. Default: one less than the cores, at most 7.
        task_bytes: host copies are shared out in parts of about this size.
        inline_bytes: batches up to this size are copied in `submit`.
    """

    def __init__(
        self, *, threads: int | None = None, task_bytes: int = TASK_BYTES, inline_bytes: int = INLINE_BYTES
    ) -> None:
        """Raises: ValueError: tasks of no bytes, or fewer than 0 threads."""
        if task_bytes < 1:
            raise ValueError(f"task_bytes is {task_bytes}: expected 1 or more")
        if threads is None:
            threads = min(THREADS_MAX, len(os.sched_getaffinity(0))) - 1
        self._threads = threads
        self._workers = Workers("memory", threads)
        self._task_bytes = task_bytes
        self._inline_bytes = inline_bytes
        self._lock = threading.Lock()
        self._closed = False
        self._moves = self._commands = self._bytes = self._failures = 0
        self._regions: list[Region] = []
        self._devices: dict[Any, DeviceCopies] = {}

    def register(self, region: Region) -> None:
        """Host memory to be pinned before the first copy to or from a device; elsewhere nothing happens."""
        with self._lock:
            self._regions.append(region)
            devices = list(self._devices.values())
        for device in devices:
            device.register(region)

    def submit(self, moves: Sequence[Move]) -> Transfer:
        """Start copies between memory spans, or between a memory span and a paged span.

        Raises:
            ValueError: other kinds of spans, unequal sizes, slots that do not exist or are named twice, a read-only target.
            Unavailable: closed.
        """
        for move in moves:
            _check(move)
        with self._lock:
            if self._closed:
                raise Unavailable("the memory mover is closed")
        by_device: dict[Any, list[Move]] = {}
        for move in moves:
            by_device.setdefault(_device_of(move), []).append(move)
        host_moves = by_device.pop(None, [])
        transfers: list[Transfer] = []
        try:
            for device_moves in by_device.values():  # the layers of one model may be on several
                transfers.append(self._device(device_moves[0]).submit(device_moves))
            if host_moves or not transfers:
                transfers.append(self._submit_host(host_moves))
        except BaseException:
            with contextlib.suppress(Unavailable):
                Joined(transfers).wait()  # nothing may touch memory after an error
            raise
        return transfers[0] if len(transfers) == 1 else Joined(transfers)

    def _submit_host(self, moves: Sequence[Move]) -> Batch:
        tasks: list[Task] = []
        for move in moves:
            tasks += self._tasks(move)
        size_bytes = sum(move.source.size_bytes for move in moves)
        batch = Batch(tasks, caller_works=True)
        if size_bytes <= self._inline_bytes or not self._threads:
            batch.work()
        else:
            self._workers.share(batch, len(tasks))
        with self._lock:
            self._moves += len(moves)
            self._commands += len(tasks)
            self._bytes += size_bytes
        return batch

    def _tasks(self, move: Move) -> list[Task]:
        source, target = move.source, move.target
        if isinstance(source, MemorySpan) and isinstance(target, MemorySpan):
            from_bytes, to_bytes, step = contiguous_bytes(source.data), contiguous_bytes(target.data), self._task_bytes
            return [
                partial(np.copyto, to_bytes[at : at + step], from_bytes[at : at + step])
                for at in range(0, len(from_bytes), step)
            ]
        if isinstance(target, PagedSpan):
            assert isinstance(source, MemorySpan)
            scatter = HostCopy(target, contiguous_bytes(source.data)).scatter
            return [partial(scatter, *part) for part in self._parts(target)]
        assert isinstance(source, PagedSpan)
        assert isinstance(target, MemorySpan)
        data, checks = contiguous_bytes(target.data), move.checks
        copy = HostCopy(source, data)
        if checks is None:
            return [partial(copy.gather, *part) for part in self._parts(source)]
        granule_blocks = checks.granule_bytes // source.plane_bytes
        parts = self._parts(source, granule_blocks)
        return [partial(_gather_checked, copy, data, checks, source.plane_bytes, *part) for part in parts]

    def _parts(self, span: PagedSpan, unit_blocks: int = 1) -> list[tuple[int, int]]:
        """`(first, end)` of parts of the span, whole units of blocks, about `task_bytes` each."""
        step = max(1, self._task_bytes // (unit_blocks * span.plane_bytes)) * unit_blocks
        blocks = len(span.slots)
        return [(first, min(first + step, blocks)) for first in range(0, blocks, step)]

    def _device(self, move: Move) -> DeviceCopies:
        device = _device_of(move)
        with self._lock:
            copies = self._devices.get(device)
            if copies is None:
                copies = self._devices[device] = DeviceCopies(device)
                for region in self._regions:
                    copies.register(region)
            return copies

    def stats(self) -> MoverStats:
        with self._lock:
            devices = [copies.stats() for copies in self._devices.values()]
            fallbacks: dict[str, int] = {}
            for stats in devices:
                for reason, count in stats.fallbacks.items():
                    fallbacks[reason] = fallbacks.get(reason, 0) + count
            return MoverStats(
                path="+".join(["memory", *sorted({stats.path for stats in devices})]),
                moves=self._moves + sum(stats.moves for stats in devices),
                commands=self._commands + sum(stats.commands for stats in devices),
                bytes_moved=self._bytes + sum(stats.bytes_moved for stats in devices),
                failures=self._failures + sum(stats.failures for stats in devices),
                fallbacks=fallbacks,
            )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            devices = list(self._devices.values())
        self._workers.close()
        for copies in devices:
            copies.close()


class Joined:
    """Several transfers as one."""

    __slots__ = ("_transfers",)

    def __init__(self, transfers: Sequence[Transfer]) -> None:
        self._transfers = transfers

    def done(self) -> bool:
        return all(transfer.done() for transfer in self._transfers)

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits for all, also when one has failed: nothing may touch memory after an error."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        failure: Unavailable | None = None
        for transfer in self._transfers:
            try:
                transfer.wait(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
            except Unavailable as error:
                failure = error
        if failure is not None:
            raise failure


def _gather_checked(copy: HostCopy, data: Bytes, checks: Checks, plane_bytes: int, first: int, end: int) -> None:
    """Gather whole granules and take their checksums before the cache has forgotten them."""
    copy.gather(first, end)
    sums = granule_checksums(data[first * plane_bytes : end * plane_bytes], checks.granule_bytes, checks.algorithm)
    at = first * plane_bytes // checks.granule_bytes
    checks.sums[at : at + len(sums)] = sums


def _check(move: Move) -> None:
    source, target = move.source, move.target
    if move.checks is not None:
        _check_checks(move, move.checks)
    paged = target if isinstance(target, PagedSpan) else source
    flat = source if isinstance(target, PagedSpan) else target
    if not isinstance(flat, MemorySpan) or not isinstance(paged, (MemorySpan, PagedSpan)):
        kinds = f"{type(source).__name__} to {type(target).__name__}"
        raise ValueError(f"memory moves between memory spans, or a memory span and paged slots, not {kinds}")  # noqa: TRY004 - as all that a move can have wrong
    if isinstance(paged, MemorySpan):
        _check_bytes(paged)
    elif paged.rows is None:
        check_span(paged)
        if not on_device(paged.pages):
            host_array(paged.pages)
    _check_bytes(flat)
    if source.size_bytes != target.size_bytes:
        raise ValueError(f"{source.size_bytes} bytes to {target.size_bytes} bytes")
    written = target.pages if isinstance(target, PagedSpan) else flat.data
    if isinstance(written, np.ndarray) and not written.flags.writeable:
        raise ValueError("the target of a move must be writable")


def _check_bytes(span: MemorySpan) -> None:
    if not on_device(span.data):
        contiguous_bytes(span.data)


def _check_checks(move: Move, checks: Checks) -> None:
    pages, granule_bytes = move.source, checks.granule_bytes
    if not isinstance(pages, PagedSpan) or _device_of(move) is not None:
        raise ValueError("checksums are taken where host memory is gathered from paged slots, nowhere else")
    if granule_bytes < 1 or granule_bytes % pages.plane_bytes:
        raise ValueError(f"a granule of {granule_bytes} bytes is not whole blocks of {pages.plane_bytes}")
    if checks.sums.shape != (-(-pages.size_bytes // granule_bytes),) or checks.sums.dtype != np.uint64:
        raise ValueError(f"{pages.size_bytes} bytes need one u64 for each {granule_bytes}, not {checks.sums.shape}")


def _device_of(move: Move) -> Any:
    """The torch device of the end that is on one, or None."""
    for span in (move.source, move.target):
        array = span.pages if isinstance(span, PagedSpan) else getattr(span, "data", None)
        if on_device(array):
            return array.device  # type: ignore[union-attr]
    return None
