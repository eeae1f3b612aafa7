"""The law: every byte of arena and SSD space is free, reserved or indexed, exactly one. And what follows from it.

Checked in small steps. Done all at once nothing moves meanwhile (`check_state`, after every stateful test); beside lookups the
store goes on between them (`check_living`, as `flatcake check`): sessions that changed since they were looked at are looked
at again until few are left, and these, with all counts, are taken in one step at the end. What is on the disks is then
compared in their threads: what changed during a look is left out of it. It is also the verdict of crash tests. Findings are
sentences; none: the law holds.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flatcake_server.arena import Arena
from flatcake_server.catalog import MEMORY_POOL, Session
from flatcake_server.disk import Disk
from flatcake_server.extents import ExtentAllocator
from flatcake_server.pace import Pace
from flatcake_server.reclaim import tails_of
from flatcake_server.records import FileId, Generation, SegmentRecord, SessionNo
from flatcake_server.scan import SessionFileReader
from flatcake_server.store import Store
from flatcake_transport.address import Medium
from flatcake_transport.errors import Corrupt, FlatCakeError
from flatcake_transport.layout import align_up, segment_layout

FINDINGS_MAX: Final = 1000  # in a report: beyond that a list helps nobody, and no message holds it
# Sessions left for the last step, and looks at those that changed before all of them are: writers that change sessions faster
# than they are looked at would else keep a check for ever.
LAST_SESSIONS: Final = 2
ROUNDS_MAX: Final = 32
STEP_BLOCKS: Final = 512  # looked up in one step, and the rest of a segment

Progress = Callable[[int, int], None]
Extents = list[tuple[int, int]]


def check_state(store: Store, memory: ExtentAllocator, ssd_range: ExtentAllocator) -> list[str]:
    """What is wrong with the state in memory, in one step of the event loop."""
    look = _Look(store, memory, ssd_range)
    for _ in look.steps():
        pass
    return look.findings


async def check_living(store: Store, memory: ExtentAllocator, ssd_range: ExtentAllocator) -> list[str]:
    """The same while the store goes on."""
    look, pace = _Look(store, memory, ssd_range), Pace()
    with closing(look.steps()) as steps:
        for _ in steps:
            await pace.rest()
    return look.findings


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a session held when it was looked at."""

    pool: int
    memory: Extents
    files: Extents
    tail_bytes: int
    segments: list[SegmentRecord]


@dataclass(frozen=True, slots=True)
class _Ends:
    """What all sessions together must come to; taken in one step."""

    segments: int
    blocks: int
    memory: Extents  # taken, and by whom but sessions
    memory_others: Extents
    ssd: Extents
    ssd_others: Extents
    files_bytes: dict[int, int]  # by pool
    tails_bytes: dict[int, int]


