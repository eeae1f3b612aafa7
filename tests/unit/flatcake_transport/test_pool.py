from __future__ import annotations

import gc
import threading

import pytest
from waiting import pause, until

from flatcake_transport.errors import Hangs, Unavailable
from flatcake_transport.movers import pool
from flatcake_transport.movers.pool import Batch, Commands, Workers


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


class Held:
    """Commands that end when the test says so."""

    def __init__(self, commands: Commands) -> None:
        self.commands, self.begun = commands, []
        self.go: dict[str, threading.Event] = {}

    def submit(self, name: str, size_bytes: int, *, yields: bool = False, device: int = 0) -> Batch:
        self.go[name] = threading.Event()

        def command() -> None:
            self.begun.append(name)
            self.go[name].wait(30)

        return self.commands.submit([(device, size_bytes, command)], yields=yields)

    def end(self, name: str) -> None:
        self.go[name].set()


def test_commands_are_bounded_in_bytes_and_go_in_order() -> None:
    held = Held(commands := Commands("test", 4, 10))
    batches = [held.submit("six", 6)]
    until(lambda: held.begun == ["six"])
    batches += [held.submit("eight", 8), held.submit("two", 2)]
    pause(0.02)
    assert held.begun == ["six"], "two would fit beside six, but eight came first"
    held.end("six")
    until(lambda: sorted(held.begun[1:]) == ["eight", "two"])
    batches.append(held.submit("fifty", 50))
    pause(0.02)
    assert len(held.begun) == 3
    held.end("two")
    held.end("eight")
    until(lambda: held.begun[3:] == ["fifty"])  # larger than all: alone
    held.end("fifty")
    for batch in batches:
        batch.wait(30)
    commands.close()


def test_writes_that_wait_have_no_threads_that_reads_need() -> None:
    held = Held(commands := Commands("test", 2, 10))
    batches = [held.submit("read", 4), *(held.submit(f"write {n}", 4, yields=True) for n in range(4))]
    until(lambda: held.begun == ["read"])
    batches.append(held.submit("another read", 4))
    until(lambda: held.begun == ["read", "another read"])
    held.end("read")
    pause(0.02)
    assert len(held.begun) == 2, "a write went beside a read"
    held.end("another read")
    until(lambda: held.begun[2:] == ["write 0", "write 1"])
    batches.append(held.submit("last read", 4))
    held.end("write 0")
    until(lambda: held.begun[4:] == ["last read"])
    for name in ("write 1", "last read", "write 2", "write 3"):
        held.end(name)
    for batch in batches:
        batch.wait(30)
    assert len(held.begun) == 7
    commands.close()


def test_a_failed_command_skips_those_of_its_batch_and_no_others() -> None:
    commands, ran = Commands("test", 1, 10), []

    def fails() -> None:
        raise OSError(5, "Input/output error")

    batch = commands.submit([(0, 1, fails), (0, 1, lambda: ran.append("mine"))])
    other = commands.submit([(0, 1, lambda: ran.append("another's"))])
    with pytest.raises(Unavailable, match="Input/output error"):
        batch.wait(30)
    other.wait(30)
    assert ran == ["another's"]
    commands.close()


def test_closing_lands_the_commands_and_ends_the_threads() -> None:
    commands, ran = Commands("closing", 3, 2), []
    batches = [commands.submit([(0, 1, lambda: ran.append(1))] * 10, yields=n % 2 == 0) for n in range(5)]
    commands.close()
    commands.close()
    assert len(ran) == 50
    assert all(batch.done() for batch in batches)
    assert not [t for t in threading.enumerate() if t.name.startswith("flatcake-closing")]
    with pytest.raises(Unavailable, match="closed"):
        commands.submit([])
    with pytest.raises(ValueError, match="0 threads"):
        Commands("test", 0, 1)


