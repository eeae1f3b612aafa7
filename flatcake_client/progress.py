"""How far a restore is: which blocks are in place, how many are still wanted, and what went wrong first. Pure.

Positions count the blocks that were asked for, from 0. A failure that belongs to a block cuts there: what lies before it is
still brought, what lies behind is of no use to anybody. A failure of everything (lease, deadline) ends the restore.

Invariant: a block is usable when all its layers are in place and so are all blocks before it; never otherwise.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from flatcake_transport.errors import FlatCakeError

DEADLINE: Final = "the restore's deadline has passed"
CLOSED: Final = "the restore was closed"


class Progress:
    """Belongs to one restore, under its lock."""

    def __init__(self, layers: int, asked: int) -> None:
        self.layers = layers
        self.asked = asked
        self.end = asked  # positions below are still wanted
        self.over = False  # nothing more will be brought
        self.failure: FlatCakeError | None = None
        self._placed = np.zeros((layers, asked), np.bool_)

    def put(self, layer: int, position: int, blocks: int) -> None:
        """The blocks of a layer have landed, and were checked. Twice is fine."""
        self._placed[layer, position : position + blocks] = True

    def cut(self, position: int, failure: FlatCakeError) -> None:
        """Nothing from `position` on can be had."""
        self.failure = self.failure or failure
        self.end = min(self.end, position)
        self.over = self.over or self.end == 0

    def stop(self, failure: FlatCakeError) -> None:
        """Nothing more can be had."""
        self.failure = self.failure or failure
        self.over = True

    def wanted(self, position: int, blocks: int) -> int:
        """How many of the blocks are still wanted."""
        return max(0, min(blocks, self.end - position))

    def usable(self) -> int:
        """Length of the prefix of asked blocks that is in place with all layers."""
        whole = self._placed.all(axis=0)
        return self.asked if whole.all() else int(np.argmin(whole))
