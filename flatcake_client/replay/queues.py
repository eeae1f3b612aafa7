"""What FC-MAS is compared with: one queue, in order of arrival. Pure, with the verbs of scheduler.TwoQueues.

in_order   what is ready waits until all that arrived before it was taken: the ablation, an engine with one queue
not        prefetches start in order of arrival, and who is ready runs, first come first: what engines do for other stores
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

from flatcake_client.scheduler import SchedulerStats, may_start

RequestId = TypeVar("RequestId", bound=Hashable)


class OneQueue(Generic[RequestId]):
    """Not thread-safe; `Scheduler` drives it. Prefetches at most `prefetches_max` at once."""

    def __init__(self, prefetches_max: int, *, in_order: bool) -> None:
        """Raises: ValueError: no prefetch at all."""
        if prefetches_max < 1:
            raise ValueError(f"prefetches_max is {prefetches_max}: expected 1 or more")
        self._prefetches_max, self._in_order = prefetches_max, in_order
        self._numbers: dict[RequestId, int] = {}  # of arrival; those that are here
        self._preparing: deque[RequestId] = deque()
        self._prefetching: set[RequestId] = set()
        self._ending: set[RequestId] = set()
        self._ready: list[tuple[int, RequestId]] = []
        self._arrived = self._taken = self._cancelled = self._prefetched = 0

    def arrive(self, request: RequestId, arrival_s: float, ssd_bytes: int) -> None:  # noqa: ARG002 - the verbs of TwoQueues
        """Raises: ValueError: it is here already."""
        if request in self._numbers:
            raise ValueError(f"request {request!r} is here already")
        self._arrived += 1
        self._numbers[request] = self._arrived
        if ssd_bytes:
            self._preparing.append(request)
        else:
            heapq.heappush(self._ready, (self._arrived, request))

    def start_prefetches(self, now_s: float) -> list[RequestId]:  # noqa: ARG002
        started: list[RequestId] = []
        while self._preparing and may_start(self._prefetches_max, len(self._prefetching), len(self._ending)):
            request = self._preparing.popleft()
            if request in self._numbers:
                self._prefetching.add(request)
                started.append(request)
        return started

    def prefetched(self, request: RequestId, *, ending: bool = False) -> None:
        under_way = request in self._prefetching or request in self._ending
        self._prefetching.discard(request)
        if ending:
            self._ending |= {request} if under_way else set()
        elif under_way:
            self._ending.discard(request)
            self._prefetched += 1
            if request in self._numbers:
                heapq.heappush(self._ready, (self._numbers[request], request))

    def take_ready(self) -> RequestId | None:
        while self._ready and self._ready[0][1] not in self._numbers:
            heapq.heappop(self._ready)
        if not self._ready or (self._in_order and self._ready[0][0] != min(self._numbers.values())):
            return None
        request = heapq.heappop(self._ready)[1]
        del self._numbers[request]
        self._taken += 1
        return request

    def cancel(self, request: RequestId) -> None:
        self._cancelled += self._numbers.pop(request, None) is not None

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            arrived_total=self._arrived,
            taken_total=self._taken,
            cancelled_total=self._cancelled,
            prefetched_total=self._prefetched,
            ready=sum(request in self._numbers for _, request in self._ready),
            preparing=sum(request in self._numbers for request in self._preparing),
            prefetching=sum(request in self._numbers for request in self._prefetching | self._ending),
        )
