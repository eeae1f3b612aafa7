"""Who goes to make room: on an SSD path, in memory, in the tables. How they go is in retire.py.

Least recently used first, and never what is being read or written, or what others depend on (reclaim.py). What would not make enough
room by all that may go drops nothing. Whoever asks waits until there is room; so nobody is chosen whose end would wait for a path that hangs.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from flatcake_server.catalog import MEMORY_POOL, Catalog, Session
from flatcake_server.disk import SLOW_S, Disk
from flatcake_server.extents import ExtentAllocator
from flatcake_server.reclaim import TRIMS_AT_ONCE, TRIMS_MAX, reclaim_need
from flatcake_server.records import SessionNo
from flatcake_server.retire import Retirement
from flatcake_transport.address import Medium
from flatcake_transport.errors import Overloaded

# Dropped together when there are as many sessions as there may be: the table is then full once in so many turns.
SESSIONS_AT_ONCE: Final = 64


class Room:
    """Belongs to the event loop. `watermarks`: the high and the low one of each medium, as shares of its quota."""

    def __init__(
        self,
        catalog: Catalog,
        memory: ExtentAllocator,
        disks: Mapping[int, Disk],
        retirement: Retirement,
        watermarks: Mapping[Medium, tuple[float, float]],
    ) -> None:
        self._catalog = catalog
        self._memory = memory
        self._memory_quota = memory.used_bytes + memory.free_bytes
        self._disks = disks
        self._retirement = retirement
        self._busy = retirement.busy
        self._watermarks = watermarks
        self._making_memory = asyncio.Lock()
        self._memory_futile = False  # nothing could go: not looked for again before the next tick
        self.reclaimed: Counter[int] = Counter()  # sessions, by pool

    def tick(self) -> None:
        """Once a second."""
        self._memory_futile = False

    # -- on an SSD path --------------------------------------------------------------------------------------------

    async def on_path(self, disk: Disk, size_bytes: int, *, drop: bool = True) -> None:
        """Have `size_bytes` free on a path: unused tails go first, then whole sessions, each least recently used first.

        Args:
            drop: without it no session goes, and what is free above the high watermark stays free.
        Raises: Overloaded: it cannot be had.
        """
        high, low = self._watermarks[Medium.SSD]
        order, trims = self._catalog.order, TRIMS_MAX
        async with disk.room:
            while need := reclaim_need(disk.used_bytes, size_bytes, disk.quota_bytes, high, low):
                tails = order.idle_tails(disk.pool, need, self._unfit_for_trim, min(trims, TRIMS_AT_ONCE))
                if tails:
                    trims -= len(tails)
                    await self._retirement.trim_tails(disk, [self._session(number) for number in tails])
                    continue
                victims = order.victims(disk.pool, need, self._busy) if drop else []
                freed = sum(self._session(victim).file_bytes for victim in victims)
                if not victims or disk.free_bytes + freed < size_bytes:
                    break
                before = disk.used_bytes
                await self._drop_all(disk.pool, victims)
                if disk.used_bytes >= before:
                    break
            if disk.free_bytes < size_bytes or (need and not drop):
                raise Overloaded(
                    f"{disk.path} has {disk.free_bytes} bytes free of its quota of {disk.quota_bytes}; {size_bytes} are "
                    "needed, and the rest is being read or written"
                )

    def _unfit_for_trim(self, session_no: int) -> bool:
        return self._busy(session_no) or self._session(session_no).lock.locked()

    # -- in memory -------------------------------------------------------------------------------------------------

    async def in_memory(self, size_bytes: int) -> None:
        """Drop what sessions have in memory, down to the low watermark, if `size_bytes` more would cross the high one."""
        high, low = self._watermarks[Medium.MEMORY]
        if size_bytes > self._memory_quota:
            return
        async with self._making_memory:
            need = reclaim_need(self._memory.used_bytes, size_bytes, self._memory_quota, high, low)
            if need:
                victims = self._catalog.order.victims(MEMORY_POOL, need, self._busy)
                self._memory_futile = not victims
                await self._drop_all(MEMORY_POOL, victims)

    def want_in_memory(self, size_bytes: int) -> None:
        """The same behind the caller's back: what it wants now goes to SSD."""
        if not self._making_memory.locked() and not self._memory_futile:
            self._retirement.background.spawn(self.in_memory(size_bytes))

    async def memory_piece(self, size_bytes: int) -> int | None:
        """Memory in one piece on a node that has nothing else: drop sessions one by one until there is. None: there is not."""
        offset = self._memory.allocate(size_bytes)
        while offset is None and self._memory.free_bytes < self._memory_quota:
            victims = self._catalog.order.victims(MEMORY_POOL, size_bytes, self._busy)
            freed = sum(self._session(victim).memory_bytes for victim in victims)
            if not victims or self._memory.free_bytes + freed < size_bytes:
                return None
            await self._drop_all(MEMORY_POOL, victims[:1])
            offset = self._memory.allocate(size_bytes)
        return offset

    def memory_left_bytes(self) -> int:
        """Free up to the high watermark; below 0 above it."""
        return int(self._watermarks[Medium.MEMORY][0] * self._memory_quota) - self._memory.used_bytes

    # -- in the tables ---------------------------------------------------------------------------------------------

    async def for_session(self, sessions_max: int) -> None:
        """Have room for one more session: drop some of the pool that has most and can spare some."""
        order = self._catalog.order
        for pool in self._fullest_first(order.sessions_in):
            if len(self._catalog) < sessions_max:
                return
            some = SESSIONS_AT_ONCE * order.bytes_of(pool) // max(1, order.sessions_in(pool))
            for victim in order.victims(pool, max(1, some), self._stays):
                if self._still_goes(victim):
                    await self._retirement.drop(self._session(victim))
                    self.reclaimed[pool] += 1

    async def for_blocks(self, blocks: int, blocks_max: int) -> None:
        """Have room for `blocks` more in the index: drop some of the pool that has most and can spare some."""
        catalog = self._catalog
        for pool in self._fullest_first(catalog.blocks_in.__getitem__):
            before = -1
            while blocks <= blocks_max < len(catalog.index) + blocks and len(catalog.index) != before:
                before = len(catalog.index)
                over = max(blocks, before + blocks - blocks_max)
                some = over * catalog.order.bytes_of(pool) // max(1, catalog.blocks_in[pool])
                await self._drop_all(pool, catalog.order.victims(pool, max(1, some), self._stays))

    def _fullest_first(self, size_of: Callable[[int], int]) -> list[int]:
        """Pools by what they have; what is lost goes before all else. None of a path that hangs."""
        well = [MEMORY_POOL, *(pool for pool, disk in self._disks.items() if disk.waited_s <= SLOW_S)]
        lost = [pool for pool in well if pool != MEMORY_POOL and self._disks[pool].failure]
        return lost + sorted((pool for pool in well if pool not in lost), key=size_of, reverse=True)

    def _stays(self, session_no: int) -> bool:
        """As `busy`, or its end would have to wait for a path that hangs: what is in memory may have files as well."""
        if self._busy(session_no):
            return True
        disk = self._disks.get(self._session(session_no).pool)
        return disk is not None and disk.waited_s > SLOW_S

    # -- the end of those chosen -----------------------------------------------------------------------------------

    async def _drop_all(self, pool: int, victims: Iterable[int]) -> None:
        for victim in victims:
            if not self._still_goes(victim):
                continue
            session = self._session(victim)
            if pool == MEMORY_POOL and session.files:
                self._retirement.drop_memory(session)  # what it has on SSD frees no memory
            else:
                await self._retirement.drop(session)
            self.reclaimed[pool] += 1

    def _still_goes(self, victim: int) -> bool:
        """Others were dropped since it was chosen: it may be gone itself, in use, or have been forked."""
        return not self._busy(victim) and not self._catalog.order.dependents(victim)

    def _session(self, number: int) -> Session:
        return self._catalog.sessions[SessionNo(number)]
