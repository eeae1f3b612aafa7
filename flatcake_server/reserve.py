"""Reserving space for a turn and giving it back: memory from the arena's allocator, SSD at the tail of a session file.

Reserving changes nothing on disk but the pre-allocation of a file; a crash leaves a file that no journal knows, deleted at
the next start. Within a file only uncommitted space at its tail is ever used again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from flatcake_server.catalog import MEMORY_POOL, Catalog, Session, SessionFile
from flatcake_server.disk import SLOW_S, Disk
from flatcake_server.extents import ExtentAllocator
from flatcake_server.placement import Reason
from flatcake_server.records import FileId, KeyArray, SessionNo
from flatcake_server.retire import Retirement
from flatcake_server.room import Room
from flatcake_server.session import DiskFull
from flatcake_server.sizing import SizingPolicy, file_bytes
from flatcake_server.turns import Part, PartPlan, TurnRequest
from flatcake_transport.address import Address, Medium
from flatcake_transport.errors import FlatCakeError, Overloaded, Unavailable
from flatcake_transport.footer import footer_bytes
from flatcake_transport.layout import segment_layout
from flatcake_transport.space import Fingerprint, SpaceSpec

log = logging.getLogger(__name__)

SHARED_PREFIX: Final = "shared/"
FULL_TOLD_S: Final = 60.0  # between two lines of the log
NO_SSD: Final = "no-ssd"  # the reason of a placement on a node of memory only


@dataclass(slots=True)
class Numbers:
    """The next of each number that is never used twice in this store."""

    session_no: int = 1
    file_id: int = 1
    generation: int = 1
    turn_id: int = 1

    def next_session_no(self) -> SessionNo:
        self.session_no += 1
        return SessionNo(self.session_no - 1)

    def next_file_id(self) -> FileId:
        self.file_id += 1
        return FileId(self.file_id - 1)


class Reserver:
    """Belongs to the event loop."""

    def __init__(
        self,
        catalog: Catalog,
        memory: ExtentAllocator,
        ssd_range: ExtentAllocator,
        disks: dict[int, Disk],
        room: Room,
        retirement: Retirement,
        numbers: Numbers,
        *,
        node_id: int,
        sessions_max: int,
        sizing: SizingPolicy,
        copy_bytes_max: int,
        wall_s: Callable[[], float],
        now_s: Callable[[], float],
    ) -> None:
        self._catalog = catalog
        self._memory = memory
        self._ssd_range = ssd_range
        self._disks = disks
        self._room = room
        self._retirement = retirement
        self._numbers = numbers
        self._node_id = node_id
        self._sessions_max = sessions_max
        self._sizing = sizing
        self._copy_bytes_max = copy_bytes_max
        self._copying: list[Part] = []
        self.copies_refused = 0
        self._wall_s = wall_s
        self._now_s = now_s

    def session(self, spec: SpaceSpec, fingerprint: Fingerprint, name: str, *, shared: bool = False) -> Session:
        """The session of that name, made if it is not there. Raises: Overloaded: as many as there may be."""
        session = self._catalog.find(fingerprint, name)
        if session is None:
            if len(self._catalog) >= self._sessions_max:
                raise Overloaded(f"{len(self._catalog)} sessions are stored, sessions_max is {self._sessions_max}")
            now_s = self._wall_s()
            number = self._numbers.next_session_no()
            session = Session(number, name, spec, fingerprint, MEMORY_POOL, now_s, now_s, shared=shared)
            self._catalog.add(session)
        return session

    def session_of_turn(
        self, spec: SpaceSpec, fingerprint: Fingerprint, request: TurnRequest, first_missing: int
    ) -> Session:
        """The session the engine named; else the one these blocks continue; else a new fork named by its first block."""
        if request.session:
            return self.session(spec, fingerprint, request.session)
        parent = request.keys[first_missing - 1].tobytes() if first_missing else request.root_key
        session = self._catalog.session_for(fingerprint, parent)
        if session is not None:
            return session
        return self.session(spec, fingerprint, f"fork/{request.keys[first_missing].tobytes().hex()}")

    async def reserve(self, turn_session: Session, plan: PartPlan, keys: KeyArray, root_key: bytes) -> Part:
        """Space for one segment of a turn; its session is held until `release`, or its commit.

        Args:
            keys: the turn's whole chain.
            root_key: the parent of its first key.
        Raises:
            Overloaded: neither medium has room. Unavailable: the SSD path failed just now.
        """
        session, spec = turn_session, turn_session.spec
        end = plan.first_block + plan.blocks
        if plan.reason in (Reason.SHARED, Reason.COPIED):
            name = SHARED_PREFIX + keys[end - 1].tobytes().hex()
            session = self.session(spec, turn_session.fingerprint, name, shared=True)
        layout = segment_layout(spec, plan.blocks)
        total_bytes = layout.data_bytes + footer_bytes(spec, session.name, plan.blocks)
        session.holds += 1
        try:
            address, reason, file, file_offset = await self._place(session, plan, total_bytes)
        except BaseException:
            session.holds -= 1
            if session is not turn_session:
                await self._retirement.settle(session)
            raise
        part = Part(
            plan=plan,
            session=session,
            layout=layout,
            total_bytes=total_bytes,
            address=address,
            reason=reason,
            keys=keys[plan.first_block : end].copy(),  # a view would keep the whole request in memory
            parent_key=keys[plan.first_block - 1].tobytes() if plan.first_block else root_key,
            file=file,
            file_offset=file_offset,
            algorithms=bytearray(spec.shards),
            checksums=np.zeros(layout.granules, np.uint64),
        )
        if reason == Reason.COPIED:
            self._copying.append(part)
        return part

    def copy_room_bytes(self) -> int:
        """What copies may take now: of their share what is left, and of memory what is free below the high watermark."""
        self._copying = [part for part in self._copying if part.open]
        copied_bytes = self._catalog.copied_bytes + sum(part.total_bytes for part in self._copying)
        return max(0, min(self._copy_bytes_max - copied_bytes, self._room.memory_left_bytes()))

    def _place_copy(self, session: Session, total_bytes: int) -> Address:
        """Raises: Overloaded: no room that nobody has to make, or somebody writes this copy already."""
        offset = None
        if session.holds == 1 and total_bytes <= self.copy_room_bytes():
            offset = self._memory.allocate(total_bytes)
        if offset is None:
            self.copies_refused += 1
            raise Overloaded(f"a copy of {total_bytes} bytes finds no room, or is being written already")
        return Address.of(Medium.MEMORY, self._node_id, offset)

    async def _place(
        self, session: Session, plan: PartPlan, total_bytes: int
    ) -> tuple[Address, str, SessionFile | None, int]:
        reason = str(plan.reason)
        if reason == Reason.COPIED:
            address = self._place_copy(session, total_bytes)
            return address, reason, None, address.offset
        if not self._disks:
            await self._room.in_memory(total_bytes)
            reason = reason if plan.medium is Medium.MEMORY else NO_SSD
        if plan.medium is Medium.MEMORY or not self._disks:
            if total_bytes > self._room.memory_left_bytes():
                self._room.want_in_memory(total_bytes)
            if self._disks:
                offset = self._memory.allocate(total_bytes)
            else:
                offset = await self._room.memory_piece(total_bytes)
            if offset is not None:
                return Address.of(Medium.MEMORY, self._node_id, offset), reason, None, offset
            if not self._disks:
                raise Overloaded(f"the arena has no {total_bytes} bytes in one piece, and this node has no SSD path")
            reason = str(Reason.MEMORY_FULL)
        if session.pool in self._disks:
            self._disks[session.pool].admit()  # before the lock, which a commit that hangs may hold
        async with session.lock:
            file = await self._file_with_room(session, total_bytes)
            file_offset = file.tail
            file.tail += total_bytes
            file.reserved_bytes += total_bytes
            self._catalog.count_tail(session)
        return Address.of(Medium.SSD, self._node_id, file.base + file_offset), reason, file, file_offset

    async def _file_with_room(self, session: Session, total_bytes: int) -> SessionFile:
        """The session's file that takes `total_bytes` more; a further one if need be. The caller holds the lock."""
        last = session.files[-1] if session.files else None
        if last is not None and not last.sealed and last.tail + total_bytes <= last.size_bytes:
            return last
        written = sum(file.committed_bytes for file in session.files)
        wanted = file_bytes(total_bytes, written, last.created_bytes if last else 0, self._sizing)
        disks = [self._disks[session.pool]] if last is not None else self._roomiest_first()
        home = session.pool
        try:
            for disk in disks:
                session.pool = disk.pool
                try:
                    file = await self._further_file(session, disk, total_bytes, wanted)
                    break
                except (Overloaded, Unavailable):
                    if disk is disks[-1] or session.gone:
                        raise
        except BaseException:
            session.pool = home  # it has nothing on the others, and is not lost with one of them
            raise
        session.files.append(file)
        self._catalog.count_tail(session)
        # Also a sealed one, and what a turn that was given up had in one before: nobody looks at their tails again.
        await self._retirement.trim(disk, *((session, other) for other in session.files[:-1] if not other.uncut))
        return file

    def _roomiest_first(self) -> list[Disk]:
        """Paths for a new session, by their quotas. Last those that hang, and those that others filled: tried again once in a while."""
        alive = [disk for disk in self._disks.values() if not disk.failure]
        if not alive:
            raise Unavailable("every SSD path is out of service")
        again_s = self._now_s() - FULL_TOLD_S

        def fitness(disk: Disk) -> tuple[bool, bool, int]:
            return disk.waited_s <= SLOW_S, not disk.full or disk.full_told_s <= again_s, disk.free_bytes

        return sorted(alive, key=fitness, reverse=True)

    async def _further_file(self, session: Session, disk: Disk, total_bytes: int, wanted_bytes: int) -> SessionFile:
        if session.gone or disk.failure:
            raise Unavailable(f"SSD path {disk.path} is out of service: {disk.failure}")
        try:
            return await self._create(disk, wanted_bytes, drop=wanted_bytes <= total_bytes)
        except Overloaded:
            if wanted_bytes <= total_bytes:
                raise
        return await self._create(disk, total_bytes)  # no session goes for headroom that may never be written

    async def _create(self, disk: Disk, size_bytes: int, *, drop: bool = True) -> SessionFile:
        disk.admit()
        await self._room.on_path(disk, size_bytes, drop=drop)
        base = self._ssd_range.allocate(size_bytes)
        if base is None:
            raise Overloaded(f"the SSD address range has no {size_bytes} bytes in one piece")
        file = SessionFile(self._numbers.next_file_id(), base, size_bytes, size_bytes)
        disk.creating[base] = size_bytes  # counted before it is taken: the quota holds at every instant
        try:
            await disk.run(disk.make_file, file.file_id, size_bytes)
        except BaseException as error:
            self._ssd_range.free(base, disk.creating.pop(base))
            if isinstance(error, Unavailable):
                self._retirement.fail_disk(disk, str(error))
            elif isinstance(error, Overloaded):
                self._tell_refused(disk, error)
            raise
        if disk.failure:  # meanwhile; the next start deletes it
            self._ssd_range.free(base, disk.creating.pop(base))
            raise Unavailable(f"SSD path {disk.path} went out of service: {disk.failure}")
        disk.files_bytes += disk.creating.pop(base)
        disk.files_count += 1
        disk.full = False
        return file

    def _tell_refused(self, disk: Disk, error: Overloaded) -> None:
        """Others have filled its file system, say: no session that goes here would keep room for us."""
        disk.full, now_s = disk.full or isinstance(error, DiskFull), self._now_s()
        if now_s >= disk.full_told_s + FULL_TOLD_S:
            disk.full_told_s = now_s
            log.warning(
                "SSD path %s has %d bytes free of its quota and takes no file: %s", disk.path, disk.free_bytes, error
            )

    def release(self, part: Part) -> None:
        """Give back a part that will not be committed and that nobody writes to any more."""
        part.open = False
        part.session.holds -= 1
        if part.file is None:
            self._memory.free(part.address.offset, part.total_bytes)
            return
        part.file.reserved_bytes -= part.total_bytes
        if not part.file.reserved_bytes:  # what was given back below others that were reserved then is free as well
            part.file.tail = part.file.written_bytes
        elif part.file.tail == part.file_offset + part.total_bytes:
            part.file.tail = part.file_offset
        self._catalog.count_tail(part.session)

    async def give_back(self, parts: list[Part]) -> None:
        """Release parts, then drop the sessions that were made for them and hold nothing else."""
        for part in parts:
            self.release(part)
        for part in parts:
            try:
                await self._retirement.settle(part.session)
            except FlatCakeError:  # the path failed meanwhile: its sessions are gone already
                continue