def test_threads_of_commands_end_with_their_owner() -> None:
    commands, together = Commands("lost", 3, 10), threading.Barrier(3)
    commands.submit([(0, 1, lambda: together.wait(30) and None)] * 3).wait(30)
    threads = [t for t in threading.enumerate() if t.name.startswith("flatcake-lost")]
    assert len(threads) == 3
    del commands
    gc.collect()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_a_finalizer_in_a_forked_child_waits_for_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever held it at the fork is not there."""
    commands = Commands("forked", 1, 10)
    ending = threading.Thread(target=commands.close, daemon=True)
    with commands._lines.changed:
        monkeypatch.setattr(pool.os, "getpid", lambda: commands._lines.process_id + 1)
        ending.start()
        ending.join(5)
        assert not ending.is_alive()


def test_threads_that_cannot_be_started_are_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    commands, started = Commands("few", 3, 10), []
    start = threading.Thread.start

    def one(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    def none(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    with pytest.raises(Unavailable, match="can't start"):
        commands.submit([(0, 1, lambda: None)])
    monkeypatch.setattr(threading.Thread, "start", one)
    commands.submit([(0, 1, lambda: None)]).wait(30)
    commands.close()


def test_a_device_that_hangs_holds_up_no_other() -> None:
    """Not its threads, not its bytes, not the order in which commands came."""
    held = Held(commands := Commands("test", 2, 10))
    hung = [held.submit(f"hung {n}", 5, device=1) for n in range(5)]
    until(lambda: held.begun == ["hung 0", "hung 1"])
    others = [held.submit(f"{device} {n}", 5, device=device, yields=device == 3) for device in (2, 3) for n in range(3)]
    for n in range(3):
        until(lambda n=n: {f"2 {n}", f"3 {n}"} <= set(held.begun))
        held.end(f"2 {n}")
        held.end(f"3 {n}")
    for batch in others:
        batch.wait(30)
    assert held.begun.count("hung 2") == 0
    for n in range(5):
        held.end(f"hung {n}")
    for batch in hung:
        batch.wait(30)
    assert not commands._lines._of, "a device with nothing to do has a line"
    commands.close()


def test_threads_are_as_many_as_are_needed_at_once() -> None:
    held = Held(commands := Commands("test", 16, 10))
    for n in range(20):
        batch = held.submit(str(n), 1, device=n)
        held.end(str(n))
        batch.wait(30)
        until(lambda: commands._lines._idle == 1)
    assert len(commands._lines.threads) == 1
    commands.close()


def test_threads_are_bounded_and_devices_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "THREADS_MAX", 1)
    held = Held(commands := Commands("test", 16, 10))
    names = [f"{device} {n}" for device in range(2) for n in range(3)]
    batches = [held.submit(name, 1, device=int(name[0])) for name in names]
    for name in names:
        held.end(name)
    for batch in batches:
        batch.wait(30)
    assert held.begun in (["0 0", "0 1", "1 0", "0 2", "1 1", "1 2"], ["0 0", "1 0", "0 1", "1 1", "0 2", "1 2"])
    commands.close()


def test_what_waits_for_a_device_that_hangs_is_given_up_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(commands := Commands("test", 2, 4))
    stuck, waits = held.submit("stuck", 4, device=1), held.submit("waits", 4, device=1)
    mixed = commands.submit([(2, 1, lambda: None), (1, 1, lambda: None)])
    until(lambda: held.begun == ["stuck"])
    with pytest.raises(TimeoutError) as error:
        waits.wait(0.01)
    assert not isinstance(error.value, Hangs), "10 s are not over"
    monkeypatch.setattr(pool, "HANGS_S", 0.0)
    with pytest.raises(Hangs):
        stuck.wait(0.01)  # its bytes may come at any time
    for batch in (waits, mixed, held.submit("comes later", 1, device=1)):
        assert batch.done()
        with pytest.raises(Unavailable, match="not answered"):
            batch.wait(0.0)
    healthy = held.submit("healthy", 1, device=2)
    held.end("healthy")
    healthy.wait(30)
    held.end("stuck")
    stuck.wait(30)
    until(lambda: not commands._lines._of)
    again = held.submit("again", 1, device=1)
    held.end("again")
    again.wait(30)
    assert held.begun == ["stuck", "healthy", "again"]
    commands.close()
