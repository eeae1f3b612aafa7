"""A trace against a node that exists only in numbers: same placement, same file sizes, same reclaim. Pure.

The decisions are the daemon's own (placement.place, sizing.file_bytes, ReclaimOrder, reclaim_need); what is done with them
is a few sums instead of bytes: which spans are where, what each session takes of which pool. A request looks up its
longest stored prefix, then stores what is missing, at once: no load, no leases beyond the request, no fragmentation of the
arena, no failures. Where the daemon reclaims memory behind a request's back, the model does so right after it.

A span counts as shared if two sessions of the trace ask for it. A daemon knows that from the engine's prefix tree; a trace
is a window of weeks in which that tree was warm, so the model gives the count the prompt ends up with.

What a request costs: restoring its hit at the rates of memory and SSD, and computing anew what had been computed before
but is not there any more. Computing what is new costs the same whatever the store does, and is left out.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flatcake_server.placement import Hints, Policy, Reason, place
from flatcake_server.reclaim import TRIMS_AT_ONCE, TRIMS_MAX, ReclaimOrder, reclaim_need, tails_of
from flatcake_server.sizing import SizingPolicy, file_bytes
from flatcake_server.traffic.spans import Ints, Spans, Traffic
from flatcake_transport.address import Medium
from flatcake_transport.footer import footer_bytes
from flatcake_transport.layout import SEGMENT_BLOCKS_MAX, segment_layout
from flatcake_transport.space import SpaceSpec

MEMORY_POOL: Final = 0
SSD_POOL: Final = 1
_AWAY: Final = 0  # homes of a span
_IN_MEMORY: Final = 1
_ON_SSD: Final = 2
_STEP_REQUESTS: Final = 512
_LAYERS: Final = 32  # any number: the padding of planes is small


@dataclass(frozen=True, slots=True)
class Node:
    """What is tried. Watermarks as the daemon's. Without `tails_first` sessions go where only unused tails need to."""

    memory_bytes: int
    ssd_bytes: int
    policy: Policy
    bytes_per_token: int
    sizing: SizingPolicy = field(default_factory=SizingPolicy)
    watermarks: tuple[float, float] = (0.95, 0.90)
    session_trim_after_s: float = 600.0
    tails_first: bool = True


