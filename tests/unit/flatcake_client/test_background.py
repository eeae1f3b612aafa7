"""Lookups, restores and crews: bounded, never blocking, each asked answered once."""

from __future__ import annotations

import threading
import time

import pytest
from waiting import until

from flatcake_client import background
from flatcake_client.background import Crew, Lookups, Restores
from flatcake_transport.errors import Unavailable

TIMEOUT_S = 10.0


class Gate:
    """Work that waits until it is let through, and says that it began."""

    def __init__(self, result: object = None) -> None:
        self.begun, self.open, self.result = threading.Event(), threading.Event(), result

    def __call__(self, *_: object) -> object:
        self.begun.set()
        assert self.open.wait(TIMEOUT_S)
        return self.result


@pytest.fixture
def discarded():
    return []


@pytest.fixture
def lookups(discarded):
    made = Lookups(discarded.append, threads_max=1, waiting_max=2)
    yield made
    made.close(TIMEOUT_S)


def test_an_answer_is_waited_for_then_kept_until_taken(lookups, discarded):
    gate = Gate("hit")
    lookups.submit("a", gate, TIMEOUT_S)
    assert lookups.poll("a").waiting
    gate.open.set()
    until(lambda: not lookups.poll("a").waiting)
    assert [lookups.poll("a").found, lookups.poll("a").found, lookups.take("a")] == ["hit"] * 3
    assert (lookups.poll("a").found, lookups.take("a"), lookups.stats().known) == (None, None, 0)
    lookups.submit("a", lambda: "again", TIMEOUT_S)
    until(lambda: lookups.poll("a").found == "again")
    with pytest.raises(ValueError, match="asked already"):
        lookups.submit("a", gate, TIMEOUT_S)
    assert discarded == []


def test_past_its_deadline_it_is_a_miss_and_what_comes_later_is_given_back(discarded):
    now = [0.0]
    lookups = Lookups(discarded.append, threads_max=1, now_s=lambda: now[0])
    gate = Gate("late hit")
    lookups.submit("a", gate, 2.0)
    assert gate.begun.wait(TIMEOUT_S)
    now[0] = 1.9
    assert lookups.poll("a").waiting
    now[0] = 2.0
    assert not lookups.poll("a").waiting
    gate.open.set()
    until(lambda: discarded == ["late hit"])
    assert lookups.poll("a").found is None
    assert lookups.stats().late_total == 1
    lookups.close(TIMEOUT_S)


def test_what_is_cancelled_is_given_back_in_the_background(lookups, discarded):
    gate, called = Gate("hit"), []
    lookups.submit("a", gate, TIMEOUT_S)
    assert gate.begun.wait(TIMEOUT_S)
    lookups.submit("b", lambda: called.append("b"), TIMEOUT_S)
    lookups.cancel("a")
    lookups.cancel("b")
    lookups.cancel("unknown")
    gate.open.set()
    until(lambda: discarded == ["hit"])
    assert called == []


def test_too_many_questions_and_failed_ones_are_misses(lookups, discarded):
    gate = Gate()
    lookups.submit(0, gate, TIMEOUT_S)
    assert gate.begun.wait(TIMEOUT_S)
    for request in (1, 2, 3):
        lookups.submit(request, lambda: "hit", TIMEOUT_S)
    assert (lookups.poll(2).waiting, lookups.poll(3).waiting, lookups.stats().refused_total) == (True, False, 1)
    gate.open.set()
    until(lambda: lookups.poll(2).found == "hit")

    def fails() -> str:
        raise KeyError("bug")

    lookups.submit(4, fails, TIMEOUT_S)
    until(lambda: not lookups.poll(4).waiting)
    assert lookups.poll(4).found is None


def test_closing_gives_back_what_was_found(discarded):
    lookups = Lookups(discarded.append)
    lookups.submit("a", lambda: "hit", TIMEOUT_S)
    until(lambda: lookups.poll("a").found == "hit")
    lookups.close(TIMEOUT_S)
    lookups.close(TIMEOUT_S)
    assert discarded == ["hit"]
    lookups.submit("b", lambda: "hit", TIMEOUT_S)
    assert lookups.poll("b").found is None


@pytest.fixture
def restores():
    made = Restores(threads_max=1, prefetches_max=1, waiting_max=3)
    yield made
    assert made.close(TIMEOUT_S)


def ended(restores, count):
    """The next that end, in order."""
    names, deadline_s = [], time.monotonic() + TIMEOUT_S
    while len(names) < count and time.monotonic() < deadline_s:
        names += restores.ended(0.1)
    return names


