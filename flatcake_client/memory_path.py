"""Bytes from the arena into an engine's slots. See `restore.py` for what both paths keep to.

    arena --copy--> slots        two jobs of about JOB_BYTES under way, layer by layer

A job is marked in place after its copy has landed and the lease was still alive then; where checksums are asked for, they are
compared in the arena, granule by granule, before the copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flatcake_client.lease import Lease
from flatcake_client.progress import DEADLINE, Progress
from flatcake_client.target import PlacedRun, Target
from flatcake_client.verify import Verifier
from flatcake_transport.errors import Corrupt, Unavailable
from flatcake_transport.mover import MemorySpan, Move, Mover, Transfer

JOB_BYTES: Final = 64 << 20  # some 10 ms of copying: what a deadline may be overrun by
JOBS_AHEAD: Final = 2


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Some blocks of one layer, of one run in the arena; `first_block` starts a granule, or the run."""

    layer: int
    placed: PlacedRun
    first_block: int
    blocks: int
    last_of_layer: bool

    @property
    def position(self) -> int:
        return self.placed.position + self.first_block - self.placed.first_block


def memory_jobs(runs: Sequence[PlacedRun], planes: range, job_bytes: int) -> Iterator[Job]:
    """All blocks of all runs, layer by layer, in jobs of about `job_bytes`, cut between granules."""
    for layer, plane in enumerate(planes):
        for index, placed in enumerate(runs):
            granule = int(placed.layout.granule_blocks[plane])
            step = max(1, job_bytes // (granule * int(placed.layout.plane_bytes[plane]))) * granule
            first, end = placed.first_block, placed.first_block + placed.blocks
            while first < end:
                upto = min(end, first // granule * granule + step)
                yield Job(layer, placed, first, upto - first, upto == end and index == len(runs) - 1)
                first = upto


class MemoryPath:
    """Copies from the arena. `layers_done`: layers of which every wanted block is in place."""

    def __init__(
        self,
        runs: Sequence[PlacedRun],
        target: Target,
        progress: Progress,
        lease: Lease,
        mover: Mover,
        arena: Callable[[float], NDArray[np.uint8]],
        verifier: Verifier | None,
        late: Callable[[], bool],
        *,
        job_bytes: int,
    ) -> None:
        self._runs = runs
        self._target = target
        self._progress = progress
        self._lease = lease
        self._mover = mover
        self._arena_of = arena
        self._arena: NDArray[np.uint8] | None = None
        self._verifier = verifier
        self._late = late
        self._jobs = memory_jobs(runs, target.planes, job_bytes)
        self._flying: deque[tuple[Job, int, Transfer]] = deque()
        self.layers_done = 0 if runs else progress.layers

    def ahead(self, timeout_s: float) -> None:
        """Have two jobs under way, so that the mover's threads work while the caller waits for something else."""
        if self.layers_done == self._progress.layers:
            return
        if self._arena is None:
            self._open(timeout_s)
        try:
            while len(self._flying) < JOBS_AHEAD and not self._progress.over:
                job = next(self._jobs, None)
                if job is None:
                    return
                blocks = self._checked(job)
                if self._late():
                    self._progress.stop(Unavailable(DEADLINE))
                    return
                self._flying.append((job, blocks, self._mover.submit([self._move(job, blocks)] if blocks else [])))
        except Unavailable as error:
            self._progress.stop(error)

    def step(self, timeout_s: float) -> None:
        """Land one job."""
        self.ahead(timeout_s)
        if self._flying:
            self._land_one()

    def moving(self) -> list[Transfer]:
        """Copies into the engine's memory are waited for: none outlives `land`."""
        return []

    def land(self) -> None:
        """Wait for the copies under way; none is begun any more."""
        while self._flying:
            self._land_one()

    def _open(self, timeout_s: float) -> None:
        try:
            arena = self._arena_of(timeout_s)
        except Unavailable as error:
            self._progress.cut(self._runs[0].position, error)
            self._jobs, self.layers_done = iter(()), self._progress.layers
            return
        self._arena = arena = arena.view()
        arena.flags.writeable = False
        for placed in self._runs:
            base, size = placed.run.segment.offset, placed.run.segment_bytes
            try:
                if base + size > len(arena) or placed.footer_bytes < 0:
                    raise Unavailable(f"{placed.run.segment} is not in the arena")  # noqa: TRY301
                if self._verifier is not None:
                    self._verifier.learn(placed, arena[base + placed.layout.data_bytes : base + size])
            except (Unavailable, Corrupt) as error:
                self._progress.cut(placed.position, error)

    def _checked(self, job: Job) -> int:
        """Blocks of the job still wanted, after its checksums were compared."""
        placed, layout = job.placed, job.placed.layout
        if self._verifier is not None and self._progress.wanted(job.position, job.blocks):
            plane = self._target.planes[job.layer]
            granule = int(layout.granule_blocks[plane])
            first = job.first_block // granule * granule
            end = min(layout.blocks, -(-(job.first_block + job.blocks) // granule) * granule)
            bad = self._verifier.first_bad(placed, plane, first, end - first, self._bytes(placed, plane, first, end))
            if bad is not None:
                self._progress.cut(bad, Corrupt(f"a block of {placed.run.segment} differs from its checksum"))
        return self._progress.wanted(job.position, job.blocks)

    def _bytes(self, placed: PlacedRun, plane: int, first: int, end: int) -> NDArray[np.uint8]:
        assert self._arena is not None
        base, layout = placed.run.segment.offset, placed.layout
        return self._arena[base + layout.chunk(plane, first) : base + layout.chunk(plane, end)]

    def _move(self, job: Job, blocks: int) -> Move:
        plane = self._target.planes[job.layer]
        data = self._bytes(job.placed, plane, job.first_block, job.first_block + blocks)
        return Move(MemorySpan(data), self._target.span(job.layer, job.position, blocks))

    def _land_one(self) -> None:
        job, blocks, transfer = self._flying.popleft()
        try:
            transfer.wait()  # without a deadline: nothing may be written after we return
            self._lease.check()
        except Unavailable as error:
            self._progress.stop(error)
            return
        self._progress.put(job.layer, job.position, blocks)
        if job.last_of_layer:
            self.layers_done = job.layer + 1