class _Look:
    """One check of the state. `findings` are whole when `steps` has ended."""

    def __init__(self, store: Store, memory: ExtentAllocator, ssd_range: ExtentAllocator) -> None:
        self.findings: list[str] = []
        self._store = store
        self._memory = memory
        self._ssd_range = ssd_range
        self._seen: dict[SessionNo, _Seen] = {}
        # Blocks of a segment that the index names it for: from its commit to its end the same, unless it is lost.
        # By session and generation: paths that served apart have counted the same generations.
        self._own: dict[tuple[SessionNo, Generation], int] = {}

    def steps(self) -> Generator[None]:
        """Steps that take well under a millisecond each, but for the one that takes `_Ends`."""
        catalog = self._store.catalog
        yield from self._inside("index", catalog.index.check_steps())
        yield from self._inside("reclaim order", catalog.order.check_steps())
        with catalog.watched() as changed:
            pending = list(catalog.sessions)
            for _ in range(ROUNDS_MAX):
                for session_no in pending:
                    yield from self._look_at(session_no)
                pending = list(changed)
                changed.clear()
                if len(pending) <= LAST_SESSIONS:
                    break
            for session_no in pending:  # from here on nothing moves
                for _ in self._look_at(session_no):
                    pass
            ends = self._ends()
        yield
        yield from self._compare_all(ends)

    def _inside(self, name: str, steps: Iterator[None]) -> Iterator[None]:
        try:
            yield from steps
        except AssertionError as error:
            self.findings.append(f"{name}: {error}")

    def _look_at(self, session_no: SessionNo) -> Iterator[None]:
        session = self._store.catalog.sessions.get(session_no)
        if session is None:
            self._seen.pop(session_no, None)
            return
        self.findings += _check_session(self._store, session)
        self._seen[session_no] = seen = _Seen(
            session.pool,
            [
                (s.address.offset, align_up(s.total_bytes))
                for s in session.segments
                if s.address.medium is Medium.MEMORY
            ],
            [(file.base, file.size_bytes) for file in session.files],
            session.tail_bytes,
            list(session.segments),
        )
        yield
        fresh: list[SegmentRecord] = []
        for segment in seen.segments:
            if (session_no, segment.generation) not in self._own or self._store.catalog.is_lost(session):
                fresh.append(segment)
                if sum(one.blocks for one in fresh) >= STEP_BLOCKS:
                    self._count_own(session, fresh)
                    fresh = []
                    yield
        self._count_own(session, fresh)

    def _count_own(self, session: Session, segments: list[SegmentRecord]) -> None:
        if not segments:
            return
        counts = np.array([segment.blocks for segment in segments])
        firsts = np.cumsum(counts) - counts
        within = np.arange(counts.sum()) - np.repeat(firsts, counts)
        bases = np.repeat(np.array([segment.address for segment in segments], np.uint64), counts)
        own = bases + within.astype(np.uint64) * np.uint64(session.spec.plane_bytes[0])
        found = self._store.catalog.index.lookup(np.concatenate([segment.keys for segment in segments]))
        told = np.add.reduceat((found == own).astype(np.int64), firsts).tolist()
        names = ((session.session_no, segment.generation) for segment in segments)
        self._own.update(zip(names, told, strict=True))

    def _ends(self) -> _Ends:
        store, catalog = self._store, self._store.catalog
        for name, part in (("arena", self._memory), ("SSD range", self._ssd_range), ("leases", store.leases)):
            try:
                part.check()
            except AssertionError as error:
                self.findings.append(f"{name}: {error}")
        parts = [part for turn in store.turns.values() for part in turn.parts if part.open and part.file is None]
        limbo = [(offset, align_up(size)) for offset, size in store.retirement.limbo]
        disks = store.disks.values()
        for disk in disks:
            if not disk.failure and disk.used_bytes > disk.quota_bytes:
                self.findings.append(f"{disk.path}: {disk.used_bytes} bytes used, the quota is {disk.quota_bytes}")
        return _Ends(
            segments=len(catalog.segments),
            blocks=len(catalog.index),
            memory=self._memory.extents(),
            memory_others=[(part.address.offset, align_up(part.total_bytes)) for part in parts] + limbo,
            ssd=self._ssd_range.extents(),
            ssd_others=[
                extent for disk in disks for extent in (*disk.creating.items(), *disk.releasing.items(), *disk.lost)
            ],
            files_bytes={disk.pool: disk.files_bytes for disk in disks if not disk.failure},
            tails_bytes={disk.pool: catalog.order.bytes_of(tails_of(disk.pool)) for disk in disks},
        )

    def _compare_all(self, ends: _Ends) -> Iterator[None]:
        memory, ssd = _Owned(ends.memory_others), _Owned(ends.ssd_others)
        files, tails = dict.fromkeys(self._store.disks, 0), dict.fromkeys(self._store.disks, 0)
        segments = blocks = 0
        for session_no, seen in self._seen.items():
            memory.add(seen.memory)
            ssd.add(seen.files)
            if seen.pool != MEMORY_POOL:
                files[seen.pool] += sum(size for _, size in seen.files)
                tails[seen.pool] += seen.tail_bytes
            segments += len(seen.segments)
            blocks += sum(self._own[session_no, segment.generation] for segment in seen.segments)
            yield
        if segments != ends.segments:
            self.findings.append(f"{segments} segments in sessions, {ends.segments} in the map")
        if blocks != ends.blocks:
            self.findings.append(f"the index has {ends.blocks} blocks, segments stand for {blocks} of them")
        self.findings += memory.differences("arena", ends.memory)
        yield
        for pool, counted in ends.files_bytes.items():
            path = self._store.disks[pool].path
            if files[pool] != counted:
                self.findings.append(f"{path}: files have {files[pool]} bytes, {counted} counted")
            if tails[pool] != ends.tails_bytes[pool]:
                self.findings.append(f"{path}: {tails[pool]} bytes to trim, {ends.tails_bytes[pool]} counted")
        self.findings += ssd.differences("SSD range", ends.ssd)


