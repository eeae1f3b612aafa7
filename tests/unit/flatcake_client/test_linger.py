from __future__ import annotations

import gc
import threading
import weakref
from functools import partial

import pytest
from waiting import until

from flatcake_client.linger import Linger
from flatcake_transport.errors import Unavailable


class Moving:
    """A transfer that rests when told, well or badly."""

    def __init__(self, error: Exception | None = None) -> None:
        self.rested = threading.Event()
        self.error = error

    def done(self) -> bool:
        return self.rested.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        if not self.rested.wait(timeout_s):
            raise TimeoutError
        if self.error is not None:
            raise self.error


@pytest.fixture
def linger():
    return Linger()


def test_what_rests_is_acted_on_at_once_by_who_says_so(linger):
    acts = []
    moving = Moving()
    moving.rested.set()
    linger.when_rested([moving], lambda: acts.append(threading.get_ident()))
    linger.when_rested([], lambda: acts.append(threading.get_ident()))
    assert acts == [threading.get_ident()] * 2


def test_acts_wait_for_all_their_transfers_and_need_nobody_to_come_by(linger):
    acts = []
    one, other = Moving(), Moving(Unavailable("failed"))
    linger.when_rested([one, other], lambda: acts.append("both"))
    linger.when_rested([other], lambda: acts.append("other"))
    other.rested.set()
    until(lambda: acts == ["other"])
    one.rested.set()
    until(lambda: acts == ["other", "both"])


def test_an_act_that_takes_its_time_holds_up_nobody_who_leaves_another(linger):
    go, acts = threading.Event(), []
    linger.leave([], lambda: acts.append(go.wait(20)))
    linger.leave([], lambda: acts.append(2))
    linger.when_rested([], lambda: acts.append(1))
    assert acts == [1]
    go.set()
    until(lambda: acts == [1, True, 2])


def test_settle_waits_and_says_what_hangs(linger):
    acts = []
    failing, hanging = Moving(Unavailable("failed")), Moving()
    linger.when_rested([failing], lambda: acts.append("failing"))
    linger.when_rested([hanging], lambda: acts.append("hanging"))
    failing.rested.set()
    assert not linger.settle(0.01)
    until(lambda: acts == ["failing"])
    threading.Timer(0.01, hanging.rested.set).start()
    assert linger.settle(20)
    assert acts == ["failing", "hanging"]


def test_where_nothing_is_left_it_is_settled_though_no_time_is(linger):
    """As at the end of a close that has used it up: the connection is ended all the same."""
    assert linger.settle(0.0)
    go, acts = threading.Event(), []
    linger.leave([], lambda: acts.append(go.wait(20)))
    assert not linger.settle(0.0)
    go.set()
    until(lambda: linger.settle(0.0))
    assert acts == [True]


def test_a_pause_is_waited_for_but_not_by_who_settles(linger):
    acts, first = [], Moving()
    linger.leave([first], lambda: acts.append("first"))
    linger.leave([], lambda: acts.append("after a pause"), pause_s=600.0)
    first.rested.set()
    until(lambda: acts)
    assert acts == ["first"]
    assert linger.settle(20)
    assert acts == ["first", "after a pause"]


def test_an_act_may_leave_another_and_may_fail(linger):
    acts = []
    moving = Moving()
    linger.leave([moving], lambda: 1 // 0)
    linger.leave([moving], lambda: linger.leave([], lambda: acts.append(1)))
    moving.rested.set()
    assert linger.settle(20)
    assert acts == [1]


def test_the_thread_keeps_nobody_alive_and_ends_when_all_is_done():
    before = set(threading.enumerate())
    linger, moving, acts = Linger(), Moving(), []
    (thread,) = set(threading.enumerate()) - before
    holder = Moving()
    kept = weakref.ref(holder)
    linger.leave([], partial(acts.append, holder))
    until(lambda: acts)
    acts.clear()
    del holder
    until(lambda: kept() is None)
    linger.when_rested([moving], lambda: acts.append(1))
    del linger
    gc.collect()
    assert thread.is_alive()
    moving.rested.set()
    thread.join(20)
    assert not thread.is_alive()
    assert acts == [1]
