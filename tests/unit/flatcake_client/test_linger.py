from __future__ import annotations

import threading

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


def test_what_rests_is_acted_on_at_once():
    linger, acts = Linger(), []
    moving = Moving()
    moving.rested.set()
    linger.when_rested([moving], lambda: acts.append(1))
    linger.when_rested([], lambda: acts.append(2))
    assert acts == [1, 2]
    assert not len(linger)


def test_acts_wait_for_all_their_transfers():
    linger, acts = Linger(), []
    one, other = Moving(), Moving(Unavailable("failed"))
    linger.when_rested([one, other], lambda: acts.append("both"))
    linger.when_rested([other], lambda: acts.append("other"))
    linger.sweep()
    other.rested.set()
    linger.sweep()
    assert acts == ["other"]
    one.rested.set()
    linger.sweep()
    linger.sweep()
    assert acts == ["other", "both"]


def test_settle_waits_and_says_what_hangs():
    linger, acts = Linger(), []
    failing, hanging = Moving(Unavailable("failed")), Moving()
    linger.when_rested([failing], lambda: acts.append("failing"))
    linger.when_rested([hanging], lambda: acts.append("hanging"))
    failing.rested.set()
    assert not linger.settle(0.01)
    assert acts == ["failing"]
    threading.Timer(0.01, hanging.rested.set).start()
    assert linger.settle(5)
    assert acts == ["failing", "hanging"]


def test_an_act_may_leave_another():
    linger, acts = Linger(), []
    moving = Moving()
    linger.when_rested([moving], lambda: linger.when_rested([], lambda: acts.append(1)))
    moving.rested.set()
    linger.sweep()
    assert acts == [1]
