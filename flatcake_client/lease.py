"""What keeps a hit's bytes in place while they are read.

The daemon lets a lease lapse `ttl` after it granted or renewed it. The client counts from before it asked, so it always stops
before the daemon does: bytes whose copy ended while `alive()` are the ones that were looked up. Whatever was copied is
trusted only after such a check, never before. A lease that has lapsed stays so, even if the daemon would still renew it.

A lease is renewed by use, when half of its time is gone: a reader that makes progress, or waits for its turn to, keeps it
however slow the disk is; one that is forgotten loses it by itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from flatcake_transport.errors import Unavailable

RENEW_TIMEOUT_S: Final = 1.0
# After a renewal that got no answer, try again when another 1/16 of the ttl is gone.
RETRIES_PER_TTL: Final = 16


class Lease:
    """One lease. Thread-safe.

    Args:
        lease_id: 0 where the hit has nothing that could be taken away: it never lapses.
        ttl_s: the daemon's.
        asked_s: the monotonic time before the lookup was sent.
        renew: asks the daemon, with a timeout; False when the lease has ended. May raise Unavailable.
        lost: whether the connection that the lease belongs to has ended.
    """

    def __init__(
        self,
        lease_id: int,
        ttl_s: float,
        asked_s: float,
        renew: Callable[[float], bool],
        lost: Callable[[], bool],
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lease_id = lease_id
        self._ttl_s = ttl_s
        self._deadline_s = asked_s + ttl_s
        self._next_s = asked_s + ttl_s / 2
        self._renew = renew
        self._lost = lost
        self._now_s = now_s
        self._lock = threading.Lock()  # of who renews
        self._given_back = threading.Lock()  # taken once, for good
        self._ended = False

    @property
    def renew_in_s(self) -> float:
        """How long a reader may wait for something else before it calls `keep` again; never 0."""
        return max(self._next_s - self._now_s(), self._ttl_s / RETRIES_PER_TTL)

    def alive(self) -> bool:
        """Whether everything copied up to now is what was looked up."""
        return not self._ended and self._now_s() < self._deadline_s and not self._lost()

    def check(self) -> None:
        """Raises: Unavailable: the lease has ended; what was copied since the last check may be anything."""
        if not self.alive():
            raise Unavailable("the lease on the hit has ended: its bytes may be gone")

    def keep(self, timeout_s: float = RENEW_TIMEOUT_S) -> None:
        """Renew if half of the time is gone. Never raises: what has ended shows in `alive`."""
        if self._now_s() < self._next_s or not self._lock.acquire(blocking=False):
            return
        try:
            asked_s = self._now_s()
            if asked_s < self._next_s or not self.alive():
                return
            try:
                renewed = self._renew(min(timeout_s, RENEW_TIMEOUT_S))
            except Unavailable:
                self._next_s = asked_s + self._ttl_s / RETRIES_PER_TTL
                return
            if not renewed:
                self._ended = True
            elif self._now_s() < self._deadline_s:
                self._deadline_s = asked_s + self._ttl_s
                self._next_s = asked_s + self._ttl_s / 2
        finally:
            self._lock.release()

    def end(self) -> bool:
        """Given back by its holder. False: it was before."""
        mine = self._given_back.acquire(blocking=False) and not self._ended  # a renewal may be waiting for its answer
        self._ended = True
        return mine
