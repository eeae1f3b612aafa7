"""Keys and values of the journal, all prefixes and both directions in one place. Pure.

Keys are one letter and a number that only grows, big-endian, so a new record sorts last and compaction has little to move.

    f + file id       FileRecord                        n + session number   SessionRecord
    g + generation    SegmentRecord with its keys       s + fingerprint      SpaceSpec, as JSON
    m + name          what the node says of itself; "format" and "marks" are the journal's own

A segment's address is not stored: it is its file's base plus its offset there, so a file can be given another base.
FORMAT.md has the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from flatcake_server.records import FileId, FileRecord, Generation, SegmentRecord, SessionNo, SessionRecord
from flatcake_transport.address import OFFSET_LIMIT, Address, Medium
from flatcake_transport.errors import Corrupt
from flatcake_transport.space import Fingerprint, SpaceSpec

FORMAT: Final = b"flatcake journal 1"
ADVICE: Final = "run `flatcake check --rebuild --ssd-paths` with this path: the session files describe themselves"

FILES: Final = b"f"
SEGMENTS: Final = b"g"
META: Final = b"m"
SESSIONS: Final = b"n"
SPACES: Final = b"s"
OWN_META: Final = ("format", "marks")

_KEY: Final = struct.Struct(">xQ")  # after the letter
# session number, base, size, written, sealed
_FILE: Final = struct.Struct("<QQQQB")
# turns, created, last used, fingerprint; then the name
_SESSION: Final = struct.Struct("<Qdd16s")
# session number, file id, file offset, total bytes, first block, turn, blocks, parent key, boot id; then keys, then reason
_SEGMENT: Final = struct.Struct("<QQQQQII16s16s")
MARKS: Final = struct.Struct("<QQQ")  # session number, file id, generation
SYNCED: Final = bytes(16)  # in place of the boot id: the data outlives the boot

Puts = Sequence[tuple[bytes, bytes]]


class Records(Protocol):
    """Ordered bytes to bytes, to be read. Thread-safe."""

    def scan(self, prefix: bytes) -> Iterable[tuple[bytes, bytes]]:
        """Records whose key begins with one byte, by key. Raises: Corrupt: one cannot be read."""
        ...


class RecordStore(Records, Protocol):
    """With atomic batches: RocksDB, or a dict in tests. Thread-safe."""

    def write(self, puts: Puts, deletes: Sequence[bytes], *, sync: bool) -> None:
        """All or nothing. `sync`: on the disk, where no damage to the log takes it back. Raises: Unavailable."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class JournalImage:
    """All that is remembered, read at one moment. Sessions of a segment or file are always among `sessions`.

    Attributes:
        segments: by generation, oldest first; all on SSD.
        next_session_no, next_file_id, next_generation: from here on never used before, as far as this path knows.
        meta: what `put_meta` stored.
        fresh: the journal was made by this `open`: session files that are there belong to one that was lost.
        forgotten: segments not synced and from before the machine's last boot: left out.
    """

    spaces: dict[Fingerprint, SpaceSpec]
    sessions: dict[SessionNo, SessionRecord]
    files: dict[FileId, FileRecord]
    segments: list[SegmentRecord]
    next_session_no: SessionNo
    next_file_id: FileId
    next_generation: Generation
    meta: dict[str, bytes]
    fresh: bool
    forgotten: list[Generation]

    @property
    def blocks(self) -> int:
        return sum(len(segment.keys) for segment in self.segments)


