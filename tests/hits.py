"""A hit without a daemon: files opened directly, an arena in the test's memory, a lease on the test's clock."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from images import Chain

from flatcake_client.lease import Lease
from flatcake_client.restore import ReadTools
from flatcake_transport.layout import SegmentLayout, align_up, segment_layout
from flatcake_transport.movers.memory import MemoryMover
from flatcake_transport.movers.posix import PosixMover
from flatcake_transport.plan import window_half_bytes_min
from flatcake_transport.window import OpenFile, StagingPool


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


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

    def _renew(self, lease_id: int, timeout_s: float) -> bool:
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

    def report_corrupt(self, segments: Sequence[int]) -> None:
        self.reported += segments

    def close(self) -> None:
        for file in self.opened.values():
            os.close(file.fd)
        self.opened = {}


class Movers:
    """Real movers for tests, closed at the end."""

    def __init__(self) -> None:
        self.memory = MemoryMover(threads=1, inline_bytes=0)
        self.files: Any = PosixMover(threads=2)

    def reading(self, hit: FakeHit, *, extra_bytes: int = 0, windows: int = 1, job_bytes: int = 1 << 20) -> ReadTools:
        half = half_bytes_min(hit) + extra_bytes
        return ReadTools(self.files, self.memory, StagingPool(2 * half * windows, half), job_bytes=job_bytes)

    def close(self) -> None:
        self.memory.close()
        self.files.close()


def half_bytes_min(hit: FakeHit) -> int:
    """The smallest window half with which the hit can be restored."""
    layout = hit.layout_of(1)
    footers = max((run.segment_bytes - hit.layout_of(run.segment_blocks).data_bytes for run in hit.runs), default=0)
    return align_up(max(window_half_bytes_min(layout, whole_granules=hit.verify), min(footers, 4096)))
