"""How space comes back: drop, trim, quarantine, and the end of a path. Who goes to make room is said in room.py.

The order is always: make invisible, write it in the journal, take the bytes from the disk, then count them free. A crash
in between leaves files the journal does not know; the next start deletes them. Bytes a reader has leased are not
reused: memory of a session that had to go at once waits in `limbo` for the last lease on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from typing import Final

from flatcake_server.catalog import Catalog, Session, SessionFile
from flatcake_server.disk import Disk
from flatcake_server.extents import ExtentAllocator
from flatcake_server.lease import LeaseTable
from flatcake_server.pace import Pace
from flatcake_server.reclaim import TRIMS_AT_ONCE, tails_of
from flatcake_server.records import SegmentRecord, SessionNo
from flatcake_server.tasks import Background
from flatcake_transport.address import Medium
from flatcake_transport.errors import FlatCakeError, Unavailable

log = logging.getLogger(__name__)

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
    ) -> None:
        self._catalog = catalog
        self._memory = memory
        self._ssd_range = ssd_range
        self._leases = leases
        self._disks = disks
        self._trimming: set[int] = set()
        self.unloading: set[asyncio.Task[None]] = (
            set()
        )  # paths that failed: no longer found, and on their way out of the tables
        self._limbo: list[tuple[SessionNo, int, int]] = []
        self.counts: Counter[str] = Counter()
        self.background = Background(self.counts)

    @property
    def limbo_bytes(self) -> int:
        return sum(size for _, _, size in self._limbo)

    @property
    def limbo(self) -> list[tuple[int, int]]:
        return [(offset, size) for _, offset, size in self._limbo]

    def busy(self, session_no: int) -> bool:
        session = self._catalog.sessions.get(SessionNo(session_no))
        return session is None or session.holds > 0 or self._leases.pins(session_no) > 0

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
            self._to_releasing(disk, file.base, file.size_bytes)
        async with session.lock:
            try:
                ssd = [segment.generation for segment in segments if segment.address.medium is Medium.SSD]
                await disk.run(disk.journal.drop, session.session_no, [file.file_id for file in files], ssd)
            except FlatCakeError as error:
                self.fail_disk(disk, f"its journal cannot be written: {error}")
                return
            await self._delete(disk, files)

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

    def _to_releasing(self, disk: Disk, base: int, size_bytes: int) -> None:
        disk.files_bytes -= size_bytes
        disk.releasing[base] = size_bytes

    def _to_free(self, disk: Disk, base: int) -> None:
        self._ssd_range.free(base, disk.releasing.pop(base))

    async def _delete(self, disk: Disk, files: list[SessionFile], *, again: bool = False) -> None:
        """Take files from the disk that nothing shows any more; what cannot be deleted is condemned, and said once."""
        for file in files:
            try:
                await disk.run(disk.files.delete, file.file_id)
            except FlatCakeError as error:
                if disk.failure:
                    return
                if not again:
                    log.warning(
                        "session file %x on %s cannot be deleted, kept as lost space: %s",
                        file.file_id,
                        disk.path,
                        error,
                    )
                disk.condemned.append(file)
                continue
            self._to_free(disk, file.base)

    def drop_memory(self, session: Session) -> None:
        """Take out what a session has in memory; what it has on SSD stays. Blocks between are missing then, and stored anew when used."""
        self._hide([segment for segment in session.segments if segment.address.medium is Medium.MEMORY])
        self.background.spawn(self.settle(session))  # with no segment left it has a path to wait for, which may hang

    async def settle(self, session: Session) -> None:
        """Drop a session that nothing was stored in and nobody writes to."""
        if not session.gone and not session.segments and session.holds == 0:
            await self.drop(session)

    # -- files -----------------------------------------------------------------------------------------------------

    async def trim(self, disk: Disk, *tails: tuple[Session, SessionFile]) -> None:
        """Give back the unused tails of files, with one write of the journal. The caller holds the sessions' locks."""
        cuts: list[tuple[Session, SessionFile, int]] = []
        empty: list[SessionFile] = []
        for session, file in tails:
            keep_bytes, size_bytes = file.keep_bytes, file.size_bytes
            if disk.failure or session.gone or keep_bytes >= size_bytes:
                continue
            if keep_bytes:
                file.size_bytes = keep_bytes
                cuts.append((session, file, size_bytes - keep_bytes))
            else:
                session.files.remove(file)
                disk.files_count -= 1
                empty.append(file)
            self._to_releasing(disk, file.base + keep_bytes, size_bytes - keep_bytes)
            self._catalog.count_tail(session)
        await self._delete(disk, empty)
        if not cuts:
            return
        records = [file.record(session.session_no) for session, file, _ in cuts if file.written_bytes]
        try:
            failures = await disk.run(disk.cut_files, records, {file.file_id: file.size_bytes for _, file, _ in cuts})
        except FlatCakeError as error:
            failures = {file.file_id: Unavailable(str(error)) for _, file, _ in cuts}
            self.fail_disk(disk, f"its journal cannot be written: {error}")
        for session, file, tail_bytes in cuts:
            if file.file_id in failures:
                self._untrimmed(disk, session, file, tail_bytes, failures[file.file_id])
            else:
                self._to_free(disk, file.base + file.size_bytes)
                self.counts["trimmed"] += 1

    def _untrimmed(self, disk: Disk, session: Session, file: SessionFile, tail_bytes: int, error: Unavailable) -> None:
        """A file is as long as it was, and stays so: the next start cuts it to what is committed."""
        if session.gone and file.base not in disk.releasing:  # lost with its path
            return
        log.warning("session file %x on %s cannot be trimmed: %s", file.file_id, disk.path, error)
        self.counts["untrimmed"] += 1
        file.uncut = True
        file.size_bytes += disk.releasing.pop(file.base + file.size_bytes)
        if file.base in disk.releasing:  # dropped meanwhile: who waits for the lock to delete it frees all of it
            disk.releasing[file.base] += tail_bytes
        else:
            disk.files_bytes += tail_bytes
        self._catalog.count_tail(session)

    async def trim_tails(self, disk: Disk, sessions: list[Session]) -> None:
        """Trim the last file of each that is in nobody's hands.

        Several locks at once, so: in order of their numbers, and none that a writer has, who may wait for this very room.
        """
        tails = []
        async with contextlib.AsyncExitStack() as locks:
            for session in sorted(sessions, key=lambda session: session.session_no):
                if session.holds == 0 and not session.lock.locked():
                    await locks.enter_async_context(session.lock)
                    tails += [(session, file) for file in session.files[-1:]]
            await self.trim(disk, *tails)

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
        held = [(no, offset, size) for no, offset, size in self._limbo if self._leases.pins(no) > 0]
        for no, offset, size in self._limbo:
            if self._leases.pins(no) == 0:
                self._memory.free(offset, size)
        self._limbo = held
        for disk in self._disks.values():
            if disk.condemned and not disk.failure:
                again, disk.condemned = disk.condemned, []
                await self._delete(disk, again, again=True)

    async def trim_idle(self, idle_since_s: float) -> None:
        """Trim the files of sessions not used since a moment. One such walk of a path at a time: it may hang in it."""
        await asyncio.gather(
            *(self._trim_all(disk, idle_since_s) for disk in self._disks.values() if disk.pool not in self._trimming)
        )

    async def _trim_all(self, disk: Disk, idle_since_s: float) -> None:
        self._trimming.add(disk.pool)
        try:
            await self._trim_idle(disk, idle_since_s)
        finally:
            self._trimming.discard(disk.pool)

    async def _trim_idle(self, disk: Disk, idle_since_s: float) -> None:
        idle = []
        for session_no in self._catalog.order.by_use(tails_of(disk.pool)):
            session = self._catalog.sessions[SessionNo(session_no)]
            if session.last_used_s > idle_since_s:
                break
            idle.append(session)
        for at in range(0, len(idle), TRIMS_AT_ONCE):
            await self.trim_tails(disk, idle[at : at + TRIMS_AT_ONCE])

    async def drain(self) -> None:
        """Wait for what was spawned. The end of a process needs no tables emptied."""
        for task in self.unloading:
            task.cancel()
        await self.background.drain()
