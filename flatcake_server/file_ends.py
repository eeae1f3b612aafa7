"""What goes of session files while their sessions stay: unused tails, and files of branches that a conversation has left.

As with all that leaves (retire.py): invisible first, then out of the journal, then off the disk, then free.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from flatcake_server.catalog import Catalog, Session, SessionFile
from flatcake_server.disk import Disk
from flatcake_server.extents import ExtentAllocator
from flatcake_server.reclaim import TRIMS_AT_ONCE, tails_of
from flatcake_server.records import FileId, Generation, SessionNo
from flatcake_transport.errors import FlatCakeError, Unavailable

log = logging.getLogger(__name__)

# Dropped together: one write of the journal.
FILES_AT_ONCE: Final = 64


class FileEnds:
    """Belongs to the event loop. `counts` are the owner's."""

    def __init__(
        self,
        catalog: Catalog,
        ssd_range: ExtentAllocator,
        disks: Mapping[int, Disk],
        busy: Callable[[int], bool],
        fail_disk: Callable[[Disk, str], None],
        counts: Counter[str],
    ) -> None:
        self._catalog = catalog
        self._ssd_range = ssd_range
        self._disks = disks
        self._busy = busy
        self._fail_disk = fail_disk
        self._counts = counts
        self._trimming: set[int] = set()

    def in_hand(self, session_no: int) -> bool:
        """Whether a session is read or written, or something happens to its files."""
        return self._busy(session_no) or self._catalog.sessions[SessionNo(session_no)].lock.locked()

    def left(self, pool: int, before: int, need_bytes: int) -> list[tuple[Session, FileId]]:
        """Files that nobody used since the stamp `before`, that of the session which would go next, for `need_bytes` or fewer.

        None of a session in anybody's hands, or that another depends on which was used no later.
        """
        found: list[tuple[Session, FileId]] = []
        for used in self._catalog.file_uses.idle(pool, before):
            if need_bytes <= 0 or len(found) >= FILES_AT_ONCE:
                break
            if self.in_hand(used.session) or not self._catalog.order.outlives(used.stamp, used.session):
                continue
            session = self._catalog.sessions[SessionNo(used.session)]
            found.append((session, FileId(used.file)))
            need_bytes -= next(file.size_bytes for file in session.files if file.file_id == used.file)
        return found

    async def drop(self, disk: Disk, left: list[tuple[Session, FileId]]) -> list[Session]:
        """Take files out of sessions that stay, with one write of the journal. The sessions; one may have nothing left."""
        gone: list[SessionFile] = []
        generations: list[Generation] = []
        async with contextlib.AsyncExitStack() as locks:
            sessions = sorted({session.session_no: session for session, _ in left}.items())
            for number, session in sessions:  # by number, as all do that take several locks
                if self._busy(number) or session.lock.locked():
                    continue
                await locks.enter_async_context(session.lock)
                if self._busy(number):  # since it was chosen: it may have gone
                    continue
                for file in [file for file in session.files if (session, file.file_id) in left]:
                    segments = [segment for segment in session.segments if segment.file_id == file.file_id]
                    self._catalog.unpublish(*segments)
                    self.to_releasing(disk, file.base, file.size_bytes)
                    self._forget(disk, session, file)
                    generations += [segment.generation for segment in segments]
                    gone.append(file)
            if not gone:
                return []
            try:
                await disk.run(disk.journal.drop, None, [file.file_id for file in gone], generations)
            except FlatCakeError as error:
                self._fail_disk(disk, f"its journal cannot be written: {error}")
                return []
            await self.delete(disk, gone)
        self._counts["left"] += len(gone)
        return [session for _, session in sessions]

    def _forget(self, disk: Disk, session: Session, file: SessionFile) -> None:
        session.files.remove(file)
        disk.files_count -= 1
        self._catalog.file_uses.remove(disk.pool, file.file_id)
        self._catalog.count_tail(session)

    def to_releasing(self, disk: Disk, base: int, size_bytes: int) -> None:
        disk.files_bytes -= size_bytes
        disk.releasing[base] = size_bytes

    def _to_free(self, disk: Disk, base: int) -> None:
        self._ssd_range.free(base, disk.releasing.pop(base))

    async def delete(self, disk: Disk, files: list[SessionFile]) -> None:
        """Take files from the disk that nothing shows any more; what cannot be deleted is condemned."""
        for file in files:
            try:
                await disk.run(disk.files.delete, file.file_id)
            except FlatCakeError as error:
                if disk.failure:
                    return
                log.warning(
                    "session file %x on %s cannot be deleted, kept as lost space: %s", file.file_id, disk.path, error
                )
                self._counts["undeletable"] += 1
                disk.condemned.append(file)
                continue
            self._to_free(disk, file.base)

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
                empty.append(file)
            self.to_releasing(disk, file.base + keep_bytes, size_bytes - keep_bytes)
            if keep_bytes:
                self._catalog.count_tail(session)
            else:
                self._forget(disk, session, file)
        await self.delete(disk, empty)
        if not cuts:
            return
        records = [file.record(session.session_no) for session, file, _ in cuts if file.written_bytes]
        try:
            failures = await disk.run(disk.cut_files, records, {file.file_id: file.size_bytes for _, file, _ in cuts})
        except FlatCakeError as error:
            failures = {file.file_id: Unavailable(str(error)) for _, file, _ in cuts}
            self._fail_disk(disk, f"its journal cannot be written: {error}")
        for session, file, tail_bytes in cuts:
            if file.file_id in failures:
                self._untrimmed(disk, session, file, tail_bytes, failures[file.file_id])
            else:
                self._to_free(disk, file.base + file.size_bytes)
                self._counts["trimmed"] += 1

    def _untrimmed(self, disk: Disk, session: Session, file: SessionFile, tail_bytes: int, error: Unavailable) -> None:
        """A file is as long as it was, and stays so: the next start cuts it to what is committed."""
        if session.gone and file.base not in disk.releasing:  # lost with its path
            return
        log.warning("session file %x on %s cannot be trimmed: %s", file.file_id, disk.path, error)
        self._counts["untrimmed"] += 1
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