def test_memory_never_waits_for_ssd_and_small_ones_come_first(restores):
    disk = Gate()
    restores.submit("reading", 10, disk)
    assert disk.begun.wait(TIMEOUT_S)
    restores.submit("large", 4 << 30, lambda _: None)
    restores.submit("small", 1 << 20, lambda _: None)
    restores.submit("memory", 0, lambda _: None)
    assert ended(restores, 1) == ["memory"]
    disk.open.set()
    assert ended(restores, 3) == ["reading", "small", "large"]
    assert not restores.busy()


def test_one_that_ends_leaves_the_disk_to_the_next(restores):
    disk, other = Gate(), Gate()
    restores.submit("ends", 1, disk)
    assert disk.begun.wait(TIMEOUT_S)
    restores.submit("next", 1, other)
    restores.ending("next")
    restores.ending("unknown")
    assert not other.begun.is_set()
    restores.ending("ends")
    assert other.begun.wait(TIMEOUT_S)
    other.open.set()
    assert ended(restores, 1) == ["next"]
    disk.open.set()
    assert ended(restores, 1) == ["ends"]


def test_one_that_fails_has_ended_and_so_has_one_cancelled(restores):
    def fails(_: object) -> None:
        raise Unavailable("no disk")

    disk, seen = Gate(), []
    restores.submit("fails", 1, fails)
    assert ended(restores, 1) == ["fails"]

    def reads(cancelled) -> None:
        disk()
        seen.append(cancelled())

    restores.submit("reading", 1, reads)
    assert disk.begun.wait(TIMEOUT_S)
    restores.submit("waiting", 1, lambda _: seen.append("never"))
    restores.cancel("waiting")
    assert ended(restores, 1) == ["waiting"]
    restores.cancel("reading")
    restores.cancel("reading")
    assert restores.ended() == []
    disk.open.set()
    assert ended(restores, 1) == ["reading"]
    restores.submit("waiting", 1, lambda _: seen.append("again"))
    assert ended(restores, 1) == ["waiting"]
    assert seen == [True, "again"]


def test_restores_are_bounded(restores):
    for size in (0, 1):
        gate = Gate()
        assert restores.submit("running", size, gate)
        assert gate.begun.wait(TIMEOUT_S)
        with pytest.raises(ValueError, match="already"):
            restores.submit("running", size, gate)
        taken = [restores.submit(number, size, lambda _: None) for number in range(4)]
        assert taken[:2] + taken[-1:] == [True, True, False]
        gate.open.set()
        assert len(ended(restores, 1 + sum(taken))) == 1 + sum(taken)


def test_a_crew_drops_what_is_too_much_and_survives_bugs(caplog):
    crew, gate, done = Crew("test", 1, 1), Gate(), []
    assert crew.submit(gate)
    assert gate.begun.wait(TIMEOUT_S)
    assert [crew.submit(lambda: done.append(1)), crew.submit(lambda: done.append(2))] == [True, False]
    gate.open.set()
    assert crew.settle(TIMEOUT_S)
    assert crew.submit(lambda: {}["bug"])
    assert crew.settle(TIMEOUT_S)
    assert "KeyError" in caplog.text
    stats = crew.stats()
    assert (stats.submitted_total, stats.done_total, stats.failed_total, stats.dropped_total) == (3, 3, 1, 1)
    assert crew.close(TIMEOUT_S)
    assert not crew.submit(lambda: None)
    assert done == [1]


def test_writes_yield_to_reads_for_a_moment(monkeypatch):
    monkeypatch.setattr(background, "YIELD_S", 600.0)
    busy, done = [True], []
    crew = Crew("test", 1, 4, yields_to=lambda: busy[0])
    crew.submit(lambda: done.append("write"))
    crew.settle(0.05)
    assert done == []
    busy[0] = False
    assert crew.settle(TIMEOUT_S)
    monkeypatch.setattr(background, "YIELD_S", 0.05)
    busy[0] = True
    crew.submit(lambda: done.append("anyway"))
    assert crew.settle(TIMEOUT_S)
    assert done == ["write", "anyway"]
    crew.close(TIMEOUT_S)


def test_closing_waits_for_what_runs_and_drops_the_rest():
    crew, gate = Crew("test", 1, 4), Gate()
    crew.submit(gate)
    assert gate.begun.wait(TIMEOUT_S)
    crew.submit(lambda: None)
    assert not crew.close(0.01)
    gate.open.set()
    assert crew.close(TIMEOUT_S)
    assert (crew.stats().done_total, crew.stats().dropped_total, crew.stats().submitted_total) == (1, 1, 1)
