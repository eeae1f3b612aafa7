"""FC-MAS: two queues, so that a request waiting for SSD never holds up one that is not.

A request whose blocks are all in memory is ready at once. One with blocks on SSD waits in the SSD-preparing queue; the one
with the highest `1 + wait_s / KV_GB` is prefetched next, and when its blocks are in place it enters the ready queue at its
original arrival time, before everything that came later. A prefetch that failed is ready too: the engine computes.

Prefetches go one after the other, each with the whole disk: two at once would take twice as long each. But the disk would idle while
one is scattered to its end, is given back, and the next is looked up and planned; so a prefetch says when little is left of
it (`ending`), and the next one begins beside its last reads.

One that hangs says so too, after two seconds (file_path.HUNG_S). When a second one does, both places are taken, and the others wait
until the first ends: once, and for HANGS_S at most (movers/pool.py), since from then on what is asked of that device fails at
once. More places would not let them pass: each that is chosen has the disk for its two seconds first, so there are
never more than five such before the ten are over, and every place costs a thread and windows of staging for good.

`TwoQueues` decides and does nothing: no clock, no threads. `Scheduler` carries it out with a bounded number of threads,
for engines that have no scheduler of their own; a connector uses the core.

Nobody starves. Let a request of S GB arrive at t0 and wait w; the device brings B GB/s. A later request of s GB that is
chosen before it at time t has waited (t - t0) s / S at least, so s < S, and it arrived before t0 + (t - t0)(1 - s/S). All
that is served before the request was therefore there at t0 (Q GB, the one being read included) or came in the first
w (1 - s_min/S) seconds. If no more than A + B x seconds GB arrive in any time (the disk is just saturated), then

    w <= (Q + A + B w (1 - s_min/S)) / B,  so  w <= (Q + A) / B * S / s_min

A small request waits for about the backlog; a large one at most as much longer as it is larger than the smallest. The
property test in tests/property/test_scheduler_bound.py drives the core into saturation and holds it to that.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from flatcake_transport.errors import Overloaded, Unavailable

log = logging.getLogger(__name__)

BYTES_PER_GB: Final = 1_000_000_000
PREFETCHES_MAX: Final = 1
ENDING_MAX: Final = 1  # prefetches that end, beside those that read
WAITING_MAX: Final = 65_536

RequestId = TypeVar("RequestId", bound=Hashable)


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """`arrived == ready + preparing + prefetching + taken + cancelled` at every moment."""

    arrived_total: int
    taken_total: int
    cancelled_total: int
    prefetched_total: int
    ready: int
    preparing: int
    prefetching: int


@dataclass(frozen=True, slots=True)
class _Waiting:
    arrival_s: float
    number: int  # of arrival: decides between equal times
    ssd_bytes: int


class Queues(Protocol[RequestId]):
    """Decisions that a `Scheduler` carries out: `TwoQueues`, or another order to compare it with."""

    def arrive(self, request: RequestId, arrival_s: float, ssd_bytes: int) -> None: ...
    def start_prefetches(self, now_s: float) -> list[RequestId]: ...
    def prefetched(self, request: RequestId, *, ending: bool = False) -> None: ...
    def take_ready(self) -> RequestId | None: ...
    def cancel(self, request: RequestId) -> None: ...
    def stats(self) -> SchedulerStats: ...


def may_start(prefetches_max: int, prefetching: int, ending: int) -> bool:
    """Whether another prefetch may begin beside those that read and those that end."""
    return prefetching < prefetches_max and prefetching + ending < prefetches_max + ENDING_MAX


def priority(wait_s: float, ssd_bytes: int) -> float:
    """`1 + wait / KV size`: 1 GB and 4 GB that both waited 2 s have 3 and 1.5. Source: FlatCake paper, FC-MAS."""
    return 1.0 + wait_s * BYTES_PER_GB / ssd_bytes


class TwoQueues(Generic[RequestId]):
    """The decisions of FC-MAS. Pure: `now_s` and arrival times are on the caller's clock. Not thread-safe."""

    def __init__(self, prefetches_max: int = PREFETCHES_MAX, waiting_max: int = WAITING_MAX) -> None:
        """Raises: ValueError: bounds below 1."""
        if prefetches_max < 1 or waiting_max < 1:
            raise ValueError(f"prefetches_max {prefetches_max} and waiting_max {waiting_max} must be 1 or more")
        self._prefetches_max = prefetches_max
        self._waiting_max = waiting_max
        self._known: dict[RequestId, _Waiting] = {}
        self._preparing: dict[RequestId, _Waiting] = {}
        self._prefetching: dict[RequestId, _Waiting] = {}
        self._ending: dict[RequestId, _Waiting] = {}
        self._ready: list[tuple[float, int, RequestId]] = []
        self._arrived = self._taken = self._cancelled = self._prefetched = 0

    def arrive(self, request: RequestId, arrival_s: float, ssd_bytes: int) -> None:
        """A request came; `ssd_bytes` of its blocks are on SSD, 0 if all of them are in memory.

        Raises:
            ValueError: it is here already, or was given up and its prefetch has not ended; or a negative size.
            Overloaded: `waiting_max` requests are here.
        """
        if any(request in held for held in (self._known, self._prefetching, self._ending)) or ssd_bytes < 0:
            raise ValueError(f"request {request!r} with {ssd_bytes} bytes on SSD: here already, or no size")
        if len(self._known) >= self._waiting_max:
            raise Overloaded(f"{self._waiting_max} requests are waiting already")
        self._arrived += 1
        waiting = _Waiting(arrival_s, self._arrived, ssd_bytes)
        self._known[request] = waiting
        if ssd_bytes:
            self._preparing[request] = waiting
        else:
            self._make_ready(request, waiting)

    def start_prefetches(self, now_s: float) -> list[RequestId]:
        """The requests to prefetch from now on, as many as may run: highest priority first, then first come."""
        started: list[RequestId] = []
        while self._preparing and may_start(self._prefetches_max, len(self._prefetching), len(self._ending)):
            request = max(self._preparing, key=lambda each: self._rank(self._preparing[each], now_s))
            self._prefetching[request] = self._preparing.pop(request)
            started.append(request)
        return started

    def prefetched(self, request: RequestId, *, ending: bool = False) -> None:
        """A prefetch ended, well or not: the request is ready, at its place by arrival. Cancelled ones are fine.

        `ending`: not yet, but it leaves the disk to another one.
        """
        waiting = self._prefetching.pop(request, None)
        if ending:
            if waiting is not None:
                self._ending[request] = waiting
            return
        waiting = waiting or self._ending.pop(request, None)
        if waiting is None:
            return
        self._prefetched += 1
        if request in self._known:
            self._make_ready(request, waiting)

    def take_ready(self) -> RequestId | None:
        """The ready request that arrived first; it is the engine's from now on."""
        while self._ready:
            _, _, request = heapq.heappop(self._ready)
            if self._known.pop(request, None) is not None:
                self._taken += 1
                return request
        return None

    def cancel(self, request: RequestId) -> None:
        """The request is gone. A prefetch under way keeps its place until `prefetched`. Unknown ones are fine."""
        if self._known.pop(request, None) is None:
            return
        self._cancelled += 1
        self._preparing.pop(request, None)
        self._ready = [entry for entry in self._ready if entry[2] != request]
        heapq.heapify(self._ready)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            arrived_total=self._arrived,
            taken_total=self._taken,
            cancelled_total=self._cancelled,
            prefetched_total=self._prefetched,
            ready=len(self._ready),
            preparing=len(self._preparing),
            prefetching=sum(request in self._known for request in (*self._prefetching, *self._ending)),
        )

    def _make_ready(self, request: RequestId, waiting: _Waiting) -> None:
        heapq.heappush(self._ready, (waiting.arrival_s, waiting.number, request))

    def _rank(self, waiting: _Waiting, now_s: float) -> tuple[float, float, int]:
        wait_s = max(0.0, now_s - waiting.arrival_s)
        return priority(wait_s, waiting.ssd_bytes), -waiting.arrival_s, -waiting.number


