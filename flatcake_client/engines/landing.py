"""Memory that restores come down in before a model's cache takes them over, kept for the next restore.

First touch of fresh memory runs at 0.7 GB/s here, slower than an SSD; a landing is touched once and used many times. Keys and
values lie apart and densely, so what has landed is, without another copy, the tensors that a cache is given.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from flatcake_client import Hit

LANDINGS_KEPT: Final = 2


@dataclass(frozen=True, slots=True)
class LayerShape:
    kv_heads: int
    head_dim: int
    device: torch.device


class Landing:
    """Memory that restores come down in: per layer (2, kv_heads, capacity, block_tokens, head_dim), K and V apart.

    A restore of n blocks uses the front of it densely, so that keys of n blocks are one array.
    """

    def __init__(self, layers: Iterable[LayerShape], dtype: torch.dtype, block_tokens: int, capacity: int) -> None:
        self.capacity = capacity
        self._block_tokens = block_tokens
        self._shapes = tuple(layers)
        self._flat = [
            torch.empty(2 * capacity * shape.kv_heads * block_tokens * shape.head_dim, dtype=dtype, device=shape.device)
            for shape in self._shapes
        ]

    def pages(self, blocks: int) -> list[torch.Tensor]:
        """One view a layer, (blocks, 2, kv_heads, block_tokens, head_dim)."""
        return [self._dense(layer, blocks).permute(2, 0, 1, 3, 4) for layer in range(len(self._shapes))]

    def keys_values(self, layer: int, blocks: int, usable: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views, each (1, kv_heads, usable * block_tokens, head_dim), of a restore of `blocks`."""
        keys, values = self._dense(layer, blocks).flatten(2, 3)[:, None, :, : usable * self._block_tokens]
        return keys, values

    def _dense(self, layer: int, blocks: int) -> torch.Tensor:
        shape = self._shapes[layer]
        sizes = (2, shape.kv_heads, blocks, self._block_tokens, shape.head_dim)
        return self._flat[layer][: int(np.prod(sizes))].view(sizes)


class Landings:
    """Landings kept for reuse, since first touch of fresh memory is slower than an SSD. Thread-safe."""

    def __init__(self, layers: tuple[LayerShape, ...], dtype: torch.dtype, block_tokens: int) -> None:
        self._layers, self._dtype, self._block_tokens = layers, dtype, block_tokens
        self._lock = threading.Lock()
        self._kept: list[Landing] = []

    def take(self, blocks: int) -> Landing:
        with self._lock:
            fitting = [landing for landing in self._kept if landing.capacity >= blocks]
            if fitting:
                self._kept.remove(fitting[0])
                return fitting[0]
        # A power of two, so that a conversation that grows does not need new memory each turn.
        return Landing(self._layers, self._dtype, self._block_tokens, 1 << (blocks - 1).bit_length())

    def give(self, landing: Landing) -> None:
        """Keep the largest."""
        with self._lock:
            self._kept = sorted([*self._kept, landing], key=lambda kept: -kept.capacity)[:LANDINGS_KEPT]


def blocks_by_place(hit: Hit, blocks: int) -> dict[str, int]:
    """The first blocks of a hit, by medium and node."""
    counts: Counter[str] = Counter()
    for run in hit.runs:
        taken = min(run.blocks, blocks)
        counts[f"{run.segment.medium.name.lower()}@{run.segment.node}"] += taken
        blocks -= taken
    return {place: count for place, count in counts.items() if count}


def bytes_by_medium(places: dict[str, int], block_bytes: int) -> dict[str, int]:
    """The same in bytes, over all nodes."""
    sums = {"memory": 0, "ssd": 0}
    for place, blocks in places.items():
        sums[place.partition("@")[0]] += blocks * block_bytes
    return sums
