"""Threads that movers share work with: batches of tasks that rest together, and a few threads that take them.

    Workers     tasks that are alike: every thread takes the next one of a batch, and the waiting caller may work along
    Commands    commands to a device: bounded in bytes, reads before writes (precedence.py)

A batch is not a Future a task. Where its tasks stand in one list iterator that threads take the next from, no lock is taken and no
thread is woken per task: in CPython `next` on it is atomic. Waking costs tens of microseconds: a batch wakes at most as
many threads as it has tasks. A command that may not go yet waits in line and not in a thread, so that the writes that wait
never have the threads that reads need.

Invariants: a batch rests when every task has run or was skipped after a failure; only then does `wait` return or raise.
The first failure wins, the tasks not begun yet are skipped, those under way are waited for.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from flatcake_transport.errors import FlatCakeError, Unavailable
from flatcake_transport.movers.precedence import ReadsFirst

Task = Callable[[], None]


class Batch:
    """Tasks under way: the `Transfer` of movers that work with threads. Thread-safe.

    Args:
        tasks: each moves some bytes, and raises OSError or Unavailable where it cannot.
        caller_works: `wait` runs tasks on its own thread too. Only for tasks that cannot block.
    """

    __slots__ = ("_caller_works", "_error", "_left", "_lock", "_next", "_rested")

    def __init__(self, tasks: Sequence[Task], *, caller_works: bool = False) -> None:
        self._next: Iterator[Task] = iter(tasks)
        self._left = len(tasks)
        self._lock = threading.Lock()
        self._rested = threading.Event()
        self._error: BaseException | None = None
        self._caller_works = caller_works
        if not tasks:
            self._rested.set()

    def work(self, deadline_s: float | None = None) -> None:
        """Run tasks until none is left, or until the monotonic `deadline_s`."""
        ran = 0
        for task in self._next:
            ran += 1
            self._run(task)
            if deadline_s is not None and time.monotonic() >= deadline_s:
                break
        if ran:
            self._ran(ran)

    def one(self, task: Task) -> None:
        """Run this task, one of the batch's; each is run like this, or all by `work`."""
        self._run(task)
        self._ran(1)

    def _run(self, task: Task) -> None:
        if self._error is None:
            try:
                task()
            except BaseException as error:  # noqa: BLE001 - the edge of a thread: `wait` raises it on the caller's
                self._error = error

    def _ran(self, tasks: int) -> None:
        with self._lock:
            self._left -= tasks
            rested = self._left == 0
        if rested:
            self._rested.set()

    def done(self) -> bool:
        return self._rested.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """See `Transfer.wait`."""
        if self._caller_works and not self._rested.is_set():
            start_s = time.monotonic()
            deadline_s = None if timeout_s is None else start_s + timeout_s
            if deadline_s is None or deadline_s > start_s:
                self.work(deadline_s)
            if deadline_s is not None:
                timeout_s = max(0.0, deadline_s - time.monotonic())
        if not self._rested.wait(timeout_s):
            raise TimeoutError("the moves have not landed yet")
        error = self._error
        if isinstance(error, FlatCakeError):
            raise Unavailable(str(error)) from error
        if isinstance(error, OSError):
            raise Unavailable(f"bytes could not be moved: {error}") from error
        if error is not None:
            raise error


