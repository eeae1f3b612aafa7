"""A turn against segments built byte by byte: any parts, media, layouts, slots, windows and order of layers."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from homes import FakeHome, padding_is_zero
from hypothesis import given, settings
from hypothesis import strategies as st
from images import PAGES, granule_sums, paged, plane_starts
from layouts import fill

from flatcake_client.writer import Turn, WriteTools
from flatcake_transport.layout import align_up, segment_layout
from flatcake_transport.movers.memory import MemoryMover
from flatcake_transport.movers.posix import PosixMover
from flatcake_transport.plan import buffer_bytes_min
from flatcake_transport.space import SpaceSpec
from flatcake_transport.window import StagingPool

PLANE_BYTES = st.sampled_from([1, 7, 1000, 4096, 5000, 64 << 10, 128 << 10])


@settings(max_examples=60)
@given(st.data())
def test_a_turn_writes_its_segments(data: st.DataObject) -> None:
    layers, shards = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    sizes = tuple(data.draw(st.lists(PLANE_BYTES, min_size=layers, max_size=layers)))
    spec = SpaceSpec("m", "u8", 4, sizes, shards=shards)
    gaps = data.draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 7), st.booleans()), min_size=1, max_size=3))
    parts, at = [], 0
    for gap, blocks, in_memory in gaps:
        parts.append((at + gap, blocks, in_memory))
        at += gap + blocks
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    buffer = align_up(buffer_bytes_min(segment_layout(spec, 1), whole_granules=True))
    buffer += data.draw(st.sampled_from([0, 4096, 1 << 20]), "extra buffer bytes")
    tools = WriteTools(PosixMover(threads=2), MemoryMover(threads=1, inline_bytes=0), StagingPool(4 * buffer, buffer))
    try:
        with tempfile.TemporaryDirectory() as root:
            home = FakeHome(spec, Path(root))
            grant = home.grant(parts)
            blocks = range(parts[0][0], at)
            kv = [rng.integers(0, 256, (len(blocks), size), np.uint8) for size in sizes * shards]
            for shard in range(shards):
                turn = Turn(home, grant, spec, shard, tools, checksums=True, timeout_s=10.0)
                assert turn.blocks == blocks
                for layer in data.draw(st.permutations(range(layers)), "order"):
                    kind = data.draw(st.sampled_from(PAGES), "pages")
                    pages, _ = paged(kind, len(blocks) + 3, sizes[layer], rng)
                    slots = rng.permutation(len(blocks) + 3)[: len(blocks)]
                    fill(pages, slots, kv[shard * layers + layer])
                    turn.write_layer(layer, pages, slots)
                    pages[slots] = 0  # the source is the caller's again
                assert turn.commit()
            for index, part in enumerate(grant.parts):
                segment = home.segment(part)
                mine = slice(part.first_block - blocks.start, part.first_block - blocks.start + part.blocks)
                planes = [plane[mine] for plane in kv]
                for plane, start in zip(planes, plane_starts(spec, part.blocks), strict=False):
                    assert np.array_equal(segment[start : start + plane.size], plane.reshape(-1))
                assert (segment[plane_starts(spec, part.blocks)[-1] :] == 0xEE).all(), "the footer is the daemon's"
                if part.file_id:
                    assert padding_is_zero(segment, spec, part.blocks, range(spec.planes)), "old bytes left the process"
                sums = b"".join(home.committed[shard][index][1] for shard in range(shards))
                assert sums == granule_sums(spec, planes).astype("<u8").tobytes()
            assert home.outcomes == ["committed"] * shards
            assert tools.staging.open_window(1.0)
    finally:
        tools.files.close()
        tools.memory.close()
