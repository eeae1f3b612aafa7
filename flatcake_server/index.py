"""Block key -> address, for tens of millions of blocks and batches of thousands. Pure.

One flat table of rows (key_lo, key_hi, ~address), 24 bytes each, open addressing with linear probing: a probe is one or
two cache lines. The upper 8 bits of a key's hash choose one of 256 sub-tables, the next 32 its home row there:
home = bits * capacity >> 32, so rows can be sorted by hash and a sub-table of any capacity is laid out at once:
row = i + running maximum of (home - i). No step runs per block in Python.

Each sub-table owns a fixed range of virtual memory, untouched and so free of cost beyond its capacity. It grows alone, in
place, by a quarter when three quarters are taken. Capacities start staggered over one such step, so growths are spread
evenly over time instead of meeting in one pause, and the load stays near two thirds at any size: 36 bytes a block.

A removed row becomes a tombstone (an address that cannot exist), or empty at once if nothing follows it; a rebuild
sweeps them. Keys are SHA-256 outputs, uniform by themselves; the hash mixes them with a seed all the same, so a client
that makes keys up cannot aim at one sub-table. Skewed keys cost time or an early Overloaded, never a wrong answer.

Invariants, held by `check`: between a key's home row and its row no row is empty; no key is there twice; counts agree.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flatcake_server.records import KeyArray
from flatcake_server.stats import IndexStats
from flatcake_transport.address import MISSING, AddressArray
from flatcake_transport.errors import Overloaded
from flatcake_transport.layout import align_up

U64Array = NDArray[np.uint64]
Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

KEY_BYTES: Final = 16
ROW_BYTES: Final = 24
SUB_BITS: Final = 8
SUBS: Final = 1 << SUB_BITS
LOAD_MAX: Final = 0.75  # rows taken before a rebuild; beyond it misses walk far: 8.5 rows at 0.75, 13 at 0.8
LOAD_MIN: Final = 0.48  # live rows after a removal before a sub-table shrinks: 24 / 0.48 = 50 bytes a block
GROWTH: Final = 1.25
CAPACITY_MIN: Final = 136  # a step later 170 rows: what a page holds, so less would save nothing. 1 MiB when empty
CHECK_ROWS: Final = 512  # looked at in one step of a check; of small sub-tables, this many
CHECK_TABLES: Final = 32
PREFIX_KEYS: Final = 4096  # looked up at once by `prefix`: a longer chain stops at its first miss
WINDOWS: Final = (2, 8, 32)  # rows read a round by the keys still looking, after the home row; the last one repeats

EMPTY: Final = np.uint64(0)  # what ~address is for MISSING, so fresh memory is an empty table
TOMBSTONE: Final = np.uint64(1)
MEDIUM_LIMIT: Final = np.uint64(2 << 60)  # addresses from here on name reserved media


class BlockIndex:
    """Not thread-safe: it belongs to the event loop.

    Args:
        blocks_max: bound of the whole index; memory is reserved for it, not used (about 34 bytes of address space each).
        seed: of the hash. A secret of this process where clients are not trusted.

    Raises:
        ValueError: blocks_max below 1, or beyond what a sub-table can address.
    """

    def __init__(self, blocks_max: int = 1 << 26, seed: int = 0) -> None:
        if not 1 <= blocks_max <= 1 << 36:
            raise ValueError(f"blocks_max is {blocks_max}: expected 1 to {1 << 36}")
        self._blocks_max = blocks_max
        self._seed = np.uint64(seed & (1 << 64) - 1)
        # Room for the mean, 8 standard deviations and the smallest table; whole pages, and a page is not whole rows.
        mean = blocks_max / SUBS
        rows = int((mean + 8 * mean**0.5 + 32) / LOAD_MAX * 1.02) + 2 * CAPACITY_MIN
        step = mmap.PAGESIZE // 8  # rows whose bytes are a multiple of both 24 and the page
        self._stride = -(-rows // step) * step
        self._memory = _untouched(SUBS * self._stride * ROW_BYTES)
        self._rows: U64Array = np.frombuffer(self._memory, np.uint64).reshape(-1, 3)
        self._base: Int64Array = np.arange(SUBS, dtype=np.int64) * self._stride
        self._steps = [0] * SUBS  # of growth, each sub-table has made
        self._capacity: Int64Array = np.array([self._capacity_at(sub, 0) for sub in range(SUBS)], np.int64)
        self._live: Int64Array = np.zeros(SUBS, np.int64)
        self._taken: Int64Array = np.zeros(SUBS, np.int64)  # live rows and tombstones
        self._blocks = 0

    def __len__(self) -> int:
        return self._blocks

    def lookup(self, keys: KeyArray) -> AddressArray:
        """Addresses of `keys`, (n, 16) uint8; MISSING where unknown."""
        return self._find(_words(keys))[1]

    def prefix(self, keys: KeyArray) -> AddressArray:
        """Addresses of the longest leading part of `keys` that is all there."""
        found: list[AddressArray] = []
        for first in range(0, len(keys), PREFIX_KEYS):
            addresses = self.lookup(keys[first : first + PREFIX_KEYS])
            gaps = np.flatnonzero(addresses == np.uint64(MISSING))
            if len(gaps):
                found.append(addresses[: gaps[0]])
                break
            found.append(addresses)
        return np.concatenate(found) if found else np.empty(0, np.uint64)

    def insert(self, keys: KeyArray, addresses: AddressArray) -> BoolArray:
        """Add what is not there; True where this entry was added. The first address of a key stays, in a batch too.

        Raises:
            Overloaded: `blocks_max` would be passed, or keys so skewed that one sub-table is full. Nothing was added.
            ValueError: not one address a key, or an address of a reserved medium.
        """
        words = _words(keys)
        _check_addresses(addresses, len(words))
        added = np.zeros(len(words), np.bool_)
        new = np.flatnonzero(self._find(words)[0] < 0) if self._blocks else np.arange(len(words))
        if not len(new):
            return added
        hashes = self._hash(words[new])
        order = np.argsort(hashes)  # by home row too: the table is walked in order
        ties = (np.diff(hashes[order]) == 0).any()
        if ties:
            order = np.argsort(hashes, kind="stable")
        new, hashes = new[order], hashes[order]
        words = words[new]
        if ties:
            first = np.ones(len(new), np.bool_)
            first[1:] = (words[1:] != words[:-1]).any(axis=1)
            new, words, hashes = new[first], words[first], hashes[first]
            ties = (np.diff(hashes) == 0).any()  # other keys of the same hash: then copies need not be neighbours
        stored = ~addresses[new]
        rebuilt = self._make_room(hashes, None if ties else np.column_stack((words, stored)))
        placed = rebuilt[(hashes >> np.uint64(64 - SUB_BITS)).view(np.int64)]
        rest = np.flatnonzero(~placed)
        if len(rest):
            placed[rest] = self._place(words[rest], hashes[rest], stored[rest])
        added[new[placed]] = True
        return added

    def remove(self, keys: KeyArray, addresses: AddressArray) -> int:
        """Forget keys whose stored address is the one given; how many. Others stay as they are."""
        words = _words(keys)
        _check_addresses(addresses, len(words))
        rows, stored = self._find(words)
        rows = np.unique(rows[(rows >= 0) & (stored == addresses)])
        if not len(rows):
            return 0
        self._rows[rows] = (EMPTY, EMPTY, TOMBSTONE)
        subs = rows // self._stride
        gone = np.bincount(subs, minlength=SUBS)
        self._live -= gone
        self._blocks -= len(rows)
        self._sweep(rows)
        for sub in np.flatnonzero((gone > 0) & (self._live < LOAD_MIN * self._capacity)).tolist():
            steps = self._steps[sub]
            while steps and self._live[sub] < LOAD_MIN * self._capacity_at(sub, steps):
                steps -= 1
            if steps < self._steps[sub]:
                self._rebuild(sub, steps)
        return len(rows)

    def arrays(self) -> tuple[KeyArray, AddressArray]:
        """All keys (n, 16) and their addresses, copied, in no order that means anything."""
        rows = np.concatenate([self._live_rows(sub) for sub in range(SUBS)])
        return np.ascontiguousarray(rows[:, :2]).view(np.uint8).reshape(-1, KEY_BYTES), ~rows[:, 2]

    def stats(self) -> IndexStats:
        touched = -(-self._capacity * ROW_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        size_bytes = int(touched.sum())
        return IndexStats(self._blocks, size_bytes, size_bytes / self._blocks if self._blocks else 0.0)

    def check(self) -> None:
        """Raises: AssertionError: an invariant of this module is broken."""
        for _ in self.check_steps():
            pass

    def check_steps(self) -> Iterator[None]:
        """As `check`, in steps of 0.2 ms at most. The index may change between them: each looks at what is there then."""
        assert self._live.sum() == self._blocks, "the count of blocks is wrong"
        live: list[Int64Array] = []
        for sub in range(SUBS):
            table = self._table(sub)
            rows = np.flatnonzero(table[:, 2] > TOMBSTONE)
            assert len(rows) == self._live[sub], f"live rows of sub-table {sub}"
            assert np.count_nonzero(table[:, 2]) == self._taken[sub], f"taken rows of sub-table {sub}"
            assert self._taken[sub] < len(table), f"sub-table {sub} has no empty row: a miss would not end"
            beyond = self._rows[self._base[sub] + len(table) : self._base[sub] + self._stride]
            assert not beyond[: 2 * CAPACITY_MIN].any(), f"sub-table {sub} has rows beyond its capacity"
            at = 0
            while at < len(table):
                if at:  # it may have changed in the pause
                    table = self._table(sub)
                    rows = np.flatnonzero(table[at : at + CHECK_ROWS, 2] > TOMBSTONE) + at
                here = rows if len(table) <= CHECK_ROWS else rows[: np.searchsorted(rows, at + CHECK_ROWS)]
                live.append(here + self._base[sub])
                at += CHECK_ROWS
                if sum(map(len, live)) >= CHECK_ROWS // 2 or len(live) >= CHECK_TABLES:
                    self._check_reached(np.concatenate(live))
                    live.clear()
                    yield
        self._check_reached(np.concatenate(live or [np.empty(0, np.int64)]))

    def _check_reached(self, rows: Int64Array) -> None:
        found, _ = self._find(np.ascontiguousarray(self._rows[rows, :2]))
        assert np.array_equal(found, rows), "a row cannot be reached from its key's home, or its key is there twice"

    def _hash(self, words: U64Array) -> U64Array:
        """64 bits of which the upper ones are well mixed (multiply and fold, as in splitmix64)."""
        mixed = words[:, 0] ^ self._seed
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(32)
        mixed += words[:, 1]
        mixed *= np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        return mixed

    def _homes(self, hashes: U64Array) -> tuple[Int64Array, Int64Array]:
        """(sub-table, home row within it)."""
        subs = (hashes >> np.uint64(64 - SUB_BITS)).view(np.int64)
        bits = ((hashes << np.uint64(SUB_BITS)) >> np.uint64(32)).view(np.int64)
        return subs, bits * self._capacity[subs] >> 32

    def _find(self, words: U64Array) -> tuple[Int64Array, AddressArray]:
        """(row or -1, address or MISSING) of each key."""
        subs, step = self._homes(self._hash(words))
        base, capacity = self._base[subs], self._capacity[subs]
        # Half of all keys stand in their home row. That one is looked at first, without windows and what they cost.
        rows = step + base
        seen = np.take(self._rows, rows, axis=0)
        stored = seen[:, 2]
        match = (seen[:, 0] == words[:, 0]) & (seen[:, 1] == words[:, 1]) & (stored > TOMBSTONE)
        found = np.where(match, rows, -1)
        addresses = np.where(match, ~stored, np.uint64(MISSING))
        asked = np.flatnonzero(~match & (stored != EMPTY))
        step, width = step[asked], 1
        for following in chain(WINDOWS, repeat(WINDOWS[-1])):
            if not len(asked):
                return found, addresses
            base, capacity = self._base[subs[asked]], self._capacity[subs[asked]]
            step = step + width
            step -= capacity * (step >= capacity)
            width = following
            windows = _window(step, width, capacity) + base[:, None]
            near = np.take(self._rows, windows.ravel(), axis=0).reshape(len(windows), width, 3)
            kept = near[:, :, 2]
            lo, hi = words[asked, 0], words[asked, 1]
            match = (near[:, :, 0] == lo[:, None]) & (near[:, :, 1] == hi[:, None]) & (kept > TOMBSTONE)
            stop = match | (kept == EMPTY)
            at = stop.argmax(axis=1)
            line = np.arange(len(windows))
            hit = np.flatnonzero(match[line, at])
            found[asked[hit]] = windows[hit, at[hit]]
            addresses[asked[hit]] = ~kept[hit, at[hit]]
            on = np.flatnonzero(~stop[line, at])
            asked, step = asked[on], step[on]
        raise AssertionError("unreachable: every sub-table keeps an empty row")

    def _place(self, words: U64Array, hashes: U64Array, stored: U64Array) -> BoolArray:
        """Put keys that are not there into the first free row after their homes; True where placed.

        Keys that want the same row are told apart by a claim: all write, the first of the batch stays, the others look
        on from there. A later copy of a key always wants what its first one wants, so it meets it and gives up.
        """
        placed = np.zeros(len(words), np.bool_)
        subs, step = self._homes(hashes)
        asked = np.arange(len(words))
        for width in chain(WINDOWS, repeat(WINDOWS[-1])):
            base, capacity = self._base[subs], self._capacity[subs]
            rows = _window(step, width, capacity) + base[:, None]
            seen = self._rows[:, 2][rows]
            free = seen <= TOMBSTONE
            at = free.argmax(axis=1)
            line = np.arange(len(rows))
            able = np.flatnonzero(free[line, at])
            mine = rows[able, at[able]]
            was_tombstone = seen[able, at[able]] == TOMBSTONE
            self._rows[mine[::-1], 2] = asked[able[::-1]].astype(np.uint64)  # of equal rows the last write stays
            won = self._rows[mine, 2] == asked[able].astype(np.uint64)
            winner, taken = asked[able[won]], mine[won]
            self._rows[taken, :2] = words[winner]
            self._rows[taken, 2] = stored[winner]
            placed[winner] = True
            grown = np.bincount(subs[able[won]], minlength=SUBS)
            self._live += grown
            self._taken += grown - np.bincount(subs[able[won & was_tombstone]], minlength=SUBS)
            self._blocks += len(winner)
            lost, lost_rows = able[~won], mine[~won]
            copies = (self._rows[lost_rows, :2] == words[asked[lost]]).all(axis=1)
            step = step + np.where(free[line, at], at, width)  # losers look again at the row they lost, and pass it
            step -= capacity * (step >= capacity)
            on = np.ones(len(rows), np.bool_)
            on[able[won]] = False
            on[lost[copies]] = False
            if not on.any():
                break
            asked, subs, step = asked[on], subs[on], step[on]
        return placed

    def _make_room(self, hashes: U64Array, rows: U64Array | None) -> BoolArray:
        """Rebuild the sub-tables that would pass LOAD_MAX with these keys, which are sorted by hash.

        Args:
            rows: (key_lo, key_hi, ~address) of the keys, none there yet, all different: each sub-table that is rebuilt takes
                its own in at once, which is how an index is filled at the start. None: they are only counted.

        Returns: which sub-tables have taken theirs in.
        Raises: Overloaded, before anything changed.
        """
        if self._blocks + len(hashes) > self._blocks_max:
            raise Overloaded(f"the index holds {self._blocks} of {self._blocks_max} blocks: {len(hashes)} are too many")
        coming = np.bincount((hashes >> np.uint64(64 - SUB_BITS)).view(np.int64), minlength=SUBS)
        full = np.flatnonzero((coming > 0) & (self._taken + coming > LOAD_MAX * self._capacity))
        plans = []
        for sub in full.tolist():
            live = int(self._live[sub] + coming[sub])
            steps = self._steps[sub]
            capacity = self._capacity_at(sub, steps)
            # Tombstones alone fill it: a sweep at the same capacity is enough, if it lasts for a while.
            limit = 0.95 * LOAD_MAX
            while live > limit * capacity and capacity < self._stride:
                steps += 1
                capacity, limit = self._capacity_at(sub, steps), LOAD_MAX
            if live > (1 + LOAD_MAX) / 2 * capacity:
                raise Overloaded(f"sub-table {sub} of the index is full with {self._live[sub]} blocks: keys are skewed")
            plans.append((sub, steps))
        end = np.cumsum(coming)
        taken_in = np.zeros(SUBS, np.bool_)
        for sub, steps in plans:
            self._rebuild(sub, steps, rows[end[sub] - coming[sub] : end[sub]] if rows is not None else None)
            taken_in[sub] = rows is not None
        return taken_in

    def _capacity_at(self, sub: int, steps: int) -> int:
        """Rows of a sub-table after so many steps of growth: the next sub-table has them a 256th of a step later."""
        return min(int(CAPACITY_MIN * GROWTH ** (steps + sub / SUBS)), self._stride)

    def _rebuild(self, sub: int, steps: int, more: U64Array | None = None) -> None:
        """Lay a sub-table out anew, with `more` rows: sorted by home, no tombstones. At 10 M blocks 40,000 rows."""
        rows = self._live_rows(sub)
        if more is not None:
            rows = np.concatenate((rows, more))
            self._blocks += len(more)
        old, capacity = int(self._capacity[sub]), self._capacity_at(sub, steps)
        self._table(sub)[:] = 0
        if capacity < old:
            self._give_back(sub, capacity, old)
        self._steps[sub], self._capacity[sub] = steps, capacity
        self._taken[sub] = self._live[sub] = len(rows)
        hashes = self._hash(rows[:, :2])
        order = np.argsort(hashes)
        _, homes = self._homes(hashes[order])
        index = np.arange(len(rows))
        places = index + np.maximum.accumulate(homes - index) if len(rows) else index
        inside = int(np.searchsorted(places, capacity))
        table = self._table(sub)
        table[places[:inside]] = rows[order[:inside]]
        if inside < len(rows):  # the last cluster runs over the end: few rows, put in one by one from the start
            rest = rows[order[inside:]]
            self._taken[sub] = self._live[sub] = inside
            self._blocks -= len(rest)
            self._place(rest[:, :2], hashes[order[inside:]], rest[:, 2])

    def _sweep(self, rows: Int64Array) -> None:
        """Tombstones that no probe needs to pass, those before an empty row, become empty."""
        while len(rows):
            subs = rows // self._stride
            base, capacity = self._base[subs], self._capacity[subs]
            after = rows - base + 1
            after -= capacity * (after >= capacity)
            rows = rows[self._rows[after + base, 2] == EMPTY]
            self._rows[rows, 2] = EMPTY
            subs = rows // self._stride
            self._taken -= np.bincount(subs, minlength=SUBS)
            base, capacity = self._base[subs], self._capacity[subs]
            before = rows - base - 1
            before += capacity * (before < 0)
            rows = before + base
            rows = rows[self._rows[rows, 2] == TOMBSTONE]

    def _give_back(self, sub: int, capacity: int, old: int) -> None:
        """Return the pages beyond a smaller capacity to the system."""
        first = int(self._base[sub])
        start, end = (align_up((first + rows) * ROW_BYTES, mmap.PAGESIZE) for rows in (capacity, old))
        if end > start and hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED, start, end - start)

    def _table(self, sub: int) -> U64Array:
        return self._rows[self._base[sub] : self._base[sub] + self._capacity[sub]]

    def _live_rows(self, sub: int) -> U64Array:
        return (table := self._table(sub))[table[:, 2] > TOMBSTONE]


def _untouched(size_bytes: int) -> mmap.mmap:
    """Zeros that cost memory page by page as they are written, whatever the system thinks of the whole size.

    Huge pages are declined: each sub-table's first write would take 2 MiB, 512 MiB in all for an empty index.
    """
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


def _words(keys: KeyArray) -> U64Array:
    if keys.ndim != 2 or keys.shape[1] != KEY_BYTES or keys.dtype != np.uint8:
        raise ValueError(f"keys are (n, {KEY_BYTES}) uint8, not {keys.shape} {keys.dtype}")
    return np.ascontiguousarray(keys).view(np.uint64).reshape(-1, 2)


def _check_addresses(addresses: AddressArray, keys: int) -> None:
    if addresses.shape != (keys,) or addresses.dtype != np.uint64:
        raise ValueError(f"expected {keys} addresses (uint64), not {addresses.shape} {addresses.dtype}")
    if (addresses >= MEDIUM_LIMIT).any():
        raise ValueError("an address names a reserved medium: only 0 (memory) and 1 (ssd) exist")


def _window(step: Int64Array, width: int, capacity: Int64Array) -> Int64Array:
    """(n, width) rows within the sub-table from `step` on, wrapping at its end."""
    rows, limit = step[:, None] + np.arange(width), capacity[:, None]
    return rows - limit * (rows >= limit)
