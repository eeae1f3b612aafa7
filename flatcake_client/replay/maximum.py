"""What a cache could have delivered at most: an infinite one, and the best that forgets whole sessions. Pure.

    ideal    a cache without end that stores at once: blocks that any request had that arrived before. A property of the
             trace; no cache can hit more, whatever the load
    stored   the same cache, but nobody can store what is not computed: blocks of requests whose prefill had ended when the
             request arrived. This is the maximum that a system is measured against. What is missing to `ideal` was still
             being computed, by requests that came shortly before
    oracle   a cache of a given size that always drops the session used again last of all. It knows the future

Hits are prefixes: a block counts if it and all before it are there.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flatcake_client.replay.workload import Numbers


class Seen:
    """Blocks that were seen, by number. Not thread-safe."""

    def __init__(self, blocks: int) -> None:
        self._seen = np.zeros(blocks, np.bool_)

    def prefix(self, numbers: Numbers) -> int:
        """How many of a chain's first blocks were seen."""
        missing = ~self._seen[numbers]
        return int(missing.argmax()) if missing.any() else len(numbers)

    def of(self, numbers: Numbers) -> NDArray[np.bool_]:
        return self._seen[numbers]

    def add(self, numbers: Numbers) -> None:
        self._seen[numbers] = True

    def drop(self, numbers: Numbers) -> None:
        self._seen[numbers] = False


def ideal_blocks(chains: Sequence[Numbers], blocks: int) -> list[int]:
    """By request, in order of arrival: blocks that a request before it had."""
    seen, hits = Seen(blocks), []
    for numbers in chains:
        hits.append(seen.prefix(numbers))
        seen.add(numbers)
    return hits


def oracle_blocks(chains: Sequence[Numbers], sessions: Sequence[str], blocks: int, capacity_blocks: int) -> list[int]:
    """By request, in order of arrival: blocks that a cache of `capacity_blocks` hits which forgets whole sessions, the best first.

    A block belongs to the session that asks for it first. When room is needed the session goes whose blocks are asked
    for again last of all, never or late, by whichever request; not one that the request at hand hits or writes. What then
    still does not fit is not stored. Dropping whole sessions is what FlatCake does; whether dropping half of one would be
    better still is not asked.
    """
    owner = np.full(blocks, -1, np.int64)
    names = {session: n for n, session in enumerate(dict.fromkeys(sessions))}
    touched: list[list[int]] = []
    uses: defaultdict[int, list[int]] = defaultdict(list)
    for r, (numbers, session) in enumerate(zip(chains, sessions, strict=True)):
        fresh = numbers[owner[numbers] < 0]
        owner[fresh] = names[session]
        touched.append(np.unique(owner[numbers]).tolist())
        for mine in touched[-1]:
            uses[mine].append(r)
    there, held = Seen(blocks), defaultdict[int, list[Numbers]](list)
    size: defaultdict[int, int] = defaultdict(int)
    total, hits = 0, []
    for r, numbers in enumerate(chains):
        hit = there.prefix(numbers)
        hits.append(hit)
        # A hole of a session dropped before may have later blocks behind it that are still there: they are not stored twice.
        missing = numbers[hit:][~there.of(numbers[hit:])]
        over = total + len(missing) - capacity_blocks
        for _, mine in _last_used_first(uses, [s for s in size if s not in touched[r]], r) if over > 0 else []:
            for part in held.pop(mine):
                there.drop(part)
            freed = size.pop(mine)
            total, over = total - freed, over - freed
            if over <= 0:
                break
        kept = missing[: max(0, capacity_blocks - total)]
        there.add(kept)
        for mine in np.unique(owner[kept]).tolist():
            part = kept[owner[kept] == mine]
            held[mine].append(part)
            size[mine] += len(part)
        total += len(kept)
    return hits


def _last_used_first(uses: dict[int, list[int]], sessions: Sequence[int], now: int) -> list[tuple[int, int]]:
    def next_use(session: int) -> int:
        mine = uses[session]
        at = bisect_right(mine, now)
        return mine[at] if at < len(mine) else len(mine) + (1 << 60)

    heap = [(-next_use(session), session) for session in sessions]
    heapq.heapify(heap)
    return [heapq.heappop(heap) for _ in range(len(heap))]
