from __future__ import annotations

import pytest

from flatcake_server.extents import NEXT_FIT_HOLES, ExtentAllocator

KIB = 1 << 10


def test_sizes_are_rounded_up_and_the_space_down() -> None:
    extents = ExtentAllocator(16 * KIB + 100)
    assert extents.size_bytes == 16 * KIB
    assert extents.allocate(1) == 0
    assert extents.used_bytes == 4 * KIB
    extents.free(0, 1)
    assert extents.extents() == []


def test_best_fit_keeps_the_long_hole_for_who_needs_it() -> None:
    extents = ExtentAllocator(100 * KIB)
    extents.reserve_at(8 * KIB, 4 * KIB)  # holes: 8 KiB before, 88 KiB behind
    assert extents.allocate(8 * KIB) == 0
    assert extents.allocate(88 * KIB) == 12 * KIB
    assert extents.largest_free_bytes == 0
    assert extents.allocate(1) is None


def test_a_tail_goes_back_and_joins_the_hole_behind_it() -> None:
    extents = ExtentAllocator(64 * KIB)
    assert extents.allocate(32 * KIB) == 0
    extents.free(8 * KIB, 24 * KIB)
    assert extents.extents() == [(0, 8 * KIB)]
    assert extents.largest_free_bytes == 56 * KIB


@pytest.mark.parametrize(
    ("offset", "size"),
    [
        (0, 8 * KIB),
        (4 * KIB, 4 * KIB),
        (12 * KIB, 8 * KIB),
        (8 * KIB, 12 * KIB),
        (9 * KIB, 4 * KIB),
        (60 * KIB, 8 * KIB),
    ],
)
def test_a_wrong_free_is_loud_and_changes_nothing(offset: int, size: int) -> None:
    extents = ExtentAllocator(64 * KIB)
    extents.reserve_at(8 * KIB, 8 * KIB)
    with pytest.raises(ValueError):
        extents.free(offset, size)
    assert extents.extents() == [(8 * KIB, 8 * KIB)]
    extents.check()


def test_next_fit_moves_on_before_it_uses_an_address_again() -> None:
    extents = ExtentAllocator(64 * KIB, next_fit=True)
    for turn in range(16):
        offset = extents.allocate(4 * KIB)
        assert offset == turn * 4 * KIB
        extents.free(offset, 4 * KIB)
    assert extents.allocate(4 * KIB) == 0


def test_next_fit_goes_on_behind_what_was_adopted() -> None:
    extents = ExtentAllocator(1 << 48, next_fit=True)
    extents.reserve_at(1 << 40, 4 * KIB)
    assert extents.allocate(4 * KIB) == (1 << 40) + 4 * KIB


def test_next_fit_leaps_over_many_holes_that_are_too_short() -> None:
    holes = 2 * NEXT_FIT_HOLES
    extents = ExtentAllocator((2 * holes + 4) * 4 * KIB, next_fit=True)
    for hole in range(holes):  # a hole of 4 KiB before each, and 16 KiB behind the last
        extents.reserve_at((2 * hole + 1) * 4 * KIB, 4 * KIB)
    assert extents.allocate(8 * KIB) == 2 * holes * 4 * KIB
    assert extents.allocate(8 * KIB) == (2 * holes + 2) * 4 * KIB
    extents.free(2 * holes * 4 * KIB, 16 * KIB)
    extents._cursor = 0
    assert extents.allocate(8 * KIB) == 2 * holes * 4 * KIB
    extents.check()


@pytest.mark.parametrize(("size", "align"), [(0, 4096), (4095, 4096), (1 << 20, 3000), (1 << 20, 0)])
def test_a_space_that_holds_nothing_is_refused(size: int, align: int) -> None:
    with pytest.raises(ValueError):
        ExtentAllocator(size, align)


def test_an_empty_request_is_a_bug_of_the_caller() -> None:
    with pytest.raises(ValueError):
        ExtentAllocator(1 << 20).allocate(0)
