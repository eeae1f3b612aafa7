from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from replays import ENGINE, PLANE_BYTES, PLANES, DictSystem, pages_for, run_of, talk, workload_of
from waiting import pause, until

from flatcake_client.replay.contents import Contents
from flatcake_client.replay.driver import ASKING_THREADS, Engine, Run, SlotPool, pages_slots
from flatcake_client.replay.metrics import summarise
from flatcake_client.replay.queues import OneQueue
from flatcake_client.scheduler import TwoQueues


@pytest.fixture
def workload():
    return workload_of(talk("x", 4, 0), talk("y", 4, 100), talk("z", 3, 200))


@pytest.mark.parametrize("medium", ["ssd", "memory"])
def test_everything_found_is_delivered_with_its_bytes(workload, medium):
    system = DictSystem(medium)
    engine = Engine(1e6, 1, 5.0, all_prefetched=medium == "ssd")
    run = run_of(workload, system, engine=engine, queues=TwoQueues(2))
    assert run.run()
    summary = summarise(run.records, 16, len(workload.requests))
    assert summary.requests == 11
    assert summary.delivered_hit == summary.stored_hit
    assert (summary.wrong_blocks, summary.short_blocks, summary.errors) == (0, 0, 0)
    assert all(record.prefetched == (medium == "ssd" and record.found_blocks > 0) for record in run.records)
    assert len(system.held) == workload.stored_blocks
    assert summary.offered_blocks == summary.kept_blocks == summary.blocks - summary.delivered_blocks


def test_a_turn_never_comes_before_the_one_before_it_is_done(workload):
    run = run_of(workload, DictSystem(), load=1000.0)  # as if all came at once
    assert run.run()
    for session in "xyz":
        mine = [record for record in run.records if record.session == session]
        assert all(b.arrived_s >= a.first_token_s for a, b in itertools.pairwise(mine))
        assert [record.delivered_blocks for record in mine[1:]] == [record.blocks for record in mine[:-1]]


def test_prefill_takes_the_time_of_what_was_not_delivered(monkeypatch):
    workload, now_s = workload_of(talk("x", 2, 0, blocks=10)), 0.0
    engine = Engine(1600.0, 1, 5.0, all_prefetched=True)  # ten blocks of 16 tokens in 100 ms
    run = run_of(workload, DictSystem(), engine=engine)

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(run, "_now_s", lambda: now_s)
    monkeypatch.setattr(run._stop, "wait", sleep)
    assert run.run()
    assert [record.first_token_s - record.prefill_began_s for record in run.records] == pytest.approx([0.1, 0.1])


def test_wrong_bytes_are_no_hit_and_are_counted(workload):
    class Liar(DictSystem):
        def restore(self, asked, found, pages, slots, timeout_s):
            usable = super().restore(asked, found, pages, slots, timeout_s)
            pages[slots[-1]] ^= 1
            return usable

    run = run_of(workload, Liar())
    assert run.run()
    summary = summarise(run.records, 16, 11)
    assert summary.wrong_blocks == sum(record.found_blocks > 0 for record in run.records) > 0
    assert summary.delivered_blocks == summary.found_blocks - summary.wrong_blocks


def test_a_restore_that_brings_nothing_cannot_live_on_what_lay_there(workload):
    class Lazy(DictSystem):
        def restore(self, asked, found, pages, slots, timeout_s):
            return found.blocks

    run = run_of(workload, Lazy())
    assert run.run()
    summary = summarise(run.records, 16, 11)
    assert summary.delivered_blocks == 0
    assert summary.wrong_blocks == summary.found_blocks > 0


def test_the_warm_up_uses_every_verb_and_no_key_of_the_trace(workload):
    system = DictSystem()
    run = run_of(workload, system)
    run.warm_up()
    assert system.stores == system.restores == 3, "one more than prefetches at once: one ends beside them"
    assert not {key.tobytes() for planned in workload.requests for key in planned.asked.keys} & set(system.held)
    assert run.run()
    assert summarise(run.records, 16, 11).delivered_hit == summarise(run.records, 16, 11).stored_hit


def test_a_delivery_that_lay_there_before_is_none():
    class Lazy(DictSystem):
        def restore(self, asked, found, pages, slots, timeout_s):
            assert slots.tolist() == list(range(found.blocks))  # where the right bytes were all the time
            return found.blocks

    workload, contents = workload_of(talk("x", 2, 0)), Contents(PLANES, PLANE_BYTES, body_every=1)
    pages, keys = pages_for(workload), workload.requests[1].asked.keys
    contents.fill(pages, np.arange(len(keys)), keys)
    run = Run(workload, Lazy(), ENGINE, pages, contents, OneQueue(2, in_order=False), load=1.0)
    assert run.run()
    assert run.records[1].wrong_blocks == run.records[1].found_blocks == 2


