"""Sessions of an engine for the scripts of this folder: written through the public client, and the slots they come back to.

A model in the shape of an 8B one at a quarter of its width: 32 layers, 64 tokens a block, 128 KiB a block and layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from _support import MIB, Bytes

import flatcake_client as fc
from flatcake_transport.window import aligned_buffer

LAYERS = 32
BLOCK_TOKENS = 64
PLANE_BYTES = 128 << 10
BLOCK_BYTES = LAYERS * PLANE_BYTES  # 4 MiB


def open_space(client: fc.Client, model: str = "bench-8b") -> Any:
    return client.open_space(
        model=model, dtype="bfloat16", block_tokens=BLOCK_TOKENS, plane_bytes=[PLANE_BYTES] * LAYERS
    )


def session_keys(space: Any, seed: int, blocks: int) -> Any:
    """Keys of a context that no other seed has."""
    tokens = np.random.default_rng(seed).integers(0, 1 << 31, blocks * BLOCK_TOKENS, dtype=np.int64)
    return space.keys(tokens)


class Pages:
    """An engine's paged KV on the host, touched: an array a layer, `spare` slots more than blocks, slots in no order."""

    def __init__(self, blocks: int, *, seed: int = 0, spare: int = 16) -> None:
        self.memory = aligned_buffer(LAYERS * (blocks + spare) * PLANE_BYTES)
        self.layers: list[Bytes] = list(self.memory.reshape(LAYERS, blocks + spare, PLANE_BYTES))
        self.slots = np.random.default_rng(seed).permutation(blocks + spare)[:blocks]
        self.blocks = blocks

    @property
    def size_bytes(self) -> int:
        return self.blocks * BLOCK_BYTES

    def fill(self, seed: int) -> None:
        """Bytes that say which layer and slot they are, and that no disk could leave out or make up."""
        noise = np.random.default_rng(seed).integers(0, 256, MIB + PLANE_BYTES, np.uint8)
        for layer, pages in enumerate(self.layers):
            for slot in range(len(pages)):
                start = (layer * 7919 + slot * 104729) % MIB // 8 * 8
                pages[slot] = noise[start : start + PLANE_BYTES]

    def clear(self) -> None:
        for pages in self.layers:
            pages[:] = 0


def turn_ends(blocks: int, turns: int) -> list[int]:
    """Where each turn of a context of so many blocks ends."""
    return [int(end) for end in np.linspace(0, blocks, turns + 1)[1:]]


def write_session(space: Any, keys: Any, name: str, pages: Pages, ends: Sequence[int], **hints: Any) -> None:
    """Store a context turn by turn, as an engine would: block i from slot `pages.slots[i]`."""
    for end in ends:
        with space.begin_turn(keys[:end], session=name, **hints) as turn:
            mine = pages.slots[turn.blocks.start : turn.blocks.stop]
            for layer, source in enumerate(pages.layers):
                turn.write_layer(layer, source, mine)
            turn.commit()


def restore(space: Any, keys: Any, pages: Pages) -> Any:
    """Look a context up and bring it into the slots; its statistics. Raises: AssertionError: not all of it came."""
    with space.lookup(keys) as hit:
        coming = hit.restore(pages.layers, pages.slots)
        usable = coming.wait()
        assert usable == len(keys), f"{usable} of {len(keys)} blocks came back: {hit.failure}"
        return coming.stats


def same(one: Pages, other: Pages) -> bool:
    """Whether all blocks have the same bytes."""
    return all(
        np.array_equal(a[one.slots[i]], b[other.slots[i]])
        for a, b in zip(one.layers, other.layers, strict=True)
        for i in range(one.blocks)
    )
