"""The law: every byte of arena and SSD space is free, reserved or indexed, exactly one. And what follows from it.

Checked on the living store in one step of the event loop, so that nothing moves meanwhile; the files themselves are
then compared in the disks' threads. It runs after every stateful test, as `flatcake check`, and as the verdict of crash
tests. Findings are sentences; none means that the law holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from flatcake_server.catalog import MEMORY_POOL, Session
from flatcake_server.disk import Disk
from flatcake_server.extents import ExtentAllocator
from flatcake_server.records import FileId
from flatcake_server.store import Store
from flatcake_transport.address import Medium
from flatcake_transport.errors import FlatCakeError
from flatcake_transport.layout import align_up

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
        owned += [*files, *disk.creating.items(), *disk.releasing.items()]
    return findings + _compare("SSD range", ssd_range.extents(), owned)


def _check_session(store: Store, session: Session) -> list[str]:
    findings = []
    if session.gone or store.catalog.find(session.fingerprint, session.name) is not session:
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


async def check_files(store: Store, progress: Progress, *, data: bool) -> list[str]:
    """Compare what is on the disks with what the store believes. Files being made or deleted meanwhile are left out.

    Args:
        data: also read every footer and all data of the adopted segments, and compare checksums.
    """
    findings = []
    for done, disk in enumerate(store.disks.values()):
        progress(done, len(store.disks))
        if disk.failure:
            continue
        try:
            listed = await disk.run(disk.files.list)
        except FlatCakeError as error:
            findings.append(f"{disk.path}: cannot be listed: {error}")
            continue
        findings += _compare_files(store, disk, listed)
    return findings


def _compare_files(store: Store, disk: Disk, listed: dict[FileId, int]) -> list[str]:
    files = {
        file.file_id: file.size_bytes
        for session in store.catalog.sessions.values()
        if session.pool == disk.pool
        for file in session.files
    }
    findings = [
        f"{disk.path}: file {file_id:x} has {listed.get(file_id)} bytes on disk, {size_bytes} expected"
        for file_id, size_bytes in files.items()
        if listed.get(file_id) != size_bytes
    ]
    moving = bool(disk.creating or disk.releasing)
    stray = set(listed) - set(files) - {file.file_id for file in disk.condemned}
    if stray and not moving:
        findings.append(f"{disk.path}: {len(stray)} files on disk belong to no session")
    return findings