@dataclass(frozen=True, slots=True)
class Rates:
    """What one request gets of an idle machine. Defaults: one copy in memory, a fast NVMe disk, 8B on one large GPU."""

    memory_bytes_per_s: float = 10e9
    ssd_bytes_per_s: float = 3e9
    prefill_tokens_per_s: float = 10_000.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run. Shares are of all blocks asked for, costs are means over requests."""

    hit_share: float
    hit_share_max: float
    memory_hit_share: float
    restore_s: float
    recompute_s: float
    memory_peak_bytes: int
    ssd_peak_bytes: int
    placed_bytes: dict[str, int]  # by reason
    refused_blocks: int
    reclaimed: dict[str, int]  # sessions, by the pool that was full
    files: int  # made on SSD, and which of them gave their tails back while they were a session's last
    files_trimmed: int

    @property
    def cost_s(self) -> float:
        return self.restore_s + self.recompute_s


@dataclass(slots=True, eq=False)
class _Session:
    key: object
    memory_bytes: int = 0
    sealed_bytes: int = 0  # in files before the last; nothing of them is free
    created_bytes: int = 0  # of the last file, as it was made
    last_bytes: int = 0  # of the last file now
    tail: int = 0  # written in the last file
    used_s: float = 0.0
    spans: list[Spans] = field(default_factory=list)

    @property
    def ssd_bytes(self) -> int:
        return self.sealed_bytes + self.last_bytes


def share_counts(traffic: Traffic) -> Ints:
    """By span: how many sessions ask for it."""
    owners = np.repeat(traffic.session, np.diff(traffic.first))
    pairs = np.unique(traffic.spans.astype(np.int64) * len(traffic.sessions) + owners)
    return np.bincount(pairs // len(traffic.sessions), minlength=len(traffic.span_blocks))


def simulate(
    traffic: Traffic, shares: Ints, node: Node, rates: Rates, progress: Callable[[int, int], None] | None = None
) -> Outcome:
    """Run the trace. `shares` is `share_counts(traffic)`: the same for every node that is tried."""
    run = _Run(traffic, shares, node)
    weights, seen = traffic.span_blocks, np.zeros(len(traffic.span_blocks), np.bool_)
    hit = in_memory = known = 0
    for r in range(traffic.requests):
        if progress and r % _STEP_REQUESTS == 0:
            progress(r, traffic.requests)
        spans = traffic.spans_of(r)
        found = run.prefix(spans)
        blocks = weights[found]
        hit += int(blocks.sum())
        in_memory += int(blocks[run.home[found] == _IN_MEMORY].sum())
        known += int(weights[spans[seen[spans]]].sum())
        seen[spans] = True
        run.store(r, spans)
    block_bytes = traffic.block_tokens * node.bytes_per_token
    restore_s = (
        in_memory * block_bytes / rates.memory_bytes_per_s + (hit - in_memory) * block_bytes / rates.ssd_bytes_per_s
    )
    return Outcome(
        hit_share=hit / traffic.accesses,
        hit_share_max=known / traffic.accesses,
        memory_hit_share=in_memory / traffic.accesses,
        restore_s=restore_s / traffic.requests,
        recompute_s=(known - hit) * traffic.block_tokens / rates.prefill_tokens_per_s / traffic.requests,
        memory_peak_bytes=run.peak[MEMORY_POOL],
        ssd_peak_bytes=run.peak[SSD_POOL],
        placed_bytes=dict(run.placed_bytes),
        refused_blocks=run.refused_blocks,
        reclaimed={"memory": run.reclaimed[MEMORY_POOL], "ssd": run.reclaimed[SSD_POOL]},
        files=run.files,
        files_trimmed=run.files_trimmed,
    )


class _Run:
    """The node's state."""

    def __init__(self, traffic: Traffic, shares: Ints, node: Node) -> None:
        self.home: NDArray[np.int8] = np.zeros(len(traffic.span_blocks), np.int8)
        self.peak = [0, 0]
        self.placed_bytes: Counter[str] = Counter()
        self.reclaimed: Counter[int] = Counter()
        self.refused_blocks = self.files = self.files_trimmed = 0
        self._traffic, self._shares, self._node = traffic, shares, node
        self._holder = np.zeros(len(traffic.span_blocks), np.int64)  # number of the session that holds the span
        self._replies = np.full(len(traffic.sessions), -1, np.int64)
        self._order = ReclaimOrder()
        self._sessions: dict[int, _Session] = {}
        self._numbers: dict[object, int] = {}
        self._next = 0
        self._now_s = 0.0
        self._trims: list[tuple[float, int]] = []
        self._segment_bytes: dict[int, int] = {}
        plane_bytes = max(1, traffic.block_tokens * node.bytes_per_token // _LAYERS)
        self._spec = SpaceSpec("model", "bfloat16", traffic.block_tokens, (plane_bytes,) * _LAYERS)

    def prefix(self, spans: Spans) -> Spans:
        """The longest stored one."""
        away = self.home[spans] == _AWAY
        return spans[: int(away.argmax())] if away.any() else spans

    def store(self, r: int, spans: Spans) -> None:
        """Store what request r lacks, and count the use of all that holds it."""
        traffic = self._traffic
        session = int(traffic.session[r])
        reply = int(self._replies[session])
        hints = Hints(int(traffic.turn[r]), int(traffic.input_tokens[r]), None if reply < 0 else reply)
        self._replies[session] = traffic.output_tokens[r]
        self._now_s = float(traffic.arrival_s[r])
        self._trim_idle()
        away = self.home[spans] == _AWAY
        busy = set(self._holder[spans[~away]].tolist())
        for first, end in np.flatnonzero(np.diff(away, prepend=False, append=False)).reshape(-1, 2).tolist():
            run = spans[first:end]
            with_shares = Hints(
                hints.turn, hints.context_tokens, hints.previous_reply_tokens, self._shares[run].tolist()
            )
            for start, count, medium, reason in place(with_shares, self._node.policy, len(run)):
                part = run[start : start + count]
                key: object = ("shared", int(part[-1])) if reason is Reason.SHARED else session
                number = self._number(key)
                busy.add(number)
                self._store_part(number, part, medium, reason, busy)
                before = first + start - 1
                if before >= 0 and self.home[part[0]] != _AWAY and self.home[spans[before]] != _AWAY:
                    parent = int(self._holder[spans[before]])
                    if parent != number:
                        self._order.depend(number, parent)
        self._use(spans)

    # -- sessions ------------------------------------------------------------------------------------------------------

    def _number(self, key: object) -> int:
        number = self._numbers.get(key)
        if number is None:
            self._next += 1
            number = self._numbers[key] = self._next
            self._sessions[number] = _Session(key, used_s=self._now_s)
            self._order.add(number)
        return number

    def _use(self, spans: Spans) -> None:
        holders = self._holder[spans[self.home[spans] != _AWAY]]
        chain = list(dict.fromkeys(holders.tolist()))
        self._order.touch(chain)
        for number in chain:
            self._sessions[number].used_s = self._now_s
            heapq.heappush(self._trims, (self._now_s + self._node.session_trim_after_s, number))

    def _drop(self, number: int) -> None:
        session = self._sessions.pop(number)
        del self._numbers[session.key]
        for spans in session.spans:
            self.home[spans] = _AWAY
        self._order.remove(number)

    def _drop_memory(self, number: int) -> None:
        """What a session has in memory; what it has on SSD stays, as in the daemon."""
        session = self._sessions[number]
        if not session.ssd_bytes:
            self._drop(number)
            return
        for spans in session.spans:
            self.home[spans[self.home[spans] == _IN_MEMORY]] = _AWAY
        session.spans = [spans[self.home[spans] != _AWAY] for spans in session.spans]
        session.memory_bytes = 0
        self._order.set_bytes(number, MEMORY_POOL, 0)

    def _trim_idle(self) -> None:
        while self._trims and self._trims[0][0] <= self._now_s:
            due_s, number = heapq.heappop(self._trims)
            session = self._sessions.get(number)
            if session is not None and session.used_s + self._node.session_trim_after_s <= due_s:
                self._trim(number)

    def _trim(self, number: int) -> None:
        session = self._sessions[number]
        self.files_trimmed += session.last_bytes > session.tail
        session.last_bytes = session.tail
        self._count_files(number)

    def _count_files(self, number: int) -> None:
        session = self._sessions[number]
        self._order.set_bytes(number, SSD_POOL, session.ssd_bytes)
        self._order.set_bytes(number, tails_of(SSD_POOL), session.last_bytes - session.tail)

    # -- space ---------------------------------------------------------------------------------------------------------

    def _store_part(self, number: int, part: Spans, medium: Medium, reason: Reason, busy: set[int]) -> None:
        session, blocks = self._sessions[number], int(self._traffic.span_blocks[part].sum())
        need_bytes = self._bytes_of(blocks)
        above = medium is Medium.MEMORY and self._above_watermark(need_bytes)
        if above and self._order.bytes_of(MEMORY_POOL) + need_bytes > self._node.memory_bytes:
            medium, reason = Medium.SSD, Reason.MEMORY_FULL
        if medium is Medium.MEMORY:
            session.memory_bytes += need_bytes
            self._order.set_bytes(number, MEMORY_POOL, session.memory_bytes)
        stored = medium is Medium.MEMORY or self._append(number, need_bytes, busy)
        if above:
            self._reclaim_memory(need_bytes, busy)  # too late for this part, as in the daemon: room for the next
        if not stored:
            self.refused_blocks += blocks
            return
        self.home[part] = _IN_MEMORY if medium is Medium.MEMORY else _ON_SSD
        self._holder[part] = number
        session.spans.append(part)
        self.placed_bytes[str(reason)] += need_bytes
        for pool in (MEMORY_POOL, SSD_POOL):
            self.peak[pool] = max(self.peak[pool], self._order.bytes_of(pool))

    def _append(self, number: int, need_bytes: int, busy: set[int]) -> bool:
        """A segment at the tail of the session's file, or of a further one. False: there is no room for it."""
        session = self._sessions[number]
        if session.tail + need_bytes > session.last_bytes:
            written = session.sealed_bytes + session.tail
            size_bytes = file_bytes(need_bytes, written, session.created_bytes, self._node.sizing)
            if not self._make_room(size_bytes, busy, drop=size_bytes == need_bytes or not self._node.tails_first):
                size_bytes = need_bytes
                if not self._make_room(size_bytes, busy):
                    return False
            self.files += 1
            session.sealed_bytes += session.tail
            session.created_bytes = session.last_bytes = size_bytes
            session.tail = 0
        session.tail += need_bytes
        self._count_files(number)
        return True

    def _make_room(self, size_bytes: int, busy: set[int], *, drop: bool = True) -> bool:
        """Have room, first by unused tails, then by whole sessions; by these never for headroom."""
        quota, order, trims = self._node.ssd_bytes, self._order, TRIMS_MAX if self._node.tails_first else 0
        while need := reclaim_need(order.bytes_of(SSD_POOL), size_bytes, quota, *self._node.watermarks):
            tails = order.idle_tails(SSD_POOL, need, busy.__contains__, min(trims, TRIMS_AT_ONCE))
            if not tails:
                break
            trims -= len(tails)
            for number in tails:
                self._trim(number)
        if need and not drop:
            return False
        used = order.bytes_of(SSD_POOL)
        victims = self._order.victims(SSD_POOL, need, busy.__contains__) if need else []
        freed = sum(self._sessions[number].ssd_bytes for number in victims)
        if used - freed + size_bytes > quota:
            return False  # dropping what may go would not make it fit: then nothing is dropped
        for number in victims:
            self._drop(number)
            self.reclaimed[SSD_POOL] += 1
        return True

    def _above_watermark(self, size_bytes: int) -> bool:
        return self._order.bytes_of(MEMORY_POOL) + size_bytes > self._node.watermarks[0] * self._node.memory_bytes

    def _reclaim_memory(self, size_bytes: int, busy: set[int]) -> None:
        used, quota = self._order.bytes_of(MEMORY_POOL), self._node.memory_bytes
        if need := reclaim_need(used, min(size_bytes, quota), quota, *self._node.watermarks):
            for number in self._order.victims(MEMORY_POOL, need, busy.__contains__):
                self._drop_memory(number)
                self.reclaimed[MEMORY_POOL] += 1

    def _bytes_of(self, blocks: int) -> int:
        known = self._segment_bytes.get(blocks)
        if known is None:
            whole, rest = divmod(blocks, SEGMENT_BLOCKS_MAX)
            known = sum(
                segment_layout(self._spec, part).data_bytes + footer_bytes(self._spec, "session", part)
                for part in (*[SEGMENT_BLOCKS_MAX] * whole, rest)
                if part
            )
            self._segment_bytes[blocks] = known
        return known
