"""Footers round trip, and no bit of one can change unseen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatcake_transport.errors import Corrupt
from flatcake_transport.footer import Footer, decode_footer, encode_footer, footer_bytes
from flatcake_transport.layout import segment_layout
from flatcake_transport.space import SpaceSpec

U32 = st.integers(0, (1 << 32) - 1)
U64 = st.sampled_from([0, 1, (1 << 64) - 1]) | st.integers(0, (1 << 64) - 1)


@st.composite
def footers(draw: st.DrawFn) -> Footer:
    text = st.text(max_size=20)
    spec = SpaceSpec(
        model=draw(st.text(min_size=1, max_size=8)),
        dtype="uint8",
        block_tokens=draw(st.integers(1, 1024)),
        plane_bytes=tuple(draw(st.lists(st.integers(1, 300_000), min_size=1, max_size=4))),
        shards=draw(st.integers(1, 3)),
        weights=draw(text),
        layout=draw(text),
    )
    blocks = draw(st.integers(1, 300))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    return Footer(
        spec=spec,
        session=draw(text),
        turn=draw(U32),
        generation=draw(U64),
        file_id=draw(U64),
        file_offset=draw(U64),
        first_block=draw(U64),
        parent_key=draw(st.binary(min_size=16, max_size=16)),
        keys=rng.integers(0, 256, (blocks, 16), dtype=np.uint8),
        algorithms=bytes(draw(st.lists(st.integers(0, 2), min_size=spec.shards, max_size=spec.shards))),
        checksums=rng.integers(0, 1 << 64, segment_layout(spec, blocks).granules, dtype=np.uint64),
    )


@given(footers())
def test_round_trip(footer: Footer) -> None:
    data = encode_footer(footer)
    assert len(data) == footer_bytes(footer.spec, footer.session, footer.blocks)
    assert len(data) % 4096 == 0
    read = decode_footer(data)
    for name in Footer.__slots__:
        assert np.array_equal(getattr(read, name), getattr(footer, name)), name
    assert encode_footer(read) == data


@given(footers(), st.data())
def test_no_bit_changes_unseen(footer: Footer, data: st.DataObject) -> None:
    good = encode_footer(footer)
    at = data.draw(st.integers(0, len(good) - 1) | st.integers(0, 200))
    bad = bytearray(good)
    bad[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(Corrupt):
        decode_footer(bad)


@given(st.binary(max_size=300), st.booleans())
def test_other_bytes_are_no_footer(noise: bytes, magic: bool) -> None:
    with pytest.raises(Corrupt):
        decode_footer((b"FLATCAKE" if magic else b"") + noise)
