"""Which prefixes of other nodes are worth a copy here: those that engines of this node read there again and again. Pure.

A remote lookup found a prefix; all its lengths that others may share with it are counted: the anchors, and where the owner's
segments end (a shared system prompt is a segment of its own). The longest that was found `after_hits` times is hot, if it fits the
room that there is. The reply then says so, and the client that restores it writes it here from the slots it went to.

Nobody need do so: a lookup may be no restore, a restore may fail. So `TELLS` lookups are told, a shard each; when it is still
not here then, it is counted anew. Once it is here, its lookups are local hits and do not come by any more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from flatcake_server.records import KeyArray

PREFIXES_MAX: Final = 1 << 16  # counted at once, some 200 B each; the least recently found is forgotten
FORGET_S: Final = 3600.0  # what nobody has read for so long begins anew
TELLS: Final = 8


@dataclass(slots=True)
class _Count:
    hits: int
    last_s: float
    told: int = 0


class HotPrefixes:
    """Belongs to the event loop."""

    def __init__(self, after_hits: int, *, prefixes_max: int = PREFIXES_MAX, forget_s: float = FORGET_S) -> None:
        """Raises: ValueError: nothing would be read before it is copied."""
        if after_hits < 1:
            raise ValueError(f"a prefix is hot after 1 hit or more, not {after_hits}")
        self._after_hits, self._prefixes_max, self._forget_s = after_hits, prefixes_max, forget_s
        self._counts: OrderedDict[bytes, _Count] = OrderedDict()  # by the prefix's last key

    def __len__(self) -> int:
        return len(self._counts)

    def found(
        self, keys: KeyArray, held: int, lengths: Sequence[int], *, shards: int, room_blocks: int, now_s: float
    ) -> int:
        """A lookup found these lengths of a chain elsewhere. Which of them is to be copied; 0: none.

        Args:
            held: blocks that are here.
            lengths: ascending, in blocks from the chain's first one, above `held`.
            shards: of the space: as many lookups are one request.
            room_blocks: what a copy may take.
        """
        best, hot = 0, self._after_hits * shards
        for length in lengths:
            count = self._found(keys[length - 1].tobytes(), now_s)
            if count.hits >= hot and length - held <= room_blocks:
                best = length
        if best:
            told = self._counts[keys[best - 1].tobytes()]
            told.told += 1
            if told.told >= TELLS * shards:
                for length in lengths:
                    if length <= best:
                        del self._counts[keys[length - 1].tobytes()]
        while len(self._counts) > self._prefixes_max:
            self._counts.popitem(last=False)
        return best

    def _found(self, key: bytes, now_s: float) -> _Count:
        count = self._counts.pop(key, None)
        if count is None or now_s - count.last_s > self._forget_s:
            count = _Count(0, now_s)
        count.hits += 1
        count.last_s = now_s
        self._counts[key] = count
        return count