@pytest.mark.parametrize("verb", ["lookup", "restore", "store"])
def test_what_a_system_raises_is_a_miss_and_an_error(workload, verb):
    system = DictSystem()

    def fails(*_):
        raise OSError("broken")

    setattr(system, verb, fails)
    run = run_of(workload, system)
    assert run.run()
    summary = summarise(run.records, 16, 11)
    assert summary.requests == 11
    assert summary.delivered_blocks == 0
    assert summary.errors > 0
    assert verb in next(record.error for record in run.records if record.error)


@pytest.mark.parametrize("part", ["wrong_blocks", "fill", "wipe"])
def test_a_fault_of_the_replay_ends_it_and_is_raised(workload, monkeypatch, part):
    def breaks(*_):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(Contents, part, breaks)
    with pytest.raises(ZeroDivisionError, match="ours"):
        run_of(workload, DictSystem()).run()


def test_a_request_counts_from_when_it_comes_not_from_when_somebody_asks_for_it():
    class Busy(DictSystem):
        def lookup(self, asked):
            assert free.wait(20)
            return super().lookup(asked)

    free = threading.Event()
    workload = workload_of(*(talk(f"s{n}", 1, 100 * n) for n in range(ASKING_THREADS + 1)))  # all at once
    run, ended = run_of(workload, Busy()), []
    thread = threading.Thread(target=lambda: ended.append(run.run()))
    thread.start()
    until(lambda: sum(record.arrived_s >= 0 for record in run.records) == ASKING_THREADS)
    pause(0.05)
    free.set()
    thread.join(20)
    assert ended == [True]
    assert [record.arrived_s for record in run.records] == [0.0] * (ASKING_THREADS + 1)
    assert all(record.ttft_s > 0.05 for record in run.records)


def test_a_short_restore_delivers_its_prefix(workload):
    class Short(DictSystem):
        def restore(self, asked, found, pages, slots, timeout_s):
            super().restore(asked, found, pages, slots, timeout_s)
            return found.blocks - 1

    run = run_of(workload, Short())
    assert run.run()
    summary = summarise(run.records, 16, 11)
    assert summary.short_blocks == summary.short_restores > 0
    assert summary.wrong_blocks == 0


def test_a_stopped_run_ends_soon_and_keeps_what_was_done():
    workload = workload_of(talk("x", 50, 0), talk("y", 50, 1000, at_s=60.0))  # y would come in a minute
    enough, ended = threading.Event(), []
    run = run_of(workload, DictSystem(), done=lambda number: enough.set() if number == 10 else None)
    thread = threading.Thread(target=lambda: ended.append(run.run()))
    thread.start()
    assert enough.wait(20)
    run.stop()
    thread.join(20)
    assert ended == [False]
    done = [record for record in run.records if record.done]
    assert 11 <= len(done) <= 51
    assert all(record.first_token_s >= record.arrived_s for record in done)


def test_slots_are_given_in_order_of_asking():
    pool = SlotPool(4)
    first = pool.take(3, lambda: False)
    assert len(set(first.tolist())) == 3
    assert pool.take(2, lambda: True) is None
    order = []
    threads = [threading.Thread(target=lambda n=n: order.append((n, pool.take(n, lambda: False)))) for n in (4, 1)]
    for waiting, thread in enumerate(threads, 1):
        thread.start()
        until(lambda waiting=waiting: len(pool._order) == waiting)
    pause(0.05)
    assert order == [], "1 is free, but 4 were asked for before"
    pool.give(first)
    threads[0].join(10)
    assert [count for count, _ in order] == [4]
    assert np.array_equal(np.sort(order[0][1]), np.arange(4))
    pool.give(order[0][1])
    threads[1].join(10)
    assert [count for count, _ in order] == [4, 1]


def test_pages_that_hold_too_little_are_refused(workload):
    need = (ENGINE.areas + 1) * workload.blocks_max
    assert pages_slots(workload, ENGINE, need * 128, 128) == need
    with pytest.raises(ValueError, match="--pages-bytes"):
        pages_slots(workload, ENGINE, need * 128 - 1, 128)