class Scheduler(Generic[RequestId]):
    """The two queues with threads that prefetch. Thread-safe.

    `submit` a request with what brings its blocks (a `Restore.wait`, say); `next_ready` gives requests in the order to run
    them. What a prefetch raises is logged: the request is ready all the same, and its restore says what is usable.
    """

    def __init__(
        self,
        prefetches_max: int = PREFETCHES_MAX,
        waiting_max: int = WAITING_MAX,
        *,
        now_s: Callable[[], float] = time.monotonic,
        queues: Queues[RequestId] | None = None,
    ) -> None:
        """`queues`: decisions of the caller's, with the same `prefetches_max`, in place of `TwoQueues`."""
        self._queues: Queues[RequestId] = queues or TwoQueues(prefetches_max, waiting_max)
        self._now_s = now_s
        self._changed = threading.Condition()
        self._work: dict[RequestId, Callable[[], object]] = {}
        self._started: list[RequestId] = []  # chosen, and not yet taken by a thread
        self._closed = False
        self._threads = [
            threading.Thread(target=self._prefetch_all, name=f"flatcake-prefetch{n}", daemon=True)
            for n in range(prefetches_max + ENDING_MAX)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: RequestId, ssd_bytes: int, prefetch: Callable[[], object]) -> None:
        """A request arrives now. `prefetch` is called once, in a thread of the scheduler, if `ssd_bytes` is above 0.

        Raises: ValueError, Overloaded: as `TwoQueues.arrive`. Unavailable: closed.
        """
        with self._changed:
            if self._closed:
                raise Unavailable("the scheduler is closed")
            self._queues.arrive(request, self._now_s(), ssd_bytes)
            if ssd_bytes:
                self._work[request] = prefetch
            self._changed.notify_all()

    def ending(self, request: RequestId) -> None:
        """Little is left of the request's prefetch, which says so itself: the next one begins. Unknown ones are fine."""
        with self._changed:
            self._queues.prefetched(request, ending=True)
            self._changed.notify_all()

    def next_ready(self, timeout_s: float | None = None) -> RequestId | None:
        """The next request to run; None when none became ready in time, or the scheduler was closed."""
        with self._changed:
            taken: list[RequestId] = []

            def came() -> bool:
                request = self._queues.take_ready()
                if request is not None:
                    taken.append(request)
                return bool(taken) or self._closed

            self._changed.wait_for(came, timeout_s)
            return taken[0] if taken else None

    def cancel(self, request: RequestId) -> None:
        """The request is gone; its prefetch, if it runs, ends by itself."""
        with self._changed:
            self._queues.cancel(request)
            self._work.pop(request, None)

    def stats(self) -> SchedulerStats:
        with self._changed:
            return self._queues.stats()

    def close(self) -> None:
        """Prefetch nothing more and wait for what runs. Twice is fine."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _prefetch_all(self) -> None:
        while (chosen := self._next_prefetch()) is not None:
            request, prefetch = chosen
            try:
                prefetch()
            except Exception as error:  # noqa: BLE001 - a thread's edge: without it, who waits for a prefetch waits for ever
                log.warning("prefetch of %r failed, it will be computed: %r", request, error)
            finally:
                del chosen, prefetch  # a thread that waits must not keep an engine's arrays alive
                with self._changed:
                    self._queues.prefetched(request)
                    self._changed.notify_all()

    def _next_prefetch(self) -> tuple[RequestId, Callable[[], object]] | None:
        """Each thread takes one: the core counts as many as there are threads."""
        with self._changed:
            while not self._closed:
                self._started += self._queues.start_prefetches(self._now_s())
                if not self._started:
                    self._changed.wait()
                    continue
                request = self._started.pop()  # any: there is a thread for each of them
                prefetch = self._work.pop(request, None)
                if prefetch is not None:
                    return request, prefetch
                self._queues.prefetched(request)  # cancelled before a thread came to it
            return None
