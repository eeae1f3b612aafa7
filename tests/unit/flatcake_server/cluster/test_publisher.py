"""What the directory is told: event by event, and beside a naive model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flatcake_server.cluster.publisher import MERGED_MAX, Publisher

AUDIT_S = 60.0


def told(publisher, now_s=0.0):
    batch = publisher.take(now_s)
    assert batch is not None
    publisher.arrived()
    return batch


def test_a_key_is_told_once():
    publisher = Publisher(1000)
    publisher.add([b"a", b"b"])
    assert told(publisher).puts == (b"a", b"b")
    publisher.add([b"a"])
    assert publisher.take(1e6) is None
    assert publisher.stats().published_total == 2


def test_a_few_are_looked_for_in_turn_and_more_as_long_as_some_are_missing():
    publisher = Publisher(1000, batch_max=10, audit_s=AUDIT_S, audit_keys=2)
    keys = [b"%02d" % n for n in range(15)]
    publisher.add(keys)
    told(publisher), told(publisher)
    assert publisher.audit(0.0) == (b"00", b"01")
    publisher.audited([])
    assert publisher.audit(AUDIT_S / 2) == ()
    assert publisher.audit(AUDIT_S) == (b"02", b"03")
    publisher.audited([b"03"])
    assert told(publisher, AUDIT_S).puts == (b"03",)
    assert publisher.audit(AUDIT_S) == (*keys[4:], b"00")[:10], "at once, and as many as in a batch"
    publisher.remove([b"07"])
    publisher.audited([b"07", b"08"])
    assert publisher.stats().missing_total == 2, "what went meanwhile is not missing"
    assert publisher.wants() == set(keys) - {b"07"}


def test_looks_are_bounded_by_the_rate_too():
    publisher = Publisher(10, audit_keys=8)
    publisher.add(b"%d" % n for n in range(10))
    told(publisher)
    assert publisher.audit(0.0) == ()
    assert len(publisher.audit(0.5)) == 5


def test_what_comes_and_goes_while_the_directory_is_gone_does_not_pile_up():
    publisher = Publisher(1000, pending_max=10)
    for number in range(1000):
        publisher.add([b"%d" % number])
        publisher.remove([b"%d" % number])
    assert publisher.stats().pending <= 10
    publisher.add([b"held"])
    assert told(publisher).puts == (b"held",)


def test_what_went_is_withdrawn():
    publisher = Publisher(1000)
    publisher.add([b"a"])
    told(publisher)
    publisher.remove([b"a", b"never known"])
    assert told(publisher).withdrawn == (b"a",)
    assert publisher.take(1000.0) is None


def test_size_and_rate_are_bounded():
    publisher = Publisher(rate_max=100, batch_max=30)
    publisher.add(b"%d" % n for n in range(1000))
    sizes = [len(told(publisher, 0.0)) for _ in range(4)]
    assert sizes == [30, 30, 30, 10]
    assert publisher.take(0.0) is None
    assert len(told(publisher, 0.1)) == 10


def test_a_lost_batch_is_told_again_first_unless_it_was_overtaken():
    publisher = Publisher(1000, batch_max=2)
    publisher.add([b"a", b"b", b"c"])
    publisher.take(0.0)
    publisher.remove([b"a"])
    publisher.lost()
    assert b"b" in told(publisher).puts
    assert publisher.wants() == {b"b", b"c"}


def test_a_withdrawal_during_the_flight_follows_it():
    publisher = Publisher(1000)
    publisher.add([b"a"])
    publisher.take(0.0)
    publisher.remove([b"a"])
    publisher.arrived()
    assert publisher.wants() == set()
    assert told(publisher).withdrawn == (b"a",)
    assert publisher.take(1000.0) is None


def test_a_directory_that_lost_its_data_is_told_all_also_what_was_on_its_way():
    publisher = Publisher(1000, batch_max=2)
    publisher.add([b"a", b"b", b"c"])
    told(publisher)
    publisher.take(0.0)
    publisher.publish_again()
    publisher.arrived()
    assert {*told(publisher).puts, *told(publisher).puts} == {b"a", b"b", b"c"}


class Key(bytes):
    hashed = 0

    def __hash__(self):
        Key.hashed += 1
        return bytes.__hash__(self)


def test_telling_all_again_half_way_through_touches_few_keys():
    """A directory that loses its data twice."""
    half = 2 * MERGED_MAX
    publisher = Publisher(1e9, batch_max=half)
    keys = [Key(b"%05d" % n) for n in range(2 * half)]
    publisher.add(keys)
    told(publisher), told(publisher)
    publisher.publish_again()
    told(publisher)
    before = Key.hashed
    publisher.publish_again()
    assert Key.hashed == before
    told(publisher)
    publisher.publish_again()
    assert publisher.stats().pending == 2 * half
    assert [key for _ in range(2) for key in told(publisher).puts] == keys, "those that wait longest come first"
    publisher.publish_again()
    publisher.remove(keys)
    assert publisher.wants() == set()
    assert [len(told(publisher).withdrawn) for _ in range(2)] == [half, half]
    assert publisher.take(1e9) is None
    publisher.publish_again()
    assert publisher.take(1e9) is None, "there is nothing"


def test_telling_all_again_touches_no_key_and_goes_before_what_is_new():
    """There are hundreds of thousands, and the event loop waits."""
    keys = [Key(b"%03d" % n) for n in range(300)]
    publisher = Publisher(1000, batch_max=100)
    publisher.add(keys)
    told(publisher), told(publisher), told(publisher)
    publisher.add([b"new"])
    before = Key.hashed
    publisher.publish_again()
    assert Key.hashed == before
    publisher.remove(keys[:1])
    publisher.add(keys[1:2])
    assert publisher.stats().pending == 301
    assert told(publisher).puts == tuple(keys[1:101])
    publisher.publish_again()
    assert publisher.wants() == {*keys[1:], b"new"}
    rest = [told(publisher), told(publisher), told(publisher, 1.0), told(publisher, 1.0)]
    assert sorted(key for batch in rest for key in batch.puts) == sorted([*keys[1:], b"new"])
    assert [key for batch in rest for key in batch.withdrawn] == keys[:1]


@pytest.mark.parametrize(("rate_max", "batch_max"), [(0, 1), (1, 0)])
def test_nonsense_is_refused(rate_max, batch_max):
    with pytest.raises(ValueError, match="above 0"):
        Publisher(rate_max, batch_max)


class PublisherMachine(RuleBasedStateMachine):
    """Beside a directory that is a set, and forgets: looked through, it holds what is held here, whatever got lost."""

    def __init__(self) -> None:
        super().__init__()
        self.publisher = Publisher(rate_max=5, batch_max=3, audit_s=AUDIT_S, audit_keys=1)
        self.held: set[bytes] = set()
        self.directory: set[bytes] = set()
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
        self.directory = (self.directory | set(self.flying.puts)) - set(self.flying.withdrawn)

    @precondition(lambda self: self.flying is not None)
    @rule(arrives=st.booleans(), known=st.booleans())
    def lands(self, arrives, known):
        if arrives:
            self._lands()
        if arrives and known:
            self.publisher.arrived()
        else:
            self.publisher.lost()
        self.flying = None

    @rule(step_s=st.sampled_from([0.1, 1.0, 29.0, 61.0]))
    def time(self, step_s):
        self.now_s += step_s

    @rule(meanwhile=keys)
    def audit(self, meanwhile):
        keys = self.publisher.audit(self.now_s)
        assert len(keys) <= 3
        missing = [key for key in keys if key not in self.directory]
        self.remove(meanwhile)
        self.publisher.audited(missing)

    @rule()
    def data_lost(self):
        self.directory.clear()
        self.publisher.publish_again()

    @rule(keys=keys)
    def entries_lost(self, keys):
        """Behind its back; audits find it."""
        self.directory -= set(keys)

    @invariant()
    def it_wants_what_is_held(self):
        assert self.publisher.wants() == self.held

    def teardown(self):
        if self.flying is not None:
            self._lands()
            self.publisher.arrived()
        for _ in range(40):
            self.now_s += AUDIT_S
            if (batch := self.publisher.take(self.now_s)) is not None:
                self.flying = batch
                self._lands()
                self.publisher.arrived()
            keys = self.publisher.audit(self.now_s)
            self.publisher.audited([key for key in keys if key not in self.directory])
        assert self.directory == self.held


TestPublisher = PublisherMachine.TestCase
TestPublisher.settings = settings(max_examples=60, stateful_step_count=30)
