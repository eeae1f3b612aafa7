"""An engine's paged KV of one shard, and the two things a connector does with it: load blocks of a chain, store a turn.

Both are to be called in a thread that may wait (background.py). Neither raises for the daemon's or the disk's sake: a load
says how many blocks are in place, a store whether it was one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flatcake_client.keys import KeyArray
from flatcake_client.space import Space
from flatcake_transport.errors import FlatCakeError, Overloaded

log = logging.getLogger(__name__)

Slots = NDArray[np.int64]

GIVEN_UP: Final = "given up by the engine"


@dataclass(frozen=True, slots=True)
class TurnFacts:
    """What the engine knows of a turn before it is written; None: it does not. As `Space.begin_turn` takes them."""

    session: str | None = None
    context_tokens: int | None = None
    previous_reply_tokens: int | None = None
    turn: int | None = None
    share_counts: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """`blocks`: the prefix of the chain that is in place, in blocks, those before `first_block` counted. Bytes of this load."""

    blocks: int
    memory_bytes: int = 0
    ssd_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Stored:
    """`blocks` were written now; `failure`: why none was, "" when all is stored."""

    blocks: int
    failure: str = ""


class PagedKv:
    """`pages[layer]`: first axis the slot. Thread-safe; the arrays live as long as this does."""

    def __init__(self, space: Space, pages: Sequence[Any]) -> None:
        self.space = space
        self.pages = tuple(pages)

    def load(
        self,
        keys: KeyArray,
        first_block: int,
        slots: Slots,
        timeout_s: float,
        cancelled: Callable[[], bool] = lambda: False,
        ending: Callable[[], object] | None = None,
    ) -> Loaded:
        """Bring blocks `first_block .. len(keys)` of a chain. Slots behind the blocks that are in place hold anything.

        Args:
            keys: from the context's first block.
            slots: one for each of these blocks.
            cancelled: looked at between layers.
            ending: as `Hit.restore`.
        """
        try:
            with self.space.lookup(keys) as hit:
                if hit.failure is not None:
                    raise hit.failure
                if hit.blocks <= first_block or cancelled():
                    return Loaded(min(hit.blocks, first_block))
                wanted = min(hit.blocks, len(keys))
                whole = np.concatenate([np.zeros(first_block, np.int64), slots[: wanted - first_block]])
                restore = hit.restore(self.pages, whole, first_block=first_block, timeout_s=timeout_s, ending=ending)
                for layer in range(len(self.pages) - 1):
                    if cancelled():
                        restore.close()
                        return Loaded(first_block)
                    restore.wait_layer(layer)
                usable = restore.wait()
                sizes = restore.stats.bytes_by_medium
                return Loaded(usable, sizes.get("memory", 0), sizes.get("ssd", 0))
        except FlatCakeError as error:
            log.warning("a restore failed, its blocks are computed: %s", error)
            return Loaded(getattr(error, "usable_blocks", first_block))

    def store(
        self,
        keys: KeyArray,
        slots: Slots,
        facts: TurnFacts,
        timeout_s: float,
        *,
        salt: bytes = b"",
        taken: Callable[[], object] = lambda: None,
        wanted: Callable[[], bool] = lambda: True,
        layer_ready: Callable[[int], bool] = lambda _: True,
    ) -> Stored:
        """Write what is not stored yet of a chain.

        Args:
            slots: one for each block of the chain.
            salt: as it was given to the keys.
            taken: called, maybe twice, when the slots may be overwritten: before the turn is persisted, or when it was given up.
            wanted: looked at between layers and before the turn is persisted; False: it is given up.
            layer_ready: waits until a layer's blocks are computed; False: they will not be, the turn is given up.
        """
        try:
            with self.space.begin_turn(
                keys,
                session=facts.session,
                context_tokens=facts.context_tokens,
                previous_reply_tokens=facts.previous_reply_tokens,
                share_counts=facts.share_counts,
                turn=facts.turn,
                salt=salt,
            ) as turn:
                mine = slots[turn.blocks.start : turn.blocks.stop]
                for layer, pages in enumerate(self.pages):
                    if not (layer_ready(layer) and wanted()):
                        return Stored(0, GIVEN_UP)
                    if turn.parts:
                        turn.write_layer(layer, pages, mine, timeout_s)
                if not wanted():
                    return Stored(0, GIVEN_UP)
                taken()
                turn.commit(timeout_s)
                return Stored(sum(part.blocks for part in turn.parts))
        except Overloaded as error:
            return Stored(0, str(error))
        except FlatCakeError as error:
            log.warning("a turn was not stored: %s", error)
            return Stored(0, str(error))
        finally:
            taken()
