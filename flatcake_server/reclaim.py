"""Which session goes next, and which tail. Pure.

Reclaim drops whole sessions, least recently used first, per pool (the arena, each SSD path). A fork depends on the session
its prefix lives in, so the parent never goes while a dependent stays: it would leave blocks no lookup can reach. Using a
fork uses its ancestors, and within one use the deeper count as older, so a chain is dropped from its end.

Before any session goes, what was pre-allocated on the path and is not written does: `tails_of` is the pool of those bytes. Only tails
of idle sessions: how idle is measured by the session that would go next.

Each use gives a session a new stamp; a pool keeps its sessions in the order of their stamps. Everything used moves to the
end, so the order holds by itself; only a session that gets bytes in a pool long after its last use breaks it, and then
the pool is sorted at the next question.

Invariants, held by `check`: dependencies have no cycle and name live sessions both ways; a pool's bytes are the sum of its
sessions', each above 0.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final

# A session in use writes on where it has room: its tail, given back, is a further file at its next turn. Tails of sessions idle for
# this share of the uses since that of the next to go will hardly be written. With 0, Claude Code makes three to five times as many
# files and hits no more; from 0.05 to 0.35 hits are the same within 0.3 points (bench/reclaim.py).
TAIL_IDLE_SHARE: Final = 0.15
# Tails trimmed together: one write of the journal, and some 20 us a file in a thread of the disk.
TRIMS_AT_ONCE: Final = 64
# Trimmed for one request, which waits meanwhile: some tens of milliseconds, as long as dropping a hundred sessions takes.
TRIMS_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class ReclaimStats:
    sessions: int
    dependencies: int
    bytes_by_pool: dict[int, int]
    sessions_by_pool: dict[int, int]


def tails_of(pool: int) -> int:
    """The pool of what sessions have pre-allocated on an SSD path and not written."""
    return -pool


@dataclass(slots=True)
class _Pool:
    size_of: OrderedDict[int, int] = field(default_factory=OrderedDict)  # session -> bytes > 0, oldest use first
    total_bytes: int = 0
    ordered: bool = True


@dataclass(slots=True)
class _Session:
    stamp: int  # of its last use
    parents: set[int] = field(default_factory=set)
    dependents: set[int] = field(default_factory=set)


class ReclaimOrder:
    """The order of reclaim. A session is an int, a pool an int (0 memory, from 1 the SSD paths; `tails_of` these)."""

    def __init__(self) -> None:
        self._sessions: dict[int, _Session] = {}
        self._pools: dict[int, _Pool] = {}
        self._stamp = 0

    def add(self, session: int) -> None:
        """A new session counts as used now. Raises: ValueError: it is there already."""
        if session in self._sessions:
            raise ValueError(f"session {session} is in the order already")
        self._stamp += 1
        self._sessions[session] = _Session(self._stamp)

    def remove(self, session: int) -> None:
        """Forget a session with its bytes and dependencies. Raises: ValueError: unknown."""
        gone = self._known(session)
        for parent in gone.parents:
            self._sessions[parent].dependents.discard(session)
        for dependent in gone.dependents:
            self._sessions[dependent].parents.discard(session)
        for pool in self._pools.values():
            pool.total_bytes -= pool.size_of.pop(session, 0)
        del self._sessions[session]

    def touch(self, chain: Sequence[int]) -> None:
        """One use of a chain of sessions, head first. Raises: ValueError: one of them is unknown; nothing changed."""
        used = [(session, self._known(session)) for session in reversed(chain)]
        for session, known in used:
            self._stamp += 1
            known.stamp = self._stamp
            for pool in self._pools.values():
                if session in pool.size_of:
                    pool.size_of.move_to_end(session)

    def set_bytes(self, session: int, pool: int, size_bytes: int) -> None:
        """What the session holds in the pool. Raises: ValueError: unknown session, or negative."""
        self._known(session)
        if size_bytes < 0:
            raise ValueError(f"session {session} cannot hold {size_bytes} bytes")
        held = self._pools.setdefault(pool, _Pool())
        held.total_bytes += size_bytes - held.size_of.get(session, 0)
        if size_bytes == 0:
            held.size_of.pop(session, None)
            return
        if session not in held.size_of and held.size_of:
            newest = self._sessions[next(reversed(held.size_of))].stamp
            held.ordered = held.ordered and newest < self._sessions[session].stamp
        held.size_of[session] = size_bytes

    def add_bytes(self, session: int, pool: int, delta_bytes: int) -> None:
        """As `set_bytes`, by difference. Raises: ValueError: unknown session, or less than nothing left."""
        held = self._pools.get(pool)
        self.set_bytes(session, pool, (held.size_of.get(session, 0) if held else 0) + delta_bytes)

    def depend(self, child: int, parent: int) -> bool:
        """`parent` may not go before `child`. False, and not noted, where `parent` already depends on `child`.

        Raises: ValueError: one of them is unknown.
        """
        young, old = self._known(child), self._known(parent)
        if parent in young.parents:
            return True
        if child in self._ancestors(parent):
            return False
        young.parents.add(parent)
        old.dependents.add(child)
        return True

    def victims(self, pool: int, need_bytes: int, busy: Callable[[int], bool]) -> list[int]:
        """Sessions to drop, in this order, to free `need_bytes` of the pool; all that may go where that is not enough.

        At each step the least recently used of those that may go: with bytes in the pool, not busy, all dependents
        dropped before.
        """
        held = self._in_order(pool)
        if need_bytes <= 0:
            return []
        dropped: dict[int, None] = {}
        freed_bytes = 0
        # Parents the scan passed over for a dependent that has gone since; all older than the scan, they go first.
        freed_parents: list[tuple[int, int]] = []
        scan = iter(held.size_of)
        scanned_stamp = 0
        while freed_bytes < need_bytes:
            if freed_parents:
                session = heappop(freed_parents)[1]
            elif (following := next(scan, None)) is not None:
                session = following
                scanned_stamp = self._sessions[session].stamp
            else:
                break
            known = self._sessions[session]
            stays = any(dependent not in dropped for dependent in known.dependents)
            if stays or session in dropped or busy(session):  # two dependents may lead to one parent
                continue
            dropped[session] = None
            freed_bytes += held.size_of[session]
            for parent in known.parents:
                stamp = self._sessions[parent].stamp
                if stamp < scanned_stamp and parent in held.size_of:
                    heappush(freed_parents, (stamp, parent))
        return list(dropped)

    def idle_tails(self, pool: int, need_bytes: int, busy: Callable[[int], bool], sessions_max: int) -> list[int]:
        """Sessions whose tails go before any session of the pool does, least recently used first.

        Not busy, and idle for `TAIL_IDLE_SHARE` of the uses there have been since the session that would go next; as many as
        have `need_bytes`, or fewer.
        """
        oldest = next(
            (self._sessions[session].stamp for session in self.by_use(pool) if not busy(session)), self._stamp
        )
        idle_uses_min = TAIL_IDLE_SHARE * (self._stamp - oldest)
        tails = self._in_order(tails_of(pool))
        found: list[int] = []
        for session, size_bytes in tails.size_of.items():
            if (
                need_bytes <= 0
                or len(found) >= sessions_max
                or self._stamp - self._sessions[session].stamp < idle_uses_min
            ):
                break
            if not busy(session):
                found.append(session)
                need_bytes -= size_bytes
        return found

    def by_use(self, pool: int) -> Iterator[int]:
        """Sessions with bytes in the pool, least recently used first. To be left before anything changes."""
        return iter(self._in_order(pool).size_of)

    def _in_order(self, pool: int) -> _Pool:
        held = self._pools.get(pool, _Pool())
        if not held.ordered:
            held.size_of = OrderedDict(sorted(held.size_of.items(), key=lambda item: self._sessions[item[0]].stamp))
            held.ordered = True
        return held

    def bytes_of(self, pool: int) -> int:
        held = self._pools.get(pool)
        return held.total_bytes if held else 0

    def sessions_in(self, pool: int) -> int:
        """How many sessions have bytes in the pool."""
        held = self._pools.get(pool)
        return len(held.size_of) if held else 0

    def dependents(self, session: int) -> int:
        """How many sessions `session` may not go before. Raises: ValueError: unknown."""
        return len(self._known(session).dependents)

    def stamp(self, session: int) -> int:
        """Of its last use: of two sessions, the greater is used later. Raises: ValueError: unknown."""
        return self._known(session).stamp

    def uses(self) -> int:
        """The stamp of the latest use of any session."""
        return self._stamp

    def sessions(self) -> list[int]:
        """All sessions, least recently used first."""
        return sorted(self._sessions, key=lambda session: self._sessions[session].stamp)

    def stats(self) -> ReclaimStats:
        return ReclaimStats(
            sessions=len(self._sessions),
            dependencies=sum(len(known.parents) for known in self._sessions.values()),
            bytes_by_pool={number: pool.total_bytes for number, pool in self._pools.items()},
            sessions_by_pool={number: len(pool.size_of) for number, pool in self._pools.items()},
        )

    def check(self) -> None:
        """Raises: AssertionError: an invariant of this module is broken."""
        for _ in self.check_steps():
            pass

    def check_steps(self) -> Iterator[None]:
        """As `check`, a session a step. The order may change between them."""
        stamps: set[int] = set()
        for session in list(self._sessions):
            if (known := self._sessions.get(session)) is None:
                continue
            assert session not in self._ancestors(session, itself=False), f"session {session} depends on itself"
            assert all(session in self._sessions[parent].dependents for parent in known.parents), "one-way parent"
            assert all(session in self._sessions[child].parents for child in known.dependents), "one-way dependent"
            assert known.stamp not in stamps, "two sessions were used at the same time"
            stamps.add(known.stamp)
            yield
        for number, pool in list(self._pools.items()):
            assert sum(pool.size_of.values()) == pool.total_bytes, f"bytes of pool {number} do not add up"
            assert min(pool.size_of.values(), default=1) > 0, f"pool {number} lists a session without bytes"
            newest, last, used = self._stamp, 0, list(pool.size_of) if pool.ordered else []
            yield
            for session in used:
                known = self._sessions.get(session)
                if known is not None and known.stamp <= newest:  # those used meanwhile have moved on
                    assert known.stamp > last, f"pool {number} is out of order"
                    last = known.stamp
                yield

    def _known(self, session: int) -> _Session:
        known = self._sessions.get(session)
        if known is None:
            raise ValueError(f"session {session} is not in the order")
        return known

    def _ancestors(self, session: int, *, itself: bool = True) -> set[int]:
        found: set[int] = {session} if itself else set()
        ahead = [session]
        while ahead:
            for parent in self._sessions[ahead.pop()].parents - found:
                found.add(parent)
                ahead.append(parent)
        return found


def reclaim_need(used: int, reserved_request: int, quota: int, high: float, low: float) -> int:
    """Bytes to free before a request is granted: none up to the high watermark, else down to the low one.

    Args:
        used: bytes taken in the pool, whatever for.
        reserved_request: bytes the request will take.
        high: share of the quota above which reclaim starts.
        low: share of the quota at which it stops, the request counted in.

    Returns:
        0 to `used`: more than all cannot be freed. The quota itself is the store's to enforce.

    Raises:
        ValueError: not 0 <= low <= high <= 1, or a negative size.
    """
    if not 0 <= low <= high <= 1:
        raise ValueError(f"watermarks are shares of the quota with low <= high: not {low} and {high}")
    if used < 0 or reserved_request < 0 or quota < 0:
        raise ValueError("sizes are bytes, 0 or more")
    wanted = used + reserved_request
    if wanted <= high * quota:
        return 0
    return min(used, max(0, wanted - int(low * quota)))
