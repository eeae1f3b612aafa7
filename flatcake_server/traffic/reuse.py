"""How blocks come back: LRU stack distances, reuse distances and gaps, sharing, the working set. Pure, one pass.

The cache that is asked about is an LRU of blocks. A request looks up what it finds, as a server does, and then uses all of
its blocks, the last first, so a chain loses its end first and what is cached of it is always a prefix. A block is hit in
a cache of C blocks exactly if it is among the C used last (Mattson's stack algorithm): one pass answers for every C.

Chains make that pass cheap. Let q be the last request that held a block, and r the one that asks for it now.

- What is known of r's chain is a prefix, and the q of its blocks never grows along it: whoever holds a block holds all
  before it. So r's known blocks are a few runs of equal q.
- The blocks whose last request is q are the end of q's chain: later requests took prefixes of it. The run starts where
  that rest starts, at depth s.
- So behind the A blocks last held by requests after q, the run's lie one after the other in the order of use: that at depth
  d is the (A + d - s + 1)th. A cache of C blocks hits the first C - A of the run, at most all.

A is a sum over requests of how many blocks each was the last to hold: a Fenwick tree. One question and one change for a
run, and a trace of 83 million accesses has about 60,000 runs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flatcake_server.traffic.spans import Ints, Traffic

Floats = NDArray[np.float64]

WINDOWS_S: Final = (60.0, 300.0, 3600.0)  # of the working set: what was used in the last minute, 5 minutes, hour
SAMPLES: Final = 240  # points in time at which it is looked at
_STEP_REQUESTS: Final = 512


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Accesses to blocks that were held before, by runs: (n,) each. `blocks` is the weight of a run."""

    blocks: Ints
    newer: Ints  # different blocks used after the run's first: the A of the theory above
    requests_since: Ints  # requests since the last one that held them; 1 is the very next
    gap_s: Floats

    def hits(self, cache_blocks: Ints) -> Ints:
        """Accesses that an LRU of each of these sizes hits, (n,)."""
        starts, ends = np.sort(self.newer), np.sort(self.newer + self.blocks)
        found = np.zeros(len(cache_blocks), np.int64)
        # Each run adds max(0, C - start) - max(0, C - end): a sum over the sorted ends that lie below C.
        for sign, edges in ((1, starts), (-1, ends)):
            sums, below = np.concatenate(([0], np.cumsum(edges))), np.searchsorted(edges, cache_blocks)
            found += sign * (below * cache_blocks - sums[below])
        return found

    def cache_for(self, hits: float) -> int:
        """The smallest LRU, in blocks, that has so many hits; as many as all is the most that is answered for."""
        sizes = np.unique(np.concatenate([self.newer, self.newer + self.blocks]))
        if len(sizes) == 0:
            return 0
        # Between two sizes where a run starts or ends the hits grow evenly.
        return int(np.ceil(np.interp(hits, self.hits(sizes), sizes)))


@dataclass(frozen=True, slots=True, eq=False)
class SessionSizes:
    """By session, as `Traffic.sessions`."""

    turns: Ints
    peak_tokens: Ints  # prompt and reply, where they are longest
    distinct_blocks: Ints  # every branch once, what is shared with others counted in


@dataclass(frozen=True, slots=True, eq=False)
class WorkingSet:
    """Over time. `used_blocks[w, i]`: different blocks used in the WINDOWS_S[w] before `at_s[i]`; `unique_blocks`: ever."""

    at_s: Floats
    used_blocks: Ints
    unique_blocks: Ints
    active_sessions: Ints  # with a request in the last 300 s


@dataclass(frozen=True, slots=True, eq=False)
class Reuse:
    runs: Runs
    sessions: SessionSizes
    working_set: WorkingSet
    once_blocks: int  # asked for by one request only
    hit_blocks: int  # what a cache without end hits
    own_hit_blocks: int  # the same if each session had a cache of its own
    hit_tokens: int


class LiveBlocks:
    """How many blocks each request is the last to hold: a Fenwick tree over requests."""

    def __init__(self, requests: int) -> None:
        self._tree = [0] * (requests + 1)
        self.total = 0

    def add(self, request: int, blocks: int) -> None:
        self.total += blocks
        tree, i = self._tree, request + 1
        while i < len(tree):
            tree[i] += blocks
            i += i & -i

    def since(self, request: int) -> int:
        """Blocks last held by `request` or a later one."""
        tree, i, before = self._tree, request, 0
        while i > 0:
            before += tree[i]
            i -= i & -i
        return self.total - before


