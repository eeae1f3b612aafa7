"""Which command goes to a device next, where reads and writes want the same one. Pure.

A read is a request that stands still; a write is a cache that may as well forget. So a write goes only when no read waits or is
under way: beside reads it would take as much of the disk as they have. But a disk that is kept busy by reads would never store
anything again, and what is not stored is computed again, which costs more: so a write that PASSES_MAX reads have passed goes next,
and under full load writes have a ninth of the commands. A write that this is too slow for ends at its turn's deadline, with a
count; no read ends for a write.

What is under way is bounded in bytes: more than keeps the device busy lands later, all at once. What is larger than the bound goes alone.

Invariant: if something waits, then something is under way or may go.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Generic, TypeVar

PASSES_MAX: Final = 8

Item = TypeVar("Item")


class ReadsFirst(Generic[Item]):
    """Two lines, each first come first served, and what is under way of them. Not thread-safe."""

    __slots__ = ("_bytes_max", "_free", "_passed", "_reads", "_reads_under_way", "_writes")

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = self._free = bytes_max
        self._reads: deque[tuple[Item, int]] = deque()
        self._writes: deque[tuple[Item, int]] = deque()
        self._reads_under_way = 0
        self._passed = 0  # reads that went while the first write waited

    def append(self, item: Item, size_bytes: int, *, yields: bool) -> None:
        """`yields`: it is a write."""
        (self._writes if yields else self._reads).append((item, size_bytes))

    @property
    def ready(self) -> bool:
        """Whether somebody may go now; if not, then when something `ended`, or came."""
        line = self._writes if self._write_is_next() else self._reads
        return bool(line) and (line[0][1] <= self._free or self._free == self._bytes_max)

    def take(self) -> tuple[Item, int, bool]:
        """Who goes now, its size, and whether it is a write. Only when `ready`."""
        write = self._write_is_next()
        item, size_bytes = (self._writes if write else self._reads).popleft()
        self._free -= size_bytes
        self._passed = 0 if write else self._passed + bool(self._writes)
        self._reads_under_way += not write
        return item, size_bytes, write

    def ended(self, size_bytes: int, *, yields: bool) -> None:
        """What was taken is over."""
        self._free += size_bytes
        self._reads_under_way -= not yields

    def clear(self) -> list[Item]:
        """All who wait, and wait no more."""
        waiting = [item for item, _ in (*self._reads, *self._writes)]
        self._reads.clear()
        self._writes.clear()
        self._passed = 0
        return waiting

    def __len__(self) -> int:
        """How many wait."""
        return len(self._reads) + len(self._writes)

    def _write_is_next(self) -> bool:
        if self._passed >= PASSES_MAX:
            return bool(self._writes)
        return not self._reads and not self._reads_under_way
