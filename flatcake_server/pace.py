"""Long work on the event loop, a slice at a time, so that nobody's lookup waits for it."""

from __future__ import annotations

import asyncio
import time
from typing import Final

# A lookup takes some three turns of the loop; between two of them lies one slice at most: 2 ms in all.
SLICE_S: Final = 0.0005


class Pace:
    """Of one piece of work. It is cut where `rest` is called: between pieces that take well under a slice each."""

    def __init__(self) -> None:
        self._since_s = time.perf_counter()

    async def rest(self) -> None:
        """Let others have their turn if the slice is over."""
        if time.perf_counter() - self._since_s >= SLICE_S:
            await asyncio.sleep(0)
            self._since_s = time.perf_counter()
