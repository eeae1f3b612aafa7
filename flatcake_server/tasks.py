"""Tasks that end when they are told to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

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
