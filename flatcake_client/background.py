"""What a connector may not do on its engine's threads: asking the daemon, and moving bytes. In threads here, all bounded.

    Lookups    asked by a request, polled by the engine's scheduler, until there is an answer or its time is over
    Restores   memory at once, SSD in FC-MAS order (scheduler.py), so that a request whose blocks are all in memory never
               waits for a disk
    Crew       the threads of both, and of stores: a queue that is full drops what comes, with a count

- `submit`, `poll`, `cancel` take microseconds and block on nothing but a lock that is never held over work.
- Whoever is asked twice answers once: a restore ends exactly once, well, failed or cancelled.
- An answer that nobody waits for any more (cancelled, late) is discarded in a thread of ours: giving a lease back is a call.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, TypeVar

from flatcake_client.scheduler import PREFETCHES_MAX, Scheduler
from flatcake_transport.errors import Overloaded, Unavailable

log = logging.getLogger(__name__)

# A lookup takes a millisecond of waiting, mostly: four keep up with 4,000 requests a second.
LOOKUP_THREADS_MAX: Final = 4
LOOKUPS_WAITING_MAX: Final = 1024
RESTORES_WAITING_MAX: Final = 4096
# Writes hold an engine's blocks while they wait for reads, so they wait for a moment only.
YIELD_S: Final = 0.5
YIELD_STEP_S: Final = 0.01

RequestId = TypeVar("RequestId", bound=Hashable)
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class CrewStats:
    """`submitted == done + waiting + running`; `failed` are among the done, `dropped` were never taken."""

    submitted_total: int
    done_total: int
    failed_total: int
    dropped_total: int
    waiting: int
    running: int


class Crew:
    """Threads that do what they are given, in order. Thread-safe."""

    def __init__(
        self, name: str, threads_max: int, waiting_max: int, *, yields_to: Callable[[], bool] = lambda: False
    ) -> None:
        """`yields_to`: while it says so no further work is begun, at most `YIELD_S` each."""
        if threads_max < 1 or waiting_max < 1:
            raise ValueError(f"threads_max {threads_max} and waiting_max {waiting_max} must be 1 or more")
        self._waiting_max = waiting_max
        self._yields_to = yields_to
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[], object]] = deque()
        self._running = self._submitted = self._done = self._failed = self._dropped = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work_all, name=f"flatcake-{name}{n}", daemon=True) for n in range(threads_max)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], object]) -> bool:
        """Have it done later. False, and dropped with a count: too much waits, or the crew is closed."""
        with self._changed:
            if self._closed or len(self._waiting) >= self._waiting_max:
                self._dropped += 1
                return False
            self._submitted += 1
            self._waiting.append(work)
            self._changed.notify_all()
            return True

    def busy(self) -> bool:
        """Whether something waits or runs."""
        return bool(self._waiting or self._running)

    def settle(self, timeout_s: float) -> bool:
        """Wait until nothing waits or runs. False: not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.busy(), timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Begin nothing more, and wait for what runs; what waits is dropped. False: not in time. Twice is fine."""
        with self._changed:
            self._closed = True
            self._submitted -= len(self._waiting)
            self._dropped += len(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def stats(self) -> CrewStats:
        with self._changed:
            return CrewStats(
                self._submitted, self._done, self._failed, self._dropped, len(self._waiting), self._running
            )

    def _work_all(self) -> None:
        while (work := self._next()) is not None:
            failed = 0
            try:
                work()
            except Exception as error:  # noqa: BLE001 - a thread's edge: without it the next would find nobody
                failed = 1
                log.warning("work in the background failed: %r", error)
            finally:
                del work  # a thread that waits must not keep an engine's arrays alive
                with self._changed:
                    self._running -= 1
                    self._done += 1
                    self._failed += failed
                    self._changed.notify_all()

    def _next(self) -> Callable[[], object] | None:
        with self._changed:
            while not self._closed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                yield_until_s = time.monotonic() + YIELD_S
                while not self._closed and self._yields_to() and time.monotonic() < yield_until_s:
                    self._changed.wait(YIELD_STEP_S)
                if self._waiting:  # another thread may have come first meanwhile
                    self._running += 1
                    return self._waiting.popleft()
            return None


@dataclass(frozen=True, slots=True)
class Answer(Generic[Found]):
    """What is known now: `waiting` for it, or `found`; None is a miss."""

    waiting: bool
    found: Found | None


class _Asked(Generic[Found]):
    __slots__ = ("answer", "deadline_s", "gone")

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.answer: Answer[Found] = Answer(waiting=True, found=None)
        self.gone = False  # nobody waits for it


@dataclass(frozen=True, slots=True)
class LookupsStats:
    """`late`: answered by the clock; `refused`: too many waited. Both are misses."""

    asked_total: int
    late_total: int
    refused_total: int
    known: int


class Lookups(Generic[RequestId, Found]):
    """Questions of an engine's scheduler. Thread-safe.

    What was found is kept until `take` or `cancel`; `discard` gives back what nobody took, in a thread of ours.
    """

    def __init__(
        self,
        discard: Callable[[Found], object],
        threads_max: int = LOOKUP_THREADS_MAX,
        waiting_max: int = LOOKUPS_WAITING_MAX,
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._discard = discard
        self._now_s = now_s
        self._lock = threading.Lock()
        self._asked: dict[RequestId, _Asked[Found]] = {}
        self._crew = Crew("lookup", threads_max, waiting_max)
        self._tidy = Crew("release", 1, RESTORES_WAITING_MAX)
        self._total = self._late = self._refused = 0

    def submit(self, request: RequestId, look: Callable[[], Found | None], timeout_s: float) -> None:
        """Ask; one question a request at a time. What `look` raises is a miss.

        Raises: ValueError: the request has asked and neither taken nor cancelled.
        """
        asked: _Asked[Found] = _Asked(self._now_s() + timeout_s)
        with self._lock:
            if request in self._asked:
                raise ValueError(f"request {request!r} has asked already")
            self._asked[request] = asked
            self._total += 1
        if not self._crew.submit(partial(self._look, asked, look)):
            with self._lock:
                self._refused += 1
                asked.answer = Answer(waiting=False, found=None)

    def poll(self, request: RequestId) -> Answer[Found]:
        """What is known by now; past its deadline a miss. Who never asked has a miss."""
        with self._lock:
            asked = self._asked.get(request)
            if asked is None:
                return Answer(waiting=False, found=None)
            if asked.answer.waiting and self._now_s() >= asked.deadline_s:
                self._late += 1
                asked.gone = True
                asked.answer = Answer(waiting=False, found=None)
            return asked.answer

    def take(self, request: RequestId) -> Found | None:
        """The answer is the caller's now, and the request may ask again. None: a miss, or still out."""
        with self._lock:
            asked = self._asked.pop(request, None)
            if asked is None:
                return None
            asked.gone = True
            return asked.answer.found

    def cancel(self, request: RequestId) -> None:
        """Nobody waits any more. Unknown ones are fine."""
        self.discard(self.take(request))

    def discard(self, found: Found | None) -> None:
        """Give back what was found, in the background. When too much waits it is left to the end of its lease."""
        if found is not None:
            self._tidy.submit(partial(self._discard, found))

    def waiting(self) -> bool:
        """Whether an answer is out."""
        return self._crew.busy()

    def stats(self) -> LookupsStats:
        with self._lock:
            return LookupsStats(self._total, self._late, self._refused, len(self._asked))

    def close(self, timeout_s: float) -> None:
        """Ask nothing more. Twice is fine."""
        deadline_s = time.monotonic() + timeout_s
        self._crew.close(timeout_s)
        with self._lock:
            requests = list(self._asked)
        for request in requests:
            self.cancel(request)
        self._tidy.settle(max(0.0, deadline_s - time.monotonic()))
        self._tidy.close(max(0.0, deadline_s - time.monotonic()))

    def _look(self, asked: _Asked[Found], look: Callable[[], Found | None]) -> None:
        found: Found | None = None
        try:
            if not asked.gone:
                found = look()
        finally:
            with self._lock:
                if not asked.gone:
                    asked.answer, found = Answer(waiting=False, found=found), None
            self.discard(found)


