"""Segments that a peer found corrupt. The owner looks for itself before it forgets them: it may have been the way that damaged them.

A peer's word is enough to look, never to lose blocks: one with bad memory would empty every cache it reads. One look at a
time, and so many waiting; a doubt beyond that is dropped, and comes again with the next reader.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from flatcake_server.records import Suspect
from flatcake_server.store import Store
from flatcake_server.tasks import end
from flatcake_transport.errors import FlatCakeError

log = logging.getLogger(__name__)

WAITING_MAX: Final = 64


class Doubts:
    """Belongs to the event loop. `differs` reads a segment by its address, as `law.differs` does."""

    def __init__(self, store: Store, differs: Callable[[int], Awaitable[bool]], counts: Counter[str]) -> None:
        self._store = store
        self._differs = differs
        self._counts = counts
        self._waiting: dict[Suspect, None] = {}
        self._work: asyncio.Task[None] | None = None

    def add(self, suspects: Sequence[Suspect]) -> None:
        for suspect in suspects:
            if len(self._waiting) < WAITING_MAX and self._store.catalog.suspected(suspect) is not None:
                self._waiting.setdefault(suspect)
        if self._waiting and (self._work is None or self._work.done()):
            self._work = asyncio.ensure_future(self._look())

    async def close(self) -> None:
        if self._work is not None:
            await end([self._work])

    async def _look(self) -> None:
        while self._waiting:
            suspect = next(iter(self._waiting))
            address = suspect.address
            self._counts["doubts"] += 1
            try:
                if await self._differs(address):
                    await self._store.report_corrupt([suspect])
                else:
                    self._counts["doubts_refuted"] += 1
                    log.warning("a peer read other bytes of segment %#x than are here: its memory, or the way", address)
            except FlatCakeError as error:
                log.warning("segment %#x, which a peer doubts, cannot be looked at: %s", address, error)
            except Exception as error:  # noqa: BLE001 - the others are looked at
                self._store.retirement.background.unforeseen("a doubted segment is not looked at", error)
            self._waiting.pop(suspect, None)
