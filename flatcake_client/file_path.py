"""Bytes from session files, or from another node's memory, into an engine's slots. See `restore.py` for what paths keep to.

    file --read ahead--> window buffer --check--> slots        a part is scattered while what follows is read

What is read from is named by `placed.run.file_id`; another node's arena is file 0 of that node. A path has a lease: when
another node's has ended, its blocks are cut off and those of this node are still brought.

A part of a buffer is trusted when the lease was alive after its reads landed; where checksums are asked for, the whole buffer is, when
its granules agree: from then on it is ours, whatever happens to the file. When the reads of a buffer fail, they and then the pieces in
them are tried alone: the failure cuts at the first piece that fails again, and what lies before is read on.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from flatcake_client.lease import Lease
from flatcake_client.memory_path import JOB_BYTES
from flatcake_client.progress import DEADLINE, Progress
from flatcake_client.target import PlacedRun, Target
from flatcake_client.verify import Verifier
from flatcake_transport.errors import Corrupt, FlatCakeError, Hangs, Overloaded, Unavailable
from flatcake_transport.layout import ALIGN_BYTES, align_up
from flatcake_transport.mover import MemorySpan, Move, Mover, MoverStats, Region, Transfer
from flatcake_transport.plan import GAP_BYTES_MAX, FileRun, Piece, Step, one_by_one, plan_restore
from flatcake_transport.window import PART_BYTES, Readable, ReadStream, StagingPool, Window, aligned_buffer

ENDING_BYTES: Final = 8 << 20  # some 3 ms of reading: what another restore takes from its beginning to its first read
HUNG_S: Final = 2.0  # a wait for one read after which another restore may begin beside it
LOOK_S: Final = 0.1  # how long one waits for a read before it looks whether that is still wanted
RETRIES_MAX: Final = 2  # of reads that fail together and succeed one by one

T = TypeVar("T")


class _Watched:
    """A mover that remembers what it has under way, so that descriptors are closed after the last read of them."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._transfers: list[Transfer] = []

    def register(self, region: Region) -> None:
        self._mover.register(region)

    def submit(self, moves: Sequence[Move]) -> Transfer:
        transfer = self._mover.submit(moves)
        self._transfers = [*self.moving(), transfer]
        return transfer

    def moving(self) -> list[Transfer]:
        return [transfer for transfer in self._transfers if not transfer.done()]

    def stats(self) -> MoverStats:
        return self._mover.stats()

    def close(self) -> None:
        """The mover is not ours."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadTools:
    """What carries bytes to one device."""

    files: Mover
    memory: Mover
    staging: StagingPool
    gap_bytes_max: int = GAP_BYTES_MAX
    part_bytes: int = PART_BYTES
    job_bytes: int = JOB_BYTES


class FilePath:
    """Reads from session files. `layers_done`: layers of which every wanted block is in place."""

    def __init__(
        self,
        runs: Sequence[PlacedRun],
        target: Target,
        progress: Progress,
        lease: Lease,
        tools: ReadTools,
        files: Callable[[float], Mapping[int, Readable]],
        verifier: Verifier | None,
        late: Callable[[], bool],
        closing: threading.Event,
    ) -> None:
        self._runs = list(runs)
        self._target = target
        self._progress = progress
        self._lease = lease
        self._tools = tools
        self._mover = _Watched(tools.files)
        self._files_of = files
        self._files: Mapping[int, Readable] = {}
        self._verifier = verifier
        self._late = late
        self._closing = closing
        self._stream: ReadStream | None = None
        self._planned: deque[Step] = deque()
        self._scattered = (0, 0)  # of the step that is landing: whole pieces, and blocks of the next one
        self._base = 0  # layer that the stream's layer 0 is
        self._retries = 0
        self._reads = self._bytes_read = 0
        self._stalled_s = 0.0  # of waiting, since something landed
        self.hung = False  # something was waited for, for long, at some time
        self.layers_done = 0 if runs else progress.layers

    @property
    def reads(self) -> int:
        return self._reads + (self._stream.reads if self._stream else 0)

    @property
    def bytes_read(self) -> int:
        return self._bytes_read + (self._stream.bytes_read if self._stream else 0)

    def moving(self) -> list[Transfer]:
        """Reads that have not come to rest."""
        return self._mover.moving()

    def ahead(self, timeout_s: float) -> None:
        """Have all buffers filling, if staging is free at once."""
        if self._stream is not None:
            try:
                self._stream.release()
            except Unavailable as error:
                self._blame(error, timeout_s)
        elif self.layers_done < self._progress.layers:
            self._open(timeout_s, staging_timeout_s=0.0)

    def step(self, timeout_s: float) -> None:
        """Bring what one buffer holds; returns empty-handed after `timeout_s`, or when it is not wanted any more."""
        if self._stream is None and not self._open(timeout_s, staging_timeout_s=timeout_s):
            return
        assert self._stream is not None
        try:
            landed = self._awaited(self._stream.advance, timeout_s)
        except Hangs as error:
            self._blame(Unavailable(str(error)), timeout_s)
            return
        except TimeoutError:
            return
        except Unavailable as error:
            self._blame(error, timeout_s)
            return
        if landed is None:
            self.layers_done = self._progress.layers
        elif landed[2] == landed[0].size_bytes or self._verifier is None:
            self._scatter(*landed)
        if self.layers_done == self._progress.layers:
            self.close()

    def keep_lease(self, timeout_s: float) -> None:
        """Renew the lease if it is time; when it has ended, nothing of this path can be had any more."""
        if self.layers_done < self._progress.layers:
            self._lease.keep(timeout_s)
            if not self._lease.alive():
                self._fail(Unavailable("the lease at the other node has ended: its bytes may be gone"))

    @property
    def renew_in_s(self) -> float:
        return self._lease.renew_in_s

    @property
    def ending(self) -> bool:
        """Whether so little is left to read that another restore may begin: its first reads then follow our last."""
        if self._stream is None:
            return self.layers_done == self._progress.layers
        left_bytes = self._stream.bytes_left
        return left_bytes is not None and left_bytes <= ENDING_BYTES

    @property
    def waits(self) -> bool:
        """Whether the next step would wait for a read."""
        return self._stream is not None and not self._stream.landed

    @property
    def holds_window(self) -> bool:
        return self._stream is not None

    @property
    def lacks_window(self) -> bool:
        return self._stream is None and self.layers_done < self._progress.layers

    def take_window(self, timeout_s: float, staging_timeout_s: float) -> None:
        """Begin to read, if staging is free in time."""
        self._open(timeout_s, staging_timeout_s)

    def land(self) -> None:
        """Nothing of this path is on its way into the engine's memory but within `step`."""
        self.close()

    def _fail(self, error: FlatCakeError) -> None:
        if self._runs:
            self._progress.cut(self._runs[0].position, error)
        self.close()
        self._runs, self.layers_done = [], self._progress.layers

    def close(self) -> None:
        """Give the window back; reads under way land in it first, by themselves. What was read ahead is read again with a next one."""
        if self._stream is not None:
            self._reads, self._bytes_read = self.reads, self.bytes_read
            stream, self._stream = self._stream, None
            stream.close()
        self._planned.clear()
        self._scattered = 0, 0

    def _open(self, timeout_s: float, staging_timeout_s: float) -> bool:
        """Plan what is still wanted and start reading it. False: not now, or nothing is left to read."""
        ends_s = time.monotonic() + timeout_s
        self._drop_cut()
        if not self._files and self._runs:
            try:
                self._files = self._files_of(timeout_s)
            except Unavailable as error:
                self._progress.cut(self._runs[0].position, error)
        for placed in self._runs:
            if placed.run.file_id not in self._files or placed.footer_bytes < 0:
                self._progress.cut(placed.position, Unavailable(f"no descriptor of the file of {placed.run.segment}"))
        if not self._drop_cut():
            return False
        try:
            window = self._window(min(staging_timeout_s, max(0.0, ends_s - time.monotonic())))
        except Overloaded:
            if staging_timeout_s:
                self._closing.wait(min(LOOK_S, staging_timeout_s))  # refused at once, perhaps: not asked in a circle
            return False
        in_time = self._verifier is None or self._learn(self._verifier, window, ends_s)
        if not in_time or not self._drop_cut():
            window.close()
            return False
        try:
            self._stream = self._streaming(window)
        except Unavailable as error:  # the mover was closed meanwhile; the stream has given the window back
            self._fail(error)
            return False
        return True

    def _window(self, timeout_s: float) -> Window:
        return self._tools.staging.open_window(timeout_s, lambda: not self._closing.is_set())

    def _streaming(self, window: Window) -> ReadStream:
        wanted = [
            FileRun(
                placed.run.file_id,
                placed.offset,
                placed.layout,
                placed.first_block,
                self._progress.wanted(placed.position, placed.blocks),
                placed.position,
            )
            for placed in self._runs
        ]
        if self._tools.gap_bytes_max < 0 and self._verifier is None:
            wanted = [block for run in wanted for block in one_by_one(run)]
        self._base = self.layers_done
        steps = plan_restore(
            wanted,
            self._target.planes[self._base :],
            buffer_bytes=window.buffer_bytes,
            gap_bytes_max=self._tools.gap_bytes_max,
            whole_granules=self._verifier is not None,
        )
        return ReadStream(self._remembered(steps), self._files, self._mover, window, part_bytes=self._tools.part_bytes)

    def _remembered(self, steps: Iterator[Step]) -> Iterator[Step]:
        for step in steps:
            self._planned.append(step)
            yield step

    def _scatter(self, step: Step, buffer: Any, end: int) -> None:
        """Check what has landed of a buffer, up to `end`, and copy into the slots what has come since the last time."""
        try:
            self._lease.check()
            self._check(step, buffer)
            came = self._came(step, end)
            if self._late():
                self._progress.stop(Unavailable(DEADLINE))
            if not self._progress.over:
                self._tools.memory.submit([self._move(buffer, *each) for each in came]).wait()
                for piece, first, blocks in came:
                    self._progress.put(self._base + piece.layer, piece.position + first, blocks)
        except Unavailable as error:
            self._fail(error)
            return
        if end == step.size_bytes:
            self._planned.popleft()
            self._scattered = 0, 0
            self.layers_done = self._base + step.layers_done

    def _came(self, step: Step, end: int) -> list[tuple[Piece, int, int]]:
        """Blocks that are there and were not before: of which piece, from which on, how many."""
        came = []
        whole, first = self._scattered
        for piece in itertools.islice(step.pieces, whole, None):
            landed = min(piece.blocks, max(0, end - piece.offset) // piece.plane_bytes)
            upto = self._progress.wanted(piece.position, landed)
            if upto > first:
                came.append((piece, first, upto - first))
            if landed < piece.blocks:  # and nothing of those behind it
                first = max(first, landed)
                break
            whole, first = whole + 1, 0
        self._scattered = whole, first
        return came

    def _check(self, step: Step, buffer: Any) -> None:
        if self._verifier is None:
            return
        for check in step.checks:
            placed = self._runs[check.run]
            data = buffer[check.offset : check.offset + check.size_bytes]
            bad = self._verifier.first_bad(placed, check.plane, check.first_block, check.blocks, data)
            if bad is not None:
                self._progress.cut(bad, Corrupt(f"a block of {placed.run.segment} differs from its checksum"))

    def _move(self, buffer: Any, piece: Piece, first: int, blocks: int) -> Move:
        start, size = piece.offset + first * piece.plane_bytes, piece.plane_bytes
        target = self._target.span(self._base + piece.layer, piece.position + first, blocks)
        return Move(MemorySpan(buffer[start : start + blocks * size]), target)

    def _blame(self, error: FlatCakeError, timeout_s: float) -> None:
        """A step's reads failed: find out which, by reading each alone, so that the blocks before are still had."""
        ends_s = time.monotonic() + timeout_s
        step = self._planned[0]
        self.close()
        self._retries += 1
        positions = [piece.position for piece in step.pieces]
        if self._retries <= RETRIES_MAX:
            try:
                with self._window(timeout_s) as window:
                    positions = self._failing(step, window, ends_s)
            except (Overloaded, TimeoutError):
                return  # planned anew, if the deadline allows
        if positions:
            self._progress.cut(min(positions), error)

    def _failing(self, step: Step, window: Window, ends_s: float) -> list[int]:
        """Positions of the pieces that cannot be read, each tried alone: a read may span segments, and fail for one."""
        buffer, positions = window.buffers[0], []

        def readable(file_id: int, offset: int, size_bytes: int) -> bool:
            try:
                self._read(file_id, offset, buffer[:size_bytes], window, ends_s)
            except Unavailable:
                return False
            return True

        for read in step.reads:
            if readable(read.file, read.offset, read.size_bytes):
                continue
            for piece in step.pieces:
                if read.target <= piece.offset < read.target + read.size_bytes:
                    start = piece.offset // ALIGN_BYTES * ALIGN_BYTES
                    size = align_up(piece.offset + piece.size_bytes) - start
                    if not readable(read.file, read.offset + start - read.target, size):
                        positions.append(piece.position)
        return positions

    def _learn(self, verifier: Verifier, window: Window, ends_s: float) -> bool:
        """Read the footers of the runs. False: not in time."""
        for placed in self._runs:
            size, offset = placed.footer_bytes, placed.offset + placed.layout.data_bytes
            try:
                if verifier.knows(placed):
                    verifier.learn(placed)
                    continue
                buffer = window.buffers[0][:size] if size <= window.buffer_bytes else aligned_buffer(size)
                self._read(placed.run.file_id, offset, buffer, window, ends_s)
                verifier.learn(placed, buffer)
            except (Unavailable, Corrupt) as error:
                self._progress.cut(placed.position, error)
            except TimeoutError:
                return False
        return True

    def _drop_cut(self) -> bool:
        """Forget runs of which nothing is wanted any more. False: none is left, so there is nothing to wait for."""
        self._runs = [run for run in self._runs if self._progress.wanted(run.position, 1)]
        if not self._runs:
            self.layers_done = self._progress.layers
        return bool(self._runs)

    def _read(self, file_id: int, offset: int, buffer: Any, window: Window, ends_s: float) -> None:
        """One read, now. Raises: Unavailable. TimeoutError: it goes on, and the window is closed when it rests."""
        source = self._files[file_id].span(offset, len(buffer))
        self._reads, self._bytes_read = self._reads + 1, self._bytes_read + len(buffer)
        transfer = self._mover.submit([Move(source, MemorySpan(buffer))])
        try:
            self._awaited(transfer.wait, ends_s - time.monotonic())
        except TimeoutError:
            window.close([transfer])
            raise

    def _awaited(self, wait: Callable[[float], T], timeout_s: float) -> T:
        """Wait for a read while its bytes are wanted.

        Raises: TimeoutError: not in time, closed, or the lease has ended; and once, when it has `hung`.
        """
        ends_s = time.monotonic() + timeout_s
        while True:
            left_s = ends_s - time.monotonic()
            look_s = min(LOOK_S, max(0.0, left_s))
            try:
                landed = wait(look_s)
            except TimeoutError as error:
                self._stalled_s += look_s
                hung, self.hung = self.hung, self.hung or self._stalled_s >= HUNG_S
                gone = self._closing.is_set() or not self._lease.alive()
                if left_s <= LOOK_S or gone or hung != self.hung or isinstance(error, Hangs):
                    raise
            else:
                self._stalled_s = 0.0
                return landed