def read_image(records: Records, node_id: int, boot_id: bytes, *, fresh: bool = False) -> JournalImage:
    """Read all records and check that each speaks only of others that are there. Changes nothing. Raises: Corrupt."""
    meta = {key[1:].decode(errors="replace"): value for key, value in records.scan(META)}
    try:
        if meta.get("format", FORMAT) != FORMAT:
            raise Corrupt(f"the journal has format {meta['format']!r}, not {FORMAT!r}; {ADVICE}")
        spaces = {Fingerprint(key[1:]): SpaceSpec.from_json(value) for key, value in records.scan(SPACES)}
        sessions = {record.session_no: record for record in map(decode_session, records.scan(SESSIONS))}
        files = {record.file_id: record for record in map(decode_file, records.scan(FILES))}
        if wrong := [one for one, spec in spaces.items() if spec.fingerprint != one]:
            raise Corrupt(f"the journal's space {wrong[0].hex()} is another one; {ADVICE}")
        if lost := [one.session_no for one in sessions.values() if one.fingerprint not in spaces]:
            raise Corrupt(f"the journal's session {lost[0]} is of no known space; {ADVICE}")
        if orphans := [one.file_id for one in files.values() if one.session_no not in sessions]:
            raise Corrupt(f"the journal's file {orphans[0]:x} is of no known session; {ADVICE}")
        segments, forgotten = _read_segments(records, files, node_id, boot_id)
        marks = MARKS.unpack(meta["marks"]) if "marks" in meta else (1, 1, 1)
    except (struct.error, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise Corrupt(f"a record of the journal is damaged: {error}; {ADVICE}") from error
    return JournalImage(
        spaces=spaces,
        sessions=sessions,
        files=files,
        segments=segments,
        next_session_no=SessionNo(max(marks[0], 1 + max(sessions, default=0))),
        next_file_id=FileId(max(marks[1], 1 + max(files, default=0))),
        next_generation=Generation(max(marks[2], 1 + (segments[-1].generation if segments else 0))),
        meta={name: value for name, value in meta.items() if name not in OWN_META},
        fresh=fresh,
        forgotten=forgotten,
    )


def read_vouched(records: Records) -> Iterator[tuple[Generation, tuple[int, int, bytes]]]:
    """Segments whose bytes are on the disk by word of the journal: generation; file id, offset, last key. Raises: Corrupt."""
    for key, value in records.scan(SEGMENTS):
        _, file_id, offset, _, _, _, blocks, _, boot = _SEGMENT.unpack_from(value)
        if boot == SYNCED:
            end = _SEGMENT.size + 16 * blocks
            yield Generation(_id_of(key)), (file_id, offset, value[end - 16 : end])


def encode_file(file: FileRecord) -> tuple[bytes, bytes]:
    value = _FILE.pack(file.session_no, file.base, file.size_bytes, file.written_bytes, file.sealed)
    return FILES + number_key(file.file_id), value


def decode_file(record: tuple[bytes, bytes]) -> FileRecord:
    key, value = record
    session_no, base, size_bytes, written_bytes, sealed = _FILE.unpack(value)
    if written_bytes > size_bytes or base + size_bytes > OFFSET_LIMIT:
        raise ValueError(f"file {key[1:].hex()} has written {written_bytes} of {size_bytes} bytes from {base:#x}")
    return FileRecord(FileId(_id_of(key)), SessionNo(session_no), base, size_bytes, written_bytes, sealed=bool(sealed))


def encode_session(session: SessionRecord) -> tuple[bytes, bytes]:
    head = _SESSION.pack(session.turns, session.created_s, session.last_used_s, session.fingerprint)
    return SESSIONS + number_key(session.session_no), head + session.name.encode()


def decode_session(record: tuple[bytes, bytes]) -> SessionRecord:
    key, value = record
    turns, created_s, last_used_s, fingerprint = _SESSION.unpack_from(value)
    name = value[_SESSION.size :].decode()
    return SessionRecord(SessionNo(_id_of(key)), name, Fingerprint(fingerprint), turns, created_s, last_used_s)


def encode_segment(segment: SegmentRecord, boot_id: bytes = SYNCED) -> tuple[bytes, bytes]:
    head = _SEGMENT.pack(
        segment.session_no, segment.file_id, segment.file_offset, segment.total_bytes,
        segment.first_block, segment.turn, len(segment.keys), segment.parent_key, boot_id,
    )  # fmt: skip
    return SEGMENTS + number_key(segment.generation), head + segment.keys.tobytes() + segment.reason.encode()


def _read_segments(
    records: Records, files: Mapping[FileId, FileRecord], node_id: int, boot_id: bytes
) -> tuple[list[SegmentRecord], list[Generation]]:
    """The one loop of a start that runs once a segment: no call in it that could be outside. 4 us a segment."""
    segments: list[SegmentRecord] = []
    forgotten: list[Generation] = []
    add, file_of, unpack_key, unpack = segments.append, files.get, _KEY.unpack, _SEGMENT.unpack_from
    head, array, u8, boots = _SEGMENT.size, np.ndarray, np.dtype(np.uint8), (SYNCED, boot_id)
    base_of_node = int(Address.of(Medium.SSD, node_id, 0))
    reasons: dict[bytes, str] = {}
    for key, value in records.scan(SEGMENTS):
        (generation,) = unpack_key(key)
        session_no, file_id, offset, total, first_block, turn, blocks, parent, boot = unpack(value)
        if boot not in boots:
            forgotten.append(generation)
            continue
        file = file_of(file_id)
        if file is None or file.session_no != session_no or offset + total > file.written_bytes or not blocks:
            raise Corrupt(f"the journal's segment {generation} is not within its session's files; {ADVICE}")
        tail = value[head + 16 * blocks :]
        if (reason := reasons.get(tail)) is None:
            reason = reasons[tail] = tail.decode()
        # A file's extent was checked to be within the node's, so this sum needs no check of `Address` again.
        address = int.__new__(Address, base_of_node + file.base + offset)
        keys = array((blocks, 16), u8, value, head)
        add(
            SegmentRecord(
                generation, session_no, address, total, turn, first_block, reason, keys, parent, file_id, offset
            )
        )
    return segments, forgotten


def number_key(number: int) -> bytes:
    return number.to_bytes(8, "big")


def _id_of(key: bytes) -> int:
    return int(_KEY.unpack(key)[0])
