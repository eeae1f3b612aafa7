from __future__ import annotations

import gc
import threading

import pytest

from flatcake_transport.errors import Unavailable
from flatcake_transport.movers.pool import Batch, ByteGate, Workers


def test_every_task_runs_once_whoever_takes_it() -> None:
    workers, ran = Workers("test", 4), []
    batch = Batch([lambda i=i: ran.append(i) for i in range(1000)], caller_works=True)
    workers.share(batch, 4)
    batch.wait(30)
    assert sorted(ran) == list(range(1000))
    workers.close()


def test_nothing_to_do_is_done() -> None:
    batch = Batch([])
    assert batch.done()
    batch.wait(0)


def test_the_waiter_works_where_no_thread_does() -> None:
    ran = []
    batch = Batch([lambda: ran.append(threading.current_thread())], caller_works=True)
    assert not batch.done()
    batch.wait(30)
    assert ran == [threading.current_thread()]


def test_a_waiter_out_of_time_does_not_begin() -> None:
    batch = Batch([lambda: pytest.fail("begun after the deadline")], caller_works=True)
    with pytest.raises(TimeoutError):
        batch.wait(0)


def test_a_waiter_stops_at_its_deadline_and_goes_on_later() -> None:
    ran = []

    def task() -> None:
        ran.append(1)
        threading.Event().wait(0.002)

    batch = Batch([task] * 3, caller_works=True)
    with pytest.raises(TimeoutError):
        batch.wait(0.001)
    assert len(ran) == 1
    batch.wait(30)
    assert len(ran) == 3


def test_wait_returns_only_when_the_last_task_rests() -> None:
    workers, go, begun = Workers("test", 2), threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        go.wait(30)

    def fails() -> None:
        begun.wait(30)
        raise OSError(5, "Input/output error")

    batch = Batch([slow, fails])
    workers.share(batch, 2)
    with pytest.raises(TimeoutError):
        batch.wait(0.05)
    assert not batch.done()
    go.set()
    with pytest.raises(Unavailable, match="Input/output error"):
        batch.wait(30)
    assert batch.done()
    workers.close()


def test_a_bug_in_a_task_reaches_the_waiter_as_it_is() -> None:
    workers = Workers("test", 1)
    batch = Batch([lambda: 1 / 0])  # type: ignore[list-item]
    workers.share(batch, 1)
    with pytest.raises(ZeroDivisionError):
        batch.wait(30)
    other = Batch([lambda: None])
    workers.share(other, 1)
    other.wait(30)
    workers.close()


def test_closing_lands_what_was_shared() -> None:
    workers, ran = Workers("test", 2), []
    batches = [Batch([lambda: ran.append(1)] * 10) for _ in range(5)]
    for batch in batches:
        workers.share(batch, 2)
    workers.close()
    workers.close()
    assert len(ran) == 50
    assert all(batch.done() for batch in batches)
    with pytest.raises(Unavailable, match="closed"):
        workers.share(Batch([]), 1)


def test_threads_end_with_their_owner() -> None:
    workers = Workers("orphan", 3)
    batch = Batch([lambda: None])
    workers.share(batch, 1)
    batch.wait(30)
    threads = [t for t in threading.enumerate() if t.name.startswith("flatcake-orphan")]
    assert len(threads) == 3
    del workers
    gc.collect()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_no_threads_is_refused_or_meant() -> None:
    with pytest.raises(ValueError, match="-1 threads"):
        Workers("test", -1)
    Workers("test", 0).close()


def test_the_gate_bounds_what_is_inside_and_lets_in_by_order_of_arrival() -> None:
    gate, order, inside = ByteGate(10), [], []
    gate.enter(6)
    arrived = []

    def enter(number: int, size: int) -> None:
        gate.enter(size)
        order.append(number)
        inside.append(size)

    for number, size in enumerate((8, 2, 3)):
        thread = threading.Thread(target=enter, args=(number, size), daemon=True)
        thread.start()
        arrived.append(thread)
        while len(gate._waiting) <= number:
            threading.Event().wait(0.001)
    assert order == [], "2 would fit beside 6, but 8 came first"
    gate.leave(6)
    arrived[0].join(30)
    arrived[1].join(30)
    assert sorted(order) == [0, 1]
    assert len(gate._waiting) == 1
    gate.leave(8)
    arrived[2].join(30)
    assert sorted(order) == [0, 1, 2]


def test_what_is_larger_than_the_gate_passes_alone() -> None:
    gate = ByteGate(10)
    gate.enter(50)
    thread = threading.Thread(target=gate.enter, args=(1,), daemon=True)
    thread.start()
    while not gate._waiting:
        threading.Event().wait(0.001)
    gate.leave(50)
    thread.join(30)
    assert gate._free == 9


def test_the_gate_lets_a_read_pass_the_writes_that_wait() -> None:
    gate, order = ByteGate(10), []
    gate.enter(10)

    def enter(name: str, size: int, yields: bool) -> None:
        gate.enter(size, yields=yields)
        order.append(name)

    threads = []
    for waiting, (name, size, yields) in enumerate([("write", 10, True), ("read", 6, False)]):
        threads.append(threading.Thread(target=enter, args=(name, size, yields), daemon=True))
        threads[-1].start()
        while len(gate._waiting) <= waiting:
            threading.Event().wait(0.001)
    gate.leave(10)
    threads[1].join(30)
    assert order == ["read"]
    enter("small read", 4, False)  # beside the other one, before the write
    gate.leave(6)
    gate.leave(4)
    threads[0].join(30)
    assert order == ["read", "small read", "write"]


def test_threads_take_reads_before_writes() -> None:
    workers, go, order = Workers("test", 1), threading.Event(), []
    workers.share(Batch([lambda: go.wait(30)]), 1)
    batches = []
    for number in range(3):
        for name, yields in ((f"write {number}", True), (f"read {number}", False)):
            batches.append(Batch([lambda name=name: order.append(name)]))
            workers.share(batches[-1], 1, yields=yields)
    go.set()
    for batch in batches:
        batch.wait(30)
    assert order == ["read 0", "read 1", "read 2", "write 0", "write 1", "write 2"]
    workers.close()
