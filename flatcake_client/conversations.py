"""What a connector remembers of conversations, so that the daemon can be told which turn this is and how long the last reply was.

An engine sees requests. One continues another when it says so (a session id), or when its blocks go on from where the other's
ended: the hash of a context's last full block names the whole context. Both are remembered, the latest `kept_max`; what is
forgotten is a conversation whose next turn says nothing of the reply before it, and is placed as such.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

KEPT_MAX: Final = 65_536  # some 10 MB
LOOK_BACK_BLOCKS: Final = 4096  # a reply and a prompt longer than that are a new conversation


@dataclass(frozen=True, slots=True)
class Past:
    """Of a conversation before its current turn. `turns`: how many there were; `reply_tokens`: of the last; None: unknown."""

    turns: int = 0
    reply_tokens: int | None = None


class Conversations:
    """Not thread-safe: belongs to the engine's scheduler."""

    def __init__(self, kept_max: int = KEPT_MAX) -> None:
        self._kept_max = kept_max
        self._by_name: OrderedDict[str, Past] = OrderedDict()
        self._by_tail: OrderedDict[bytes, Past] = OrderedDict()

    def past(self, session: str | None, hashes: Sequence[bytes]) -> Past:
        """Of the conversation that a context goes on: by its name, else by the blocks it begins with.

        Args:
            hashes: of the context's full blocks, each naming its whole prefix.
        """
        if session is not None:
            return self._by_name.get(session, Past())
        for value in reversed(hashes[-LOOK_BACK_BLOCKS:]):
            past = self._by_tail.get(value)
            if past is not None:
                return past
        return Past()

    def turned(self, session: str | None, hashes: Sequence[bytes], past: Past, reply_tokens: int) -> None:
        """A turn of that conversation is over; `hashes` are those of the context with its reply."""
        now = Past(past.turns + 1, reply_tokens)
        if session is not None:
            self._keep(self._by_name, session, now)
        elif hashes:
            self._keep(self._by_tail, hashes[-1], now)

    def _keep(self, kept: OrderedDict[Any, Past], name: str | bytes, past: Past) -> None:
        kept[name] = past
        kept.move_to_end(name)
        if len(kept) > self._kept_max:
            kept.popitem(last=False)
