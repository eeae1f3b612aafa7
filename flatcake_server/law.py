"""The law: every byte of arena and SSD space is free, reserved or indexed, exactly one. And what follows from it.

Checked on the living store in one step of the event loop, so that nothing moves meanwhile. What is on the disks is then
compared in their threads, while the store goes on: what changed during a look is left out of it. It runs after every
stateful test, as `flatcake check`, and as the verdict of crash tests. Findings are sentences; none: the law holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import numpy as np

from flatcake_server.arena import Arena
from flatcake_server.catalog import MEMORY_POOL, Session
from flatcake_server.disk import Disk
from flatcake_server.extents import ExtentAllocator
from flatcake_server.reclaim import tails_of
from flatcake_server.records import FileId, SegmentRecord
from flatcake_server.scan import SessionFileReader
from flatcake_server.store import Store
from flatcake_transport.address import Medium
from flatcake_transport.errors import Corrupt, FlatCakeError
from flatcake_transport.layout import align_up, segment_layout

FINDINGS_MAX: Final = 1000  # in a report: beyond that a list helps nobody, and no message holds it

Progress = Callable[[int, int], None]
Extents = list[tuple[int, int]]


def check_state(store: Store, memory: ExtentAllocator, ssd_range: ExtentAllocator) -> list[str]:
    """What is wrong with the state in memory, in one step."""
    findings: list[str] = []
    for name, part in (("arena", memory), ("SSD range", ssd_range), ("index", store.catalog.index)):
        findings += _asserted(name, part.check)
    findings += _asserted("reclaim order", store.catalog.order.check) + _asserted("leases", store.leases.check)
    sessions = list(store.catalog.sessions.values())
    findings += _check_memory(store, memory, sessions)
    findings += _check_ssd(store, ssd_range, sessions)
    for session in sessions:
        findings += _check_session(store, session)
    findings += _check_index(store, sessions)
    return findings


def _asserted(name: str, check: Callable[[], None]) -> list[str]:
    try:
        check()
    except AssertionError as error:
        return [f"{name}: {error}"]
    return []


def _compare(name: str, taken: Extents, owned: Iterable[tuple[int, int]]) -> list[str]:
    """`taken` (of the allocator) must be exactly what is owned, and no two owners may overlap."""
    findings: list[str] = []
    merged: Extents = []
    for offset, size in sorted(owned):
        if merged and merged[-1][0] + merged[-1][1] > offset:
            findings.append(f"{name}: bytes at {offset:#x} have two owners")
        if merged and merged[-1][0] + merged[-1][1] >= offset:
            merged[-1] = (merged[-1][0], max(merged[-1][1], offset + size - merged[-1][0]))
        else:
            merged.append((offset, size))
    if merged != taken:
        for extent in sorted(set(merged) - set(taken))[:8]:
            findings.append(f"{name}: bytes {extent[0]:#x}+{extent[1]:#x} are owned, but not as the allocator has them")
        for extent in sorted(set(taken) - set(merged))[:8]:
            findings.append(f"{name}: bytes {extent[0]:#x}+{extent[1]:#x} are taken, but not as they are owned")
    return findings


def _check_memory(store: Store, memory: ExtentAllocator, sessions: list[Session]) -> list[str]:
    owned = [
        (segment.address.offset, align_up(segment.total_bytes))
        for session in sessions
        for segment in session.segments
        if segment.address.medium is Medium.MEMORY
    ]
    owned += [
        (part.address.offset, align_up(part.total_bytes))
        for turn in store.turns.values()
        for part in turn.parts
        if part.open and part.file is None
    ]
    owned += [(offset, align_up(size)) for offset, size in store.retirement.limbo]
    return _compare("arena", memory.extents(), owned)


def _check_ssd(store: Store, ssd_range: ExtentAllocator, sessions: list[Session]) -> list[str]:
    findings: list[str] = []
    owned: Extents = []
    for disk in store.disks.values():
        if disk.failure:
            # Its bytes are out of reach and its range stays taken until the next start.
            return findings
        files = [(file.base, file.size_bytes) for s in sessions if s.pool == disk.pool for file in s.files]
        if sum(size for _, size in files) != disk.files_bytes:
            findings.append(
                f"{disk.path}: files have {sum(size for _, size in files)} bytes, {disk.files_bytes} counted"
            )
        if disk.used_bytes > disk.quota_bytes:
            findings.append(f"{disk.path}: {disk.used_bytes} bytes used, the quota is {disk.quota_bytes}")
        tails, counted = sum(s.tail_bytes for s in sessions if s.pool == disk.pool), tails_of(disk.pool)
        if tails != store.catalog.order.bytes_of(counted):
            findings.append(f"{disk.path}: {tails} bytes to trim, {store.catalog.order.bytes_of(counted)} counted")
        owned += [*files, *disk.creating.items(), *disk.releasing.items()]
    return findings + _compare("SSD range", ssd_range.extents(), owned)


def _check_session(store: Store, session: Session) -> list[str]:
    findings = []
    named = store.catalog.find(session.fingerprint, session.name)
    if session.gone or named is None or (named is not session and named.pool == session.pool):
        findings.append(f"session {session.name}: listed, but not to be found by its name")
    if session.files and session.pool == MEMORY_POOL:
        findings.append(f"session {session.name}: has files, but no SSD path")
    open_parts = [part for turn in store.turns.values() for part in turn.parts if part.open and part.session is session]
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


def _check_index(store: Store, sessions: list[Session]) -> list[str]:
    findings = []
    listed = sum(len(session.segments) for session in sessions)
    if listed != len(store.catalog.segments):
        findings.append(f"{listed} segments in sessions, {len(store.catalog.segments)} in the map")
    own_blocks = 0
    for session in sessions:
        step = np.uint64(session.spec.plane_bytes[0])
        for segment in session.segments:
            found = store.catalog.present(segment.keys)
            own = np.uint64(segment.address) + np.arange(segment.blocks, dtype=np.uint64) * step
            own_blocks += len(np.unique(own[found == own]))
    if own_blocks != len(store.catalog.index):
        findings.append(f"the index has {len(store.catalog.index)} blocks, segments stand for {own_blocks} of them")
    return findings


async def check_files(store: Store) -> list[str]:
    """Compare the files that are on the disks with those the store believes in."""
    findings = []
    for disk in store.disks.values():
        if disk.failure:
            continue
        before, moving = _files_of(store, disk), bool(disk.creating or disk.releasing)
        try:
            listed = await disk.run(disk.files.list)
        except FlatCakeError as error:
            findings.append(f"{disk.path}: cannot be listed: {error}")
            continue
        after, moving = _files_of(store, disk), moving or bool(disk.creating or disk.releasing)
        findings += [
            f"{disk.path}: file {file_id:x} has {listed.get(file_id)} bytes on disk, {size_bytes} expected"
            for file_id, size_bytes in before.items()
            if after.get(file_id) == size_bytes != listed.get(file_id)
        ]
        stray = set(listed) - set(before) - set(after) - {file.file_id for file in disk.condemned}
        if stray and not moving:
            findings.append(f"{disk.path}: {len(stray)} files on disk belong to no session")
    return findings


def _files_of(store: Store, disk: Disk) -> dict[FileId, int]:
    return {
        file.file_id: file.size_bytes
        for session in store.catalog.sessions.values()
        if session.pool == disk.pool
        for file in session.files
    }


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
    return await disk.run(_segment_findings, path, segment.file_offset, session, segment)


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
