"""ReclaimOrder beside a plain list, oldest use first, that asks every session again at each step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flatcake_server.reclaim import TAIL_IDLE_SHARE, ReclaimOrder, reclaim_need, tails_of

POOLS = st.integers(0, 2)
HELD = st.integers(-2, 2)  # tails, too
SESSIONS = 8


class Reclaim(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.order = ReclaimOrder()
        self.by_use: list[int] = []  # oldest use first
        self.bytes: dict[tuple[int, int], int] = {}  # (session, pool)
        self.edges: set[tuple[int, int]] = set()  # (child, parent)

    def reaches(self, start: int, goal: int) -> bool:
        """Whether `start` depends on `goal`, over any number of steps."""
        return start == goal or any(self.reaches(parent, goal) for child, parent in self.edges if child == start)

    def naive_victims(self, pool: int, need: int, busy: set[int]) -> list[int]:
        dropped: list[int] = []
        while need > sum(self.bytes[session, pool] for session in dropped):
            may_go = [
                session
                for session in self.by_use
                if self.bytes.get((session, pool), 0) > 0
                and session not in busy
                and session not in dropped
                and all(child in dropped for child, parent in self.edges if parent == session)
            ]
            if not may_go:
                break
            dropped.append(may_go[0])
        return dropped

    @initialize(sizes=st.lists(st.integers(0, 3), max_size=SESSIONS))
    def begin(self, sizes: list[int]) -> None:
        for session, size in enumerate(sizes):
            self.add(session)
            self.order.set_bytes(session, 0, size)
            self.bytes[session, 0] = size

    @rule(session=st.integers(0, SESSIONS))
    def add(self, session: int) -> None:
        if session in self.by_use:
            with pytest.raises(ValueError):
                self.order.add(session)
        else:
            self.order.add(session)
            self.by_use.append(session)

    @precondition(lambda self: self.by_use)
    @rule(data=st.data(), pool=HELD, size=st.integers(0, 5), delta=st.booleans())
    def hold(self, data: st.DataObject, pool: int, size: int, delta: bool) -> None:
        session = data.draw(st.sampled_from(self.by_use))
        if delta:
            change = size - 2
            if self.bytes.get((session, pool), 0) + change < 0:
                with pytest.raises(ValueError):
                    self.order.add_bytes(session, pool, change)
                return
            self.order.add_bytes(session, pool, change)
            self.bytes[session, pool] = self.bytes.get((session, pool), 0) + change
        else:
            self.order.set_bytes(session, pool, size)
            self.bytes[session, pool] = size

    @precondition(lambda self: self.by_use)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        chain = data.draw(st.lists(st.sampled_from(self.by_use), max_size=4))
        self.order.touch(chain)
        for session in reversed(chain):
            self.by_use.remove(session)
            self.by_use.append(session)

    @precondition(lambda self: self.by_use)
    @rule(data=st.data())
    def depend(self, data: st.DataObject) -> None:
        child = data.draw(st.sampled_from(self.by_use))
        parent = data.draw(st.sampled_from(self.by_use))
        closes = self.reaches(parent, child)
        assert self.order.depend(child, parent) == (not closes)
        if not closes:
            self.edges.add((child, parent))

    @precondition(lambda self: self.by_use)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self.forget(data.draw(st.sampled_from(self.by_use)))

    @rule(
        pool=st.integers(1, 2),
        need=st.integers(0, 20),
        busy=st.sets(st.integers(0, SESSIONS), max_size=3),
        drop=st.booleans(),
    )
    def victims(self, pool: int, need: int, busy: set[int], drop: bool) -> None:
        victims = self.order.victims(pool, need, busy.__contains__)
        assert victims == self.naive_victims(pool, need, busy)
        if drop:
            for session in victims:
                self.forget(session)

    @rule(
        pool=POOLS, need=st.integers(0, 20), busy=st.sets(st.integers(0, SESSIONS), max_size=3), most=st.integers(0, 4)
    )
    def idle_tails(self, pool: int, need: int, busy: set[int], most: int) -> None:
        held, tails = (
            [session for session in self.by_use if self.bytes.get((session, one), 0)] for one in (pool, tails_of(pool))
        )
        assert list(self.order.by_use(pool)) == held
        uses = self.order.uses()
        oldest = next((self.order.stamp(session) for session in held if session not in busy), uses)
        expected: list[int] = []
        for session in tails:
            enough = sum(self.bytes[one, tails_of(pool)] for one in expected) >= need
            idle = uses - self.order.stamp(session) >= TAIL_IDLE_SHARE * (uses - oldest)
            if session not in busy and idle and not enough and len(expected) < most:
                expected.append(session)
        assert self.order.idle_tails(pool, need, busy.__contains__, most) == expected

    def forget(self, session: int) -> None:
        self.order.remove(session)
        self.by_use.remove(session)
        self.edges = {edge for edge in self.edges if session not in edge}
        self.bytes = {place: size for place, size in self.bytes.items() if place[0] != session}

    @rule()
    def unknown_sessions_are_refused(self) -> None:
        for refused in (
            lambda: self.order.remove(99),
            lambda: self.order.touch([*self.by_use, 99]),
            lambda: self.order.set_bytes(99, 0, 1),
            lambda: self.order.depend(99, 99),
            lambda: self.order.dependents(99),
        ):
            with pytest.raises(ValueError):
                refused()

    @invariant()
    def agrees(self) -> None:
        self.order.check()
        assert self.order.sessions() == self.by_use
        stats = self.order.stats()
        assert stats.sessions == len(self.by_use)
        assert stats.dependencies == len(self.edges)
        for pool in range(3):
            held = [size for (_, place), size in self.bytes.items() if place == pool and size]
            assert self.order.bytes_of(pool) == sum(held)
            assert stats.sessions_by_pool.get(pool, 0) == self.order.sessions_in(pool) == len(held)
        for need in (1, 4, 9):
            assert self.order.victims(0, need, {3}.__contains__) == self.naive_victims(0, need, {3})
        for session in self.by_use:
            assert self.order.dependents(session) == sum(parent == session for _, parent in self.edges)


TestReclaim = Reclaim.TestCase

SHARES = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40), SHARES, SHARES)
def test_reclaim_need_against_the_smallest_number_that_will_do(
    used: int, request: int, quota: int, one: float, other: float
) -> None:
    low, high = sorted((one, other))
    need = reclaim_need(used, request, quota, high, low)
    if used + request <= high * quota:
        assert need == 0
    else:
        enough = [freed for freed in range(used + 1) if used - freed + request <= low * quota]
        assert need == (enough[0] if enough else used)
