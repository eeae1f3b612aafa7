from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flatcake_transport.layout import ALIGN_BYTES, GRANULE_BYTES_MIN, segment_layout
from flatcake_transport.space import SpaceSpec

SPECS = st.builds(
    lambda planes, shards: SpaceSpec("m", "u8", 1, tuple(planes), shards=shards),
    st.lists(st.one_of(st.integers(1, 9000), st.sampled_from([4096, 8192, 131072, 300_000])), min_size=1, max_size=4),
    st.integers(1, 3),
)


@given(SPECS, st.integers(1, 70))
def test_chunks_do_not_overlap_and_fill_the_segment(spec: SpaceSpec, blocks: int) -> None:
    layout = segment_layout(spec, blocks)
    chunks = sorted(
        (layout.chunk(p, b), layout.chunk(p, b) + int(layout.plane_bytes[p]))
        for p in range(layout.planes)
        for b in range(blocks)
    )
    assert chunks[0][0] == 0
    for (_, end), (start, _) in itertools.pairwise(chunks):
        assert end <= start < end + ALIGN_BYTES
    assert chunks[-1][1] <= layout.data_bytes < chunks[-1][1] + ALIGN_BYTES
    assert layout.data_bytes % ALIGN_BYTES == 0
    assert (layout.plane_offset % ALIGN_BYTES == 0).all()
    assert layout.planes == spec.planes


@given(SPECS, st.integers(1, 70), st.data())
def test_granules_cover_what_they_say(spec: SpaceSpec, blocks: int, data: st.DataObject) -> None:
    layout = segment_layout(spec, blocks)
    owners = np.concatenate(
        [layout.granule_first[p] + np.arange(blocks) // layout.granule_blocks[p] for p in range(layout.planes)]
    )
    assert sorted(set(owners.tolist())) == list(range(layout.granules))
    plane = data.draw(st.integers(0, layout.planes - 1))
    first = data.draw(st.integers(0, blocks - 1))
    count = data.draw(st.integers(1, blocks - first))
    mine = owners[plane * blocks + first : plane * blocks + first + count]
    assert list(layout.granules_of(plane, first, count)) == sorted(set(mine.tolist()))
    size = layout.granule_bytes(plane)
    assert size >= GRANULE_BYTES_MIN
    assert size - int(layout.plane_bytes[plane]) < GRANULE_BYTES_MIN
