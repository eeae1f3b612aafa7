"""Which bytes of a linear space are taken: the arena, and the node's SSD address range. Pure.

Only the holes are kept; what is not a hole is allocated. So any part of what was allocated may be given back (the tail of
a session file, say), and one rule catches every wrong free: the bytes given back must not touch a hole.

Two orders of the same holes: by start (neighbours, adoption) and by size (the smallest hole that fits: best fit). Both
are sorted lists: O(log n) comparisons and one memmove, which at 100,000 holes costs 25 us and needs no tree.

Next fit, for the SSD range of 2**48 bytes: addresses move on before they are used again, so that a stale address meets
nothing instead of another session's bytes for as long as can be. It looks at `NEXT_FIT_HOLES` holes from where it stands,
then leaps to the largest.

Invariants, held by `check`: holes are aligned, disjoint, never adjacent; both orders hold the same; used + free = size.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import Final

from flatcake_transport.layout import ALIGN_BYTES, align_up

# Holes looked at before leaping to the largest: more finds a closer hole, at a longer worst case. 32 take about 10 us.
NEXT_FIT_HOLES: Final = 32


class ExtentAllocator:
    """Hands out extents of `[0, size_bytes)`. Sizes are rounded up to `align_bytes`, the space itself down.

    Raises: ValueError: not even one aligned extent fits, or the alignment is no power of two.
    """

    def __init__(self, size_bytes: int, align_bytes: int = ALIGN_BYTES, *, next_fit: bool = False) -> None:
        if align_bytes < 1 or align_bytes & align_bytes - 1:
            raise ValueError(f"alignment {align_bytes} is no power of two")
        size_bytes = size_bytes // align_bytes * align_bytes
        if size_bytes < align_bytes:
            raise ValueError(f"a space of {size_bytes} bytes holds no extent of {align_bytes}")
        self.size_bytes: Final = size_bytes
        self.align_bytes: Final = align_bytes
        self._next_fit = next_fit
        self._cursor = 0  # next fit: where the last allocation ended
        self._starts = [0]
        self._size_of = {0: size_bytes}
        self._by_size = [(size_bytes, 0)]
        self._free_bytes = size_bytes

    @property
    def used_bytes(self) -> int:
        return self.size_bytes - self._free_bytes

    @property
    def free_bytes(self) -> int:
        return self._free_bytes

    @property
    def largest_free_bytes(self) -> int:
        return self._by_size[-1][0] if self._by_size else 0

    def allocate(self, size: int) -> int | None:
        """Offset of `size` bytes, or None where no hole is that long. Raises: ValueError: size below 1."""
        if size < 1:
            raise ValueError(f"cannot allocate {size} bytes")
        size = align_up(size, self.align_bytes)
        if size > self.largest_free_bytes:
            return None
        if self._next_fit:
            hole, offset = self._hole_from_cursor(size)
            self._cursor = offset + size
        else:
            hole = offset = self._by_size[bisect_left(self._by_size, (size, 0))][1]
        self._take(hole, offset, size)
        return offset

    def reserve_at(self, offset: int, size: int) -> None:
        """Take exactly this extent: what was committed before a restart.

        Raises: ValueError: not inside the space, not aligned, or part of it is taken.
        """
        size = self._checked(offset, size)
        at = bisect_right(self._starts, offset) - 1
        hole = self._starts[at] if at >= 0 else -1
        if hole < 0 or hole + self._size_of[hole] < offset + size:
            raise ValueError(f"extent {offset:#x}+{size:#x} overlaps one that is taken")
        self._take(hole, offset, size)
        if self._next_fit:
            self._cursor = max(self._cursor, offset + size)

    def free(self, offset: int, size: int) -> None:
        """Give back any part of what is allocated; it need not be one extent as handed out.

        Raises: ValueError: not inside the space, not aligned, or part of it is free already. Nothing changed.
        """
        size = self._checked(offset, size)
        start, end = offset, offset + size
        at = bisect_left(self._starts, offset)
        before = self._starts[at - 1] if at else -1
        after = self._starts[at] if at < len(self._starts) else self.size_bytes + 1
        before_end = before + self._size_of[before] if at else -1
        if before_end > start or after < end:
            raise ValueError(f"extent {offset:#x}+{size:#x} is not allocated, or not all of it")
        if before_end == start:
            start = before
            self._drop_hole(before)
        if after == end:
            end += self._size_of[after]
            self._drop_hole(after)
        self._add_hole(start, end - start)
        self._free_bytes += size

    def extents(self) -> list[tuple[int, int]]:
        """What is used, as (offset, size) in order of offset; extents that touch are one."""
        used, position = [], 0
        for start in self._starts:
            if start > position:
                used.append((position, start - position))
            position = start + self._size_of[start]
        if position < self.size_bytes:
            used.append((position, self.size_bytes - position))
        return used

    def check(self) -> None:
        """Raises: AssertionError: an invariant of this module is broken."""
        holes = [(start, self._size_of[start]) for start in self._starts]
        assert len(self._size_of) == len(holes), "a hole is in one order only"
        assert sorted((size, start) for start, size in holes) == self._by_size, "the two orders of holes differ"
        position = -1  # no hole may start where the last one ended: they would be one
        for start, size in holes:
            assert position < start, f"holes overlap or touch at {start:#x}"
            assert size > 0, f"the hole at {start:#x} is empty"
            assert start % self.align_bytes == size % self.align_bytes == 0, f"the hole at {start:#x} is not aligned"
            position = start + size
        assert position <= self.size_bytes, "a hole reaches beyond the space"
        assert sum(size for _, size in holes) == self._free_bytes, "the count of free bytes is wrong"

    def _checked(self, offset: int, size: int) -> int:
        size = align_up(size, self.align_bytes)
        if size < 1 or offset < 0 or offset + size > self.size_bytes:
            raise ValueError(f"extent {offset:#x}+{size:#x} is not inside a space of {self.size_bytes:#x} bytes")
        if offset % self.align_bytes:
            raise ValueError(f"offset {offset:#x} is not aligned to {self.align_bytes}")
        return size

    def _hole_from_cursor(self, size: int) -> tuple[int, int]:
        """(hole, offset in it) for `size` bytes that fit somewhere: from the cursor on, wrapping once."""
        at = bisect_right(self._starts, self._cursor) - 1
        if at >= 0:
            hole = self._starts[at]
            if hole + self._size_of[hole] - self._cursor >= size:
                return hole, self._cursor
        for step in range(1, 1 + min(NEXT_FIT_HOLES, len(self._starts))):
            hole = self._starts[(at + step) % len(self._starts)]
            if self._size_of[hole] >= size:
                return hole, hole
        largest = self._by_size[-1][1]
        return largest, largest

    def _take(self, hole: int, offset: int, size: int) -> None:
        end = hole + self._size_of[hole]
        self._drop_hole(hole)
        if offset > hole:
            self._add_hole(hole, offset - hole)
        if end > offset + size:
            self._add_hole(offset + size, end - offset - size)
        self._free_bytes -= size

    def _add_hole(self, start: int, size: int) -> None:
        insort(self._starts, start)
        self._size_of[start] = size
        insort(self._by_size, (size, start))

    def _drop_hole(self, start: int) -> None:
        size = self._size_of.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        del self._by_size[bisect_left(self._by_size, (size, start))]
