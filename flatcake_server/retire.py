"""How space comes back: reclaim, drop, quarantine, and the end of a path. Carries out what the pure parts decide.

The order is always: make invisible, write it in the journal, take the bytes from the disk, then count them free. A crash
in between leaves files the journal does not know; the next start deletes them. Bytes a reader has leased are not
reused: memory of a session that had to go at once waits in `limbo` for the last lease on it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from flatcake_server.catalog import MEMORY_POOL, Catalog, Session, SessionFile
from flatcake_server.disk import SLOW_S, Disk
from flatcake_server.extents import ExtentAllocator
from flatcake_server.file_ends import FileEnds
from flatcake_server.lease import LeaseTable
from flatcake_server.pace import Pace
from flatcake_server.reclaim import TRIMS_AT_ONCE, TRIMS_MAX, reclaim_need
from flatcake_server.records import SegmentRecord, SessionNo
from flatcake_server.tasks import Background
from flatcake_transport.address import Medium
from flatcake_transport.errors import FlatCakeError, Overloaded

log = logging.getLogger(__name__)

# Dropped together when there are as many sessions as there may be: the table is then full once in so many turns.
SESSIONS_AT_ONCE: Final = 64
UNLOAD_AGAIN_S: Final = 10.0


class Retirement:
    """Owns what leaves. Belongs to the event loop."""

    def __init__(
        self,
        catalog: Catalog,
        memory: ExtentAllocator,
        ssd_range: ExtentAllocator,
        leases: LeaseTable,
        disks: dict[int, Disk],
        watermarks: dict[Medium, tuple[float, float]],
    ) -> None:
        self._catalog = catalog
        self._memory = memory
        self._memory_quota = memory.used_bytes + memory.free_bytes
        self._leases = leases
        self._disks = disks
        self._watermarks = watermarks
        self._memory_room = asyncio.Lock()
        self._memory_futile = False  # nothing could go: not looked for again before the next tick
        self.unloading: set[asyncio.Task[None]] = (
            set()
        )  # paths that failed: no longer found, and on their way out of the tables
        self._limbo: list[tuple[SessionNo, int, int]] = []
        self.counts: Counter[str] = Counter()
        self.files = FileEnds(catalog, ssd_range, disks, self.busy, self.fail_disk, self.counts)
        self.background = Background()
        self.reclaimed: Counter[int] = Counter()

    @property
    def limbo_bytes(self) -> int:
        return sum(size for _, _, size in self._limbo)

    @property
    def limbo(self) -> list[tuple[int, int]]:
        return [(offset, size) for _, offset, size in self._limbo]

    def busy(self, session_no: int) -> bool:
        session = self._catalog.sessions.get(SessionNo(session_no))
        return session is None or session.holds > 0 or self._leases.pins(session_no) > 0

    # -- making room -----------------------------------------------------------------------------------------------

    async def make_room(self, disk: Disk, size_bytes: int, *, drop: bool = True) -> None:
        """Have `size_bytes` free on a path: unused tails go first, then sessions, but before one goes what others have left.

        Each least recently used first.

        Args:
            drop: without it no session goes, and what is free above the high watermark stays free.
        Raises: Overloaded: it cannot be had.
        """
        high, low = self._watermarks[Medium.SSD]
        order, trims = self._catalog.order, TRIMS_MAX
        async with disk.room:
            while need := reclaim_need(disk.used_bytes, size_bytes, disk.quota_bytes, high, low):
                tails = order.idle_tails(disk.pool, need, self.files.in_hand, min(trims, TRIMS_AT_ONCE))
                if tails:
                    trims -= len(tails)
                    await self.files.trim_tails(disk, [self._catalog.sessions[SessionNo(number)] for number in tails])
                    continue
                victims = order.victims(disk.pool, need, self.busy) if drop else []
                freed = sum(self._catalog.sessions[SessionNo(victim)].file_bytes for victim in victims)
                if not victims or disk.free_bytes + freed < size_bytes:
                    break  # dropping what may go would not make it fit: then nothing is dropped
                before = disk.used_bytes
                if left := self.files.left(disk.pool, order.stamp(victims[0]), need):
                    for session in await self.files.drop(disk, left):
                        await self.settle(session)
                else:
                    await self._drop_all(disk.pool, victims)
                if disk.used_bytes >= before:
                    break
            if disk.free_bytes < size_bytes or (need and not drop):
                raise Overloaded(
                    f"{disk.path} has {disk.free_bytes} bytes free of its quota of {disk.quota_bytes}; {size_bytes} are "
                    "needed, and the rest is being read or written"
                )

    async def make_session_room(self, sessions_max: int) -> None:
        """Have room for one more session in the tables: drop some of the pool that has most and can spare some."""
        order = self._catalog.order
        for pool in self._fullest_first(order.sessions_in):
            if len(self._catalog) < sessions_max:
                return
            some = SESSIONS_AT_ONCE * order.bytes_of(pool) // max(1, order.sessions_in(pool))
            for victim in order.victims(pool, max(1, some), self._stays):
                if self._still_goes(victim, pool):
                    await self.drop(self._catalog.sessions[SessionNo(victim)])
                    self.reclaimed[pool] += 1

    async def make_index_room(self, blocks: int, blocks_max: int) -> None:
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
        """Pools by what they have; what is lost goes before all else. None of a path that hangs: who waits for room would, too."""
        well = [MEMORY_POOL, *(pool for pool, disk in self._disks.items() if disk.waited_s <= SLOW_S)]
        lost = [pool for pool in well if pool != MEMORY_POOL and self._disks[pool].failure]
        return lost + sorted((pool for pool in well if pool not in lost), key=size_of, reverse=True)

    def _stays(self, session_no: int) -> bool:
        """As `busy`, or its end would have to wait for a path that hangs: what is in memory may have files as well."""
        if self.busy(session_no):
            return True
        disk = self._disks.get(self._catalog.sessions[SessionNo(session_no)].pool)
        return disk is not None and disk.waited_s > SLOW_S

    async def make_memory_piece(self, size_bytes: int) -> int | None:
        """Memory in one piece on a node that has nothing else: drop sessions one by one until there is. None: there is not."""
        offset = self._memory.allocate(size_bytes)
        while offset is None and self._memory.free_bytes < self._memory_quota:
            victims = self._catalog.order.victims(MEMORY_POOL, size_bytes, self.busy)
            freed = sum(self._catalog.sessions[SessionNo(victim)].memory_bytes for victim in victims)
            if not victims or self._memory.free_bytes + freed < size_bytes:
                return None
            await self._drop_all(MEMORY_POOL, victims[:1])
            offset = self._memory.allocate(size_bytes)
        return offset

    async def make_memory_room(self, size_bytes: int) -> None:
        """Drop what sessions have in memory, down to the low watermark, if `size_bytes` more would cross the high one."""
        high, low = self._watermarks[Medium.MEMORY]
        if size_bytes > self._memory_quota:
            return
        async with self._memory_room:
            need = reclaim_need(self._memory.used_bytes, size_bytes, self._memory_quota, high, low)
            if need:
                victims = self._catalog.order.victims(MEMORY_POOL, need, self.busy)
                self._memory_futile = not victims
                await self._drop_all(MEMORY_POOL, victims)

    def memory_room_bytes(self) -> int:
        """Free up to the high watermark; below 0 above it."""
        return int(self._watermarks[Medium.MEMORY][0] * self._memory_quota) - self._memory.used_bytes

    def memory_above_watermark(self, size_bytes: int) -> bool:
        return size_bytes > self.memory_room_bytes()

    def want_memory_room(self, size_bytes: int) -> None:
        """The same behind the caller's back: what it wants now goes to SSD."""
        if not self._memory_room.locked() and not self._memory_futile:
            self.background.spawn(self.make_memory_room(size_bytes))

    async def _drop_all(self, pool: int, victims: Iterable[int]) -> None:
        for session_no in victims:
            if not self._still_goes(session_no, pool):
                continue
            session = self._catalog.sessions[SessionNo(session_no)]
            if pool == MEMORY_POOL and session.files:
                # What it has on SSD frees no memory. Blocks between are missing then, and stored anew when they are used.
                self._hide([s for s in session.segments if s.address.medium is Medium.MEMORY])
                self.background.spawn(
                    self.settle(session)
                )  # with no segment left it has a path to wait for, which may hang
            else:
                await self.drop(session)
            self.reclaimed[pool] += 1

    def _still_goes(self, victim: int, pool: int) -> bool:
        """Others were dropped since it was chosen: it may be gone itself, in use, or have been forked."""
        return not self.busy(victim) and self._catalog.order.may_go(victim, pool)

    # -- sessions --------------------------------------------------------------------------------------------------

    async def drop(self, session: Session) -> None:
        """Take a session out whole. When it returns its bytes are free, or counted as releasing."""
        segments, files = list(session.segments), list(session.files)
        self._vanish(session)
        disk = self._disks.get(session.pool)
        if disk is None or not files:
            return
        disk.files_count -= len(files)
        for file in files:
            self.files.to_releasing(disk, file.base, file.size_bytes)
        async with session.lock:
            try:
                ssd = [segment.generation for segment in segments if segment.address.medium is Medium.SSD]
                await disk.run(disk.journal.drop, session.session_no, [file.file_id for file in files], ssd)
            except FlatCakeError as error:
                self.fail_disk(disk, f"its journal cannot be written: {error}")
                return
            await self.files.delete(disk, files)

    def _vanish(self, session: Session) -> None:
        self._hide(list(session.segments))
        self._catalog.forget(session)

    def _hide(self, segments: list[SegmentRecord]) -> None:
        """Make segments invisible; memory is free with them, or with the last lease on it."""
        self._catalog.unpublish(*segments)
        for segment in segments:
            if segment.address.medium is Medium.MEMORY:
                self._free_memory(segment)

    def _free_memory(self, segment: SegmentRecord) -> None:
        if self._leases.pins(segment.session_no) > 0:
            self._limbo.append((segment.session_no, segment.address.offset, segment.total_bytes))
        else:
            self._memory.free(segment.address.offset, segment.total_bytes)

    async def settle(self, session: Session) -> None:
        """Drop a session that nothing was stored in and nobody writes to."""
        if not session.gone and not session.segments and session.holds == 0:
            await self.drop(session)

    # -- files -----------------------------------------------------------------------------------------------------

    async def seal(self, session: Session, file: SessionFile) -> None:
        """A write into the file failed: it is read from now on, never written again. The caller holds the session's lock.

        So no commit is half way, and a drop is either not begun or waits: its record never comes after that of its end,
        and never names a session that the journal does not know. Such a journal is damaged to the next start.
        """
        if file.sealed or session.gone:
            return
        file.sealed = True
        self.counts["sealed"] += 1
        disk = self._disks[session.pool]
        log.warning("session file %x of %s on %s is sealed after a failed write", file.file_id, session.name, disk.path)
        if file.written_bytes:
            try:
                await disk.run(disk.journal.put_file, file.record(session.session_no))
            except FlatCakeError as error:
                self.fail_disk(disk, f"its journal cannot be written: {error}")

    # -- segments --------------------------------------------------------------------------------------------------

    async def discard(self, session: Session, segment: SegmentRecord) -> None:
        """Take one segment out: it is corrupt, or somebody else's copy came first. Its bytes in a file stay a hole."""
        self._catalog.unpublish(segment)
        if segment.address.medium is Medium.MEMORY:
            self._free_memory(segment)
        else:
            for file in session.files:
                if file.file_id == segment.file_id:
                    file.committed_bytes -= segment.total_bytes
            disk = self._disks[session.pool]
            async with session.lock:  # before the session's own end: a journal has no segment without its file
                try:
                    await disk.run(disk.journal.drop, None, [], [segment.generation], True)  # also over a power cut
                except FlatCakeError as error:
                    self.fail_disk(disk, f"its journal cannot be written: {error}")
        await self.settle(session)

    # -- paths -----------------------------------------------------------------------------------------------------

    def fail_disk(self, disk: Disk, failure: str) -> None:
        """A path can no longer be trusted with writes or asked: its sessions become misses, all else goes on."""
        if disk.failure:
            return
        disk.failure = failure
        self._catalog.lose(disk.pool)
        self.counts["disk_failures"] += 1
        sessions = self._catalog.order.sessions_in(disk.pool)
        log.error("SSD path %s is out of service, %d sessions with it: %s", disk.path, sessions, failure)
        self.unloading.add(task := asyncio.ensure_future(self._unload(disk)))
        task.add_done_callback(self.unloading.discard)

    async def _unload(self, disk: Disk) -> None:
        """Until nothing is left: whatever goes wrong, half a path may not stay in the tables."""
        while True:
            try:
                await self._empty(disk)
            except Exception as error:  # noqa: BLE001 - the edge of a task that nobody waits for
                self.background.unforeseen(f"what SSD path {disk.path} lost is taken out of the tables later", error)
                await asyncio.sleep(UNLOAD_AGAIN_S)
            else:
                return

    async def _empty(self, disk: Disk) -> None:
        pace = Pace()
        for gone in self._catalog.unload(disk.pool):
            for segment in gone:
                if segment.address.medium is Medium.MEMORY:
                    self._free_memory(segment)
            await pace.rest()
        for session in list(self._catalog.sessions.values()):
            if session.pool == disk.pool and not session.gone:
                disk.lost += [(file.base, file.size_bytes) for file in session.files]
                self._catalog.forget(session)
            await pace.rest()
        self._catalog.emptied(disk.pool)

    # -- time ------------------------------------------------------------------------------------------------------

    async def tick(self) -> None:
        """Once a second: memory whose last lease ended, files that could not be deleted."""
        self._memory_futile = False
        held = [(no, offset, size) for no, offset, size in self._limbo if self._leases.pins(no) > 0]
        for no, offset, size in self._limbo:
            if self._leases.pins(no) == 0:
                self._memory.free(offset, size)
        self._limbo = held
        for disk in self._disks.values():
            if disk.condemned and not disk.failure:
                again, disk.condemned = disk.condemned, []
                await self.files.delete(disk, again)

    async def drain(self) -> None:
        """Wait for what was spawned. The end of a process needs no tables emptied."""
        for task in self.unloading:
            task.cancel()
        await self.background.drain()
