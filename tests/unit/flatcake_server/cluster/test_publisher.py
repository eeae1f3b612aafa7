"""What the directory is told: event by event, and beside a naive model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flatcake_server.cluster.publisher import Publisher

TTL_S = 60.0


def told(publisher, now_s=0.0):
    batch = publisher.take(now_s)
    assert batch is not None
    publisher.arrived(now_s)
    return batch


def test_a_key_is_told_once_and_refreshed_at_half_its_life():
    publisher = Publisher(TTL_S, 1000)
    publisher.add([b"a", b"b"])
    assert told(publisher).puts == (b"a", b"b")
    publisher.add([b"a"])
    assert publisher.take(29.0) is None
    assert told(publisher, 30.0).puts == (b"a", b"b")
    assert publisher.stats().published_total == 4


def test_what_comes_and_goes_while_the_directory_is_gone_does_not_pile_up():
    publisher = Publisher(TTL_S, 1000, pending_max=10)
    for number in range(1000):
        publisher.add([b"%d" % number])
        publisher.remove([b"%d" % number])
    assert publisher.stats().pending <= 10
    publisher.add([b"held"])
    assert told(publisher).puts == (b"held",)


def test_what_went_is_withdrawn():
    publisher = Publisher(TTL_S, 1000)
    publisher.add([b"a"])
    told(publisher)
    publisher.remove([b"a", b"never known"])
    assert told(publisher).withdrawn == (b"a",)
    assert publisher.take(1000.0) is None


def test_size_and_rate_are_bounded():
    publisher = Publisher(TTL_S, rate_max=100, batch_max=30)
    publisher.add(b"%d" % n for n in range(1000))
    sizes = [len(told(publisher, 0.0)) for _ in range(4)]
    assert sizes == [30, 30, 30, 10]
    assert publisher.take(0.0) is None
    assert len(told(publisher, 0.1)) == 10


def test_refreshes_never_crowd_out_what_is_new():
    publisher = Publisher(TTL_S, rate_max=10)
    publisher.add(b"old %d" % n for n in range(10))
    told(publisher)
    publisher.add([b"new"])
    assert told(publisher, 40.0).puts[0] == b"new"


def test_a_lost_batch_is_told_again_first_unless_it_was_overtaken():
    publisher = Publisher(TTL_S, 1000, batch_max=2)
    publisher.add([b"a", b"b", b"c"])
    publisher.take(0.0)
    publisher.remove([b"a"])
    publisher.lost()
    assert b"b" in told(publisher).puts
    assert publisher.wants() == {b"b", b"c"}


def test_a_withdrawal_during_the_flight_follows_it():
    publisher = Publisher(TTL_S, 1000)
    publisher.add([b"a"])
    publisher.take(0.0)
    publisher.remove([b"a"])
    publisher.arrived(0.0)
    assert publisher.wants() == set()
    assert told(publisher).withdrawn == (b"a",)
    assert publisher.take(1000.0) is None, "it is not refreshed"


def test_a_directory_that_lost_its_data_is_told_all_also_what_was_on_its_way():
    publisher = Publisher(TTL_S, 1000, batch_max=2)
    publisher.add([b"a", b"b", b"c"])
    told(publisher)
    publisher.take(0.0)
    publisher.publish_again()
    publisher.arrived(0.0)
    assert {*told(publisher).puts, *told(publisher).puts} == {b"a", b"b", b"c"}


@pytest.mark.parametrize(("ttl_s", "rate_max", "batch_max"), [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_nonsense_is_refused(ttl_s, rate_max, batch_max):
    with pytest.raises(ValueError, match="above 0"):
        Publisher(ttl_s, rate_max, batch_max)


class PublisherMachine(RuleBasedStateMachine):
    """Beside a directory that is a dict of expiries: told everything, it holds what is held here, whatever got lost."""

    def __init__(self) -> None:
        super().__init__()
        self.publisher = Publisher(TTL_S, rate_max=5, batch_max=3)
        self.held: set[bytes] = set()
        self.directory: dict[bytes, float] = {}
        self.flying = None
        self.now_s = 0.0

    keys = st.lists(st.sampled_from([b"%d" % n for n in range(6)]), max_size=4)

    @rule(keys=keys)
    def add(self, keys):
        self.held |= set(keys)
        self.publisher.add(keys)

    @rule(keys=keys)
    def remove(self, keys):
        self.held -= set(keys)
        self.publisher.remove(keys)

    @rule()
    def take(self):
        batch = self.publisher.take(self.now_s)
        assert batch is None or (self.flying is None and 0 < len(batch) <= 3)
        if batch is not None:
            self.flying = batch
            assert not set(batch.puts) & set(batch.withdrawn)

    def _lands(self):
        for key in self.flying.puts:
            self.directory[key] = self.now_s + TTL_S
        for key in self.flying.withdrawn:
            self.directory.pop(key, None)

    @precondition(lambda self: self.flying is not None)
    @rule(arrives=st.booleans(), known=st.booleans())
    def lands(self, arrives, known):
        if arrives:
            self._lands()
        if arrives and known:
            self.publisher.arrived(self.now_s)
        else:
            self.publisher.lost()
        self.flying = None

    @rule(step_s=st.sampled_from([0.1, 1.0, 29.0, 31.0]))
    def time(self, step_s):
        self.now_s += step_s
        self.directory = {key: end_s for key, end_s in self.directory.items() if end_s > self.now_s}

    @rule()
    def data_lost(self):
        self.directory.clear()
        self.publisher.publish_again()

    @invariant()
    def it_wants_what_is_held(self):
        assert self.publisher.wants() == self.held

    def teardown(self):
        if self.flying is not None:
            self._lands()
            self.publisher.arrived(self.now_s)
        for _ in range(20):
            self.now_s += 1.0
            if (batch := self.publisher.take(self.now_s)) is not None:
                self.flying = batch
                self._lands()
                self.publisher.arrived(self.now_s)
        assert {key for key, end_s in self.directory.items() if end_s > self.now_s} == self.held


TestPublisher = PublisherMachine.TestCase
TestPublisher.settings = settings(max_examples=60, stateful_step_count=30)
