"""A new journal for one SSD path, from what its session files say themselves.

Taken over is every segment whose footer proves itself and whose bytes agree with its checksums. All bytes are read: a
footer can outlive its data (a power cut between the two), and a segment the store gave up as corrupt still has its footer.
For the same reason a segment without checksums (stored under `verify = off`) is taken over only where what can be read of the old
journal still has it: then it is as good as at any start. A cache may forget; it may never lie.

Files are sealed and nothing in them is changed. The new journal is made beside the old one, synced, and put in its place by
renaming; the old one stays as `journal.old`. Killed at any moment, rebuild leaves the old journal, or the new one, or none
and `journal.old`: then a daemon refuses to start until it has been run again.

Ids go on from the old journal's marks where those can be read. Where they cannot, from the clock, as a daemon counts files
(`number_of_now`): no id of a file that was deleted before is used again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from flatcake_server.journal import JOURNAL_NAME, MARK_STEP, RocksRecords, sync_directory
from flatcake_server.journal_records import (
    FORMAT,
    MARKS,
    META,
    OWN_META,
    SPACES,
    encode_file,
    encode_segment,
    encode_session,
    read_vouched,
)
from flatcake_server.records import FileId, FileRecord, Generation, SegmentRecord, SessionNo, SessionRecord
from flatcake_server.scan import SessionFileReader
from flatcake_server.session import (
    LOCK_NAME,
    SESSIONS_NAME,
    file_path,
    lock_path,
    number_of_now,
    sync_file,
    walk_files,
)
from flatcake_transport.address import Address, Medium
from flatcake_transport.errors import FlatCakeError, Unavailable
from flatcake_transport.footer import Footer
from flatcake_transport.space import Fingerprint, SpaceSpec

Progress = Callable[[int, int], None]  # bytes done, in all

REBUILT: Final = "rebuilt"  # the reason of a placement is not in the footer
_BATCH_RECORDS: Final = 10_000

Record = tuple[bytes, bytes]
Marks = tuple[int, int, int]  # session number, file id, generation


@dataclass(slots=True)
class _Found:
    """What the files gave so far. `sessions` are numbered as they are met."""

    next_session_no: int
    vouched: dict[Generation, tuple[int, int, bytes]] = field(default_factory=dict)  # by the old journal
    spaces: dict[Fingerprint, SpaceSpec] = field(default_factory=dict)
    sessions: dict[tuple[Fingerprint, str], SessionRecord] = field(default_factory=dict)
    files: list[FileRecord] = field(default_factory=list)
    segments: dict[Generation, SegmentRecord] = field(default_factory=dict)
    base: int = 0
    corrupt_segments: int = 0
    unchecked_segments: int = 0
    strange_segments: int = 0  # of another session than the file's first, or with a generation that was met before
    empty_files: int = 0
    unreadable_files: int = 0


def rebuild(path: Path, *, progress: Progress = lambda _done, _total: None) -> dict[str, int]:
    """Make the journal of one SSD path anew. Reads every session file whole; holds the path's lock meanwhile.

    Returns: counts of what was taken over and what was left out, and why.
    Raises: ValueError: no SSD path of FlatCake. Unavailable: a process has it (named by its pid), or the disk fails.
    """
    refuse_strange(path)
    fd = lock_path(path)
    try:
        meta, marks = _old_meta(path)
        first = marks or (number_of_now(),) * 3
        found = _Found(next_session_no=first[0], vouched=_old_segments(path))
        _read_files(path, found, progress)
        ids = (
            found.next_session_no,
            max(first[1], 1 + max((file.file_id for file in found.files), default=0)),
            max(first[2], 1 + max(found.segments, default=0)),
        )
        meta = [*meta, (META + b"format", FORMAT), (META + b"marks", MARKS.pack(*(one + MARK_STEP for one in ids)))]
        try:
            _replace_journal(path, [*meta, *_records(found)])
        except OSError as error:
            raise Unavailable(f"the journal of {path} cannot be replaced: {error.strerror or error}") from error
    finally:
        os.close(fd)
    return {
        "sessions": len(found.sessions),
        "files": len(found.files),
        "segments": len(found.segments),
        "blocks": sum(segment.blocks for segment in found.segments.values()),
        "bytes": sum(segment.total_bytes for segment in found.segments.values()),
        "corrupt_segments": found.corrupt_segments,
        "unchecked_segments": found.unchecked_segments,
        "strange_segments": found.strange_segments,
        "empty_files": found.empty_files,
        "unreadable_files": found.unreadable_files,
    }


def refuse_strange(path: Path) -> None:
    """Raises: ValueError: no directory that a daemon has ever used: nothing is looked for or made in there."""
    if not path.is_dir():
        raise ValueError(f"{path} is no directory")
    if not any((path / name).exists() for name in (LOCK_NAME, SESSIONS_NAME, JOURNAL_NAME)):
        raise ValueError(f"{path} is no SSD path of FlatCake: it has no {SESSIONS_NAME}, {JOURNAL_NAME} or {LOCK_NAME}")


def _read_files(path: Path, found: _Found, progress: Progress) -> None:
    try:
        sizes = {file_id: entry.stat(follow_symlinks=False).st_size for file_id, entry in walk_files(path)}
    except FileNotFoundError:
        sizes = {}
    except OSError as error:
        raise Unavailable(f"{path} cannot be listed: {error.strerror or error}") from error
    done, total = 0, sum(sizes.values())
    specs: list[SpaceSpec] = []
    for file_id in sorted(sizes):
        try:
            with SessionFileReader(file_path(path, file_id), file_id) as reader:
                good = [footer for footer in reader.footers(specs) if _is_good(reader, footer, found)]
            if good:
                sync_file(reader.path)  # what was read may have been in memory only, and is recorded as on the disk
        except Unavailable:
            found.unreadable_files += 1
            good = []
        _take(file_id, good, file_path(path, file_id), found)
        done += sizes[file_id]
        progress(done, total)


def _is_good(reader: SessionFileReader, footer: Footer, found: _Found) -> bool:
    result = reader.check_data(footer)
    if result.bad:
        found.corrupt_segments += 1
    elif result.unchecked:
        here = int(footer.file_id), int(footer.file_offset), footer.keys[-1].tobytes()
        if found.vouched.get(Generation(footer.generation)) == here:
            return True
        found.unchecked_segments += 1
    return not result.bad and not result.unchecked


def _take(file_id: FileId, footers: list[Footer], path: Path, found: _Found) -> None:
    """Add a file, its session and its segments."""
    if not footers:
        found.empty_files += 1
        return
    name, fingerprint = footers[0].session, footers[0].spec.fingerprint
    used_s = path.stat().st_mtime
    session = found.sessions.get((fingerprint, name))
    if session is None:
        session = SessionRecord(SessionNo(found.next_session_no), name, fingerprint, 0, used_s, used_s)
        found.next_session_no += 1
    turns = session.turns
    end = 0
    for footer in footers:
        generation = Generation(footer.generation)
        strange = (footer.session, footer.spec.fingerprint) != (name, fingerprint) or generation in found.segments
        if strange:
            found.strange_segments += 1
            continue
        found.segments[generation] = _segment(footer, session.session_no, file_id, found.base)
        turns, end = max(turns, footer.turn), footer.file_offset + footer.total_bytes
    if not end:
        found.empty_files += 1
        return
    found.spaces[fingerprint] = footers[0].spec
    found.sessions[fingerprint, name] = SessionRecord(
        session.session_no, name, fingerprint, turns, min(session.created_s, used_s), max(session.last_used_s, used_s)
    )
    found.files.append(FileRecord(file_id, session.session_no, found.base, end, end, sealed=True))
    found.base += end


def _segment(footer: Footer, session_no: SessionNo, file_id: FileId, base: int) -> SegmentRecord:
    return SegmentRecord(
        generation=Generation(footer.generation),
        session_no=session_no,
        address=Address.of(Medium.SSD, 0, base + footer.file_offset),
        total_bytes=footer.total_bytes,
        turn=footer.turn,
        first_block=footer.first_block,
        reason=REBUILT,
        keys=footer.keys,
        parent_key=footer.parent_key,
        file_id=file_id,
        file_offset=footer.file_offset,
    )


def _records(found: _Found) -> Iterator[Record]:
    yield from ((SPACES + fingerprint, spec.to_json()) for fingerprint, spec in found.spaces.items())
    yield from map(encode_session, found.sessions.values())
    yield from map(encode_file, found.files)
    yield from (encode_segment(found.segments[generation]) for generation in sorted(found.segments))


def _old_meta(path: Path) -> tuple[list[Record], Marks | None]:
    """What the node said of itself and the marks, of the newest journal in which they can be read."""
    for name in (JOURNAL_NAME, f"{JOURNAL_NAME}.old"):
        # Damaged is what it is here for: whatever cannot be read is gone.
        with contextlib.suppress(FlatCakeError, struct.error):
            records = RocksRecords(path / name, read_only=True)
            try:
                meta = dict(records.scan(META))
                session_no, file_id, generation = (
                    MARKS.unpack(meta[META + b"marks"]) if META + b"marks" in meta else (1, 1, 1)
                )
            finally:
                records.close()
            own = {META + one.encode() for one in OWN_META}
            return [record for record in meta.items() if record[0] not in own], (session_no, file_id, generation)
    return [], None


def _old_segments(path: Path) -> dict[Generation, tuple[int, int, bytes]]:
    """What the journal in place says is committed, as far as it can be read. Not the one before it: it knows of no drop since."""
    vouched: dict[Generation, tuple[int, int, bytes]] = {}
    with contextlib.suppress(FlatCakeError, struct.error):
        records = RocksRecords(path / JOURNAL_NAME, read_only=True)
        try:
            vouched.update(read_vouched(records))
        finally:
            records.close()
    return vouched


def _replace_journal(path: Path, records: Iterable[Record]) -> None:
    """Write a journal beside the old one, then let it take its place. Raises: OSError. Unavailable."""
    journal = path / JOURNAL_NAME
    old, new = journal.with_name(f"{JOURNAL_NAME}.old"), journal.with_name(f"{JOURNAL_NAME}.new")
    if new.exists():
        shutil.rmtree(new)
    store = RocksRecords(new)
    batch: list[Record] = []
    for record in records:
        batch.append(record)
        if len(batch) == _BATCH_RECORDS:
            store.write(batch, [], sync=False)
            batch = []
    store.write(batch, [], sync=True)
    store.close()
    if journal.exists():
        if old.exists():
            shutil.rmtree(old)
        journal.rename(old)
    new.rename(journal)
    sync_directory(path)
