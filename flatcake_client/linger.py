"""What must wait until abandoned transfers rest.

Who stops waiting for a read or write (deadline, failure, close) may not give up at once what it still uses: a descriptor
closed under a read names another file a moment later, and a write grant given back under a write lets its bytes be used
twice. Such acts are left here; they happen with a later call of the client, when the transfers have come to rest.

Invariant: an act runs once, after all its transfers rest, on some thread that calls `sweep` or `settle`; never under the lock.
What is left by a finalizer takes no lock: a collection may run in a thread that has it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from flatcake_transport.errors import FlatCakeError
from flatcake_transport.mover import Transfer


class Pause:
    """Something to wait for that is no transfer: time. Who waits for it ends it."""

    def __init__(self, pause_s: float) -> None:
        self._until_s = time.monotonic() + pause_s

    def done(self) -> bool:
        return time.monotonic() >= self._until_s

    def wait(self, timeout_s: float | None = None) -> None:  # noqa: ARG002 - as Transfer has it
        self._until_s = 0.0


class Linger:
    """Acts that wait for transfers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[Sequence[Transfer], Callable[[], None]]] = []
        self._left: deque[tuple[Sequence[Transfer], Callable[[], None]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._left)

    def leave(self, transfers: Sequence[Transfer], act: Callable[[], None]) -> None:
        """As `when_rested`, but always later and without a lock: for finalizers."""
        self._left.append((transfers, act))

    def when_rested(self, transfers: Sequence[Transfer], act: Callable[[], None]) -> None:
        """Act now if all transfers rest, else later. The act raises nothing."""
        moving = [transfer for transfer in transfers if not transfer.done()]
        if not moving:
            act()
            return
        with self._lock:
            self._waiting.append((moving, act))

    def sweep(self) -> None:
        """Do what can be done by now."""
        if not len(self):
            return
        with self._lock:
            self._take_in()
            ready: list[Callable[[], None]] = []
            waiting = []
            for transfers, act in self._waiting:
                if all(transfer.done() for transfer in transfers):
                    ready.append(act)
                else:
                    waiting.append((transfers, act))
            self._waiting = waiting
        for act in ready:
            act()

    def settle(self, timeout_s: float) -> bool:
        """Wait for what is left. False: some transfer did not come to rest in time; its act is still to be done."""
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            self._take_in()
            transfers = [transfer for entry in self._waiting for transfer in entry[0]]
        for transfer in transfers:
            with contextlib.suppress(FlatCakeError, TimeoutError):
                transfer.wait(max(0.0, deadline_s - time.monotonic()))
        self.sweep()
        return not len(self)

    def _take_in(self) -> None:
        while self._left:
            self._waiting.append(self._left.popleft())
