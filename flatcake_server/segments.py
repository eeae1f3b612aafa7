"""Which segment holds an address: the sorted table behind the index. Pure; belongs to the event loop.

Segments do not overlap, so an address belongs to the segment with the greatest base at or below it. Addresses of one
segment's blocks step by the space's first plane; a footer stands between two segments, so equal steps never cross from
one into the next, and a lookup's addresses fall into runs by comparing neighbours, without looking at single blocks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from flatcake_server.records import SegmentRecord
from flatcake_transport.address import AddressArray


class SegmentRun(NamedTuple):
    """`blocks` consecutive blocks of a segment, from `first_block` within it. A tuple: a lookup makes hundreds of them."""

    segment: SegmentRecord
    first_block: int
    blocks: int


class SegmentMap:
    """All live segments of a node by address."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._segments: list[SegmentRecord] = []

    def __len__(self) -> int:
        return len(self._bases)

    def __iter__(self) -> Iterator[SegmentRecord]:
        return iter(self._segments)

    def load(self, segments: Iterable[SegmentRecord]) -> None:
        """Replace everything, in one sort. For the start."""
        self._segments = sorted(segments, key=lambda segment: segment.address)
        self._bases = [int(segment.address) for segment in self._segments]

    def add(self, segment: SegmentRecord) -> None:
        """Raises: ValueError: its bytes overlap another segment's."""
        at = bisect_left(self._bases, segment.address)
        before = self._segments[at - 1] if at else None
        after = self._segments[at] if at < len(self._bases) else None
        if before is not None and before.address + before.total_bytes > segment.address and _same_node(before, segment):
            raise ValueError(f"segment at {segment.address} overlaps the one at {before.address}")
        if after is not None and int(segment.address) + segment.total_bytes > after.address:
            raise ValueError(f"segment at {segment.address} overlaps the one at {after.address}")
        self._bases.insert(at, int(segment.address))
        self._segments.insert(at, segment)

    def remove(self, segment: SegmentRecord) -> None:
        """Raises: KeyError: no segment stands there."""
        at = bisect_left(self._bases, segment.address)
        if at == len(self._bases) or self._bases[at] != segment.address:
            raise KeyError(str(segment.address))
        del self._bases[at], self._segments[at]

    def get(self, base: int) -> SegmentRecord | None:
        """The segment that begins at `base`."""
        at = bisect_left(self._bases, base)
        return self._segments[at] if at < len(self._bases) and self._bases[at] == base else None

    def at(self, address: int) -> SegmentRecord:
        """The segment that holds the address. Raises: KeyError: none does."""
        return self._segments[self._at(address)]

    def _at(self, address: int) -> int:
        at = bisect_right(self._bases, address) - 1
        if at < 0 or address >= self._bases[at] + self._segments[at].total_bytes:
            raise KeyError(f"{address:#x}")
        return at

    def resolve(self, addresses: AddressArray, step_bytes: int) -> list[SegmentRun]:
        """Split addresses, in chain order, into runs. A loop over runs, not over blocks.

        Args:
            addresses: (n,) u64, none missing.
            step_bytes: bytes of a block in the space's first plane.
        """
        if not len(addresses):
            return []
        breaks = np.flatnonzero(np.diff(addresses) != np.uint64(step_bytes)) + 1
        starts = np.concatenate(([0], breaks))
        counts = np.diff(starts, append=len(addresses)).tolist()
        runs = []
        bases, segments, at = self._bases, self._segments, -1
        for first, count in zip(addresses[starts].tolist(), counts, strict=True):
            at += 1  # a session's segments mostly follow each other
            if at >= len(bases) or bases[at] != first:
                at = self._at(first)
            runs.append(SegmentRun(segments[at], (first - bases[at]) // step_bytes, count))
        return runs


def _same_node(one: SegmentRecord, other: SegmentRecord) -> bool:
    return one.address.medium == other.address.medium and one.address.node == other.address.node
