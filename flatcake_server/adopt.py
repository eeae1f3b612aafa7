"""The start: what the journals and disks of a stopped or killed daemon hold becomes the store's again.

Every committed segment whose file still reaches over it is adopted; all else is freed. A file is cut to what is committed
in it and never appended to again: a client of the old daemon may still hold a descriptor and write where it had reserved.
Starting twice gives the same.

Decided per path by `plan_adoption` from the journal's image and the list of files; carried out by `adopt`. What takes long or asks the
disk runs in its threads, since a signal must be heard meanwhile. All are short steps, and so is each record in the reading of the journal,
which takes as long as it is large: a path that does not answer one within `OPEN_S` is left out where there are others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from flatcake_server.catalog import Session, SessionFile
from flatcake_server.disk import Disk
from flatcake_server.extents import ExtentAllocator
from flatcake_server.journal_records import JournalImage
from flatcake_server.records import FileId, FileRecord, Generation, SegmentRecord, SessionNo, SessionRecord
from flatcake_server.reserve import SHARED_PREFIX, Numbers
from flatcake_server.session import PathInUse, sync_file
from flatcake_transport.address import Address, Medium
from flatcake_transport.errors import Corrupt, FlatCakeError, Unavailable
from flatcake_transport.layout import align_up

log = logging.getLogger(__name__)

T = TypeVar("T")

OPEN_S: Final = 60.0  # a command to a disk that is dying fails after half a minute
LOOK_S: Final = 1.0  # between two looks at how far a journal has been read


@dataclass(slots=True)
class Adoption:
    """What becomes of one path's image."""

    sessions: list[SessionRecord] = field(default_factory=list)
    files: dict[SessionNo, list[FileRecord]] = field(default_factory=lambda: defaultdict(list))  # cut and sealed
    segments: dict[SessionNo, list[SegmentRecord]] = field(default_factory=lambda: defaultdict(list))
    cut: list[FileRecord] = field(default_factory=list)  # files to truncate to their size
    orphans: list[FileId] = field(default_factory=list)  # files to delete
    lost_sessions: list[SessionNo] = field(default_factory=list)
    lost_files: list[FileId] = field(default_factory=list)
    lost_segments: list[Generation] = field(default_factory=list)


def plan_adoption(image: JournalImage, on_disk: Mapping[FileId, int]) -> Adoption:
    """Decide what is kept.

    Args:
        image: what the journal says.
        on_disk: bytes of each session file that is there.
    """
    plan = Adoption()
    files, sessions = image.files, image.sessions
    end_of: dict[FileId, int] = {}
    for segment in image.segments:
        file, session = files.get(segment.file_id), sessions.get(segment.session_no)
        reaches = segment.end_offset <= on_disk.get(segment.file_id, 0)
        if file is None or session is None or session.fingerprint not in image.spaces or not reaches:
            plan.lost_segments.append(segment.generation)
            continue
        plan.segments[segment.session_no].append(segment)
        end_of[file.file_id] = max(end_of.get(file.file_id, 0), segment.end_offset)
    for file in image.files.values():
        if file.file_id not in end_of:
            plan.lost_files.append(file.file_id)
            continue
        end = end_of[file.file_id]
        kept = replace(file, size_bytes=align_up(end), written_bytes=end, sealed=True)
        plan.files[file.session_no].append(kept)
        if on_disk[file.file_id] != kept.size_bytes or file.size_bytes != kept.size_bytes:
            plan.cut.append(kept)
    for session in image.sessions.values():
        if plan.segments.get(session.session_no):
            plan.sessions.append(session)
        else:
            plan.lost_sessions.append(session.session_no)
    plan.orphans = [file_id for file_id in on_disk if file_id not in end_of]
    return plan


@dataclass(slots=True)
class Taken:
    """Numbers that the node's other paths use. `new_session_no` gives one that nobody does."""

    new_session_no: Callable[[], SessionNo]
    session_nos: set[SessionNo] = field(default_factory=set)
    file_ids: set[FileId] = field(default_factory=set)


