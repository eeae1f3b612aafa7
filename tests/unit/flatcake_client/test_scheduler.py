from __future__ import annotations

import threading
import weakref
from functools import partial

import numpy as np
import pytest
from waiting import pause, until

from flatcake_client.scheduler import BYTES_PER_GB, Scheduler, TwoQueues, priority
from flatcake_transport.errors import Overloaded, Unavailable

GB = BYTES_PER_GB
TIMEOUT_S = 10.0


def test_the_papers_example():
    assert (priority(2.0, GB), priority(2.0, 4 * GB)) == (3.0, 1.5)


def test_memory_runs_at_once_and_ssd_waits_for_its_blocks():
    queues: TwoQueues[str] = TwoQueues()
    queues.arrive("ssd", 1.0, GB)
    queues.arrive("memory", 2.0, 0)
    assert queues.take_ready() == "memory"
    assert queues.take_ready() is None
    assert queues.start_prefetches(3.0) == ["ssd"]
    queues.prefetched("ssd")
    assert queues.take_ready() == "ssd"


def test_what_was_prefetched_comes_back_at_its_original_arrival():
    queues: TwoQueues[str] = TwoQueues()
    queues.arrive("early", 1.0, GB)
    queues.arrive("late", 2.0, 0)
    queues.start_prefetches(3.0)
    queues.prefetched("early")
    assert [queues.take_ready(), queues.take_ready()] == ["early", "late"]


def test_the_small_and_the_long_waiting_go_first():
    queues: TwoQueues[str] = TwoQueues(prefetches_max=1)
    queues.arrive("large", 0.0, 4 * GB)
    queues.arrive("small", 1.0, GB)
    queues.arrive("smaller, later", 2.5, GB // 2)
    # At 3 s: 1 + 3/4, 1 + 2/1, 1 + 0.5/0.5.
    order = []
    for _ in range(3):
        (chosen,) = queues.start_prefetches(3.0)
        order.append(chosen)
        queues.prefetched(chosen)
    assert order == ["small", "smaller, later", "large"]


def test_no_more_prefetches_than_may_run():
    queues: TwoQueues[int] = TwoQueues(prefetches_max=2)
    for n in range(5):
        queues.arrive(n, n, GB)
    assert len(queues.start_prefetches(9.0)) == 2
    assert queues.start_prefetches(9.0) == []
    queues.prefetched(0)
    assert len(queues.start_prefetches(9.0)) == 1


def test_a_cancelled_request_is_never_run_and_its_prefetch_keeps_its_place_till_it_ends():
    queues: TwoQueues[str] = TwoQueues(prefetches_max=1)
    for name, size in (("ready", 0), ("preparing", 2 * GB), ("reading", GB)):
        queues.arrive(name, 0.0, size)
    assert queues.start_prefetches(1.0) == ["reading"]
    for name in ("ready", "reading", "unknown"):
        queues.cancel(name)
    assert queues.start_prefetches(1.0) == []
    queues.prefetched("reading")
    assert queues.start_prefetches(1.0) == ["preparing"]
    queues.cancel("preparing")
    queues.prefetched("preparing")
    assert queues.take_ready() is None
    stats = queues.stats()
    assert (stats.arrived_total, stats.cancelled_total, stats.ready, stats.preparing, stats.prefetching) == (
        3,
        3,
        0,
        0,
        0,
    )


def test_one_that_ends_leaves_the_disk_to_the_next_and_is_not_ready_yet():
    queues: TwoQueues[str] = TwoQueues(prefetches_max=1)
    for n, name in enumerate(("first", "second", "third")):
        queues.arrive(name, n, GB)
    assert queues.start_prefetches(9.0) == ["first"]
    queues.prefetched("second", ending=True)  # it has not begun
    assert queues.start_prefetches(9.0) == []
    queues.prefetched("first", ending=True)
    queues.prefetched("first", ending=True)
    assert queues.start_prefetches(9.0) == ["second"]
    assert queues.take_ready() is None
    queues.prefetched("second", ending=True)
    assert queues.start_prefetches(9.0) == [], "two of them end already"
    assert queues.stats().prefetching == 2
    queues.prefetched("first")
    assert queues.start_prefetches(9.0) == ["third"]
    queues.prefetched("first", ending=True)
    queues.cancel("second")
    queues.prefetched("second")
    queues.prefetched("third")
    assert [queues.take_ready(), queues.take_ready(), queues.take_ready()] == ["first", "third", None]
    stats = queues.stats()
    assert (stats.prefetched_total, stats.prefetching, stats.preparing) == (3, 0, 0)


def test_the_driver_begins_the_next_when_one_says_that_it_ends():
    scheduler: Scheduler[str] = Scheduler(1)
    gates = {name: threading.Event() for name in ("first", "second", "third")}
    begun = []

    def reads(name: str) -> None:
        begun.append(name)
        gates[name].wait(TIMEOUT_S)

    for name in gates:
        scheduler.submit(name, GB, partial(reads, name))
        until(lambda: begun)
    pause(0.02)
    assert begun == ["first"]
    scheduler.ending("first")
    until(lambda: begun == ["first", "second"])
    scheduler.ending("second")
    pause(0.02)
    assert begun == ["first", "second"]
    gates["second"].set()
    until(lambda: begun == ["first", "second", "third"])
    assert scheduler.next_ready(TIMEOUT_S) == "second"
    for gate in gates.values():
        gate.set()
    assert {scheduler.next_ready(TIMEOUT_S), scheduler.next_ready(TIMEOUT_S)} == {"first", "third"}
    scheduler.close()


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="1 or more"):
        TwoQueues(0)
    queues: TwoQueues[str] = TwoQueues(waiting_max=1)
    queues.arrive("a", 0.0, 1)
    with pytest.raises(ValueError, match="here already"):
        queues.arrive("a", 0.0, 1)
    with pytest.raises(Overloaded, match="1 requests"):
        queues.arrive("b", 0.0, 1)


