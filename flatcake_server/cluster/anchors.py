"""Which keys of a chain the directory is told of, and what its answers say. Pure.

Keys are chained, so who holds the block at position n mostly holds the n - 1 before it. A node therefore publishes anchors only:
the prefix lengths that are multiples of 16 or powers of two. A chain of n blocks has n / 16 + 4 of them, so the
directory holds some 1/16 of all keys, and a prefix found by its anchors is at most 15 blocks shorter than the one held.

What the directory says is a hint: the owner looks its own index up before anything is read. A prefix may have holes where
memory was reclaimed under it, so the answers are read from the first anchor beyond the local hit onwards, without gaps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flatcake_transport.address import NODES_MAX

ANCHOR_BLOCKS: Final = 16
# Asked in one round trip: each costs some 40 us there and back. Of a longer chain some are left out: which node is chosen is
# then known to a fiftieth of the chain; what it holds the owner says exactly.
PROBES_MAX: Final = 64

Lengths = NDArray[np.int64]


def anchor_lengths(held: int, total: int) -> Lengths:
    """The prefix lengths in `(held, total]` that are anchors, ascending."""
    lengths = np.arange(held + 1, total + 1, dtype=np.int64)
    anchors: Lengths = lengths[(lengths % ANCHOR_BLOCKS == 0) | (lengths & lengths - 1 == 0)]
    return anchors


def anchors_within(first_block: int, blocks: int) -> Lengths:
    """Which of a segment's blocks are anchors, by their index within it; its first is at `first_block` of the chain."""
    return anchor_lengths(first_block, first_block + blocks) - (first_block + 1)


def probes(held: int, total: int, probes_max: int = PROBES_MAX) -> Lengths:
    """The prefix lengths worth asking for when `held` of `total` blocks are here already.

    The first and the last anchor always are, and all powers of two as far as there is room: a short prefix is found, too.
    """
    lengths = anchor_lengths(held, total)
    if len(lengths) <= probes_max:
        return lengths
    short = np.flatnonzero(lengths & lengths - 1 == 0)[: probes_max // 2]
    spread = np.linspace(0, len(lengths) - 1, probes_max - len(short)).astype(np.int64)
    return lengths[np.union1d(short, spread)]


def choose(holders: Sequence[Collection[int]], asking_node: int) -> int | None:
    """The node with the longest prefix, or None when nobody holds any.

    Args:
        holders: for each probe, ascending, the nodes that hold it. Not the asking node.
        asking_node: of equal nodes each asker takes another one, so that a shared prompt does not load one node only.
    """
    unbroken: Counter[int] = Counter()
    held: Counter[int] = Counter()
    running: set[int] | None = None
    for nodes in holders:
        present = set(nodes)
        held.update(present)
        running = present if running is None else running & present
        unbroken.update(running)
    return min(held, key=lambda node: (-unbroken[node], -held[node], (node - asking_node) % NODES_MAX), default=None)
