from __future__ import annotations

import numpy as np
import pytest

from flatcake_server.records import Generation, SegmentRecord, SessionNo
from flatcake_server.segments import SegmentMap
from flatcake_transport.address import Address, Medium

STEP = 4096


def segment(offset: int, blocks: int, medium: Medium = Medium.SSD, total: int | None = None) -> SegmentRecord:
    keys = np.full((blocks, 16), offset % 251, np.uint8)
    address = Address.of(medium, 3, offset)
    size = total or (blocks + 1) * STEP
    return SegmentRecord(Generation(offset), SessionNo(1), address, size, 1, 0, "first-turn", keys, b"p" * 16)


def addresses(*runs: tuple[SegmentRecord, int, int]) -> np.ndarray:
    return np.concatenate(
        [np.uint64(s.address) + np.arange(first, first + n, dtype=np.uint64) * np.uint64(STEP) for s, first, n in runs]
    )


def test_a_lookup_falls_into_one_run_a_segment():
    one, two, memory = segment(0, 4), segment(5 * STEP, 3), segment(0, 2, Medium.MEMORY)
    table = SegmentMap()
    for each in (two, memory, one):
        table.add(each)
    runs = table.resolve(addresses((memory, 0, 2), (one, 1, 3), (two, 0, 3)), STEP)
    assert [(run.segment, run.first_block, run.blocks) for run in runs] == [(memory, 0, 2), (one, 1, 3), (two, 0, 3)]


def test_neighbours_in_a_file_stay_two_runs_because_a_footer_stands_between():
    one, two = segment(0, 1), segment(2 * STEP, 1)
    table = SegmentMap()
    table.load([two, one])
    assert [run.blocks for run in table.resolve(addresses((one, 0, 1), (two, 0, 1)), STEP)] == [1, 1]


def test_a_run_that_goes_backwards_or_skips_is_cut():
    one = segment(0, 8)
    table = SegmentMap()
    table.add(one)
    runs = table.resolve(addresses((one, 5, 1), (one, 2, 2), (one, 6, 1)), STEP)
    assert [(run.first_block, run.blocks) for run in runs] == [(5, 1), (2, 2), (6, 1)]


def test_no_addresses_are_no_runs():
    assert SegmentMap().resolve(np.empty(0, np.uint64), STEP) == []


def test_overlaps_are_refused_on_both_sides():
    table = SegmentMap()
    table.add(segment(10 * STEP, 4))
    with pytest.raises(ValueError, match="overlaps"):
        table.add(segment(14 * STEP, 1))
    with pytest.raises(ValueError, match="overlaps"):
        table.add(segment(8 * STEP, 2))
    table.add(segment(15 * STEP, 1))
    table.add(segment(8 * STEP, 1))
    assert len(table) == 3


def test_removed_segments_hold_no_address():
    one, two = segment(0, 4), segment(5 * STEP, 3)
    table = SegmentMap()
    table.load([one, two])
    table.remove(one)
    with pytest.raises(KeyError):
        table.at(int(one.address))
    with pytest.raises(KeyError):
        table.remove(one)
    assert table.get(int(two.address)) is two
    assert table.get(int(two.address) + STEP) is None
    assert list(table) == [two]


def test_the_footer_belongs_to_the_segment_and_what_follows_does_not():
    one = segment(0, 4)
    table = SegmentMap()
    table.add(one)
    assert table.at(int(one.address) + one.total_bytes - 1) is one
    with pytest.raises(KeyError):
        table.at(int(one.address) + one.total_bytes)
