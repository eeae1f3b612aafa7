"""Long work on the event loop, a slice at a time, so that nobody's lookup waits for it."""

from __future__ import annotations

import asyncio
import time
from typing import Final

SLICE_S: Final = 0.0005
# A lookup takes some seven turns of the loop, in a millisecond. With a slice in each of them it took five (bench/lookup.py): so
# the loop is left alone for as long as a lookup lasts, and one meets a slice or two.
REST_S: Final = 0.001


class Pace:
    """Of one piece of work. It is cut where `rest` is called: between pieces that take well under a slice each."""

    def __init__(self) -> None:
        self._since_s = time.perf_counter()

    async def rest(self) -> None:
        """Let others have their turn if the slice is over."""
        if time.perf_counter() - self._since_s >= SLICE_S:
            await asyncio.sleep(REST_S)
            self._since_s = time.perf_counter()
