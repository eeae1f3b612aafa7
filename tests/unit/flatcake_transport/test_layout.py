from __future__ import annotations

import numpy as np
import pytest

from flatcake_transport.layout import GRANULE_BYTES_MIN, SEGMENT_BLOCKS_MAX, align_up, segment_layout
from flatcake_transport.space import SpaceSpec


def spec(*plane_bytes: int, shards: int = 1) -> SpaceSpec:
    return SpaceSpec("m", "u8", 16, plane_bytes, shards=shards)


def test_align_up() -> None:
    assert [align_up(n) for n in (0, 1, 4095, 4096, 4097)] == [0, 4096, 4096, 4096, 8192]
    assert align_up(10, 3) == 12


def test_planes_follow_each_other_on_pages() -> None:
    layout = segment_layout(spec(4096, 100, 5000), 3)
    assert layout.plane_offset.tolist() == [0, 12288, 16384]
    assert layout.data_bytes == 16384 + 16384  # 3 x 5000 needs four pages
    assert layout.chunk(0, 2) == 8192
    assert layout.chunk(2, 1) == 16384 + 5000


def test_shards_are_major() -> None:
    layout = segment_layout(spec(4096, 8192, shards=2), 2)
    assert layout.planes == 4
    assert layout.plane_bytes.tolist() == [4096, 8192, 4096, 8192]
    assert layout.plane_offset.tolist() == [0, 8192, 24576, 32768]


def test_granules_are_the_fewest_whole_blocks_that_reach_256_kib() -> None:
    layout = segment_layout(spec(1, 100_000, 256 << 10, 300_000), 7)
    assert layout.granule_blocks.tolist() == [GRANULE_BYTES_MIN, 3, 1, 1]
    assert layout.granule_first.tolist() == [0, 1, 4, 11, 18]
    assert layout.granules == 18
    assert layout.granule_bytes(1) == 300_000


def test_granules_of_a_range_cover_it() -> None:
    layout = segment_layout(spec(100_000, 100_000), 10)  # granules of 3 blocks: 4 a plane
    assert layout.granules_of(0, 0, 3) == range(1)
    assert layout.granules_of(0, 2, 2) == range(2)
    assert layout.granules_of(1, 9, 1) == range(7, 8)
    assert layout.granules_of(1, 0, 10) == range(4, 8)


@pytest.mark.parametrize("blocks", [0, -1, SEGMENT_BLOCKS_MAX + 1])
def test_blocks_out_of_range(blocks: int) -> None:
    with pytest.raises(ValueError, match="segment has"):
        segment_layout(spec(1), blocks)


def test_the_largest_segment_does_not_overflow() -> None:
    layout = segment_layout(spec(1 << 30, shards=2), SEGMENT_BLOCKS_MAX)
    assert layout.data_bytes == 2 << 50
    assert layout.plane_offset.dtype == np.int64
    assert layout.chunk(1, SEGMENT_BLOCKS_MAX - 1) == (2 << 50) - (1 << 30)
