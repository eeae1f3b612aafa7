"""A hit without a daemon: files opened directly, an arena in the test's memory, a lease on the test's clock."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from images import FAR_ID, Chain

from flatcake_client.file_path import ReadTools
from flatcake_client.lease import Lease
from flatcake_client.records import Run
from flatcake_transport.address import Medium
from flatcake_transport.errors import Unavailable
from flatcake_transport.layout import SegmentLayout, align_up, segment_layout
from flatcake_transport.mover import Move, MoverStats
from flatcake_transport.movers.memory import MemoryMover
from flatcake_transport.movers.posix import PosixMover
from flatcake_transport.plan import buffer_bytes_min
from flatcake_transport.remote import RemoteMemory, RemoteSpan
from flatcake_transport.window import OpenFile, StagingPool


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


def time_from(happened: Callable[[], object]) -> Callable[[], float]:
    """Real time, which stands still until that has happened."""
    began_s = time.monotonic()
    return lambda: time.monotonic() if happened() else began_s


@dataclass
class FakeHit:
    """`restore.HitSource` over a chain."""

    chain: Chain
    shard: int = 0
    verify: bool = False
    clock: Clock = field(default_factory=Clock)
    renewals: list[bool] = field(default_factory=list)  # answers to come; then True
    reported: list[int] = field(default_factory=list)
    opened: dict[int, OpenFile] = field(default_factory=dict)
    lost: bool = False
    remote: list = field(default_factory=list)  # restore.RemoteSource

    def __post_init__(self) -> None:
        self.spec = self.chain.spec
        self.runs = tuple(self.chain.runs)
        self.blocks = sum(run.blocks for run in self.runs)
        self.keys = self.chain.keys
        self.renewed = 0
        self.lease = Lease(7, 8.0, self.clock(), self._renew, lambda: self.lost, now_s=self.clock)

    def _renew(self, timeout_s: float) -> bool:
        self.renewed += 1
        return self.renewals.pop(0) if self.renewals else True

    def layout_of(self, blocks: int) -> SegmentLayout:
        return segment_layout(self.spec, blocks)

    def arena(self, timeout_s: float) -> np.ndarray:
        return self.chain.arena

    def files(self, timeout_s: float) -> dict[int, OpenFile]:
        if not self.opened:
            for run in self.runs:
                if run.file_id and run.file_id not in self.opened:
                    self.opened[run.file_id] = OpenFile(os.open(self.chain.path(run.file_id), os.O_RDONLY), False)
        return self.opened

    def report_corrupt(self, runs: Sequence[Run]) -> None:
        self.reported += [int(run.segment) for run in runs]

    def close(self) -> None:
        for file in self.opened.values():
            os.close(file.fd)
        self.opened = {}


class FarMover:
    """Another node's memory, which is here: `Chain.far_arena`. Dead: nothing can be read any more."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self.dead = False

    def submit(self, moves: Sequence[Move]) -> FarTransfer:
        if not self.dead:
            for move in moves:
                at = move.source.offset
                move.target.data[:] = self._chain.far_arena[at : at + move.source.size_bytes]
        return FarTransfer(self.dead)

    def register(self, region: object) -> None: ...

    def stats(self) -> MoverStats:
        return MoverStats("far")

    def close(self) -> None: ...


@dataclass
class FarTransfer:
    failed: bool

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        if self.failed:
            raise Unavailable("the peer is dead")


@dataclass
class FarMemory:
    memory: RemoteMemory

    def span(self, offset: int, size_bytes: int) -> RemoteSpan:
        return RemoteSpan(self.memory, offset, size_bytes)


class FarSource:
    """`restore.RemoteSource` over a chain's other node."""

    node_id = FAR_ID
    medium = Medium.MEMORY

    def __init__(self, hit: FakeHit, tools: ReadTools) -> None:
        self._hit = hit
        self.mover = FarMover(hit.chain)
        self.tools = dataclasses.replace(tools, files=self.mover)
        self.verify = hit.verify
        self.report_corrupt = hit.report_corrupt
        self.lost = False
        self.lease = Lease(8, 8.0, hit.clock(), lambda *_: True, lambda: self.lost, now_s=hit.clock)

    def files(self, timeout_s: float) -> dict[int, FarMemory]:
        return {0: FarMemory(RemoteMemory(b"", b"", 0, len(self._hit.chain.far_arena)))}


class Movers:
    """Real movers for tests, closed at the end."""

    def __init__(self) -> None:
        self.memory = MemoryMover(threads=1, inline_bytes=0)
        self.files: Any = PosixMover(threads=2)

    def reading(self, hit: FakeHit, *, extra_bytes: int = 0, windows: int = 1, **sizes: int) -> ReadTools:
        buffer = hit_buffer_bytes_min(hit) + extra_bytes
        sizes = {"job_bytes": 1 << 20} | sizes
        tools = ReadTools(self.files, self.memory, StagingPool(2 * buffer * windows, buffer), **sizes)
        if len(hit.chain.far_arena):
            far = dataclasses.replace(tools, staging=StagingPool(2 * buffer * windows, buffer))
            hit.remote = [FarSource(hit, far)]
        return tools

    def close(self) -> None:
        self.memory.close()
        self.files.close()


def hit_buffer_bytes_min(hit: FakeHit) -> int:
    """The smallest window buffer with which the hit can be restored."""
    layout = hit.layout_of(1)
    footers = max((run.segment_bytes - hit.layout_of(run.segment_blocks).data_bytes for run in hit.runs), default=0)
    return align_up(max(buffer_bytes_min(layout, whole_granules=hit.verify), min(footers, 4096)))
