"""Block ids of any trace -> dense numbers, and sessions where a trace names none. Pure.

An id of a trace should mean "this block after exactly this prefix", as a FlatCake key does, but not every trace keeps that:
ids of several sources joined in one file collide, and a hash of a block's content alone repeats. `ChainNumbers` gives
the same number to two blocks exactly if their ids and all ids before them are equal. So its numbers hold the chain law
whatever the trace does: a number has one parent, hence one depth, and what is known of a chain is a prefix of it.

Numbers count from 0 in order of first sight, and what is new in a request is one range of them. A lawful trace of ids
below DENSE_LIMIT is numbered by whole arrays; other requests take a dictionary, about a microsecond a block.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Numbers = NDArray[np.int32]

DENSE_LIMIT: Final = 1 << 28  # 1 GiB of table at most, and the kernel gives only the pages that are used
_ROOT: Final = -1  # the parent of a chain's first block
# A block that more different blocks follow is a shared prompt, not the end of somebody's turn (traces/README.md).
FOLLOWERS_MAX: Final = 6


class ChainNumbers:
    """The numbers given so far."""

    def __init__(self) -> None:
        self.blocks = 0
        self._ticket = np.zeros(1 << 16, np.int32)  # by id: number + 1, 0 where none is given
        self._parent = np.full(1 << 16, _ROOT, np.int32)  # by number
        self._other: dict[tuple[int, int], int] = {}  # (parent, id) -> number, for ids that the table cannot hold

    def number(self, ids: Ids) -> tuple[Numbers, int]:
        """Numbers of a request's chain.

        Args:
            ids: (n,) from the chain's first block.

        Returns:
            (n,) numbers, and how many of them, from the first, were given before.
        """
        count = len(ids)
        if count == 0:
            return np.empty(0, np.int32), 0
        self._reserve(count)
        dense = (ids >= 0) & (ids < DENSE_LIMIT)
        # Every id that the table may hold gets its first number there, so one without a ticket was never seen.
        self._ticket = _grown(self._ticket, int(ids.max(initial=0, where=dense)) + 1)
        if not dense.all():
            return self._one_by_one(ids)
        numbers = self._ticket[ids] - np.int32(1)
        unknown = numbers < 0
        known = int(unknown.argmax()) if unknown.any() else count
        if not unknown[known:].all() or not self._is_chain(numbers[:known]):
            return self._one_by_one(ids)
        if known < count:
            tail = ids[known:]
            fresh = np.arange(self.blocks, self.blocks + count - known, dtype=np.int32)
            self._ticket[tail] = fresh + 1
            if (self._ticket[tail] != fresh + 1).any():  # an id twice in one chain
                self._ticket[tail] = 0
                return self._one_by_one(ids)
            numbers[known:] = fresh
            self._parent[fresh] = numbers[known - 1 : -1] if known else np.concatenate(([_ROOT], fresh[:-1]))
            self.blocks += count - known
        return numbers, known

    def _is_chain(self, numbers: Numbers) -> bool:
        if len(numbers) == 0:
            return True
        parents = self._parent[numbers]
        return bool(parents[0] == _ROOT and (parents[1:] == numbers[:-1]).all())

    def _one_by_one(self, ids: Ids) -> tuple[Numbers, int]:
        numbers = np.empty(len(ids), np.int32)
        parent, known = _ROOT, 0
        for i, block in enumerate(ids.tolist()):
            number = self._find(parent, block)
            if number < 0:
                number = self._give(parent, block)
            else:
                known = i + 1
            numbers[i] = parent = number
        return numbers, known

    def _find(self, parent: int, block: int) -> int:
        ticket = int(self._ticket[block]) if 0 <= block < len(self._ticket) else 0
        if ticket and self._parent[ticket - 1] == parent:
            return ticket - 1
        return self._other.get((parent, block), -1)

    def _give(self, parent: int, block: int) -> int:
        number = self.blocks
        self.blocks += 1
        self._parent[number] = parent
        if 0 <= block < len(self._ticket) and not self._ticket[block]:
            self._ticket[block] = number + 1
        else:
            self._other[parent, block] = number
        return number

    def _reserve(self, count: int) -> None:
        if self.blocks + count > len(self._parent):
            self._parent = _grown(self._parent, self.blocks + count, _ROOT)


class SessionGuess:
    """Sessions of a trace that names none.

    A request continues the session of the earlier request whose last full block lies deepest on its chain, among blocks
    that at most FOLLOWERS_MAX different ones follow in the whole trace: after more, many conversations start. So the
    trace is seen once, request by request, before its requests are placed.
    """

    def __init__(self) -> None:
        self._followers = np.zeros(1 << 16, np.int32)  # by number: different blocks that come after it
        self._session = np.zeros(1 << 16, np.int32)  # by number of a request's last full block: its session + 1
        self._turns: list[int] = []  # by session

    def see(self, numbers: Numbers, known: int) -> None:
        """Count who follows whom: `numbers` of a chain, `known` of them given before, as `ChainNumbers` says."""
        if known == len(numbers):
            return
        if numbers[-1] >= len(self._followers):
            self._followers = _grown(self._followers, int(numbers[-1]) + 1)
        self._followers[numbers[max(known - 1, 0) : -1]] += 1

    def place(self, numbers: Numbers, full_blocks: int) -> tuple[int, int]:
        """Session, from 0, and turn, from 1, of the next request. Only after all were seen.

        Args:
            full_blocks: blocks of the chain that are full; a partial one cannot be continued.
        """
        self._session = _grown(self._session, len(self._followers))
        ends = numbers[(self._session[numbers] > 0) & (self._followers[numbers] <= FOLLOWERS_MAX)]
        if len(ends):
            session = int(self._session[ends[-1]]) - 1
        else:
            session = len(self._turns)
            self._turns.append(0)
        self._turns[session] += 1
        if full_blocks and len(numbers):
            self._session[numbers[min(full_blocks, len(numbers)) - 1]] = session + 1
        return session, self._turns[session]


def _grown(array: Numbers, size: int, fill: int = 0) -> Numbers:
    if size <= len(array):
        return array
    size = max(2 * len(array), size)
    grown: Numbers = np.full(size, fill, np.int32) if fill else np.zeros(size, np.int32)  # zeros take no memory yet
    grown[: len(array)] = array
    return grown
