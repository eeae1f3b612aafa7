"""Checksums of granules: whole blocks of one plane, 256 KiB or more each.

Two algorithms, because bytes are checked where they are. One shard uses one of them for all it writes:

    XXH3      xxh3_64 of the granule. Bytes on the host. Measured here: 29 GB/s on one core, without the GIL.
    WORDSUM   a tree of multilinear hashes that torch's int64 operations on a GPU and numpy on a host compute equally.
              Bytes on a device, and a host that must check what a device wrote: 4 GB/s, one core, with the GIL.

WORDSUM: the granule, zero-padded to rows of 16 KiB, is read as little-endian int32 words x. Each row becomes
`sum(w[j] * x[j]) mod 2^64`, with 4096 fixed odd pseudo-random 64-bit weights w; the rows' sums are the bytes of the next
level, until one is left; the granule's length times an odd constant is added. Multilinear hashing with random weights
is almost universal: two different granules collide with probability about 2^-32 a level. Words are 32 bits in a 64-bit sum on
purpose: with 64-bit words, two flipped top bits (two signs) would cancel.

These guard against faults (torn writes, bit rot, wrong place), not against somebody who computes collisions.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from flatcake_transport.footer import CHECKSUM_NONE, CHECKSUM_WORDSUM, CHECKSUM_XXH3
from flatcake_transport.paged import Bytes, contiguous_bytes, on_device

if TYPE_CHECKING:
    import torch

ChecksumArray = NDArray[np.uint64]

ROW_WORDS: Final = 4096
ROW_BYTES: Final = 4 * ROW_WORDS  # 16 KiB
_LENGTH_FACTOR: Final = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd
_BATCH_BYTES: Final = 32 << 20  # int64 products take twice the bytes they come from: bound them on a device


def granule_checksums(data: Any, granule_bytes: int, algorithm: int) -> ChecksumArray:
    """One checksum a granule of contiguous bytes of a plane; the last granule may be shorter.

    Args:
        data: 1-d uint8 that starts at a granule: numpy or a tensor, host or device. Only read.
        granule_bytes: `granule_blocks[plane] * plane_bytes[plane]`.
        algorithm: of footer.ALGORITHMS. Each runs on host and device bytes; XXH3 copies those of a device to the host.
    Returns:
        (granules,) u64; zeros where the algorithm is none. The caller's thread does the work.
    Raises:
        ValueError: an unknown algorithm, or data that are not contiguous 1-d bytes.
    """
    if granule_bytes < 1:
        raise ValueError(f"granule_bytes is {granule_bytes}: expected 1 or more")
    granules = -(-len(data) // granule_bytes)
    if algorithm == CHECKSUM_NONE:
        return np.zeros(granules, np.uint64)
    if algorithm == CHECKSUM_XXH3:
        view = contiguous_bytes(data.cpu() if on_device(data) else data).data
        digest = xxhash.xxh3_64_intdigest
        return np.array([digest(view[at : at + granule_bytes]) for at in range(0, len(view), granule_bytes)], np.uint64)
    if algorithm == CHECKSUM_WORDSUM:
        return _wordsum_device(data, granule_bytes) if on_device(data) else _wordsum(data, granule_bytes)
    raise ValueError(f"checksum algorithm {algorithm} is unknown: expected 0 (none), 1 (xxh3) or 2 (word sum)")


@lru_cache(maxsize=1)
def _weights() -> NDArray[np.int64]:
    """4096 odd 64-bit constants: splitmix64 of 1, 2, ... Part of the format, never to change."""
    z = np.arange(1, ROW_WORDS + 1, dtype=np.uint64) * np.uint64(_LENGTH_FACTOR)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)


def _length_terms(total_bytes: int, granule_bytes: int) -> ChecksumArray:
    lengths = np.minimum(granule_bytes, total_bytes - np.arange(0, total_bytes, granule_bytes)).astype(np.uint64)
    return lengths * np.uint64(_LENGTH_FACTOR)


def _wordsum(data: Any, granule_bytes: int) -> ChecksumArray:
    host = contiguous_bytes(data)
    sums = [_row_tree(host[at : at + granule_bytes]) for at in range(0, len(host), granule_bytes)]
    return np.asarray(sums, np.int64).view(np.uint64) + _length_terms(len(host), granule_bytes)


def _row_tree(level: Bytes) -> np.int64:
    """The hash of one granule, without its length."""
    while True:
        whole = len(level) // ROW_BYTES * ROW_BYTES
        sums = np.empty(-(-len(level) // ROW_BYTES), np.int64)
        if whole:
            _row_sums(level[:whole], sums[: whole // ROW_BYTES])
        if whole < len(level):
            tail = np.zeros(ROW_BYTES, np.uint8)
            tail[: len(level) - whole] = level[whole:]
            _row_sums(tail, sums[-1:])
        if len(sums) == 1:
            return cast("np.int64", sums[0])
        level = sums.view(np.uint8)


def _row_sums(rows: Bytes, sums: NDArray[np.int64]) -> None:
    np.einsum("rj,j->r", rows.view("<i4").reshape(-1, ROW_WORDS), _weights(), out=sums)


def _wordsum_device(data: torch.Tensor, granule_bytes: int) -> ChecksumArray:
    """The same sums with torch operations on the data's own device, for many granules at once."""
    import torch

    weights = torch.from_numpy(_weights()).to(data.device)
    whole = len(data) // granule_bytes
    step = max(1, _BATCH_BYTES // granule_bytes)
    parts = [
        _tensor_tree(data[at * granule_bytes : min(at + step, whole) * granule_bytes].view(-1, granule_bytes), weights)
        for at in range(0, whole, step)
    ]
    if whole * granule_bytes < len(data):
        parts.append(_tensor_tree(data[whole * granule_bytes :].view(1, -1), weights))
    sums = torch.cat(parts).cpu().numpy() if parts else np.zeros(0, np.int64)
    return sums.view(np.uint64) + _length_terms(len(data), granule_bytes)


def _tensor_tree(granules: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Hashes, without length, of equally long granules (n, bytes)."""
    import torch

    level = granules
    while True:
        rows = -(-level.shape[1] // ROW_BYTES)
        if level.shape[1] % ROW_BYTES or level.storage_offset() % 4:
            padded = torch.zeros((len(level), rows * ROW_BYTES), dtype=torch.uint8, device=level.device)
            padded[:, : level.shape[1]] = level
            level = padded
        words = level.view(torch.int32).view(len(level), rows, ROW_WORDS)
        sums = (words * weights).sum(2)  # int32 * int64 is int64 and wraps
        if rows == 1:
            return sums[:, 0]
        level = sums.view(torch.uint8)
