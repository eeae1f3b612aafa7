"""What a restore wants of a hit, and where it goes. Pure.

Blocks that were asked for are numbered by position: 0 is the first that the engine does not have. A hit's runs are clipped to
the positions asked for, and each then knows the segment's geometry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flatcake_client.records import Run
from flatcake_transport.address import Medium
from flatcake_transport.layout import SegmentLayout
from flatcake_transport.mover import PagedSpan, Slots


@dataclass(frozen=True, slots=True, eq=False)
class PlacedRun:
    """What a restore wants of one run: `blocks` from `first_block` within the segment, for positions from `position`."""

    run: Run
    layout: SegmentLayout
    first_block: int
    blocks: int
    position: int

    @property
    def footer_bytes(self) -> int:
        return self.run.segment_bytes - self.layout.data_bytes

    @property
    def offset(self) -> int:
        """Of the segment in what its bytes are read from: its file, or its node's arena."""
        return self.run.file_offset if self.run.file_id else self.run.segment.offset


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """Where a restore puts blocks: position p of layer l goes to block p of `spans[l]`. `planes[l]` is layer l's plane."""

    spans: Sequence[PagedSpan]
    planes: range

    @property
    def slots(self) -> Slots:
        return self.spans[0].slots

    def span(self, layer: int, position: int, blocks: int) -> PagedSpan:
        return self.spans[layer].part(position, position + blocks)


def place_runs(
    runs: Sequence[Run], first_block: int, end_block: int, layout_of: Callable[[int], SegmentLayout]
) -> list[PlacedRun]:
    """The parts of runs, in chain order, that lie in blocks `first_block .. end_block` of the hit."""
    placed = []
    start = 0
    for run in runs:
        first, end = max(start, first_block), min(start + run.blocks, end_block)
        if first < end:
            within = run.first_block + first - start
            placed.append(PlacedRun(run, layout_of(run.segment_blocks), within, end - first, first - first_block))
        start += run.blocks
    return placed


def split_runs(placed: Sequence[PlacedRun], node_id: int, medium: Medium) -> tuple[list[PlacedRun], list[PlacedRun]]:
    """Those that lie on a medium of a node, and the others."""
    there: list[PlacedRun] = []
    others: list[PlacedRun] = []
    for each in placed:
        segment = each.run.segment
        (there if segment.node == node_id and segment.medium is medium else others).append(each)
    return there, others
