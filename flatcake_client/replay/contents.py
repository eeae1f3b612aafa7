"""Bytes of blocks, made from their keys, and the check that what came back is them.

Each plane of a block is a piece of one noise buffer, from an offset that the key chooses, with 16 bytes of stamp at either end:
the key, crossed with the plane. So a wrong block, a wrong plane, a shifted or short one shows in its stamps, which are
compared for every plane of every block; the bytes between are compared for one block in `BODY_EVERY`, chosen by its key, or
for all. Before a restore the stamps in its slots are wiped: what an earlier restore left there is not taken for a delivery.

Making a block costs one copy of it, checking it one look at its stamps and an eighth of a comparison: both within the prefill's time.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from flatcake_client.keys import KeyArray
from flatcake_client.replay.system import Pages, Slots

STAMP_BYTES: Final = 16
PLANE_BYTES_MIN: Final = 64
BODY_EVERY: Final = 8
_NOISE_BYTES: Final = 4 << 20
_STEP_BYTES: Final = 64
_PLANE_SALT: Final = np.uint64(0x9E3779B97F4A7C15)


class Contents:
    """Thread-safe: nothing changes after it is made."""

    def __init__(self, planes: int, plane_bytes: int, *, body_every: int = BODY_EVERY, seed: int = 0) -> None:
        """`body_every`: one block in so many is compared in full; 1: all.

        Raises: ValueError: planes too small for their stamps, or not whole words.
        """
        if plane_bytes < PLANE_BYTES_MIN or plane_bytes % 8:
            raise ValueError(
                f"planes of {plane_bytes} bytes: expected a multiple of 8 from {PLANE_BYTES_MIN}; change "
                "--kv-bytes-per-token, --block-tokens or --planes"
            )
        self._block_bytes = planes * plane_bytes
        self._noise = np.random.default_rng(seed).integers(0, 256, _NOISE_BYTES + self._block_bytes, np.uint8)
        self._salts = (np.arange(1, planes + 1, dtype=np.uint64) * _PLANE_SALT)[:, None]
        self._body_every = body_every

    def fill(self, pages: Pages, slots: Slots, keys: KeyArray) -> None:
        """Write block i, whose key is `keys[i]`, to `pages[slots[i]]`."""
        flat = pages.reshape(len(pages), -1)
        # One copy of a whole block each: a fancy index would take three times as long.
        for slot, start in zip(slots.tolist(), self._starts(keys).tolist(), strict=True):
            flat[slot] = self._noise[start : start + self._block_bytes]
        words, stamps = pages.view(np.uint64), self._stamps(keys)
        words[slots, :, :2] = stamps
        words[slots, :, -2:] = stamps

    def wipe(self, pages: Pages, slots: Slots) -> None:
        """Make sure that nothing in these slots passes for a block."""
        words = pages.view(np.uint64)
        words[slots, :, :2] = 0
        words[slots, :, -2:] = 0

    def wrong_blocks(self, pages: Pages, slots: Slots, keys: KeyArray) -> int:
        """How many of these slots do not hold what their keys say."""
        words, stamps = pages.view(np.uint64), self._stamps(keys)
        wrong = ((words[slots, :, :2] != stamps) | (words[slots, :, -2:] != stamps)).any(axis=(1, 2))
        flat, starts = pages.reshape(len(pages), -1), self._starts(keys)
        ends = STAMP_BYTES
        for i in np.flatnonzero(keys[:, 1].astype(np.int64) % self._body_every == 0).tolist():
            start = int(starts[i])
            held = flat[slots[i]].reshape(pages.shape[1:])[:, ends:-ends]
            meant = self._noise[start : start + self._block_bytes].reshape(pages.shape[1:])[:, ends:-ends]
            wrong[i] = wrong[i] or not np.array_equal(held, meant)
        return int(wrong.sum())

    def _starts(self, keys: KeyArray) -> NDArray[np.int64]:
        steps = keys[:, 8:12].copy().view(np.uint32)[:, 0]
        return (steps % (_NOISE_BYTES // _STEP_BYTES)).astype(np.int64) * _STEP_BYTES

    def _stamps(self, keys: KeyArray) -> NDArray[np.uint64]:
        return np.ascontiguousarray(keys).view(np.uint64)[:, None, :] ^ self._salts
