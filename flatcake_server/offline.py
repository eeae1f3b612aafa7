"""One SSD path without its daemon: whether the law holds on its disk.

The law: every byte of a session file belongs to one segment of the journal, or to none, and what the journal says of a
segment is what the segment's own footer says. `check` looks and never changes anything: RocksDB is opened read-only through
a directory of links elsewhere, files are opened for reading. A running daemon keeps it out, and it a daemon.

Findings are violations. Notes are what a crash may leave and the next start tidies: files without a segment, files longer
than they need be, segments not synced before a boot.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flatcake_server.journal import JOURNAL_NAME, RocksRecords, read_boot_id
from flatcake_server.journal_records import (
    JournalImage,
    read_image,
)
from flatcake_server.law import FINDINGS_MAX
from flatcake_server.rebuild import rebuild, refuse_strange
from flatcake_server.records import FileId, SegmentRecord, SessionRecord
from flatcake_server.scan import SessionFileReader
from flatcake_server.session import LOCK_NAME, SESSIONS_NAME, file_path, lock_path, walk_files
from flatcake_transport.errors import Corrupt, Unavailable
from flatcake_transport.footer import Footer
from flatcake_transport.layout import ALIGN_BYTES, segment_layout

__all__ = ["CheckReport", "Progress", "check", "rebuild"]

Progress = Callable[[int, int], None]  # done, total: segments, or bytes where bytes are read


@dataclass(slots=True)
class CheckReport:
    """What a check found. `ok`: the law holds. `facts` are counts, and the notes."""

    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def facts(self) -> dict[str, Any]:
        return {**self.counts, "notes": self.notes}

    def find(self, finding: str) -> None:
        if len(self.findings) == FINDINGS_MAX:
            self.findings.append(f"more than {FINDINGS_MAX} findings: the rest is not listed")
        elif len(self.findings) < FINDINGS_MAX:
            self.findings.append(finding)

    def note(self, note: str) -> None:
        if len(self.notes) < FINDINGS_MAX:
            self.notes.append(note)


def check(path: Path, *, data: bool = False, progress: Progress = lambda _done, _total: None) -> CheckReport:
    """Check one SSD path. Costs a read of the journal and of each footer; with `data`, of every committed byte.

    Args: progress: called with segments done and in all; with `data`, with bytes.
    Raises: ValueError: no SSD path of FlatCake. Unavailable: a process has it (named by its pid), or it cannot be read.
    """
    report = CheckReport()
    with _looking(path):
        on_disk = _files_on_disk(path)
        try:
            image = _read_journal(path)
        except Corrupt as error:
            report.find(str(error))
            report.counts = {"files_on_disk": len(on_disk)}
            return report
        if image is None:
            if on_disk:
                report.find(
                    f"{path} has {len(on_disk)} session files and no journal: `flatcake check --rebuild --ssd-paths {path}` makes one"
                )
            report.counts = {"files_on_disk": len(on_disk)}
            return report
        _check_extents(image, report)
        _check_segments(image, report)
        _check_files(image, on_disk, report)
        checked_bytes = _check_footers(path, image, on_disk, report, progress, data=data)
        report.counts = _counts(image, on_disk, checked_bytes)
    return report


def _check_extents(image: JournalImage, report: CheckReport) -> None:
    """Files own disjoint, aligned parts of the address range."""
    files = sorted(image.files.values(), key=lambda file: file.base)
    for file in files:
        if file.base % ALIGN_BYTES or file.size_bytes % ALIGN_BYTES or not file.size_bytes:
            report.find(
                f"file {file.file_id:x}: extent {file.base:#x}+{file.size_bytes} is not in units of {ALIGN_BYTES}"
            )
    for one, other in itertools.pairwise(files):
        if one.base + one.size_bytes > other.base:
            report.find(f"files {one.file_id:x} and {other.file_id:x} share addresses from {other.base:#x}")


def _check_segments(image: JournalImage, report: CheckReport) -> None:
    """No byte of a file belongs to two segments. That each is within its file was seen when the journal was read."""
    rows = np.array([(s.file_id, s.file_offset, s.end_offset) for s in image.segments], np.uint64).reshape(-1, 3)
    order = np.lexsort((rows[:, 1], rows[:, 0]))
    rows = rows[order]
    overlap = (rows[1:, 0] == rows[:-1, 0]) & (rows[1:, 1] < rows[:-1, 2])
    for at in np.flatnonzero(overlap).tolist():
        one, other = image.segments[order[at]], image.segments[order[at + 1]]
        report.find(f"segments {one.generation} and {other.generation} share bytes of file {one.file_id:x}")
    for at in np.flatnonzero((rows[:, 1] % ALIGN_BYTES) | (rows[:, 2] % ALIGN_BYTES)).tolist():
        report.find(f"segment {image.segments[order[at]].generation} is not in units of {ALIGN_BYTES}")


def _check_files(image: JournalImage, on_disk: dict[FileId, int], report: CheckReport) -> None:
    for file in image.files.values():
        size_bytes = on_disk.get(file.file_id)
        if size_bytes is None:
            report.find(f"file {file.file_id:x} is in the journal and not on the disk")
        elif size_bytes < file.size_bytes:
            report.find(f"file {file.file_id:x} has {size_bytes} bytes, the journal says {file.size_bytes}")
        elif size_bytes > file.size_bytes:
            report.note(f"file {file.file_id:x} is {size_bytes - file.size_bytes} bytes longer than the journal says")
    for file_id in on_disk.keys() - image.files.keys():
        report.note(f"file {file_id:x} is on the disk and not in the journal: nothing in it is committed")
    used = {segment.session_no for segment in image.segments}
    for session in image.sessions.values():
        if session.session_no not in used:
            report.note(f"session {session.name!r} has no segments")
    if image.forgotten:
        report.note(
            f"{len(image.forgotten)} segments were not synced before the machine's last start: they are forgotten"
        )


def _check_footers(
    path: Path, image: JournalImage, on_disk: dict[FileId, int], report: CheckReport, progress: Progress, *, data: bool
) -> int:
    """Compare each segment with its footer, and with `data` its bytes with their checksums. Returns bytes compared."""
    by_file: dict[FileId, list[SegmentRecord]] = defaultdict(list)
    for segment in image.segments:
        by_file[segment.file_id].append(segment)
    total = sum(segment.total_bytes for segment in image.segments) if data else len(image.segments)
    done = checked_bytes = 0
    for file_id, segments in by_file.items():
        if file_id in on_disk:
            with SessionFileReader(file_path(path, file_id), file_id) as reader:
                for segment in sorted(segments, key=lambda one: one.file_offset):
                    checked_bytes += _check_segment(reader, segment, image, report, data=data)
                    done += segment.total_bytes if data else 1
                    progress(done, total)
    return checked_bytes


def _check_segment(
    reader: SessionFileReader, segment: SegmentRecord, image: JournalImage, report: CheckReport, *, data: bool
) -> int:
    session = image.sessions[segment.session_no]
    where = f"segment {segment.generation} of session {session.name!r} in file {segment.file_id:x}"
    spec = image.spaces[session.fingerprint]
    try:
        footer = reader.footer_at(segment.file_offset + segment_layout(spec, segment.blocks).data_bytes)
    except (Corrupt, ValueError) as error:
        report.find(f"{where}: {error}")
        return 0
    wrong = [name for name, found, expected in _pairs(footer, segment, session) if found != expected]
    if not np.array_equal(footer.keys, segment.keys):
        wrong.append("keys")
    if wrong:
        report.find(f"{where}: journal and footer differ in {', '.join(wrong)}")
        return 0
    if not data:
        return 0
    result = reader.check_data(footer)
    if result.bad:
        report.find(f"{where}: {result.bad} of {result.granules} granules differ from their checksums")
    if result.unchecked:
        report.note(f"{where}: {result.unchecked} of {result.granules} granules have no checksum")
    return 0 if result.unchecked else segment.total_bytes


def _pairs(footer: Footer, segment: SegmentRecord, session: SessionRecord) -> tuple[tuple[str, object, object], ...]:
    return (
        ("space", footer.spec.fingerprint, session.fingerprint),
        ("session", footer.session, session.name),
        ("turn", footer.turn, segment.turn),
        ("generation", footer.generation, segment.generation),
        ("offset", footer.file_offset, segment.file_offset),
        ("size", footer.total_bytes, segment.total_bytes),
        ("first block", footer.first_block, segment.first_block),
        ("parent key", footer.parent_key, segment.parent_key),
    )


def _counts(image: JournalImage, on_disk: dict[FileId, int], checked_bytes: int) -> dict[str, int]:
    committed = sum(segment.total_bytes for segment in image.segments)
    written = sum(file.written_bytes for file in image.files.values())
    return {
        "spaces": len(image.spaces),
        "sessions": len(image.sessions),
        "files": len(image.files),
        "segments": len(image.segments),
        "blocks": image.blocks,
        "committed_bytes": committed,
        "hole_bytes": written - committed,  # of aborted turns and discarded segments
        "reserved_bytes": sum(file.size_bytes for file in image.files.values()) - written,
        "files_on_disk": len(on_disk),
        "disk_bytes": sum(on_disk.values()),
        "checked_bytes": checked_bytes,
    }


@contextlib.contextmanager
def _looking(path: Path) -> Iterator[None]:
    """Keep a daemon from starting meanwhile. Where no lock file is, no daemon ever was, and none is made."""
    refuse_strange(path)
    fd = lock_path(path, shared=True) if (path / LOCK_NAME).exists() else -1
    try:
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def _files_on_disk(path: Path) -> dict[FileId, int]:
    try:
        if not (path / SESSIONS_NAME).exists():
            return {}
        return {file_id: entry.stat(follow_symlinks=False).st_size for file_id, entry in walk_files(path)}
    except OSError as error:
        raise Unavailable(f"{path} cannot be listed: {error.strerror or error}") from error


def _read_journal(path: Path) -> JournalImage | None:
    """None where there is none. Raises: Corrupt."""
    if not (path / JOURNAL_NAME).exists():
        return None
    records = RocksRecords(path / JOURNAL_NAME, read_only=True)
    try:
        return read_image(records, 0, read_boot_id())
    finally:
        records.close()
