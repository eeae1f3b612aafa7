"""Whose entries go from the directory: those of nodes that are members no longer. Pure: the clock is an argument.

An entry names its node and the incarnation that wrote it, and no asker believes one of an incarnation that is not in the list of
members; so a dead node's entries are out of all answers with it. What is left of them is memory of the directory. The
members take it out together: each reads its own share of the buckets, all of them once in `period_s`, and removes
what is dead. A small cluster takes longer, at `RATE_MAX` buckets a second and node: it has little to sweep.

A node may be missing in the list for a moment: it cannot reach the directory, or the list was lost. So an incarnation is dead only
when it was in none of the lists of `grace_s`. One that comes back after that joins afresh, and publishes all it has again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from flatcake_server.cluster.directory import BUCKETS, TAG_BYTES, Holder
from flatcake_server.cluster.members import Member

RATE_MAX: Final = 128.0  # 2 ms of a node's time a second; one node by itself reads all 4 million in nine hours
BATCH_MAX: Final = 64
SUSPECTS_MAX: Final = 1 << 16


class Sweeper:
    """Belongs to the event loop."""

    def __init__(self, period_s: float, grace_s: float, *, buckets: int = BUCKETS, rate_max: float = RATE_MAX) -> None:
        self._period_s, self._grace_s, self._buckets, self._rate_max = period_s, grace_s, buckets, rate_max
        self._listed: frozenset[Holder] = frozenset()
        self._suspects: dict[Holder, float] = {}  # since when: seen in a bucket, and in no list
        self._next = 0
        self._taken_s: float | None = None

    def listed(self, members: Iterable[Member]) -> None:
        """All members there are, also this node, and those that do not count as peers."""
        self._listed = frozenset(Holder(member.node_id, member.incarnation[:TAG_BYTES]) for member in members)
        for holder in self._listed:
            self._suspects.pop(holder, None)

    def take(self, now_s: float, node_id: int) -> range:
        """The buckets that this node reads now; maybe none."""
        sharers = sorted({holder.node_id for holder in self._listed} | {node_id})
        rank = sharers.index(node_id)
        first, end = (self._buckets * at // len(sharers) for at in (rank, rank + 1))
        if self._taken_s is None:
            self._taken_s = now_s
        rate = min(self._rate_max, (end - first) / self._period_s)
        due = min(BATCH_MAX, int((now_s - self._taken_s) * rate))
        if due < 1:
            return range(0)
        self._taken_s = now_s if due == BATCH_MAX else self._taken_s + due / rate
        start = self._next if first <= self._next < end else first
        self._next = min(start + due, end)
        return range(start, self._next)

    def dead(self, holders: Iterable[Holder], now_s: float) -> set[Holder]:
        """Which of the writers of a bucket's entries are dead."""
        if len(self._suspects) > SUSPECTS_MAX:
            self._suspects.clear()  # then they die later
        unlisted = set(holders) - self._listed
        return {holder for holder in unlisted if now_s - self._suspects.setdefault(holder, now_s) >= self._grace_s}
