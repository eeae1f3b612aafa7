"""Tasks that end when they are told to, and those that nobody waits for."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Iterable
from typing import Any, Final

log = logging.getLogger(__name__)

AGAIN_S: Final = 0.1


async def end(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks until all have ended.

    Once is not enough: `asyncio.wait_for` of Python 3.11, which redis-py calls with every command, loses a cancellation that
    meets the answer (python/cpython#86296). A loop that lost its only one would never end, and nor would who waits for it.
    """
    ending = left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=AGAIN_S)
    await asyncio.gather(*ending, return_exceptions=True)  # what they raised is of no use to anybody any more


class Background:
    """Work behind the callers' backs. What fails there is told here: nobody waits to hear it."""

    def __init__(self, counts: Counter[str]) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._counts = counts

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Kept until done, and waited for by `drain`."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.unforeseen("something is not done", error)

    def unforeseen(self, what: str, error: BaseException) -> None:
        """Tell of an error that nobody foresaw."""
        self._counts["unforeseen"] += 1
        log.error("%s, for a reason nobody foresaw", what, exc_info=error)

    async def end(self) -> None:
        """Cancel what is under way, and wait for it."""
        await end(self._tasks)

    async def drain(self) -> None:
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
