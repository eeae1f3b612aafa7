"""A hit, brought into the engine's slots layer by layer, driven by its caller.

`wait_layer(l)` pumps until layer l is in place; what is read ahead meanwhile lands in staging (a window of a few buffers), so the
caller may compute on layer l while layer l+1 is on its way. Paths work side by side: this node's arena (memory_path.py), its
files, and each medium of each other node that a hit lies on (file_path.py). What all keep to:

- Layers come in order, a bounded piece at a time. A full staging pool makes the next read wait; nothing is cancelled for it.
  Who waits for one for longer than `HOLD_S` holds no window of another: two restores could wait for each other's.
- A block is reported only if all its layers were copied while the lease was alive; what fails cuts off its block and
  those behind it, and the blocks before are still brought.
- The engine's memory is written only in slots of blocks that were asked for, and from files only inside `wait_layer` and `wait`.
  Of this node's memory two copies into later layers may be under way when `wait_layer` returns. Past the deadline no further copy
  begins, and those begun have landed when the call, or `close`, returns (some 10 ms).
- Nothing here raises for I/O except `wait_layer`, whose caller must know before it computes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from flatcake_client.deadline import deadline
from flatcake_client.file_path import FilePath, ReadTools
from flatcake_client.keys import KeyArray, host_integers
from flatcake_client.lease import Lease
from flatcake_client.memory_path import MemoryPath
from flatcake_client.progress import CLOSED, DEADLINE, Progress
from flatcake_client.records import Run
from flatcake_client.target import PlacedRun, Target, place_runs, split_runs
from flatcake_client.verify import Verifier
from flatcake_client.worth import RemoteRead
from flatcake_transport.address import Medium
from flatcake_transport.errors import Corrupt, Unavailable
from flatcake_transport.layout import SegmentLayout
from flatcake_transport.mover import PagedSpan, Slots, Transfer
from flatcake_transport.paged import prepared
from flatcake_transport.space import SpaceSpec
from flatcake_transport.window import Readable

HOLD_S: Final = 0.1  # what was read ahead is kept so long, then read again: some windows of 32 MiB come back meanwhile


class RestoreUnavailable(Unavailable):
    """Not all blocks that were asked for are in place. `usable_blocks`: the prefix of the hit that is, all layers."""

    usable_blocks: int = 0


class RestoreCorrupt(Corrupt):
    """Bytes differ from their checksum. `usable_blocks`: the prefix of the hit that is in place, all layers."""

    usable_blocks: int = 0


@dataclass(frozen=True, slots=True)
class RestoreStats:
    """`bytes_by_medium`: useful bytes of the blocks asked for. `bytes_read`: from files, with alignment and gaps."""

    read_commands: int
    bytes_read: int
    bytes_by_medium: dict[str, int] = field(default_factory=dict)


class RemoteSource(Protocol):
    """What a restore needs of another node that a hit lies on, for one medium there."""

    node_id: int
    medium: Medium
    lease: Lease
    verify: bool
    tools: ReadTools

    def files(self, timeout_s: float) -> Mapping[int, Readable]: ...
    def report_corrupt(self, runs: Sequence[Run]) -> None: ...


class HitSource(Protocol):
    """What a restore needs of its hit. Calls take a timeout in seconds and raise Unavailable."""

    spec: SpaceSpec
    shard: int
    runs: tuple[Run, ...]
    blocks: int
    keys: KeyArray
    lease: Lease
    verify: bool
    remote: Sequence[RemoteSource]  # runs that lie there are brought from there; all others are this node's

    def layout_of(self, blocks: int) -> SegmentLayout: ...
    def arena(self, timeout_s: float) -> NDArray[np.uint8]: ...
    def files(self, timeout_s: float) -> Mapping[int, Readable]: ...
    def report_corrupt(self, runs: Sequence[Run]) -> None: ...


class Restore:
    """One restore under way. Thread-safe; a context manager that closes itself. Owned by its hit, which outlives it.

    The target's arrays must stay alive and unmoved until `close`, or a `wait` or `wait_layer` of the last layer, has returned.
    """

    def __init__(
        self,
        hit: HitSource,
        tools: ReadTools,
        target: Sequence[Any],
        slots: Any,
        first_block: int,
        timeout_s: float,
        *,
        now_s: Callable[[], float] = time.monotonic,
        guard: Callable[[], None] = lambda: None,
        forked: Callable[[], bool] = lambda: False,
        ending: Callable[[], object] | None = None,
        ended: Callable[[Restore], None] = lambda _: None,
    ) -> None:
        """Raises: ValueError: target or slots do not fit the space, or the hit has no block `first_block`."""
        deadline_s = self._deadline_s = deadline(now_s(), timeout_s)
        self._now_s, self._guard, self._forked, self._ending, self._ended = now_s, guard, forked, ending, ended
        self._lock = threading.RLock()
        self._hit = hit
        spec = hit.spec
        slot_array, end_block = _checked_slots(slots, first_block, hit.blocks)
        self.first_block = first_block
        planes = range(hit.shard * spec.layers, (hit.shard + 1) * spec.layers)
        spans = _target_spans(target, slot_array, spec)
        closing = self._closing = threading.Event()  # said without the lock, to who waits with it
        self._progress = Progress(spec.layers, end_block - first_block)
        # Not a method of ours: with no circle, the engine's arrays are let go with us, and need no collection.
        late = lambda: now_s() >= deadline_s  # noqa: E731
        aim = self._aim = Target(spans, planes)
        keys = hit.keys[first_block:end_block]
        placed = place_runs(hit.runs, first_block, end_block, hit.layout_of)
        self._bytes = {medium.name.lower(): _useful_bytes(placed, spec, medium) for medium in Medium}

        def path(runs: Sequence[PlacedRun], source: HitSource | RemoteSource, tools: ReadTools) -> FilePath:
            verifier = _verifier(source, spec, hit.shard, keys)
            return FilePath(runs, aim, self._progress, source.lease, tools, source.files, verifier, late, closing)

        self._remote: list[FilePath] = []
        self._places = [(source.node_id, source.medium) for source in hit.remote]
        for source in hit.remote:
            there, placed = split_runs(placed, source.node_id, source.medium)
            self._remote.append(path(there, source, source.tools))
        self._memory = MemoryPath(
            [run for run in placed if not run.run.file_id], aim, self._progress, hit.lease, tools.memory, hit.arena,
            _verifier(hit, spec, hit.shard, keys), late, job_bytes=tools.job_bytes,
        )  # fmt: skip
        self._files = path([run for run in placed if run.run.file_id], hit, tools)
        self._paths: tuple[FilePath | MemoryPath, ...] = (self._files, *self._remote, self._memory)
        self._waited_s = [0.0] * len(self._paths)
        self._closed = False

    def wait_layer(self, layer: int) -> None:
        """Return when every block that was asked for is in place in layers `0 .. layer`.

        Raises:
            ValueError: no such layer.
            Unavailable, Corrupt: it is not, and will not be; the error's `usable_blocks` are, with all layers.
        """
        self._guard()
        if not 0 <= layer < self._progress.layers:
            raise ValueError(f"layer {layer} of a space with {self._progress.layers}")
        with self._lock:
            self._pump(layer)
            if self._progress.failure is not None:
                raise self._incomplete()

    def wait(self) -> int:
        """Return when all is in place, or what failed has failed, or at the deadline. Never raises for I/O.

        Returns:
            The prefix of the hit that is in place with all layers, in blocks, counted from the chain's first block: those
            before `first_block` count as in place.
        """
        self._guard()
        with self._lock:
            self._pump(self._progress.layers - 1)
            return self.first_block + self._progress.usable()

    @property
    def stats(self) -> RestoreStats:
        with self._lock:
            files = (self._files, *self._remote)
            reads, bytes_read = sum(path.reads for path in files), sum(path.bytes_read for path in files)
            return RestoreStats(reads, bytes_read, dict(self._bytes))

    @property
    def remote_reads(self) -> list[RemoteRead]:
        """What was read from other nodes; nothing before the end, or when anything failed: then it is no measure of a link."""
        with self._lock:
            if self._progress.failure is not None or not self._done(self._progress.layers - 1):
                return []
            waited_s = self._waited_s[1 : 1 + len(self._remote)]  # behind this node's files
            read = zip(self._places, self._remote, waited_s, strict=True)
            return [RemoteRead(place, path.bytes_read, seconds) for place, path, seconds in read]

    @property
    def brought(self) -> Target | None:
        """Where the blocks from `first_block` on are, once all that were asked for are in place; None before, and else."""
        done = self._progress.failure is None and self._done(self._progress.layers - 1)
        return self._aim if done else None

    def close(self) -> None:
        """Bring no more. Copies into the engine's memory have landed when this returns. Twice is fine.

        Whoever waits in another thread is told; a disk that hangs holds neither up.

        In a forked child it does nothing.
        """
        if self._forked():
            return
        self._closing.set()
        with self._lock:
            if not self._closed and not self._done(self._progress.layers - 1):
                self._progress.stop(Unavailable(CLOSED))
            self._finish()

    def moving(self) -> list[Transfer]:
        """Reads into staging that have not come to rest: the hit's descriptors stay open until they do."""
        return [transfer for path in self._paths for transfer in path.moving()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _pump(self, layer: int) -> None:
        """Bring pieces until the layer is in place. After a failure: all that can be had, to know what is usable."""
        progress, lease = self._progress, self._hit.lease
        while not self._closed:
            wanted = layer if progress.failure is None else progress.layers - 1
            if progress.over or self._done(wanted):
                break
            lease.keep(self.left_s())
            left_s = self.left_s()
            if self._closing.is_set():
                progress.stop(Unavailable(CLOSED))
            elif left_s <= 0:
                progress.stop(Unavailable(DEADLINE))
            elif not lease.alive():
                progress.stop(Unavailable("the lease on the hit has ended: its bytes may be gone"))
            else:  # an owner's lease hangs on ours: looked at before, the end of ours would be told as that of the owner's
                for path in self._remote:
                    path.keep_lease(left_s)
                wait_s = min(self.left_s(), lease.renew_in_s, *(path.renew_in_s for path in self._remote))
                ends_s = self._now_s() + wait_s
                for each in self._paths:
                    each.ahead(max(0.0, ends_s - self._now_s()))
                behind = self._next(wanted)
                began_s = self._now_s()
                self._step(self._paths[behind], max(0.0, ends_s - began_s))
                self._waited_s[behind] += self._now_s() - began_s
                self._say_ending()
        if progress.over or self._done(progress.layers - 1):
            self._finish()

    def _next(self, wanted: int) -> int:
        """Which path to step: the one furthest behind; but while that waits for a read, memory, as far as it is wanted."""
        behind = min(range(len(self._paths)), key=lambda index: self._paths[index].layers_done)
        path = self._paths[behind]
        idle = isinstance(path, FilePath) and path.waits and self._memory.layers_done <= wanted
        return len(self._paths) - 1 if idle else behind

    def _say_ending(self) -> None:
        paths = (self._files, *self._remote)
        if self._ending is None:
            return
        if all(path.ending for path in paths) or any(path.hung for path in paths):
            say, self._ending = self._ending, None
            say()

    def _step(self, path: FilePath | MemoryPath, wait_s: float) -> None:
        holders = [each for each in self._paths if isinstance(each, FilePath) and each.holds_window]
        if isinstance(path, FilePath) and path.lacks_window and holders:
            path.take_window(wait_s, min(wait_s, HOLD_S))
            if path.lacks_window:
                for each in holders:
                    each.close()
        else:
            path.step(wait_s)

    def _done(self, layer: int) -> bool:
        return min(path.layers_done for path in self._paths) > layer

    def left_s(self) -> float:
        """Until the deadline."""
        return self._deadline_s - self._now_s()

    def _finish(self) -> None:
        if not self._closed:
            self._closed = True
            for each in self._paths:
                each.land()
            self._ended(self)

    def _incomplete(self) -> RestoreUnavailable | RestoreCorrupt:
        self._pump(self._progress.layers - 1)
        cause = self._progress.failure
        kind = RestoreCorrupt if isinstance(cause, Corrupt) else RestoreUnavailable
        error = kind(str(cause))
        error.usable_blocks = self.first_block + self._progress.usable()
        error.__cause__ = cause
        return error


def _checked_slots(slots: Any, first_block: int, blocks: int) -> tuple[Slots, int]:
    """Slots of the blocks that are asked for, and the end of these in the hit."""
    array = host_integers(slots, "slots")
    if not 0 <= first_block <= blocks:
        raise ValueError(f"first_block is {first_block}: the hit has {blocks} blocks")
    end_block = max(first_block, min(len(array), blocks))
    # A copy: engines use their slot arrays again, and a change of ours half way would send layers elsewhere.
    return np.array(array[first_block:end_block], np.int64), end_block


def _target_spans(target: Sequence[Any], slots: Slots, spec: SpaceSpec) -> list[PagedSpan]:
    if len(target) != spec.layers:
        raise ValueError(f"the target has {len(target)} arrays: expected one a layer of the shard, {spec.layers}")
    top = int(slots.max(initial=-1))
    spans = []
    for layer, pages in enumerate(target):
        try:
            # Slots are looked at in full once; for the other layers it is enough that they have as many.
            span = prepared(PagedSpan(pages, slots if layer == 0 else slots[:0], spec.plane_bytes[layer]))
        except (ValueError, AttributeError) as error:
            raise ValueError(f"layer {layer} of the target: {error}") from error
        if top >= pages.shape[0]:
            raise ValueError(f"layer {layer} of the target has {pages.shape[0]} slots: slot {top} was asked for")
        if isinstance(pages, np.ndarray) and not pages.flags.writeable:
            raise ValueError(f"layer {layer} of the target is read-only")
        spans.append(PagedSpan(pages, slots, span.plane_bytes, span.rows))
    return spans


def _verifier(source: HitSource | RemoteSource, spec: SpaceSpec, shard: int, keys: KeyArray) -> Verifier | None:
    return Verifier(spec, shard, keys, source.lease, source.report_corrupt) if source.verify else None


def _useful_bytes(placed: Sequence[PlacedRun], spec: SpaceSpec, medium: Medium) -> int:
    return sum(run.blocks for run in placed if run.run.segment.medium is medium) * sum(spec.plane_bytes)
