"""Threads that movers share work with: batches of tasks that rest together, and a few threads that take them.

    Workers     tasks that are alike: every thread takes the next one of a batch, and the waiting caller may work along
    Commands    commands to devices: bounded in bytes, reads before writes (precedence.py), each device by itself

A batch is not a Future a task. Where its tasks stand in one list iterator that threads take the next from, no lock is taken and no
thread is woken per task: in CPython `next` on it is atomic. Waking costs tens of microseconds: a batch wakes at most as
many threads as it has tasks. A command that may not go yet waits in line and not in a thread, so that the writes that wait
never have the threads that reads need.

A device that hangs keeps the threads and the memory of the commands that it has. After `HANGS_S` it is given no more, and those that
wait for it fail: else what they hold (windows of staging) would soon be all there is, and others would wait for that device too.

Invariants: a batch rests when every task has run or was skipped after a failure; only then does `wait` return or raise.
The first failure wins, the tasks not begun yet are skipped, those under way are waited for.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Final

from flatcake_transport.errors import FlatCakeError, Hangs, Unavailable
from flatcake_transport.movers.precedence import ReadsFirst

Task = Callable[[], None]
Command = tuple[int, int, Task]  # device, bytes, what to do

HANGS_S: Final = 10.0  # as long as the daemon goes on giving a path turns; a command of some MiB takes milliseconds
THREADS_MAX: Final = 256  # of all devices together


class Batch:
    """Tasks under way: the `Transfer` of movers that work with threads. Thread-safe.

    Args:
        tasks: each moves some bytes, and raises OSError or Unavailable where it cannot.
        caller_works: `wait` runs tasks on its own thread too. Only for tasks that cannot block.
        hangs: whether a device that tasks wait for hangs; asked by who has waited in vain.
    """

    __slots__ = ("_caller_works", "_error", "_hangs", "_left", "_lock", "_next", "_rested")

    def __init__(
        self, tasks: Sequence[Task], *, caller_works: bool = False, hangs: Callable[[], bool] = lambda: False
    ) -> None:
        self._next: Iterator[Task] = iter(tasks)
        self._left = len(tasks)
        self._lock = threading.Lock()
        self._rested = threading.Event()
        self._error: BaseException | None = None
        self._caller_works = caller_works
        self._hangs = hangs
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
            hangs = self._hangs()
            if not self._rested.is_set():  # it may have been all refused just now
                raise (Hangs if hangs else TimeoutError)("the moves have not landed yet")
        error = self._error
        if isinstance(error, FlatCakeError):
            raise Unavailable(str(error)) from error
        if isinstance(error, OSError):
            raise Unavailable(f"bytes could not be moved: {error}") from error
        if error is not None:
            raise error


class _Threads:
    """Daemon threads of somebody who is not held by them: when it is collected unclosed, they end."""

    def __init__(self, name: str, count_max: int, work: Callable[[], object]) -> None:
        self._name, self._count_max, self._work = name, count_max, work
        self._threads: list[threading.Thread] = []

    def start(self, count: int) -> None:
        """So many more, as far as there may be. Under a lock of the caller's. Raises: Unavailable: there is none at all."""
        for n in range(len(self._threads), min(len(self._threads) + count, self._count_max)):
            thread = threading.Thread(target=self._work, name=f"flatcake-{self._name}-{n}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads, or the interpreter ends
                if self._threads:
                    break  # those that there are do it
                raise Unavailable(f"{self._name}: {error}") from error
            self._threads.append(thread)

    def __len__(self) -> int:
        return len(self._threads)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


class _Line:
    """Commands to one device: those that wait, and since when those under way are, oldest first."""

    __slots__ = ("began_s", "waiting")

    def __init__(self, bytes_max: int) -> None:
        self.waiting: ReadsFirst[tuple[Batch, Task]] = ReadsFirst(bytes_max)
        self.began_s: dict[object, float] = {}

    def hangs(self) -> bool:
        return bool(self.began_s) and time.monotonic() - next(iter(self.began_s.values())) > HANGS_S


class _Lines:
    """What the threads of `Commands` share. A device has a line while something of it waits or is under way."""

    def __init__(self, name: str, under_way_max: int, bytes_max: int, *, patient: bool) -> None:
        self._name, self._under_way_max, self._bytes_max, self._patient = name, under_way_max, bytes_max, patient
        self.changed = threading.Condition()  # taken again where the owner is collected under it
        self.closed = False
        self.process_id = os.getpid()
        self.threads = _Threads(name, THREADS_MAX, self._serve)
        self._idle = 0  # threads that wait and were not woken yet
        self._coming = False  # a thread was woken or started, and has not looked yet; it wakes the next
        self._of: OrderedDict[int, _Line] = OrderedDict()

    def append(self, commands: Sequence[Command], *, yields: bool) -> Batch:
        """See `Commands.submit`."""
        devices = {device for device, _, _ in commands}
        batch = Batch([task for _, _, task in commands], hangs=partial(self.hang, devices))
        with self.changed:
            if self.closed:
                raise Unavailable(f"the {self._name} mover is closed")
            if commands and not len(self.threads):
                self._start()  # it looks when all are in line
            for device, size_bytes, task in commands:
                line = self._of.get(device)
                if line is None:
                    line = self._of[device] = _Line(self._bytes_max)
                line.waiting.append((batch, task), size_bytes, yields=yields)
            given_up = self._give_up(devices)
            self._wake()
        _refuse(given_up)
        return batch

    def hang(self, devices: Collection[int]) -> bool:
        """Whether one of them does; what waits for it is given up, and with that the memory that it was to move."""
        with self.changed:
            given_up = self._give_up(devices)
            hang = any(self._hangs(device) for device in devices)
        _refuse(given_up)
        return hang

    def _hangs(self, device: int) -> bool:
        line = self._of.get(device)
        return not self._patient and line is not None and line.hangs()

    def _give_up(self, devices: Collection[int]) -> list[tuple[Batch, Task]]:
        return [each for device in devices if self._hangs(device) for each in self._of[device].waiting.clear()]

    def close(self) -> None:
        """A finalizer, too. In a forked child there are no threads to tell, and the lock's holder may be one of them."""
        if os.getpid() != self.process_id:
            self.closed = True
            return
        with self.changed:
            self.closed, self._idle = True, 0
            self.changed.notify_all()

    def waiting(self, device: int = 0) -> int:
        """How many commands wait for a device."""
        line = self._of.get(device)
        return len(line.waiting) if line is not None else 0

    def _serve(self) -> None:
        """A thread: one command after the other, whichever device's may go."""
        taken = self._take(comes=True)
        while taken is not None:
            device, line, token, (batch, task), size_bytes, yields = taken
            batch.one(task)
            del taken, batch, task  # an idle thread must not keep the last batch's buffers alive
            with self.changed:
                line.waiting.ended(size_bytes, yields=yields)
                del line.began_s[token]
                if not line.began_s and not line.waiting:
                    del self._of[device]
            del line
            taken = self._take()

    def _take(self, *, comes: bool = False) -> tuple[int, _Line, object, tuple[Batch, Task], int, bool] | None:
        """Wait for a command that may go. None: closed, and all have gone."""
        with self.changed:
            if comes:
                self._coming = False
            while (device := self._ready()) is None:
                if self.closed and not any(line.waiting for line in self._of.values()):
                    self.changed.notify_all()
                    return None
                self._idle += 1
                self.changed.wait()
                self._coming = False
            line, token = self._of[device], object()
            self._of.move_to_end(device)  # devices in turn, if threads are few
            command, size_bytes, yields = line.waiting.take()
            line.began_s[token] = time.monotonic()
            self._wake()
            return device, line, token, command, size_bytes, yields

    def _ready(self) -> int | None:
        """A device to which a command may go now."""
        for device, line in self._of.items():
            if len(line.began_s) < self._under_way_max and line.waiting.ready:
                return device
        return None

    def _wake(self) -> None:
        """Have a command taken, if one may go: by a thread that waits, or by another one."""
        if self._coming or self._ready() is None:
            return
        if self._idle:
            self._idle, self._coming = self._idle - 1, True
            self.changed.notify()
        else:
            self._start()

    def _start(self) -> None:
        count = len(self.threads)
        self.threads.start(1)
        self._coming = len(self.threads) > count


def _refuse(commands: Sequence[tuple[Batch, Task]]) -> None:
    def fails() -> None:
        raise Unavailable(f"the device has not answered for {HANGS_S:g} s")

    for batch, _ in commands:
        batch.one(fails)


class Commands:
    """Commands to devices, so many under way to each; one that hangs holds up no other's. Thread-safe.

    Threads are started when none is idle, `THREADS_MAX` at most: as many commands can hang before other devices wait.
    """

    def __init__(self, name: str, under_way_max: int, bytes_max: int, *, patient: bool = False) -> None:
        """`under_way_max`, `bytes_max`: of commands under way to one device. `patient`: none is said to hang.

        Raises: ValueError: no commands.
        """
        if under_way_max < 1:
            raise ValueError(f"{name} with {under_way_max} threads: expected 1 or more")
        self._lines = _Lines(name, under_way_max, bytes_max, patient=patient)
        self._stop = weakref.finalize(self, self._lines.close)

    def submit(self, commands: Sequence[Command], *, yields: bool = False) -> Batch:
        """Have commands done: to which device, its bytes, and what to do. In order, but writes (`yields`) after reads.

        Raises: Unavailable: closed, or no thread can be started.
        """
        return self._lines.append(commands, yields=yields)

    def close(self) -> None:
        """Land what was submitted, then end the threads. Twice is fine."""
        self._stop()
        self._lines.threads.join()


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
            if threads > 0 and not len(self._threads):
                self._threads.start(self._count)
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