class _Threads:
    """Daemon threads, started with the first work; they do not hold their owner: when it is collected unclosed, they end."""

    def __init__(self, name: str, count: int, work: Callable[[], object]) -> None:
        self._name, self._count, self._work = name, count, work
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Under a lock of the caller's. Twice is fine. Raises: Unavailable: not one could be started."""
        if not self._threads:
            for i in range(self._count):
                thread = threading.Thread(target=self._work, name=f"flatcake-{self._name}-{i}", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # no more threads, or the interpreter ends
                    if self._threads:
                        break  # those that there are do it
                    raise Unavailable(f"{self._name}: {error}") from error
                self._threads.append(thread)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


class _Line:
    """What the threads of `Commands` share."""

    __slots__ = ("changed", "closed", "process_id", "waiting")

    def __init__(self, bytes_max: int) -> None:
        self.waiting: ReadsFirst[Callable[[], object]] = ReadsFirst(bytes_max)
        self.changed = threading.Condition()  # taken again where the owner is collected under it
        self.closed = False
        self.process_id = os.getpid()

    def close(self) -> None:
        """A finalizer, too. In a forked child there are no threads to tell, and the lock's holder may be one of them."""
        if os.getpid() != self.process_id:
            self.closed = True
            return
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def serve(self) -> None:
        """A thread: one command after the other."""
        while (taken := self._take()) is not None:
            command, size_bytes, yields = taken
            command()
            del taken, command  # an idle thread must not keep the last batch's buffers alive
            with self.changed:
                self.waiting.ended(size_bytes, yields=yields)

    def _take(self) -> tuple[Callable[[], object], int, bool] | None:
        """Wait for a command that may go. None: closed, and all have gone."""
        with self.changed:
            while not self.waiting.ready:
                if self.closed and not self.waiting:
                    self.changed.notify_all()
                    return None
                self.changed.wait()
            taken = self.waiting.take()
            if self.waiting.ready:
                self.changed.notify()
            return taken


class Commands:
    """A fixed number of threads, and so of commands under way. Thread-safe."""

    def __init__(self, name: str, threads: int, bytes_max: int) -> None:
        """`bytes_max`: of all commands under way. Raises: ValueError: no threads."""
        if threads < 1:
            raise ValueError(f"{name} with {threads} threads: expected 1 or more")
        self._name = name
        self._line = _Line(bytes_max)
        self._threads = _Threads(name, threads, self._line.serve)
        self._stop = weakref.finalize(self, self._line.close)

    def submit(self, commands: Sequence[tuple[int, Task]], *, yields: bool = False) -> Batch:
        """Have commands done, each with its bytes; in order, but writes (`yields`) after reads.

        Raises: Unavailable: closed.
        """
        batch = Batch([task for _, task in commands])
        line = self._line
        with line.changed:
            if line.closed:
                raise Unavailable(f"the {self._name} mover is closed")
            self._threads.start()
            for size_bytes, task in commands:
                line.waiting.append(partial(batch.one, task), size_bytes, yields=yields)
            if line.waiting.ready:
                line.changed.notify()
        return batch

    def close(self) -> None:
        """Land what was submitted, then end the threads. Twice is fine."""
        self._stop()
        self._threads.join()


class Workers:
    """A fixed number of threads that work on batches, one after the other. Thread-safe."""

    def __init__(self, name: str, threads: int) -> None:
        """Raises: ValueError: fewer than 0 threads."""
        if threads < 0:
            raise ValueError(f"{name} with {threads} threads: expected 0 or more")
        self._name = name
        self._count = threads
        self._batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._threads = _Threads(name, threads, partial(_work_on, self._batches))
        self._lock = threading.Lock()
        self._closed = False
        self._stop = weakref.finalize(self, _stop, self._batches, threads)

    def share(self, batch: Batch, threads: int) -> None:
        """Let up to `threads` threads work on a batch; it is begun after the batches before it.

        Raises: Unavailable: closed.
        """
        with self._lock:
            if self._closed:
                raise Unavailable(f"the {self._name} mover is closed")
            if threads > 0:
                self._threads.start()
            for _ in range(min(threads, self._count)):
                self._batches.put(batch)

    def close(self) -> None:
        """Land what was shared, then end the threads. Twice is fine."""
        with self._lock:
            self._closed = True
            self._stop()  # queued behind all batches; finalizers run once
        self._threads.join()


def _stop(batches: queue.SimpleQueue[Batch | None], threads: int) -> None:
    for _ in range(threads):
        batches.put(None)


def _work_on(batches: queue.SimpleQueue[Batch | None]) -> None:
    while (batch := batches.get()) is not None:
        batch.work()
        del batch  # an idle thread must not keep the last batch's buffers alive