class _Sharing:
    """Which blocks a session has used itself. Those it wrote need no note; of the others there are few."""

    def __init__(self, traffic: Traffic) -> None:
        self.own_hit_blocks = 0
        self._traffic = traffic
        self._writer = np.full(len(traffic.span_blocks), -1, np.int64)  # session that asked for the span first
        self._borrowed: list[set[int]] = [set() for _ in traffic.sessions]
        self._distinct = [0] * len(traffic.sessions)

    def see(self, session: int, spans: NDArray[np.int32], known: int) -> None:
        """A request of the session holds `spans`, the first `known` of them held before by anybody."""
        weights, borrowed = self._traffic.span_blocks, self._borrowed[session]
        # What the session used before is a prefix. Those it wrote reach to `low`; then perhaps some it borrowed.
        wrote = np.flatnonzero(self._writer[spans[:known]] == session)
        low, high = int(wrote[-1]) + 1 if len(wrote) else 0, known
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if int(spans[middle]) in borrowed else (low, middle)
        borrowed.update(spans[low:known].tolist())
        self._writer[spans[known:]] = session
        self.own_hit_blocks += int(weights[spans[:low]].sum())
        self._distinct[session] += int(weights[spans[low:]].sum())

    def sizes(self) -> SessionSizes:
        traffic = self._traffic
        peak = np.zeros(len(traffic.sessions), np.int64)
        np.maximum.at(peak, traffic.session, traffic.input_tokens + traffic.output_tokens)
        turns = np.bincount(traffic.session, minlength=len(traffic.sessions))
        return SessionSizes(turns, peak, np.array(self._distinct, np.int64))


class _Clock:
    """Looks at the working set at SAMPLES points in time, evenly from the first request to the last."""

    def __init__(self, traffic: Traffic) -> None:
        arrival_s = traffic.arrival_s
        self.at_s = np.linspace(arrival_s[0], arrival_s[-1], SAMPLES)
        self._first = np.stack([np.searchsorted(arrival_s, self.at_s - window, "right") for window in WINDOWS_S])
        self._used = np.zeros((len(WINDOWS_S), SAMPLES), np.int64)
        self._unique = np.zeros(SAMPLES, np.int64)
        ends = np.searchsorted(arrival_s, self.at_s, "right")
        starts = np.searchsorted(arrival_s, self.at_s - 300.0, "right")
        active = [len(np.unique(traffic.session[i:j])) for i, j in zip(starts.tolist(), ends.tolist(), strict=True)]
        self._active = np.array(active, np.int64)
        self._next = 0

    def advance(self, now_s: float, live: LiveBlocks) -> None:
        """All requests before `now_s` have been seen, none at it."""
        while self._next < SAMPLES and self.at_s[self._next] < now_s:
            self._used[:, self._next] = [live.since(first) for first in self._first[:, self._next].tolist()]
            self._unique[self._next] = live.total
            self._next += 1

    def result(self) -> WorkingSet:
        return WorkingSet(self.at_s, self._used, self._unique, self._active)


def analyse(traffic: Traffic, progress: Callable[[int, int], None] | None = None) -> Reuse:
    """One pass over the requests. `progress` is told how many are done, and of how many."""
    weights = traffic.span_blocks
    last = np.full(len(weights), -1, np.int64)  # request that held the span last
    again = np.zeros(len(weights), np.bool_)
    live = LiveBlocks(traffic.requests)
    sharing = _Sharing(traffic)
    clock = _Clock(traffic)
    seen, gaps_s = tuple(array("q") for _ in range(3)), array("d")
    hit_blocks = hit_tokens = 0
    for r in range(traffic.requests):
        if progress and r % _STEP_REQUESTS == 0:
            progress(r, traffic.requests)
        clock.advance(float(traffic.arrival_s[r]), live)
        spans = traffic.spans_of(r)
        depth = np.concatenate(([0], np.cumsum(weights[spans])))
        before = last[spans]
        known = int((before >= 0).sum())
        edges = [*np.flatnonzero(np.diff(before[:known], prepend=-2)).tolist(), known]
        for start, end in pairwise(edges):
            q = int(before[start])
            blocks = int(depth[end] - depth[start])
            seen[0].append(blocks)
            seen[1].append(live.since(q + 1))
            seen[2].append(r - q)
            gaps_s.append(float(traffic.arrival_s[r] - traffic.arrival_s[q]))
            # Only after the whole request: all its runs are looked up before any of its blocks is used.
        for start, end in pairwise(edges):
            live.add(int(before[start]), int(depth[start] - depth[end]))
        live.add(r, int(depth[-1]))
        again[spans[:known]] = True
        last[spans] = r
        hit_blocks += int(depth[known])
        hit_tokens += min(int(depth[known]) * traffic.block_tokens, int(traffic.input_tokens[r]))
        sharing.see(int(traffic.session[r]), spans, known)
    clock.advance(float("inf"), live)
    weight, newer, since = (np.frombuffer(column, np.int64) for column in seen)
    return Reuse(
        runs=Runs(weight, newer, since, np.frombuffer(gaps_s, np.float64)),
        sessions=sharing.sizes(),
        working_set=clock.result(),
        once_blocks=int(weights[~again].sum()),
        hit_blocks=hit_blocks,
        own_hit_blocks=sharing.own_hit_blocks,
        hit_tokens=hit_tokens,
    )
