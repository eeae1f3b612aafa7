"""Threads that movers share work with: batches of tasks, a few threads, one iterator.

A batch is not a Future a task. Its tasks stand in one list iterator that every thread takes the next from; in CPython
`next` on it is atomic, so no lock is taken and no thread is woken per task. Waking costs tens of microseconds: a batch wakes
at most as many threads as it has tasks, and copies let the waiting caller work along instead of only waiting for others.

Invariants: a batch rests when every task has run or was skipped after a failure; only then does `wait` return or raise.
The first failure wins, the tasks not begun yet are skipped, those under way are waited for.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

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
            if self._error is None:
                try:
                    task()
                except BaseException as error:  # noqa: BLE001 - the edge of a thread: `wait` raises it on the caller's
                    self._error = error
            if deadline_s is not None and time.monotonic() >= deadline_s:
                break
        if ran:
            with self._lock:
                self._left -= ran
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


class ByteGate:
    """Bounds the bytes in flight; reads before writes, then first come first served. Thread-safe.

    Without it all of two batches would be in flight at once and land together, and the device would idle while both are
    used; with it the first batch lands while the second is behind it.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = self._free = bytes_max
        self._lock = threading.Lock()
        self._waiting: ReadsFirst[tuple[int, threading.Lock]] = ReadsFirst()

    def enter(self, size_bytes: int, *, yields: bool = False) -> None:
        """Wait for room. What is larger than the bound passes alone."""
        with self._lock:
            if not self._waiting and self._fits(size_bytes):
                self._free -= size_bytes
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append((size_bytes, turn), yields=yields)
            self._admit()  # a small read may fit where the write before it does not
        turn.acquire()  # `_admit` gives our bytes and releases it

    def leave(self, size_bytes: int) -> None:
        """Give back what `enter` took, and let in those it holds up."""
        with self._lock:
            self._free += size_bytes
            self._admit()

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting.first()[0]):
            size_bytes, turn = self._waiting.popleft()
            self._free -= size_bytes
            turn.release()

    def _fits(self, size_bytes: int) -> bool:
        return size_bytes <= self._free or self._free == self._bytes_max


class _Shared:
    """What threads take work from: a token a batch and thread, and the batches."""

    __slots__ = ("batches", "lock", "tokens")

    def __init__(self) -> None:
        self.tokens: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.batches: ReadsFirst[Batch] = ReadsFirst()
        self.lock = threading.Lock()


class Workers:
    """A fixed number of daemon threads, started with the first batch. Thread-safe.

    The threads do not hold their owner: when it is collected unclosed, they end.
    """

    def __init__(self, name: str, threads: int) -> None:
        """Raises: ValueError: fewer than 0 threads."""
        if threads < 0:
            raise ValueError(f"{name} with {threads} threads: expected 0 or more")
        self._name = name
        self._count = threads
        self._shared = _Shared()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False
        self._stop = weakref.finalize(self, _stop, self._shared, threads)

    def share(self, batch: Batch, threads: int, *, yields: bool = False) -> None:
        """Let up to `threads` threads work on a batch; it is begun after the batches before it, and a write after reads.

        Raises: Unavailable: closed.
        """
        with self._lock:
            if self._closed:
                raise Unavailable(f"the {self._name} mover is closed")
            if not self._threads and threads > 0:
                for i in range(self._count):
                    name = f"flatcake-{self._name}-{i}"
                    thread = threading.Thread(target=_run, args=(self._shared,), name=name, daemon=True)
                    thread.start()
                    self._threads.append(thread)
            for _ in range(min(threads, self._count)):
                with self._shared.lock:
                    self._shared.batches.append(batch, yields=yields)
                self._shared.tokens.put(True)

    def close(self) -> None:
        """Land what was shared, then end the threads. Twice is fine."""
        with self._lock:
            self._closed = True
            self._stop()  # queued behind all batches; finalizers run once
        for thread in self._threads:
            thread.join()


def _stop(shared: _Shared, threads: int) -> None:
    for _ in range(threads):
        shared.tokens.put(False)


def _run(shared: _Shared) -> None:
    while shared.tokens.get():
        with shared.lock:
            batch = shared.batches.popleft()  # not the one the token came with, if another goes first
        batch.work()
        del batch  # an idle thread must not keep the last batch's buffers alive
