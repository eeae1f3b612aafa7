"""An SSD path as a daemon would leave it, made with the real files and journal; segments have bytes their generation gives."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
from images import granule_sums, plane_starts

from flatcake_server.journal import Journal
from flatcake_server.journal_records import JournalImage
from flatcake_server.records import FileId, FileRecord, Generation, SegmentRecord, SessionNo, SessionRecord
from flatcake_server.session import SessionFiles
from flatcake_transport.address import Address, Medium
from flatcake_transport.footer import Footer, encode_footer, footer_bytes
from flatcake_transport.space import SpaceSpec

SPEC = SpaceSpec(model="m", dtype="uint8", block_tokens=16, plane_bytes=(3000, 100_000), shards=2)
FILE_BYTES = 4 << 20


def keys_of(generation: int, blocks: int) -> np.ndarray:
    return np.random.default_rng(generation).integers(0, 256, (blocks, 16), dtype=np.uint8)


def planes_of(spec: SpaceSpec, generation: int, blocks: int) -> list[np.ndarray]:
    rng = np.random.default_rng(generation + 1_000_000)
    return [rng.integers(0, 256, (blocks, size), dtype=np.uint8) for size in list(spec.plane_bytes) * spec.shards]


def raw_file(root: Path, file_id: int) -> Path:
    """Where a file is, said once more and not by the code under test."""
    name = f"{file_id:016x}"
    return root / "sessions" / name[10:12] / name[12:14] / f"{name}.kv"


class DiskPath:
    """Opens a path; `turn`, `trim` and `drop` do what the store does, in its order."""

    def __init__(self, root: Path, *, boot_id: bytes | None = None, spec: SpaceSpec = SPEC) -> None:
        self.root, self.spec = root, spec
        self.files = SessionFiles(root)
        with ExitStack() as undo:
            undo.callback(self.files.close)
            self.journal = Journal(root / "journal", boot_id=boot_id)
            undo.callback(self.journal.close)
            self.image: JournalImage = self.journal.load()
            undo.pop_all()
        self.sessions = {s.name: s for s in self.image.sessions.values()}
        self.file_of = {f.session_no: f for f in self.image.files.values()}
        self.segments = list(self.image.segments)
        self._next = [self.image.next_session_no, self.image.next_file_id, self.image.next_generation]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.journal.close()
        self.files.close()

    def sessions_file(self, name: str) -> FileId:
        return self.file_of[self.sessions[name].session_no].file_id

    def take(self, kind: int) -> int:
        self._next[kind] += 1
        return self._next[kind] - 1

    def turn(
        self,
        name: str,
        blocks: int,
        *,
        algorithm: int = 1,
        skip: int = 0,
        synced: bool = True,
        commit: bool = True,
        spec: SpaceSpec | None = None,
    ) -> SegmentRecord:
        """Store a turn after leaving a hole of `skip` bytes; without `commit` the journal never hears of it."""
        spec = spec or self.spec
        session = self.sessions.get(name)
        if session is None:
            session = SessionRecord(SessionNo(self.take(0)), name, spec.fingerprint, 0, 1.0, 1.0)
        file = self.file_of.get(session.session_no)
        if file is None:
            base = max((f.base + f.size_bytes for f in self.file_of.values()), default=0)
            file = FileRecord(FileId(self.take(1)), session.session_no, base, FILE_BYTES)
            self.journal.cover(file_id=file.file_id)
            self.files.create(file.file_id, FILE_BYTES)
        generation = Generation(self.take(2))
        segment = self._write(spec, session, file, generation, blocks, file.written_bytes + skip, algorithm)
        session = replace(session, turns=session.turns + 1, last_used_s=float(generation))
        file = replace(file, written_bytes=segment.end_offset)
        if commit:
            self.journal.commit(session, file, [segment], {spec.fingerprint: spec}, synced)
            self.segments.append(segment)
        self.sessions[name], self.file_of[session.session_no] = session, file
        return segment

    def _write(
        self,
        spec: SpaceSpec,
        session: SessionRecord,
        file: FileRecord,
        generation: Generation,
        blocks: int,
        offset: int,
        algorithm: int,
    ) -> SegmentRecord:
        keys, planes, starts = (
            keys_of(generation, blocks),
            planes_of(spec, generation, blocks),
            plane_starts(spec, blocks),
        )
        with raw_file(self.root, file.file_id).open("r+b") as raw:
            for start, plane in zip(starts, planes, strict=False):
                raw.seek(offset + start)
                raw.write(plane.tobytes())
        footer = Footer(
            spec=spec,
            session=session.name,
            turn=session.turns + 1,
            generation=generation,
            file_id=file.file_id,
            file_offset=offset,
            first_block=7,
            parent_key=bytes(range(16)),
            keys=keys,
            algorithms=bytes([algorithm]) * spec.shards,
            checksums=granule_sums(spec, planes),
        )
        self.files.write_footer(file.file_id, offset + starts[-1], encode_footer(footer))
        return SegmentRecord(
            generation=generation,
            session_no=session.session_no,
            address=Address.of(Medium.SSD, 0, file.base + offset),
            total_bytes=starts[-1] + footer_bytes(spec, session.name, blocks),
            turn=session.turns + 1,
            first_block=7,
            reason="first-turn",
            keys=keys,
            parent_key=bytes(range(16)),
            file_id=file.file_id,
            file_offset=offset,
        )

    def trim(self, name: str) -> None:
        session = self.sessions[name]
        file = self.file_of[session.session_no]
        file = replace(file, size_bytes=file.written_bytes, sealed=True)
        self.journal.put_file(file)
        self.files.truncate(file.file_id, file.size_bytes)
        self.file_of[session.session_no] = file

    def drop(self, name: str) -> None:
        session = self.sessions.pop(name)
        file = self.file_of.pop(session.session_no)
        gone = [s.generation for s in self.segments if s.session_no == session.session_no]
        self.segments = [s for s in self.segments if s.session_no != session.session_no]
        self.journal.drop(session.session_no, [file.file_id], gone)
        self.files.delete(file.file_id)


def same_segment(one: SegmentRecord, other: SegmentRecord) -> bool:
    names = [name for name in SegmentRecord.__slots__ if name != "keys"]
    return all(getattr(one, n) == getattr(other, n) for n in names) and np.array_equal(one.keys, other.keys)


def snapshot(root: Path) -> dict[str, tuple[int, int, int]]:
    """Everything below a directory: size, time of change, inode."""
    found = {}
    for folder, _, names in os.walk(root):
        for path in [Path(folder), *(Path(folder, name) for name in names)]:
            stat = path.lstat()
            found[str(path)] = (stat.st_size, stat.st_ctime_ns, stat.st_ino)
    return found


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))
