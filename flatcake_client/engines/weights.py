"""Which weights an engine's KV is of, while they may be changed under it. Imports no engine.

    served --changed--> mixed --flushed--> served, under another salt

A space is named by the weights that an engine started with; what it stores after a change of them has a salt in its keys, so that it
is never found by who has other weights. Between a change and the flush of the engine's own cache that cache may hold KV of either:
then nothing is found and nothing stored.

A change to weights with a name that all engines agree on (the digest of their files) makes that name the salt, so engines that made
the same change share. Any other change is known to this engine alone, so its salt is: who it is, and how often they changed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from flatcake_transport.errors import Unavailable

log = logging.getLogger(__name__)


class Weights:
    """Of one engine. Thread-safe."""

    def __init__(self, name: str, engine: Callable[[], str], flush: str) -> None:
        """Args:
        name: of those it started with.
        engine: names this engine like no other, and the same in all its ranks; asked at the first change.
        flush: what an operator does to flush the engine's cache, for messages.
        """
        self._started = self._name = name
        self._engine = engine
        self._flush = flush
        self._lock = threading.Lock()
        self._next: str | None = None  # the name after the flush; None: served
        self._changes = 0

    def salt(self) -> bytes:
        """What is in the keys of all that these weights compute. Raises: Unavailable: KV in the engine's cache may be of others."""
        with self._lock:
            if self._next is not None:
                raise Unavailable(f"the weights were changed, and the engine's cache not flushed since: {self._flush}")
            return b"" if self._name == self._started else self._name.encode()

    def changed(self, to: str | None = None) -> None:
        """They are others from now on, or about to be. `to`: their name, where all engines have the same for them."""
        engine = "" if to is not None else self._engine()
        with self._lock:
            if to is not None and to == self._name and self._next is None:
                return  # loaded once more
            self._changes += 1
            if self._next is None:
                log.info("FlatCake: the weights change; nothing is found or stored until the cache is flushed")
            self._next = to if to is not None else f"{engine} {self._changes}"

    def flushed(self) -> None:
        """Nothing computed before is in the engine's cache any more."""
        with self._lock:
            if self._next is not None:
                self._name, self._next = self._next, None
                log.info("FlatCake: KV is of other weights from now on: %s", self._name)
