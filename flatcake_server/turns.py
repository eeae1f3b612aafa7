r"""A turn being written: what was reserved for it, who writes it, how far they are. It decides, and does nothing.

The daemon reserves, clients move, the daemon commits. Each tensor-parallel shard writes its own planes of the same
segments; the turn becomes visible when all have committed, so ranks can never disagree on what is stored. A write grant
ends only by its writer's word or with its connection: until then the bytes are nobody else's, however slow it is.

    reserved --all shards committed--> finishing --> visible
        \--a shard aborted or died--> failed --no writer left--> released
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from flatcake_server.catalog import Session, SessionFile
from flatcake_server.placement import Hints, Policy, place
from flatcake_server.records import KeyArray
from flatcake_transport.address import Address, Medium
from flatcake_transport.layout import SEGMENT_BLOCKS_MAX, SegmentLayout
from flatcake_transport.space import Fingerprint, SpaceSpec


@dataclass(frozen=True, slots=True, eq=False)
class TurnRequest:
    """What a client says of a turn before it is written. `keys` is the whole chain, `root_key` the parent of its first."""

    shard: int
    session: str
    keys: KeyArray
    root_key: bytes
    context_tokens: int | None = None
    previous_reply_tokens: int | None = None
    share_counts: Sequence[int] | None = None
    turn: int | None = None
    request_id: int = 0
    copy: bool = False  # of blocks of other nodes: makes no room for itself


@dataclass(slots=True, frozen=True)
class PartPlan:
    """Blocks `[first_block, first_block + blocks)` of the chain, to become one segment."""

    first_block: int
    blocks: int
    medium: Medium
    reason: str


@dataclass(slots=True, eq=False)
class Part:
    """Space reserved for one segment of a turn."""

    plan: PartPlan
    session: Session
    layout: SegmentLayout
    total_bytes: int
    address: Address
    reason: str
    keys: KeyArray
    parent_key: bytes
    file: SessionFile | None
    file_offset: int
    algorithms: bytearray
    checksums: NDArray[np.uint64]
    open: bool = True  # neither committed nor given back


@dataclass(slots=True, eq=False)
class Turn:
    turn_id: int
    spec: SpaceSpec
    fingerprint: Fingerprint
    session: Session
    turn_no: int
    keys: KeyArray
    parts: list[Part]
    holds: list[Session]
    join_key: tuple[Fingerprint, str, bytes]
    writers: dict[int, int] = field(default_factory=dict)  # shard -> client that may still write
    requests: dict[int, int] = field(default_factory=dict)  # shard -> what its client calls the request; 0: nothing
    joined: set[int] = field(default_factory=set)
    committed: set[int] = field(default_factory=set)
    failure: str = ""
    failed: bool = False
    blocks_reserved: int = 0  # counted against index_blocks_max until the turn ends
    waited_s: int = 0  # for shards that have not come
    ready: asyncio.Event = field(default_factory=asyncio.Event)  # its parts are reserved, or it failed

    def set_checksums(self, shard: int, sums: list[tuple[int, bytes]]) -> None:
        """Keep what a shard computed over its planes, one (algorithm, u64 little-endian) a part.

        Raises: ValueError: not one a part, an unknown algorithm, or not one checksum a granule.
        """
        if len(sums) != len(self.parts):
            raise ValueError(f"{len(sums)} parts committed, the turn has {len(self.parts)}")
        first_plane, end_plane = shard * self.spec.layers, (shard + 1) * self.spec.layers
        for part, (algorithm, data) in zip(self.parts, sums, strict=True):
            first, end = (int(part.layout.granule_first[plane]) for plane in (first_plane, end_plane))
            if algorithm not in (0, 1, 2):
                raise ValueError(f"checksum algorithm {algorithm} is unknown: expected 0, 1 or 2")
            expected = 8 * (end - first) if algorithm else 0
            if len(data) != expected:
                raise ValueError(f"{len(data)} bytes of checksums for shard {shard}: expected {expected}")
            part.algorithms[shard] = algorithm
            if algorithm:
                part.checksums[first:end] = np.frombuffer(data, "<u8")


def plan_parts(missing: NDArray[np.bool_], hints: Hints, policy: Policy) -> list[PartPlan]:
    """Cut what a chain lacks into segments: maximal runs of missing blocks, cut again where the home changes.

    Args:
        missing: (n,) one a block of the whole chain.
        hints: of the turn; its share counts, if any, are one a block of the whole chain.
    """
    edges = np.flatnonzero(np.diff(np.concatenate(([False], missing, [False])).astype(np.int8)))
    plans = []
    for first, end in edges.reshape(-1, 2).tolist():
        of_run = replace(hints, share_counts=None if hints.share_counts is None else hints.share_counts[first:end])
        for start, count, medium, reason in place(of_run, policy, end - first):
            plans += [
                PartPlan(first + start + cut, min(SEGMENT_BLOCKS_MAX, count - cut), medium, reason)
                for cut in range(0, count, SEGMENT_BLOCKS_MAX)
            ]
    return plans
