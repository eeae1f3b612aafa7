"""The two queues beside lists that are sorted anew each time: whatever comes, goes, ends and is given up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flatcake_client.scheduler import BYTES_PER_GB, TwoQueues
from flatcake_transport.errors import Overloaded

NAMES = st.integers(0, 7)  # few, so that a name comes again after its request has gone
TIMES = st.integers(0, 3)  # few, so that arrivals and priorities are equal
SIZES = st.sampled_from([0, 1, BYTES_PER_GB, 2 * BYTES_PER_GB])
WAITING_MAX, PREFETCHES_MAX, ENDING = 6, 2, 1


def chosen_of(names: set[int], nth: int) -> int:
    """One of them, else (now and then, too) any name."""
    return [*sorted(names), *range(8)][nth % (len(names) + 1)]


class QueuesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queues: TwoQueues[int] = TwoQueues(PREFETCHES_MAX, WAITING_MAX)
        self.asked: dict[int, tuple[int, int, int]] = {}  # arrival, its number, bytes
        self.preparing: set[int] = set()
        self.reading: set[int] = set()  # also of requests that were given up
        self.ending: set[int] = set()
        self.ready: set[int] = set()
        self.given_up: set[int] = set()  # those whose prefetch has not ended
        self.arrived = self.taken = self.cancelled = self.prefetched = 0

    @property
    def here(self) -> int:
        return self.arrived - self.taken - self.cancelled

    @rule(name=NAMES, at=TIMES, ssd_bytes=SIZES)
    def arrive(self, name: int, at: int, ssd_bytes: int) -> None:
        if name in self.preparing | self.reading | self.ending | self.ready:
            with pytest.raises(ValueError, match="here already"):
                self.queues.arrive(name, at, ssd_bytes)
        elif self.here == WAITING_MAX:
            with pytest.raises(Overloaded):
                self.queues.arrive(name, at, ssd_bytes)
        else:
            self.queues.arrive(name, at, ssd_bytes)
            self.arrived += 1
            self.asked[name] = at, self.arrived, ssd_bytes
            (self.preparing if ssd_bytes else self.ready).add(name)

    @rule(waited=TIMES)
    def start(self, waited: int) -> None:
        expected = []
        while self.preparing and len(self.reading) < PREFETCHES_MAX:
            if len(self.reading) + len(self.ending) == PREFETCHES_MAX + ENDING:
                break
            # Longest wait for its size; of equal ones who came first.
            chosen = min(
                self.preparing, key=lambda n: (-max(0, waited - self.asked[n][0]) / self.asked[n][2], self.asked[n])
            )
            self.preparing.remove(chosen)
            self.reading.add(chosen)
            expected.append(chosen)
        assert self.queues.start_prefetches(waited) == expected

    @rule(nth=NAMES)
    def ends_soon(self, nth: int) -> None:
        name = chosen_of(self.reading, nth)
        self.queues.prefetched(name, ending=True)
        if name in self.reading:
            self.reading.remove(name)
            self.ending.add(name)

    @rule(nth=NAMES)
    def ended(self, nth: int) -> None:
        name = chosen_of(self.reading | self.ending, nth)
        self.queues.prefetched(name)
        if name in self.reading | self.ending:
            self.prefetched += 1
            if name not in self.given_up:
                self.ready.add(name)
        self.reading.discard(name)
        self.ending.discard(name)
        self.given_up.discard(name)

    @rule(nth=NAMES)
    def cancel(self, nth: int) -> None:
        name = chosen_of(self.preparing | self.ready | self.reading | self.ending, nth)
        self.queues.cancel(name)
        if name in self.preparing | self.ready | ((self.reading | self.ending) - self.given_up):
            self.cancelled += 1
        self.given_up |= (self.reading | self.ending) & {name}
        self.preparing.discard(name)
        self.ready.discard(name)

    @rule()
    def take(self) -> None:
        first = min(self.ready, key=lambda n: self.asked[n][:2], default=None)
        assert self.queues.take_ready() == first
        self.ready.discard(first)
        self.taken += first is not None

    @invariant()
    def counts_add_up(self) -> None:
        stats = self.queues.stats()
        assert (stats.ready, stats.preparing) == (len(self.ready), len(self.preparing))
        assert stats.prefetching == len((self.reading | self.ending) - self.given_up)
        assert (stats.taken_total, stats.cancelled_total) == (self.taken, self.cancelled)
        assert stats.prefetched_total == self.prefetched
        assert (
            stats.arrived_total
            == self.arrived
            == (stats.ready + stats.preparing + stats.prefetching + self.taken + self.cancelled)
        )


TestQueues = QueuesMachine.TestCase


@given(st.lists(TIMES, min_size=3, max_size=8), st.sets(NAMES, min_size=1))
def test_those_that_stay_keep_their_order_when_others_go(arrivals: list[int], gone: set[int]) -> None:
    queues: TwoQueues[int] = TwoQueues()
    for name, at in enumerate(arrivals):
        queues.arrive(name, at, 0)
    for name in gone:
        queues.cancel(name)
    stay = sorted((at, name) for name, at in enumerate(arrivals) if name not in gone)
    assert [queues.take_ready() for _ in range(len(stay) + 1)] == [*(name for _, name in stay), None]
