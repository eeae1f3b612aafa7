"""FC-GVA: where a turn's blocks will live, decided once, before they are written. Pure.

Under agent traffic memory in front of SSD filters almost no reads, so memory is no tier: it is for what is read by many
(shared prompts) or comes back soon and small (a short exchange). The table of DESIGN section 1, first match wins:

    a copy of what other nodes hold           memory   copied: and nowhere else, it is there already
    share count > 1                           memory   shared
    first turn of a session                   SSD      first-turn: most are never seen again
    context tokens > agent_context_tokens     SSD      long-context
    previous reply unknown                    SSD      reply-unknown: memory is for what is known to be short
    previous reply tokens > short_reply       SSD      long-reply
    otherwise                                 memory   short-reply
    any memory home, but the arena is full    SSD      memory-full: said by the store, which knows the arena
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from flatcake_transport.address import Medium


class Reason(StrEnum):
    COPIED = "copied"
    SHARED = "shared"
    FIRST_TURN = "first-turn"
    LONG_CONTEXT = "long-context"
    REPLY_UNKNOWN = "reply-unknown"
    LONG_REPLY = "long-reply"
    SHORT_REPLY = "short-reply"
    MEMORY_FULL = "memory-full"


@dataclass(frozen=True, slots=True)
class Policy:
    """Thresholds of the table, in tokens. `flatcake tune` recommends them from a trace.

    Defaults: Mooncake's conversations have a median context of 7.3K tokens, Claude Code's sessions one of 145K
    (traces/README.md): 32K tells them apart. 512 reply tokens end a short exchange.
    """

    agent_context_tokens: int = 32 << 10
    short_reply_tokens: int = 512

    def __post_init__(self) -> None:
        if self.agent_context_tokens < 0 or self.short_reply_tokens < 0:
            raise ValueError("placement thresholds are counts of tokens, 0 or more")


@dataclass(frozen=True, slots=True)
class Hints:
    """What the engine knows before the turn is written.

    `turn` counts from 1. `share_counts` has one entry a block of the range that is placed: requests that share it.
    """

    turn: int
    context_tokens: int
    previous_reply_tokens: int | None = None
    share_counts: Sequence[int] | None = None
    copy: bool = False


class Placed(NamedTuple):
    """`blocks` blocks from `first`, relative to the range that is placed."""

    first: int
    blocks: int
    medium: Medium
    reason: Reason


def place(hints: Hints, policy: Policy, blocks: int) -> list[Placed]:
    """Homes of `blocks` blocks: the shared head, if any, then the rest. They cover the range in order, none is empty.

    Only leading blocks with a share count above 1 are shared: keys are chained, so a block shared by two requests lies
    under a head that both share, and a count that says otherwise is noise.

    Raises: ValueError: no blocks, turn below 1, negative tokens, or not one share count a block.
    """
    if blocks < 1:
        raise ValueError(f"cannot place {blocks} blocks")
    if hints.turn < 1:
        raise ValueError(f"turns count from 1, not {hints.turn}")
    if hints.context_tokens < 0 or (hints.previous_reply_tokens or 0) < 0:
        raise ValueError("counts of tokens are 0 or more")
    if hints.copy:
        return [Placed(0, blocks, Medium.MEMORY, Reason.COPIED)]
    head = _shared_head(hints.share_counts, blocks)
    placed = [Placed(0, head, Medium.MEMORY, Reason.SHARED)] if head else []
    if head < blocks:
        medium, reason = _home_of_rest(hints, policy)
        placed.append(Placed(head, blocks - head, medium, reason))
    return placed


def _shared_head(share_counts: Sequence[int] | None, blocks: int) -> int:
    if share_counts is None or len(share_counts) == 0:
        return 0
    if len(share_counts) != blocks:
        raise ValueError(f"{len(share_counts)} share counts for {blocks} blocks: expected one a block")
    alone = np.flatnonzero(np.asarray(share_counts) <= 1)
    return int(alone[0]) if len(alone) else blocks


def _home_of_rest(hints: Hints, policy: Policy) -> tuple[Medium, Reason]:
    if hints.turn == 1:
        return Medium.SSD, Reason.FIRST_TURN
    if hints.context_tokens > policy.agent_context_tokens:
        return Medium.SSD, Reason.LONG_CONTEXT
    if hints.previous_reply_tokens is None:
        return Medium.SSD, Reason.REPLY_UNKNOWN
    if hints.previous_reply_tokens > policy.short_reply_tokens:
        return Medium.SSD, Reason.LONG_REPLY
    return Medium.MEMORY, Reason.SHORT_REPLY