async def take_over(disks: Sequence[Disk], ssd_range: ExtentAllocator, node_id: int, numbers: Numbers) -> list[Session]:
    """Open a node's SSD paths and adopt what is on them. One of several that cannot be had is left out; its `failure` says why.

    Raises: Unavailable, Overloaded, Corrupt: none can be had. PathInUse: one belongs to another daemon.
    """
    results = await asyncio.gather(*(_opened(disk, node_id) for disk in disks), return_exceptions=True)
    images: dict[Disk, JournalImage] = {}
    for disk, result in zip(disks, results, strict=True):
        with _or_without(disk, disks):
            if isinstance(result, BaseException):
                raise result
            numbers.session_no = max(numbers.session_no, result.next_session_no)
            numbers.file_id = max(numbers.file_id, result.next_file_id)
            numbers.generation = max(numbers.generation, result.next_generation)
            images[disk] = result
    sessions: list[Session] = []
    taken = Taken(numbers.next_session_no)
    for disk, image in images.items():
        with _or_without(disk, disks):
            sessions += await _answered(disk, adopt(disk, image, ssd_range, node_id, taken))
    return sessions


async def _opened(disk: Disk, node_id: int) -> JournalImage:
    await _answered(disk, disk.run(disk.open))
    return await _answered(disk, disk.run(disk.journal.load, node_id), lambda: disk.journal.records_read)


async def _answered(disk: Disk, work: Coroutine[Any, Any, T], progress: Callable[[], int] = lambda: 0) -> T:
    """Raises: Unavailable: a step of the work has lasted for `OPEN_S`, and `progress` said nothing new. What it raises."""
    task, said, since_s = asyncio.ensure_future(work), 0, time.monotonic()
    try:
        while not task.done():
            now_s = time.monotonic()
            if (says := progress()) != said:
                said, since_s = says, now_s
            if (left_s := OPEN_S - min(disk.waited_s, now_s - since_s)) <= 0:
                raise Unavailable(
                    f"SSD path {disk.path} cannot be opened: its disk has not answered for {OPEN_S:g} s: look at it and its mount"
                )
            await asyncio.wait({task}, timeout=min(left_s, LOOK_S))
        return task.result()
    finally:
        task.cancel()


@contextlib.contextmanager
def _or_without(disk: Disk, disks: Sequence[Disk]) -> Iterator[None]:
    """One of several paths may fail to start, and costs its own sessions only; but not all of them."""
    try:
        yield
    except PathInUse:
        raise
    except FlatCakeError as error:
        if all(other.failure for other in disks if other is not disk):
            raise
        disk.failure = str(error)
        log.error("SSD path %s is out of service: %s", disk.path, error)


async def adopt(
    disk: Disk, image: JournalImage, ssd_range: ExtentAllocator, node_id: int, taken: Taken
) -> list[Session]:
    """Carry out the plan of one path and return its sessions. One path at a time.

    Raises: Unavailable, Overloaded, Corrupt: the path cannot be used.
    """
    on_disk: dict[FileId, int] = {}
    for folder in await disk.run(disk.files.folders):
        on_disk |= await disk.run(disk.files.list, folder)
    if taken.file_ids & (image.files.keys() | on_disk.keys()):
        raise Unavailable(
            f"{disk.path} has session files with the numbers of another path's: it is a copy of it, or they counted from the "
            "same number (a clock that was set back): serve it alone, or empty it"
        )
    if image.fresh and on_disk:
        raise Corrupt(
            f"{disk.path} has {len(on_disk)} session files, but its journal is gone: "
            f"run `flatcake check --rebuild --ssd-paths {disk.path}`, or empty the directory to start anew"
        )
    plan = await disk.read(plan_adoption, image, on_disk)
    if plan.lost_segments or plan.lost_sessions or plan.lost_files:
        log.warning(
            "%s: %d segments have no bytes on the disk any more and are forgotten", disk.path, len(plan.lost_segments)
        )
        await disk.run(disk.journal.drop, None, plan.lost_files, plan.lost_segments)
        for session_no in plan.lost_sessions:
            await disk.run(disk.journal.drop, session_no, [], [])
    await _cut(disk, plan, on_disk)
    await disk.read(_take_range, plan, ssd_range)
    disk.lost = [(file.base, file.size_bytes) for files in plan.files.values() for file in files]  # should it fail now
    changed = [file for files in plan.files.values() for file in files if file != image.files[file.file_id]]
    if changed:
        await disk.run(disk.journal.put_file, *changed)
    await _renumber(disk, plan, taken)
    await _delete_orphans(disk, plan, on_disk, ssd_range)
    taken.session_nos.update(record.session_no for record in plan.sessions)
    taken.file_ids.update(on_disk)
    sessions = await disk.read(_sessions, plan, image, disk.pool, node_id)
    disk.files_bytes = sum(session.file_bytes for session in sessions)
    disk.files_count = sum(len(session.files) for session in sessions)
    disk.lost = []
    return sessions


