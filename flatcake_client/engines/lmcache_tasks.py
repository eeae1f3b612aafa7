"""What an adapter of LMCache needs besides the chunks: bounded work in threads, and locks that end. No LMCache here.

Whatever is given to a thread carries its own deadline, counted from when it was asked; the threads only make it wait its turn. So
what waits behind a daemon that hangs is answered, as a miss, one deadline later at the latest.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from flatcake_client import Hit, Overloaded
from flatcake_client.background import Crew

HELD_S_MAX: Final = 300.0  # a lock that is never given back
HITS_MAX: Final = 1024
CLOSE_S: Final = 5.0

T = TypeVar("T")


class Workers:
    """A crew whose work is waited for: what is submitted is a future, cancelled while it waits when the crew closes. Thread-safe."""

    def __init__(self, name: str, threads: int, waiting_max: int) -> None:
        self._crew = Crew(f"lmcache-{name}", threads, waiting_max)
        self._open: set[Future[Any]] = set()

    def submit(self, act: Callable[[], T]) -> Future[T]:
        """Raises: Overloaded: too much is waiting, or closed."""
        future: Future[T] = Future()
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        if not self._crew.submit(partial(_run, future, act)):
            future.cancel()
            raise Overloaded("too many tasks are waiting, or this is closed")
        return future

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Cancel what waits; what runs ends by its own deadline, and is waited for. Twice is fine."""
        self._crew.close(timeout_s)
        for future in list(self._open):
            future.cancel()


def _run(future: Future[T], act: Callable[[], T]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(act())
        except BaseException as error:  # noqa: BLE001 - passed on to whoever waits for the future
            future.set_exception(error)


@dataclass(slots=True, eq=False)
class _Held:
    hit: Hit
    left: int
    since_s: float


class Locks:
    """Hits kept until all keys that they were looked up for are unlocked. Thread-safe.

    A hit's lease is renewed by `tick`; one that is held for five minutes is given back: its caller is gone. Beyond 1024 hits the
    oldest is given back. Whoever loads what was unlocked so finds it, or a miss.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._by_key: dict[Hashable, list[_Held]] = {}
        self._held: OrderedDict[int, tuple[_Held, tuple[Hashable, ...]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, keys: Iterable[Hashable], hit: Hit) -> None:
        """Keep a hit until each of these keys was unlocked once."""
        names = tuple(keys)
        held = _Held(hit, len(names), self._now_s())
        with self._lock:
            self._held[id(held)] = held, names
            for name in names:
                self._by_key.setdefault(name, []).append(held)
            late = [self._drop(next(iter(self._held)))] if len(self._held) > HITS_MAX else []
        _release(late)

    def unlock(self, keys: Iterable[Hashable]) -> None:
        """Each key once; unknown ones are fine. Asks the daemon where a hit ends; never raises for that."""
        done = []
        with self._lock:
            for key in keys:
                of_key = self._by_key.get(key)
                if not of_key:
                    continue
                held = of_key.pop(0)
                if not of_key:
                    del self._by_key[key]
                held.left -= 1
                if held.left == 0:
                    self._held.pop(id(held))
                    done.append(held.hit)
        _release(done)

    def tick(self) -> None:
        """Once a second: renew what is held, let go of what is held too long."""
        with self._lock:
            late_s = self._now_s() - HELD_S_MAX
            late = [name for name, (held, _) in self._held.items() if held.since_s < late_s]
            dropped = [self._drop(name) for name in late]
            alive = [held.hit for held, _ in self._held.values()]
        _release(dropped)
        for hit in alive:
            hit.lease.keep()

    def close(self) -> None:
        with self._lock:
            held = [self._drop(name) for name in list(self._held)]
        _release(held)

    def _drop(self, name: int) -> Hit:
        held, keys = self._held.pop(name)
        for key in keys:
            of_key = self._by_key.get(key, [])
            if held in of_key:
                of_key.remove(held)
                if not of_key:
                    del self._by_key[key]
        return held.hit


def _release(hits: Iterable[Hit]) -> None:
    for hit in hits:
        hit.release()
