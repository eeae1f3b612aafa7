"""ExtentAllocator beside a list of units, one flag each. Numbers are small, so every bound is met exactly."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flatcake_server.extents import ExtentAllocator

UNIT = 8
UNITS = 24


class Extents(RuleBasedStateMachine):
    @initialize(next_fit=st.booleans(), slack=st.integers(0, UNIT - 1))
    def begin(self, next_fit: bool, slack: int) -> None:
        self.next_fit = next_fit
        self.extents = ExtentAllocator(UNITS * UNIT + slack, UNIT, next_fit=next_fit)
        self.taken = [False] * UNITS
        self.last_end = 0

    def holes(self) -> list[tuple[int, int]]:
        """(first unit, units) of each run of free units."""
        text = "".join("x" if taken else "." for taken in self.taken)
        found, at = [], 0
        for run in text.split("x"):
            if run:
                found.append((at, len(run)))
            at += len(run) + 1
        return found

    @rule(size=st.integers(1, (UNITS + 1) * UNIT))
    def allocate(self, size: int) -> None:
        units = -(-size // UNIT)
        fitting = [hole for hole in self.holes() if hole[1] >= units]
        offset = self.extents.allocate(size)
        if not fitting:
            assert offset is None
            return
        assert offset is not None
        assert offset % UNIT == 0
        first = offset // UNIT
        assert not any(self.taken[first : first + units])
        if self.next_fit:  # onwards from the last one; back to the start only if nothing fits there
            onward = [s for s in range(self.last_end, UNITS - units + 1) if not any(self.taken[s : s + units])]
            assert first == (onward[0] if onward else fitting[0][0])
        else:
            assert first in [start for start, length in fitting if length == min(hole[1] for hole in fitting)]
        self.taken[first : first + units] = [True] * units
        self.last_end = first + units

    @rule(first=st.integers(-1, UNITS), units=st.integers(0, 4), off=st.sampled_from([0, 0, 0, 1]))
    def reserve_at(self, first: int, units: int, off: int) -> None:
        inside = first >= 0 and units > 0 and first + units <= UNITS and not off
        if inside and not any(self.taken[first : first + units]):
            self.extents.reserve_at(first * UNIT, units * UNIT)
            self.taken[first : first + units] = [True] * units
            self.last_end = max(self.last_end, first + units)
        else:
            with pytest.raises(ValueError):
                self.extents.reserve_at(first * UNIT + off, units * UNIT)

    @rule(first=st.integers(-1, UNITS), units=st.integers(0, 6), off=st.sampled_from([0, 0, 0, 1]))
    def free_anything(self, first: int, units: int, off: int) -> None:
        inside = first >= 0 and units > 0 and first + units <= UNITS and not off
        if inside and all(self.taken[first : first + units]):
            self.extents.free(first * UNIT, units * UNIT)
            self.taken[first : first + units] = [False] * units
        else:
            with pytest.raises(ValueError):
                self.extents.free(first * UNIT + off, units * UNIT)

    @precondition(lambda self: any(self.taken))
    @rule(data=st.data())
    def free_some_taken(self, data: st.DataObject) -> None:
        offset, size = data.draw(st.sampled_from(self.extents.extents()))
        first = data.draw(st.integers(offset // UNIT, (offset + size) // UNIT - 1))
        units = data.draw(st.integers(1, (offset + size) // UNIT - first))
        self.extents.free(first * UNIT, units * UNIT - data.draw(st.integers(0, UNIT - 1)))
        self.taken[first : first + units] = [False] * units

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "extents"):
            return
        self.extents.check()
        used = [False] * UNITS
        for offset, size in self.extents.extents():
            assert offset % UNIT == size % UNIT == 0
            used[offset // UNIT : (offset + size) // UNIT] = [True] * (size // UNIT)
        assert used == self.taken
        assert self.extents.used_bytes == sum(self.taken) * UNIT
        assert self.extents.free_bytes + self.extents.used_bytes == self.extents.size_bytes == UNITS * UNIT
        assert self.extents.largest_free_bytes == max((units for _, units in self.holes()), default=0) * UNIT


TestExtents = Extents.TestCase
