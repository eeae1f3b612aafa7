"""A turn: what the engine computed, written layer by layer into the space the daemon reserved for it.

    memory part   slots --gather--> arena                                     lands before write_layer returns
    file part     slots --gather--> buffer of a window --write--> session file  writes go on while the next buffer is gathered

Checksums (xxh3 a granule) are taken from the gathered bytes while the cache has them, so they cover the way to the medium. Of
memory they cost 15 to 25 % of a store, so they are left out where nobody would compare them. Staging
is held only while bytes move: a turn that waits for the engine's next layer holds none.

- A write that fails is remembered; the turn then writes no more, and `commit` raises and tells the daemon to seal the file.
- Writes wait for reads (movers/precedence.py) and for staging of their own; a turn whose writes waited until a deadline is dropped
  and counted as yielded. No read waits for a write, or ends for one.
- The daemon may reuse a turn's space as soon as we commit or give up, so neither is said before all our writes rest.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from flatcake_client.deadline import deadline
from flatcake_client.keys import host_integers
from flatcake_client.records import Grant, Part
from flatcake_transport.checksum import granule_checksums
from flatcake_transport.errors import FlatCakeError, Overloaded, Unavailable
from flatcake_transport.footer import CHECKSUM_NONE, CHECKSUM_XXH3
from flatcake_transport.layout import SegmentLayout
from flatcake_transport.mover import Checks, MemorySpan, Move, Mover, PagedSpan, Slots, Transfer
from flatcake_transport.paged import check_span, on_device
from flatcake_transport.plan import plan_writes
from flatcake_transport.space import SpaceSpec
from flatcake_transport.window import OpenFile, StagingPool, Window

ABORT_TIMEOUT_S: Final = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class WriteTools:
    """What carries bytes from one device."""

    files: Mover
    memory: Mover
    staging: StagingPool


class Yielded(Unavailable):
    """A turn was dropped: its writes waited for reads, for other writes or for the disk, until the deadline."""


class GivenUp(Unavailable):
    """The engine gave a turn up while its writes waited."""


class TurnHome(Protocol):
    """Where a turn is written to. Calls take a timeout in seconds and raise Unavailable; so does `check` once the space is not ours."""

    def layout_of(self, blocks: int) -> SegmentLayout: ...
    def check(self) -> None: ...
    def arena(self, timeout_s: float) -> NDArray[np.uint8]: ...
    def files(self, turn_id: int, timeout_s: float) -> Mapping[int, OpenFile]: ...
    def commit(self, turn_id: int, sums: Sequence[tuple[int, bytes]], timeout_s: float) -> bool: ...
    def abort(self, turn_id: int, failure: str, timeout_s: float) -> None: ...
    def when_rested(self, transfers: Sequence[Transfer], act: Callable[[], None]) -> None: ...
    def ended(self, outcome: str) -> None: ...


class Turn:
    """One turn being written. Thread-safe; a context manager that aborts what was not committed.

    Attributes:
        blocks: the range of the chain that is to be stored: `write_layer` takes one slot for each. Blocks in it that are
            stored already (see `parts`) are skipped. Empty: everything is stored.
        parts: what is stored where, and why.
        session: the name of the session, as given or as the daemon inferred it.
    """

    def __init__(
        self,
        home: TurnHome,
        grant: Grant,
        spec: SpaceSpec,
        shard: int,
        tools: WriteTools,
        *,
        checksums: bool,
        memory_checksums: bool = True,
        timeout_s: float,
        now_s: Callable[[], float] = time.monotonic,
        guard: Callable[[], None] = lambda: None,
        forked: Callable[[], bool] = lambda: False,
    ) -> None:
        """`timeout_s` bounds each call that is given no other."""
        self._home, self._grant, self._spec, self._shard = home, grant, spec, shard
        self._tools, self._timeout_s, self._now_s, self._guard = tools, timeout_s, now_s, guard
        self._forked = forked
        self._algorithms = [
            CHECKSUM_XXH3 if checksums and (part.file_id or memory_checksums) else CHECKSUM_NONE for part in grant.parts
        ]
        self._lock = threading.RLock()
        self._files: Mapping[int, OpenFile] = {}
        self._layouts = [home.layout_of(part.blocks) for part in grant.parts]
        self._written = np.zeros(spec.layers, np.bool_)
        self._sums: list[list[bytes]] = [[b""] * spec.layers for _ in grant.parts]
        self.transfers: list[Transfer] = []  # writes that have not come to rest: one list for the turn's life
        self._failure: FlatCakeError | None = None
        self._torn = False  # a write failed: the file's state is unknown
        self._over = self._unwanted = False
        self.parts = grant.parts
        self.session = grant.session
        self.blocks = range(grant.parts[0].first_block, grant.parts[-1].first_block + grant.parts[-1].blocks) if (
            grant.parts
        ) else range(0)  # fmt: skip

    def write_layer(self, layer: int, source: Any, slots: Any, timeout_s: float | None = None) -> None:
        """Take one layer's blocks; the source may be changed when this returns. Layers in any order, each exactly once.

        Args:
            layer: of the caller's shard.
            source: its paged KV: numpy or torch, first axis the slot, a slot holding `plane_bytes[layer]` bytes.
            slots: one for each block of `blocks`.

        Raises:
            ValueError: a layer twice or unknown, shapes that do not fit, or the turn is over. Nothing else: a write that
            fails is told by `commit`.
        """
        self._guard()
        slot_array = np.ascontiguousarray(host_integers(slots, "slots"), np.int64)
        with self._lock:
            self._check_open()
            if not 0 <= layer < self._spec.layers or self._written[layer]:
                raise ValueError(f"layer {layer}: expected each of 0 to {self._spec.layers - 1} exactly once")
            if len(slot_array) != len(self.blocks):
                raise ValueError(
                    f"{len(slot_array)} slots: expected one for each of the turn's {len(self.blocks)} blocks"
                )
            check_span(PagedSpan(source, slot_array, self._spec.plane_bytes[layer]))
            deadline_s = deadline(self._now_s(), self._timeout_s if timeout_s is None else timeout_s)
            self._written[layer] = True
            try:
                self._home.check()
                self._harvest(None)
                for index, part in enumerate(self.parts):
                    if self._failure is None:
                        start = part.first_block - self.blocks.start
                        self._write(index, layer, source, slot_array[start : start + part.blocks], deadline_s)
            except FlatCakeError as error:
                self._failure = self._failure or error

    def commit(self, timeout_s: float | None = None) -> bool:
        """Have the turn persisted and published, when all layers were written and all writes have landed.

        Returns:
            Whether it is visible now: with several shards, only the last commit makes it so.

        Raises:
            ValueError: a layer was not written, or the turn is over.
            Unavailable: a write failed, or it took too long; the turn is aborted, nothing of it is stored.
        """
        self._guard()
        with self._lock:
            self._check_open()
            if not self._grant.turn_id:
                self._end("stored")
                return True
            if not self._written.all():
                raise ValueError(f"layers {np.flatnonzero(~self._written).tolist()} were not written")
            deadline_s = deadline(self._now_s(), self._timeout_s if timeout_s is None else timeout_s)
            self._harvest(deadline_s - self._now_s())
            if self._failure is None:
                sums = [
                    (algorithm, b"".join(layers))
                    for algorithm, layers in zip(self._algorithms, self._sums, strict=True)
                ]
                try:
                    visible = self._home.commit(self._grant.turn_id, sums, deadline_s - self._now_s())
                except FlatCakeError as error:
                    # Whether it arrived is unknown. If it did not, this gives the space back; if it did, it does nothing.
                    self._failure = error
                else:
                    self._end("committed")
                    return visible
            failure = self._failure
            self._give_up(min(ABORT_TIMEOUT_S, max(0.0, deadline_s - self._now_s())))
            raise Unavailable(f"the turn was not stored: {failure}") from failure

    def abort(self, timeout_s: float = ABORT_TIMEOUT_S) -> None:
        """Store nothing. Twice is fine, and so is after a commit. In a forked child it does nothing.

        Waits a moment for writes under way, and for the daemon to hear of it; else the space is given back later.
        """
        if self._forked():
            return
        deadline_s = self._now_s() + timeout_s
        self._unwanted = True  # heard by a write that waits for staging, lock in hand
        if not self._lock.acquire(timeout=timeout_s):
            return  # somebody waits for the daemon, or commits: the turn is over when that fails, or is lost
        try:
            if not self._over:
                self._harvest(max(0.0, deadline_s - self._now_s()))
                self._give_up(min(ABORT_TIMEOUT_S, max(0.0, deadline_s - self._now_s())))
        finally:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.abort()

    def _check_open(self) -> None:
        if self._over:
            raise ValueError("the turn is over: committed or aborted")

    def _end(self, outcome: str) -> None:
        self._over = True
        self._home.ended(outcome)

    def _give_up(self, timeout_s: float) -> None:
        self._over = True

        def give_back() -> None:
            self._harvest(0.0)  # one that failed after we stopped waiting leaves a file to be sealed, too
            failure = str(self._failure or "a write failed") if self._torn else ""
            with contextlib.suppress(FlatCakeError):
                if self._grant.turn_id:
                    self._home.abort(self._grant.turn_id, failure, timeout_s)
            self._home.ended("failed" if self._torn else _outcome(self._failure))

        self._home.when_rested(self.transfers, give_back)

    def _harvest(self, timeout_s: float | None) -> None:
        """Look at the writes that have landed; with a timeout, also one that is over, all must have landed by then."""
        deadline_s = self._now_s() + (timeout_s or 0.0)
        moving = []
        for transfer in self.transfers:
            try:
                if timeout_s is not None or transfer.done():
                    transfer.wait(max(0.0, deadline_s - self._now_s()))
                else:
                    moving.append(transfer)
            except TimeoutError:
                moving.append(transfer)
                self._failure = self._failure or self._late("the turn's writes did not land in time")
            except Unavailable as error:
                self._failure = self._failure or error
                self._torn = True
        self.transfers[:] = moving

    def _write(self, index: int, layer: int, source: Any, slots: Slots, deadline_s: float) -> None:
        part, layout, algorithm = self.parts[index], self._layouts[index], self._algorithms[index]
        plane = self._shard * self._spec.layers + layer
        pages = PagedSpan(source, slots, int(layout.plane_bytes[plane]))
        if part.file_id:
            sums = self._write_file(part, layout, plane, algorithm, pages, deadline_s)
        else:
            start = part.segment.offset + layout.chunk(plane, 0)
            data = self._home.arena(deadline_s - self._now_s())[start : start + pages.size_bytes]
            sums = _gather(self._tools.memory, pages, data, 0, layout.granule_bytes(plane), algorithm)
        self._sums[index][layer] = sums.astype("<u8").tobytes() if algorithm else b""

    def _write_file(
        self, part: Part, layout: SegmentLayout, plane: int, algorithm: int, pages: PagedSpan, deadline_s: float
    ) -> NDArray[np.uint64]:
        """Gather and write one plane, a buffer at a time; the last writes go on after this returns. Its checksums."""
        if not self._files:
            self._files = self._home.files(self._grant.turn_id, deadline_s - self._now_s())
        file = self._files.get(part.file_id)
        if file is None:
            raise Unavailable(f"the daemon handed over no descriptor of file {part.file_id}")
        tools, plane_bytes = self._tools, pages.plane_bytes
        sums: list[NDArray[np.uint64]] = []
        # A window more each step, not one again: the disk never waits for the next gather.
        for step in plan_writes(layout, plane, buffer_bytes=tools.staging.buffer_bytes):
            window, moving = self._open_window(deadline_s), []
            buffer = window.buffers[0]
            try:
                gathered = buffer[step.gather_offset : step.gather_offset + step.blocks * plane_bytes]
                blocks = pages.part(step.first_block, step.first_block + step.blocks)
                unchecked_blocks = (step.checked_offset - step.gather_offset) // plane_bytes
                sums.append(_gather(tools.memory, blocks, gathered, unchecked_blocks, step.granule_bytes, algorithm))
                aligned = buffer[step.source_offset : step.source_offset + step.size_bytes]
                aligned[step.size_bytes - step.zero_bytes :] = 0
                target = file.span(part.file_offset + step.offset, step.size_bytes)
                moving.append(tools.files.submit([Move(MemorySpan(aligned), target)]))
                self.transfers += moving
            finally:
                window.close(moving)
        return np.concatenate(sums)

    def _open_window(self, deadline_s: float) -> Window:
        """A window whose writes have landed. Raises: Yielded, GivenUp: other writes had them all until the deadline, or the end."""
        try:
            return self._tools.staging.open_window(deadline_s - self._now_s(), lambda: not self._unwanted)
        except Overloaded as error:
            raise self._late(f"writes yielded to other traffic: {error}") from error

    def _late(self, why: str) -> Yielded | GivenUp:
        return GivenUp("the turn was given up") if self._unwanted else Yielded(why)


def _outcome(failure: FlatCakeError | None) -> str:
    """Of a turn that is not stored, and of which no write failed."""
    if failure is None or isinstance(failure, GivenUp):
        return "aborted"
    return "yielded" if isinstance(failure, Yielded) else "failed"


def _gather(
    mover: Mover, pages: PagedSpan, data: Any, unchecked_blocks: int, granule_bytes: int, algorithm: int
) -> NDArray[np.uint64]:
    """Copy slots to host memory; the checksums of what follows the first `unchecked_blocks`, taken on the way."""
    start = unchecked_blocks * pages.plane_bytes
    whole = Move(pages, MemorySpan(data))
    if not algorithm or on_device(pages.pages):
        mover.submit([whole]).wait()  # without a deadline: when this returns, nobody may still read the engine's memory
        return granule_checksums(data[start:], granule_bytes, algorithm)
    checks = Checks(granule_bytes, algorithm, np.zeros(-(-(len(data) - start) // granule_bytes), np.uint64))
    moves = [replace(whole, checks=checks)]
    if start:
        before, after = pages.part(0, unchecked_blocks), pages.part(unchecked_blocks, len(pages.slots))
        moves = [Move(before, MemorySpan(data[:start])), Move(after, MemorySpan(data[start:]), checks)]
    mover.submit(moves).wait()
    return checks.sums