def test_the_driver_prefetches_and_hands_out_in_order_of_arrival():
    scheduler: Scheduler[str] = Scheduler(prefetches_max=2)
    gate, fetched = threading.Event(), []
    scheduler.submit("slow", GB, lambda: gate.wait(TIMEOUT_S))
    scheduler.submit("quick", GB, lambda: fetched.append("quick"))
    scheduler.submit("memory", 0, lambda: fetched.append("never called"))
    assert {scheduler.next_ready(TIMEOUT_S), scheduler.next_ready(TIMEOUT_S)} == {"quick", "memory"}
    assert scheduler.next_ready(0.0) is None
    gate.set()
    assert scheduler.next_ready(TIMEOUT_S) == "slow"
    assert fetched == ["quick"]
    scheduler.close()
    scheduler.close()
    with pytest.raises(Unavailable):
        scheduler.submit("after", 0, lambda: None)


def test_a_failed_prefetch_is_ready_all_the_same(caplog):
    scheduler: Scheduler[str] = Scheduler()

    def fails() -> None:
        raise Unavailable("no disk")

    scheduler.submit("fails", GB, fails)
    assert scheduler.next_ready(TIMEOUT_S) == "fails"
    assert "no disk" in caplog.text
    scheduler.close()


def test_a_prefetch_with_a_bug_costs_no_thread(caplog):
    scheduler: Scheduler[str] = Scheduler(1)

    def bug() -> None:
        raise KeyError("slot")

    for name in ("one", "two"):
        scheduler.submit(name, GB, bug)
    assert [scheduler.next_ready(TIMEOUT_S) for _ in range(2)] == ["one", "two"]
    assert caplog.text.count("KeyError") >= 2
    scheduler.close()


def test_what_was_prefetched_is_let_go():
    scheduler: Scheduler[str] = Scheduler(1)
    pages = np.zeros(1)
    gone = weakref.ref(pages)
    scheduler.submit("one", GB, partial(len, pages))
    del pages
    assert scheduler.next_ready(TIMEOUT_S) == "one"
    assert gone() is None
    scheduler.close()


def test_closing_wakes_who_waits_and_cancelled_work_is_not_done():
    scheduler: Scheduler[str] = Scheduler(prefetches_max=1)
    gate, started, called = threading.Event(), threading.Event(), []

    def reads() -> None:
        started.set()
        gate.wait(TIMEOUT_S)

    scheduler.submit("reading", GB, reads)
    assert started.wait(TIMEOUT_S)
    scheduler.submit("waiting", GB, lambda: called.append(1))
    scheduler.cancel("waiting")
    scheduler.cancel("reading")
    answers = []
    waiter = threading.Thread(target=lambda: answers.append(scheduler.next_ready(TIMEOUT_S)))
    waiter.start()
    gate.set()
    scheduler.close()
    waiter.join(TIMEOUT_S)
    assert (answers, called) == ([None], [])


def test_what_is_given_up_before_its_turn_is_let_go_and_holds_no_place():
    scheduler: Scheduler[str] = Scheduler(prefetches_max=1)
    pages = np.zeros(1)
    gone = weakref.ref(pages)
    with scheduler._changed:  # no thread comes between
        scheduler.submit("waiting", GB, partial(len, pages))
        scheduler.cancel("waiting")
        scheduler.submit("chosen", GB, partial(len, pages))
        scheduler._started += scheduler._queues.start_prefetches(0.0)
        scheduler.cancel("chosen")
    del pages
    assert gone() is None
    scheduler.submit("next", GB, lambda: None)
    assert scheduler.next_ready(TIMEOUT_S) == "next"
    scheduler.close()
