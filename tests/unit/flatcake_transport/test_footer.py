"""The bytes of a footer, read here with offsets taken from FORMAT.md and nothing of the code under test."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from images import plane_starts

from flatcake_transport.errors import Corrupt
from flatcake_transport.footer import Footer, decode_footer, encode_footer, footer_bytes, peek_footer_bytes
from flatcake_transport.space import SpaceSpec

SPEC = SpaceSpec(model="m", dtype="uint8", block_tokens=16, plane_bytes=(100, 300_000), shards=2)
BLOCKS = 3
GRANULES = 2 * (1 + 3)  # of 100 B all blocks are one granule; of 300,000 B each is one


def footer(**changes: object) -> Footer:
    fields = Footer(
        spec=SPEC,
        session="agent-é",
        turn=3,
        generation=1 << 40,
        file_id=0xABCDEF,
        file_offset=1 << 20,
        first_block=17,
        parent_key=bytes(range(16)),
        keys=np.arange(BLOCKS * 16, dtype=np.uint8).reshape(BLOCKS, 16),
        algorithms=b"\1\2",
        checksums=np.arange(GRANULES, dtype=np.uint64) + np.uint64(1 << 63),
    )
    return replace(fields, **changes)


def u64(data: bytes, at: int) -> int:
    return int(struct.unpack_from("<Q", data, at)[0])


def test_the_bytes_are_those_of_the_format():
    data = encode_footer(footer())
    assert len(data) == footer_bytes(SPEC, "agent-é", BLOCKS) == 4096
    assert data[:8] == b"FLATCAKE"
    assert struct.unpack_from("<II", data, 8) == (1, 136)
    assert u64(data, 16) == xxhash.xxh3_64_intdigest(data[:16] + data[24:])
    assert u64(data, 24) == 4096
    assert data[32:48] == SPEC.fingerprint
    assert data[48:64] == bytes(range(16))
    starts = plane_starts(SPEC, BLOCKS)
    assert struct.unpack_from("<QQQQQ", data, 64) == (0xABCDEF, 1 << 20, 1 << 40, starts[-1], 17)
    text, name = SPEC.to_json(), "agent-é".encode()
    assert struct.unpack_from("<8I", data, 104) == (BLOCKS, 3, 2, 4, GRANULES, len(text), len(name), 0)
    at = 136
    for plane, size in enumerate((100, 300_000, 100, 300_000)):
        assert struct.unpack_from("<QII", data, at) == (starts[plane], size, max(1, -(-(256 << 10) // size)))
        at += 16
    assert data[at : at + 48] == bytes(range(48))
    at += 48
    assert struct.unpack_from(f"<{GRANULES}Q", data, at) == tuple((1 << 63) + n for n in range(GRANULES))
    at += 8 * GRANULES
    assert data[at:] == (b"\1\2" + text + name).ljust(4096 - at, b"\0")


def test_what_is_written_is_read():
    for trailing in (b"", b"more of the file"):
        read = decode_footer(encode_footer(footer()) + trailing)
        for name in ("spec", "session", "turn", "generation", "file_id", "file_offset", "first_block", "parent_key"):
            assert getattr(read, name) == getattr(footer(), name), name
        assert read.algorithms == b"\1\2"
        assert np.array_equal(read.keys, footer().keys)
        assert np.array_equal(read.checksums, footer().checksums)
        assert read.total_bytes == plane_starts(SPEC, BLOCKS)[-1] + 4096


def test_it_grows_by_whole_pages_and_keys_may_be_any_view():
    keys = np.arange(600 * 32, dtype=np.uint8).reshape(600, 32)[:, ::2]
    granules = 2 * (1 + 600)
    data = encode_footer(footer(keys=keys, checksums=np.zeros(granules, np.uint64)))
    assert (
        len(data) == footer_bytes(SPEC, "agent-é", 600) == 20480
    )  # 9,600 of keys and 9,616 of checksums and 400 of rest
    assert np.array_equal(decode_footer(data).keys, keys)
    assert peek_footer_bytes(data[:4096]) == 20480
    with pytest.raises(Corrupt, match="20480 bytes where 4096"):
        decode_footer(data[:4096])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"keys": np.zeros((0, 16), np.uint8)}, "1 to"),
        ({"keys": np.zeros((3, 15), np.uint8)}, "keys are"),
        ({"keys": np.zeros((3, 16), np.int8)}, "keys are"),
        ({"checksums": np.zeros(GRANULES - 1, np.uint64)}, "granules"),
        ({"algorithms": b"\1"}, "algorithms"),
        ({"algorithms": b"\1\3"}, "algorithms"),
        ({"parent_key": bytes(15)}, "parent key"),
        ({"turn": 1 << 32}, "does not fit"),
        ({"turn": -1}, "does not fit"),
        ({"file_offset": 1 << 64}, "does not fit"),
        ({"session": "x" * 4097}, "4097 bytes"),
        ({"session": "\ud800"}, "no Unicode"),
    ],
)
def test_what_does_not_fit_is_refused(change, match):
    with pytest.raises(ValueError, match=match):
        encode_footer(footer(**change))


def sealed(data: bytearray) -> bytes:
    """With the checksum a liar would compute."""
    struct.pack_into("<Q", data, 16, xxhash.xxh3_64_intdigest(bytes(data[:16] + data[24:])))
    return bytes(data)


@pytest.mark.parametrize(
    ("at", "value", "match"),
    [
        (0, b"flatcake", "begins with"),
        (8, b"\2", "format 2"),
        (12, b"\0", "contradict"),
        (24, struct.pack("<Q", 8192), "where 4096"),
        (24, struct.pack("<Q", 100), "100 bytes"),
        (24, struct.pack("<Q", 0), "0 bytes"),
        (32, b"\xff", "fingerprint"),
        (88, struct.pack("<Q", 4096), "counts"),
        (104, struct.pack("<I", 0), "contradict"),
        (104, struct.pack("<I", 2), "Corrupt|not one|counts"),
        (112, struct.pack("<I", 3), "not one|counts"),
        (116, struct.pack("<I", 5), "not one|counts|contradict"),
        (124, struct.pack("<I", 1 << 31), "contradict"),
        (132, b"\1", "contradict"),
        (136, b"\1", "plane table"),
        (136 + 64 + 48 + 64, b"\7", "unknown checksum"),
        (4095, b"\1", "padding"),
    ],
)
def test_a_lie_with_the_right_checksum_is_refused(at, value, match):
    data = bytearray(encode_footer(footer()))
    data[at : at + len(value)] = value
    with pytest.raises(Corrupt, match=match):
        decode_footer(sealed(data))


def test_a_space_that_is_none_is_refused():
    data = encode_footer(footer())
    text = SPEC.to_json()
    backwards = json.dumps(dict(reversed(json.loads(text).items())), separators=(",", ":")).encode()
    assert SpaceSpec.from_json(backwards) == SPEC, "the same space, in other bytes"
    for other in (
        backwards,
        b"[" * len(text),
        text.replace(b'"model":"m"', b'"model":777'),
        text.replace(b"16,", b"16 "),
    ):
        lie = bytearray(data.replace(text, other.ljust(len(text))))
        assert lie != data
        with pytest.raises(Corrupt):
            decode_footer(sealed(lie))
    lie = bytearray(data.replace("é".encode(), b"\xff\xff"))
    with pytest.raises(Corrupt, match="no Unicode"):
        decode_footer(sealed(lie))


@pytest.mark.parametrize("length", [0, 7, 8, 135, 136, 4095])
def test_cut_short(length):
    with pytest.raises(Corrupt):
        decode_footer(encode_footer(footer())[:length])


def test_peek_is_a_hint():
    data = encode_footer(footer())
    assert peek_footer_bytes(data) == 4096
    assert peek_footer_bytes(data[:135]) is None
    assert peek_footer_bytes(b"x" + data[1:]) is None
    for size in (0, 4097, 1 << 63):
        assert peek_footer_bytes(data[:24] + struct.pack("<Q", size) + data[32:]) is None
