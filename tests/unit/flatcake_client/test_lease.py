from __future__ import annotations

import threading

import pytest
from hits import Clock

from flatcake_client.lease import RENEW_TIMEOUT_S, Lease
from flatcake_transport.errors import Unavailable


class Daemon:
    """Answers renewals as told: True, False, or an error; `seconds` is how long an answer takes."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.answers: list[object] = []
        self.asked: list[float] = []
        self.seconds = 0.0
        self.lost = False

    def renew(self, timeout_s: float) -> bool:
        assert timeout_s <= RENEW_TIMEOUT_S
        self.asked.append(self.clock())
        self.clock.now_s += self.seconds
        answer = self.answers.pop(0) if self.answers else True
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)


@pytest.fixture
def clock():
    return Clock(100.0)


@pytest.fixture
def daemon(clock):
    return Daemon(clock)


@pytest.fixture
def lease(clock, daemon):
    return Lease(7, 16.0, 100.0, daemon.renew, lambda: daemon.lost, now_s=clock)


def test_it_lapses_by_itself(lease, clock):
    clock.now_s = 115.99
    lease.check()
    clock.now_s = 116.0
    assert not lease.alive()
    with pytest.raises(Unavailable, match="lease"):
        lease.check()


def test_it_is_renewed_when_half_is_gone(lease, clock, daemon):
    clock.now_s = 107.9
    lease.keep()
    assert daemon.asked == []
    clock.now_s = 108.0
    lease.keep()
    assert daemon.asked == [108.0]
    clock.now_s = 123.9
    assert lease.alive()
    assert lease.renew_in_s == pytest.approx(1.0)


def test_time_counts_from_before_the_question(lease, clock, daemon):
    """The daemon's clock starts when it answers, ours when we ask: ours ends first."""
    clock.now_s, daemon.seconds = 108.0, 0.9
    lease.keep()
    clock.now_s = 123.99
    assert lease.alive()
    clock.now_s = 124.0
    assert not lease.alive()


def test_an_answer_after_the_end_comes_too_late(lease, clock, daemon):
    clock.now_s, daemon.seconds = 115.5, 0.6
    lease.keep()
    assert not lease.alive()
    clock.now_s = 117
    lease.keep()
    assert len(daemon.asked) == 1, "a lapsed lease is not brought back"


def test_no_answer_is_asked_again_later(lease, clock, daemon):
    daemon.answers = [Unavailable("silent")]
    clock.now_s = 108.0
    lease.keep()
    clock.now_s = 108.9
    lease.keep()
    assert len(daemon.asked) == 1
    clock.now_s = 109.0
    lease.keep()
    assert len(daemon.asked) == 2
    clock.now_s = 124.9
    assert lease.alive()


def test_the_daemon_says_it_has_ended(lease, clock, daemon):
    daemon.answers = [False]
    clock.now_s = 108.0
    lease.keep()
    assert not lease.alive()


def test_it_ends_with_its_connection(lease, daemon):
    assert lease.alive()
    daemon.lost = True
    assert not lease.alive()


def test_it_is_given_back_once(lease):
    assert lease.end()
    assert not lease.end()
    assert not lease.alive()


def test_giving_it_back_waits_for_no_renewal(clock):
    """Which may be waiting for a daemon that does not answer."""
    asked, answer = threading.Event(), threading.Event()

    def renew(timeout_s: float) -> bool:
        asked.set()
        return answer.wait(30)

    lease = Lease(7, 16.0, 100.0, renew, lambda: False, now_s=clock)
    clock.now_s = 109.0
    reader = threading.Thread(target=lease.keep, daemon=True)
    reader.start()
    assert asked.wait(30)
    ended: list[bool] = []
    holder = threading.Thread(target=lambda: ended.append(lease.end()), daemon=True)
    holder.start()
    holder.join(10)
    assert ended == [True]
    answer.set()
    reader.join(30)
    assert not lease.alive()
