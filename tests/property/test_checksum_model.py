"""Checksums: host and tensor code agree, both follow a rule written with Python's integers, and every flipped bit shows."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from flatcake_transport import checksum
from flatcake_transport.checksum import ROW_BYTES, granule_checksums
from flatcake_transport.footer import CHECKSUM_NONE, CHECKSUM_WORDSUM, CHECKSUM_XXH3

torch = pytest.importorskip("torch", reason="word sums of tensors were not tested")

SIZES = st.one_of(st.integers(1, 100), st.integers(ROW_BYTES - 5, ROW_BYTES + 5), st.integers(1, 5 * ROW_BYTES))
FROZEN = [12128641574587603369, 1765297156151587293]
MASK = (1 << 64) - 1


def naive_wordsum(data: bytes) -> int:
    length, words = len(data), []
    z = 0
    for i in range(1, 4097):
        z = i * 0x9E3779B97F4A7C15 & MASK
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
        words.append((z ^ z >> 31) | 1)
    while True:
        data += b"\0" * (-len(data) % 16384)
        level = []
        for at in range(0, len(data), 16384):
            row = np.frombuffer(data[at : at + 16384], "<i4").tolist()
            level.append(sum(w * x for w, x in zip(words, row, strict=True)) & MASK)
        if len(level) == 1:
            return level[0] + length * 0x9E3779B97F4A7C15 & MASK
        data = b"".join(h.to_bytes(8, "little") for h in level)


def random_bytes(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.parametrize("size", [1, 4, 16384, 16385, 100_001])
def test_wordsum_is_the_rule(size: int) -> None:
    data = random_bytes(size, size)
    assert granule_checksums(data, size, CHECKSUM_WORDSUM).tolist() == [naive_wordsum(data.tobytes())]


def test_wordsum_with_three_levels() -> None:
    data = random_bytes(1, 2048 * ROW_BYTES + 1)  # 2049 rows: their sums need two rows
    assert granule_checksums(data, len(data), CHECKSUM_WORDSUM).tolist() == [naive_wordsum(data.tobytes())]


def test_values_are_frozen() -> None:
    """They are on disks: a change makes every stored segment Corrupt."""
    data = np.arange(100_000, dtype=np.uint32).view(np.uint8)
    assert granule_checksums(data, 300_000, CHECKSUM_XXH3).tolist() == [
        xxhash.xxh3_64_intdigest(data[:300_000].tobytes()), xxhash.xxh3_64_intdigest(data[300_000:].tobytes()),
    ]  # fmt: skip
    assert granule_checksums(data, 300_000, CHECKSUM_WORDSUM).tolist() == FROZEN


@given(SIZES, SIZES, st.integers(0, 7))
def test_tensors_and_arrays_agree(size: int, granule_bytes: int, skew: int) -> None:
    data = random_bytes(size, size + skew)[skew:]
    expected = granule_checksums(data, granule_bytes, CHECKSUM_WORDSUM)
    tensor = torch.from_numpy(data)
    assert np.array_equal(checksum._wordsum_device(tensor, granule_bytes), expected)
    assert np.array_equal(granule_checksums(tensor, granule_bytes, CHECKSUM_WORDSUM), expected)
    assert len(expected) == -(-size // granule_bytes)
    xxh3 = granule_checksums(tensor, granule_bytes, CHECKSUM_XXH3)
    assert xxh3.tolist() == [
        xxhash.xxh3_64_intdigest(data[at : at + granule_bytes].tobytes()) for at in range(0, size, granule_bytes)
    ]


@pytest.mark.parametrize("algorithm", [CHECKSUM_XXH3, CHECKSUM_WORDSUM])
@given(size=SIZES, data=st.data())
def test_a_flipped_bit_shows_in_its_granule_only(algorithm: int, size: int, data: st.DataObject) -> None:
    granule_bytes = data.draw(SIZES)
    bytes_ = random_bytes(size, size)
    before = granule_checksums(bytes_, granule_bytes, algorithm)
    at = data.draw(st.integers(0, size - 1))
    bytes_[at] ^= 1 << data.draw(st.integers(0, 7))
    changed = np.flatnonzero(granule_checksums(bytes_, granule_bytes, algorithm) != before)
    assert changed.tolist() == [at // granule_bytes]


@pytest.mark.parametrize("algorithm", [CHECKSUM_XXH3, CHECKSUM_WORDSUM])
@given(size=SIZES, data=st.data())
def test_two_flipped_signs_and_swapped_words_show(algorithm: int, size: int, data: st.DataObject) -> None:
    words = random_bytes(size, -(-size // 8) * 8 + 16).view(np.uint64)
    before = granule_checksums(words.view(np.uint8), 1 << 20, algorithm)[0]
    i = data.draw(st.integers(0, len(words) - 1))
    j = data.draw(st.integers(0, len(words) - 1).filter(lambda j: j != i))
    signs = words.copy()
    signs[[i, j]] ^= np.uint64(1 << 63)
    swapped = words.copy()
    swapped[[i, j]] = swapped[[j, i]]
    for other in (signs, swapped):
        assert granule_checksums(other.view(np.uint8), 1 << 20, algorithm)[0] != before


@pytest.mark.parametrize("algorithm", [CHECKSUM_XXH3, CHECKSUM_WORDSUM])
def test_zeros_of_other_lengths_differ(algorithm: int) -> None:
    sums = {int(granule_checksums(np.zeros(n, np.uint8), 1 << 20, algorithm)[0]) for n in range(1, 300)}
    assert len(sums) == 299


def test_none_and_unknown() -> None:
    data = np.ones(10, np.uint8)
    assert granule_checksums(data, 4, CHECKSUM_NONE).tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="unknown"):
        granule_checksums(data, 4, 3)
    with pytest.raises(ValueError, match="granule_bytes"):
        granule_checksums(data, 0, CHECKSUM_XXH3)
