"""Who is next where reads and writes want the same device: reads, unless PASSES_MAX of them have passed a write. Pure.

A read is a request that stands still; a write is a cache that may as well forget. So reads pass writes. But a disk that is
kept busy by reads would never store anything again, and what is not stored is computed again, which costs more: so one
write goes after so many reads, and under full load writes have a ninth of the commands. A write that this is too slow for
ends at its turn's deadline, with a count; no read ends for a write.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Generic, TypeVar

PASSES_MAX: Final = 8

Item = TypeVar("Item")


class ReadsFirst(Generic[Item]):
    """Two lines, each first come first served. Not thread-safe."""

    __slots__ = ("_passed", "_reads", "_writes")

    def __init__(self) -> None:
        self._reads: deque[Item] = deque()
        self._writes: deque[Item] = deque()
        self._passed = 0  # reads that went while the first write waited

    def append(self, item: Item, *, yields: bool) -> None:
        """`yields`: it is a write."""
        (self._writes if yields else self._reads).append(item)

    def first(self) -> Item:
        """Who is next. Raises: IndexError: nobody."""
        return (self._reads if self._read_is_next() else self._writes)[0]

    def popleft(self) -> Item:
        """Take who is next. Raises: IndexError: nobody."""
        if self._read_is_next():
            self._passed += bool(self._writes)
            return self._reads.popleft()
        self._passed = 0
        return self._writes.popleft()

    def __len__(self) -> int:
        return len(self._reads) + len(self._writes)

    def _read_is_next(self) -> bool:
        return bool(self._reads) and not (self._writes and self._passed >= PASSES_MAX)
