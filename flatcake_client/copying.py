"""A copy of a hot prefix of another node: a new write here, from the slots that a restore has just filled.

The daemon counts what is found elsewhere and says in a lookup that it wants this prefix here. Its bytes are fetched once, for the
engine; when all of them are in place (checked, where they are checked) they are gathered from the engine's slots as those of a turn are.
That happens before the last `wait` returns, since later the engine may change its slots: one restore in many takes the
time of one more copy in memory. What cannot be written is counted by the daemon and left.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from flatcake_client.keys import KeyArray
from flatcake_client.target import Target
from flatcake_transport.errors import FlatCakeError

if TYPE_CHECKING:
    from flatcake_client.space import Space

log = logging.getLogger(__name__)


def keep_copy(space: Space, keys: KeyArray, brought: Target, first_block: int, timeout_s: float) -> int:
    """Write what this node lacks of a prefix. How many blocks were written; raises nothing.

    Args:
        keys: the prefix, from the context's first block.
        brought: where its blocks from `first_block` on are.
        timeout_s: for all of it; an engine waits for this, and may want its slots back.
    """
    end = first_block + len(brought.slots)
    if len(keys) > end:  # the engine wanted less of it
        return 0
    deadline_s = time.monotonic() + timeout_s
    try:
        turn = space.begin_copy(keys, timeout_s)
        try:
            if turn.parts and turn.blocks.start < first_block:  # the engine has it where nobody told us
                return 0
            mine = brought.slots[turn.blocks.start - first_block : turn.blocks.stop - first_block]
            for layer, span in enumerate(brought.spans if turn.parts else ()):
                turn.write_layer(layer, span.pages, mine, deadline_s - time.monotonic())
            turn.commit(deadline_s - time.monotonic())
            return sum(part.blocks for part in turn.parts)
        finally:
            turn.abort(max(0.0, deadline_s - time.monotonic()))
    except (FlatCakeError, ValueError) as error:
        log.info("a prefix of another node is not copied: %s", error)
        return 0