class _Owned:
    """Extents and that somebody owns them. Compared at once: 0.1 us each."""

    def __init__(self, extents: Extents) -> None:
        self._offsets, self._sizes = array("Q"), array("Q")
        self.add(extents)

    def add(self, extents: Extents) -> None:
        self._offsets.extend(offset for offset, _ in extents)
        self._sizes.extend(size for _, size in extents)

    def differences(self, name: str, taken: Extents) -> list[str]:
        """`taken` (of the allocator) must be exactly what is owned, and no two owners may overlap."""
        offsets, sizes = np.frombuffer(self._offsets, np.uint64), np.frombuffer(self._sizes, np.uint64)
        order = np.argsort(offsets)
        offsets = offsets[order]
        ends = np.maximum.accumulate(offsets + sizes[order]) if len(order) else offsets
        twice = offsets[1:][offsets[1:] < ends[:-1]][:8].tolist()
        findings = [f"{name}: bytes at {offset:#x} have two owners" for offset in twice]
        first = np.flatnonzero(np.concatenate(([True], offsets[1:] > ends[:-1]))) if len(order) else order
        last = np.append(first[1:], len(order)) - 1 if len(order) else order
        owned = np.column_stack((offsets[first], ends[last] - offsets[first]))
        told: NDArray[np.uint64] = np.array(taken, np.uint64).reshape(-1, 2)
        if np.array_equal(owned, told):
            return findings
        here, there = set(map(tuple, owned.tolist())), set(taken)
        for what, which in (("owned, but not as the allocator has them", here - there),
                            ("taken, but not as they are owned", there - here)):  # fmt: skip
            findings += [f"{name}: bytes {offset:#x}+{size:#x} are {what}" for offset, size in sorted(which)[:8]]
        return findings


def _check_session(store: Store, session: Session) -> list[str]:
    findings = []
    named = store.catalog.find(session.fingerprint, session.name)
    astray = named is None or (named is not session and named.pool == session.pool)
    if session.gone or (astray and not store.catalog.is_lost(session)):
        findings.append(f"session {session.name}: listed, but not to be found by its name")
    if session.files and session.pool == MEMORY_POOL:
        findings.append(f"session {session.name}: has files, but no SSD path")
    turns = store.turns.values() if session.holds else ()
    open_parts = [part for turn in turns for part in turn.parts if part.open and part.session is session]
    for file in session.files:
        segments = sorted(
            (segment for segment in session.segments if segment.file_id == file.file_id and segment.file_id),
            key=lambda segment: segment.file_offset,
        )
        at = 0
        for segment in segments:
            if segment.file_offset < at:
                findings.append(f"session {session.name}: segments overlap in file {file.file_id:x}")
            if segment.address.offset != file.base + segment.file_offset:
                findings.append(f"session {session.name}: segment {segment.address} is not where its file says")
            at = segment.end_offset
        if not at <= file.written_bytes <= file.tail <= file.size_bytes:
            findings.append(
                f"session {session.name}: file {file.file_id:x} ends are out of order: segments {at}, "
                f"written {file.written_bytes}, tail {file.tail}, size {file.size_bytes}"
            )
        if sum(segment.total_bytes for segment in segments) != file.committed_bytes:
            findings.append(f"session {session.name}: committed bytes of file {file.file_id:x} do not add up")
        reserved = sum(part.total_bytes for part in open_parts if part.file is file)
        if reserved != file.reserved_bytes:
            findings.append(f"session {session.name}: {file.reserved_bytes} bytes reserved, turns have {reserved}")
    return findings


async def check_files(store: Store) -> list[str]:
    """Compare the files that are on the disks with those the store believes in."""
    findings = []
    for disk in store.disks.values():
        if disk.failure:
            continue
        try:
            wrong, stray = await _compare_files(store, disk)
            if stray:  # one that came and went during the look is not there at the next
                stray &= (await _compare_files(store, disk))[1]
        except FlatCakeError as error:
            findings.append(f"{disk.path}: cannot be listed: {error}")
            continue
        findings += wrong
        if stray:
            findings.append(f"{disk.path}: {len(stray)} files on disk belong to no session")
    return findings


