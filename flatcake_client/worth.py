"""Fetch or recompute: whether blocks of other nodes come sooner than an engine computes them. Pure; the clock is an argument.

Each medium of each node has a measured bandwidth, from restores that have read it: bytes over the time they stood waiting for
them, which is what a fetch costs an engine that overlaps. It is an average that forgets (EWMA), of the time a byte takes: what came
while the restore waited for something else took none, and in an average of bandwidths that would outweigh all others. Nobody
knows the bandwidth of what was not read for a while, and such blocks are fetched: that is how it is learned, and learned anew when
a link gets better.

An engine that does not say how fast it computes always fetches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from flatcake_client.records import Run
from flatcake_transport.address import Medium

NEW_SHARE: Final = 0.3  # of an average that is the last restore: five of them outweigh what was before
FORGET_S: Final = 60.0  # a link that was slow is tried again once a minute
SAMPLE_BYTES_MIN: Final = 1 << 20  # less measures round trips, not bandwidth

Place = tuple[int, Medium]


@dataclass(frozen=True, slots=True)
class RemoteRead:
    """What a restore read from one medium of another node, and how long it stood waiting for that."""

    place: Place
    size_bytes: int
    seconds: float


class Bandwidths:
    """By place. Of two threads that add at once, one may be left out."""

    def __init__(self) -> None:
        self._known: dict[Place, tuple[float, float]] = {}  # seconds a byte, when it was measured last

    def add(self, read: RemoteRead, now_s: float) -> None:
        if read.size_bytes < SAMPLE_BYTES_MIN or read.seconds <= 0:
            return
        byte_s, before = read.seconds / read.size_bytes, self.of(read.place, now_s)
        self._known[read.place] = byte_s if before is None else 1 / before + NEW_SHARE * (byte_s - 1 / before), now_s

    def of(self, place: Place, now_s: float) -> float | None:
        """Bytes a second; None: not known, or not lately."""
        byte_s, measured_s = self._known.get(place, (0.0, float("-inf")))
        return 1 / byte_s if now_s - measured_s < FORGET_S else None


def worth_fetching(
    runs: Sequence[Run],
    near_node: int,
    *,
    block_bytes: int,
    block_tokens: int,
    prefill_tokens_per_s: float,
    bandwidth: Callable[[Place], float | None],
) -> int:
    """How many of a hit's runs to keep, so that fetching these and computing the others takes the least time.

    What is computed is a tail: a block can be computed only after all blocks before it. This node's runs are never cut off for
    being slow themselves, and among equals the longest hit is kept.

    Args:
        runs: in chain order.
        near_node: the node whose runs cost nothing that is counted here.
        block_bytes: of the caller's shard.
        bandwidth: bytes a second of a place; None: not known, taken to cost nothing.
    """
    fetch_s: list[float] = []
    for run in runs:
        place = run.segment.node, run.segment.medium
        rate = None if place[0] == near_node else bandwidth(place)
        fetch_s.append(0.0 if rate is None else run.blocks * block_bytes / rate)
    best, kept = 0.0, len(runs)
    saved = 0.0  # by cutting the runs from `index` on
    for index in range(len(runs) - 1, -1, -1):
        saved += fetch_s[index] - runs[index].blocks * block_tokens / prefill_tokens_per_s
        if saved > best:
            best, kept = saved, index
    return kept