class _Move:
    __slots__ = ("begun", "cancelled", "ended", "ticket")

    def __init__(self, ticket: int) -> None:
        self.begun = self.cancelled = self.ended = False
        self.ticket = ticket  # its name to the scheduler


class Restores(Generic[RequestId]):
    """Restores under way. Thread-safe."""

    def __init__(
        self, threads_max: int = 2, prefetches_max: int = PREFETCHES_MAX, waiting_max: int = RESTORES_WAITING_MAX
    ) -> None:
        """`threads_max` for memory, `prefetches_max` for SSD."""
        self._changed = threading.Condition()
        self._moves: dict[RequestId, _Move] = {}
        self._ended: list[RequestId] = []
        self._tickets = 0
        self._crew = Crew("restore", threads_max, waiting_max)
        self._scheduler: Scheduler[int] = Scheduler(prefetches_max, waiting_max)

    def submit(self, request: RequestId, ssd_bytes: int, restore: Callable[[Callable[[], bool]], object]) -> bool:
        """Have it done: `restore` is called once, with what says whether it was cancelled. Its failure is its own to tell.

        Returns: False: too much waits, nothing will be done. Raises: ValueError: the request is being restored.
        """
        with self._changed:
            if request in self._moves:
                raise ValueError(f"request {request!r} is being restored already")
            self._tickets += 1
            move = self._moves[request] = _Move(self._tickets)
        work = partial(self._do, request, move, restore)
        taken = self._crew.submit(work) if ssd_bytes <= 0 else self._prefetch(move.ticket, ssd_bytes, work)
        if not taken:
            with self._changed:
                self._moves.pop(request, None)
        return taken

    def busy(self) -> bool:
        """Whether a restore waits or runs."""
        return bool(self._moves)

    def ending(self, request: RequestId) -> None:
        """Little is left to read of it: the next may begin (`Scheduler.ending`). Unknown ones are fine."""
        with self._changed:
            move = self._moves.get(request)
        if move is not None:
            self._scheduler.ending(move.ticket)

    def cancel(self, request: RequestId) -> None:
        """It ends soon, or at once if it has not begun. Unknown ones are fine."""
        with self._changed:
            move = self._moves.get(request)
            if move is not None:
                move.cancelled = True
                if not move.begun:
                    self._end(request, move)

    def ended(self, timeout_s: float = 0.0) -> list[RequestId]:
        """Those that ended since the last call, in that order, each once. With a timeout: wait for one if some are moving."""
        while self._scheduler.next_ready(0.0) is not None:
            pass  # our own list is the one that says so; here they are only let go
        with self._changed:
            self._changed.wait_for(lambda: self._ended or not self._moves, timeout_s)
            ended, self._ended = self._ended, []
            return ended

    def close(self, timeout_s: float) -> bool:
        """Cancel all and wait. False: something still runs. Twice is fine."""
        with self._changed:
            requests = list(self._moves)
        for request in requests:
            self.cancel(request)
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            still = self._changed.wait_for(lambda: not self._moves, timeout_s)
        if still:
            self._scheduler.close()
        return self._crew.close(max(0.0, deadline_s - time.monotonic())) and still

    def _prefetch(self, ticket: int, ssd_bytes: int, work: Callable[[], object]) -> bool:
        try:
            self._scheduler.submit(ticket, ssd_bytes, work)
        except (Overloaded, Unavailable) as error:
            log.warning("a restore is not begun, it will be computed: %s", error)
            return False
        return True

    def _do(self, request: RequestId, move: _Move, restore: Callable[[Callable[[], bool]], object]) -> None:
        with self._changed:
            if move.ended:
                return
            move.begun = True
        try:
            restore(lambda: move.cancelled)
        finally:
            with self._changed:
                self._end(request, move)

    def _end(self, request: RequestId, move: _Move) -> None:
        move.ended = True
        self._moves.pop(request, None)
        self._ended.append(request)
        self._changed.notify_all()