async def _cut(disk: Disk, plan: Adoption, on_disk: Mapping[FileId, int]) -> None:
    """Cut files to what is committed in them. One that cannot be cut keeps its length, which counts as reserved."""
    for file in plan.cut:
        try:
            await disk.run(disk.files.truncate, file.file_id, file.size_bytes)
        except Unavailable as error:
            log.warning("session file %x on %s keeps its unused tail: %s", file.file_id, disk.path, error)
            whole = replace(file, size_bytes=on_disk[file.file_id])
            files = plan.files[file.session_no]
            files[files.index(file)] = whole


def _take_range(plan: Adoption, ssd_range: ExtentAllocator) -> None:
    """Take each file's extent of the address range; one that is taken (a disk came from another node) moves."""
    for files in plan.files.values():
        for at, file in enumerate(files):
            try:
                ssd_range.reserve_at(file.base, file.size_bytes)
            except ValueError:
                base = ssd_range.allocate(file.size_bytes)
                assert base is not None, "256 TiB of addresses are used up"
                files[at] = replace(file, base=base)


async def _renumber(disk: Disk, plan: Adoption, taken: Taken) -> None:
    """Give another number to sessions whose number is another path's: a rebuilt journal counts from 1 again.

    Killed half way, a session may have become two, each whole in itself.
    """
    for at, known in enumerate(plan.sessions):
        if known.session_no not in taken.session_nos:
            continue
        old, new = known.session_no, taken.new_session_no()
        plan.sessions[at] = record = replace(known, session_no=new)
        plan.files[new] = [replace(file, session_no=new) for file in plan.files.pop(old)]
        plan.segments[new] = [replace(segment, session_no=new) for segment in plan.segments.pop(old)]
        for file in plan.files[new]:
            await disk.run(sync_file, disk.files.path_of(file.file_id))  # its segments may have been of this boot only
            mine = [segment for segment in plan.segments[new] if segment.file_id == file.file_id]
            await disk.run(disk.journal.commit, record, file, mine, {})
        await disk.run(disk.journal.drop, old, [], [])


async def _delete_orphans(
    disk: Disk, plan: Adoption, on_disk: Mapping[FileId, int], ssd_range: ExtentAllocator
) -> None:
    for file_id in plan.orphans:
        try:
            await disk.run(disk.files.delete, file_id)
        except FlatCakeError as error:
            size_bytes = align_up(max(on_disk[file_id], 1))
            base = ssd_range.allocate(size_bytes)
            assert base is not None, "256 TiB of addresses are used up"
            log.warning("session file %x on %s cannot be deleted, kept as lost space: %s", file_id, disk.path, error)
            disk.condemned.append(SessionFile(file_id, base, size_bytes, size_bytes))
            disk.releasing[base] = size_bytes
    if plan.orphans:
        log.info("%s: %d files that nothing was committed in are deleted", disk.path, len(plan.orphans))


def _sessions(plan: Adoption, image: JournalImage, pool: int, node_id: int) -> list[Session]:
    return [_session(record, plan, image, pool, node_id) for record in plan.sessions]


def _session(record: SessionRecord, plan: Adoption, image: JournalImage, pool: int, node_id: int) -> Session:
    files = {
        file.file_id: SessionFile(
            file.file_id,
            file.base,
            file.size_bytes,
            created_bytes=file.size_bytes,
            tail=file.written_bytes,
            written_bytes=file.written_bytes,
            sealed=True,
        )
        for file in sorted(plan.files[record.session_no], key=lambda file: file.file_id)
    }
    segments = sorted(plan.segments[record.session_no], key=lambda segment: segment.generation)
    placed = []
    for segment in segments:
        file = files[segment.file_id]
        file.committed_bytes += segment.total_bytes
        address = Address.of(Medium.SSD, node_id, file.base + segment.file_offset)
        placed.append(segment if address == segment.address else replace(segment, address=address))
    return Session(
        record.session_no,
        record.name,
        image.spaces[record.fingerprint],
        record.fingerprint,
        pool,
        record.created_s,
        record.last_used_s,
        turns=record.turns,
        shared=record.name.startswith(SHARED_PREFIX),
        tail_key=segments[-1].keys[-1].tobytes(),
        files=list(files.values()),
        segments=placed,
    )