async def _compare_files(store: Store, disk: Disk) -> tuple[list[str], set[FileId]]:
    """Files of other lengths than they should have, and files that belong to nobody."""
    before, moving = await _files_of(store, disk), bool(disk.creating or disk.releasing)
    listed = await disk.read(disk.files.list)
    moving = moving or bool(disk.creating or disk.releasing)
    after = await _files_of(store, disk)
    wrong = [
        f"{disk.path}: file {file_id:x} has {listed.get(file_id)} bytes on disk, {size_bytes} expected"
        for file_id, size_bytes in before.items()
        if after.get(file_id) == size_bytes != listed.get(file_id)
    ]
    stray = set(listed) - set(before) - set(after) - {file.file_id for file in disk.condemned}
    return wrong, set() if moving else stray


async def _files_of(store: Store, disk: Disk) -> dict[FileId, int]:
    """Lengths, but of those that are being cut: theirs are known before the disk has them."""
    files: dict[FileId, int] = {}
    pace = Pace()
    for session in list(store.catalog.sessions.values()):
        if session.pool == disk.pool and not session.gone:
            files |= {f.file_id: f.size_bytes for f in session.files if f.base + f.size_bytes not in disk.releasing}
        await pace.rest()
    return files


async def check_data(store: Store, arena: Arena, progress: Progress) -> list[str]:
    """Read every segment: its footer must say what the store believes, its bytes must have the footer's checksums."""
    findings: list[str] = []
    sessions = list(store.catalog.sessions.values())
    for done, session in enumerate(sessions):
        progress(done, len(sessions))
        if session.gone:
            continue
        session.holds += 1  # it stays while it is read
        try:
            for segment in list(session.segments):
                found = await _read_segment(store, arena, session, segment)
                if store.catalog.segments.get(segment.address) is segment:
                    findings += [f"session {session.name}: segment {segment.address}: {text}" for text in found]
        finally:
            session.holds -= 1
            await store.retirement.settle(session)
    progress(len(sessions), len(sessions))
    return findings


async def differs(store: Store, arena: Arena, address: int) -> bool:
    """Whether the bytes of a segment are other ones than its footer says. One that is gone does not differ.

    Raises: Unavailable, Overloaded: it cannot be read now.
    """
    segment = store.catalog.segments.get(address)
    if segment is None:
        return False
    session = store.catalog.sessions[segment.session_no]
    session.holds += 1  # it stays while it is read
    try:
        return bool(await _found_in(store, arena, session, segment))
    except Corrupt:
        return True
    finally:
        session.holds -= 1
        await store.retirement.settle(session)


async def _read_segment(store: Store, arena: Arena, session: Session, segment: SegmentRecord) -> list[str]:
    try:
        return await _found_in(store, arena, session, segment)
    except FlatCakeError as error:
        return [str(error)]


async def _found_in(store: Store, arena: Arena, session: Session, segment: SegmentRecord) -> list[str]:
    if segment.address.medium is Medium.MEMORY:
        # The arena is a file to whoever has its descriptor: one reader serves both media.
        path, base = Path(f"/proc/self/fd/{arena.fd}"), segment.address.offset
        work = asyncio.get_running_loop().run_in_executor(None, _segment_findings, path, base, session, segment)
        return await work
    disk = store.disks[session.pool]
    path = disk.files.path_of(segment.file_id)
    return await disk.read(_segment_findings, path, segment.file_offset, session, segment)


def _segment_findings(path: Path, base: int, session: Session, segment: SegmentRecord) -> list[str]:
    """What is wrong with a segment that begins at `base` of a file. Blocks. Raises: Corrupt, Unavailable."""
    with SessionFileReader(path, segment.file_id) as reader:
        footer = reader.footer_at(base + segment_layout(session.spec, segment.blocks).data_bytes)
        said = (footer.spec, footer.session, footer.generation, footer.turn, footer.first_block, footer.parent_key)
        known = (session.spec, session.name, segment.generation, segment.turn, segment.first_block, segment.parent_key)
        if said != known or not np.array_equal(footer.keys, segment.keys):
            return ["its footer is of another segment"]
        checked = reader.check_data(footer)
        return [f"{checked.bad} of {checked.granules} granules differ from their checksums"] if checked.bad else []
