"""What one SSD path remembers across restarts: spaces, sessions, files and committed segments, in RocksDB.

One state change is one write batch, so after a crash each is there whole or not at all. Keys and values are those of
journal_records.py.

Order of things: data and footer are fdatasync'ed before `commit`; the batch itself is not synced. A batch that returned is
in the kernel's hands and survives the process. A power cut may take the last batches, and recovery ends at the first
one missing: the journal is then as it was a moment before, and the store forgets what came after. It cannot lie, because
- a record only ever names bytes that were on the disk before it was written. Where the node was told not to sync data, its
  segments are marked, and those from before the machine's last boot are not loaded;
- a deletion that was lost shows a file that is gone or shorter than `written_bytes`, which the store checks at the start;
- ids are never reused: next ids start at marks that are synced and flushed in steps, ahead of use.

Faults survived: kill -9 at any moment, also while the journal is made for the first time (it is made beside its place and
renamed); power cut; a full or failing disk (`Unavailable`, and from then on every write is refused: what RocksDB has kept
is no longer known here); another process that has it open (`Unavailable`); a damaged table, manifest or record
(`Corrupt`: what the files say themselves is read back by `flatcake check --rebuild`). A damaged log ends recovery
there: later commits are forgotten.

Thread-safe. Errors of RocksDB arrive as bare `Exception`s with text and are translated in `_RocksErrors` only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from rocksdict import (
    AccessType,
    BlockBasedOptions,
    Cache,
    DBCompressionType,
    DBRecoveryMode,
    Options,
    Rdict,
    ReadOptions,
    WriteBatch,
    WriteOptions,
)

from flatcake_server.journal_records import (
    ADVICE,
    FILES,
    FORMAT,
    MARKS,
    META,
    OWN_META,
    SEGMENTS,
    SESSIONS,
    SPACES,
    SYNCED,
    JournalImage,
    Puts,
    RecordStore,
    encode_file,
    encode_segment,
    encode_session,
    number_key,
    read_image,
)
from flatcake_server.records import FileId, FileRecord, Generation, SegmentRecord, SessionNo, SessionRecord
from flatcake_transport.errors import Corrupt, FlatCakeError, Unavailable
from flatcake_transport.space import Fingerprint, SpaceSpec

JOURNAL_NAME: Final = "journal"  # below the SSD path
# Ids below a mark may have been used. A step costs one synced write; a restart skips what is left of it, of 2^64.
MARK_STEP: Final = 1 << 16

# A batch is in the log until 8 MiB of them are written out as a table; tables are merged up to 64 MiB. 10 M blocks are
# 200 MB in few files, and RocksDB's own memory stays below some 30 MB.
_WRITE_BUFFER_BYTES: Final = 8 << 20
_TABLE_BYTES: Final = 64 << 20
_CACHE_BYTES: Final = 4 << 20
_READAHEAD_BYTES: Final = 2 << 20


class Journal:
    """The journal at `path`, made if it is not there; or over another `records` store.

    Raises:
        Unavailable: another process has it, or the disk fails.
        Corrupt: it cannot be read; the message says what to do.
    """

    def __init__(self, path: Path, *, records: RecordStore | None = None, boot_id: bytes | None = None) -> None:
        self._fresh = records is None and make_journal(path)
        self._records = RocksRecords(path) if records is None else records
        self._boot_id = read_boot_id() if boot_id is None else boot_id
        self._lock = threading.Lock()
        self._known: set[Fingerprint] = set()
        self._marks = (0, 0, 0)
        self._failure = ""
        self.records_read = 0  # by `load` so far
        self.stopping = False  # whoever sets it ends `load`

    def load(self, node_id: int = 0) -> JournalImage:
        """Read everything, and remember that ids may be used from here on. To be called once, before anything is written.

        Raises: Corrupt: a record is damaged, or speaks of one that is not there. Unavailable: `stopping`, or the disk fails.
        """
        image = read_image(self, node_id, self._boot_id, fresh=self._fresh)
        self._known = set(image.spaces)
        self.drop(None, [], image.forgotten)
        self.cover(image.next_session_no, image.next_file_id, image.next_generation)
        return image

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """What `load` reads, with a word of how far it is."""
        for record in self._records.scan(prefix):
            if self.stopping:
                raise Unavailable("the journal is being closed")
            self.records_read += 1
            yield record

    def commit(
        self,
        session: SessionRecord,
        file: FileRecord,
        segments: Sequence[SegmentRecord],
        spaces: Mapping[Fingerprint, SpaceSpec],
        synced: bool = True,
    ) -> None:
        """Remember a session, its file and new segments in it. Their bytes are in place, and on the disk if `synced`.

        Raises: Unavailable: it is not known whether they are remembered. The path must be given up.
        """
        for segment in segments:
            if segment.file_id != file.file_id or segment.end_offset > file.written_bytes:
                raise ValueError(f"segment {segment.generation} is not within the written part of file {file.file_id}")
        self.cover(session.session_no, file.file_id, max((s.generation for s in segments), default=0))
        puts = [
            (SPACES + fingerprint, spec.to_json())
            for fingerprint, spec in spaces.items()
            if fingerprint not in self._known
        ]
        puts += (encode_session(session), encode_file(file))
        boot_id = SYNCED if synced else self._boot_id
        puts += (encode_segment(segment, boot_id) for segment in segments)
        self._write(puts)
        self._known.update(spaces)

    def drop(
        self,
        session_no: SessionNo | None,
        file_ids: Sequence[FileId],
        generations: Sequence[Generation],
        sync: bool = False,
    ) -> None:
        """Forget files and segments, and their session unless None. Raises: Unavailable: as `commit`.

        `sync`: for good, also over a power cut. Not needed where the files go with them.
        """
        deletes = [SESSIONS + number_key(session_no)] if session_no is not None else []
        deletes += (FILES + number_key(file_id) for file_id in file_ids)
        deletes += (SEGMENTS + number_key(generation) for generation in generations)
        self._write([], deletes, sync=sync)

    def put_file(self, *files: FileRecord) -> None:
        """Replace what is remembered of files that have segments: cut, or sealed. Raises: Unavailable: as `commit`."""
        self._write([encode_file(file) for file in files])

    def put_session(self, *sessions: SessionRecord) -> None:
        """Replace what is remembered of sessions: when they were used. Raises: Unavailable: as `commit`."""
        self._write([encode_session(session) for session in sessions])

    def put_meta(self, meta: Mapping[str, bytes]) -> None:
        """Remember what the node says of itself. Raises: ValueError: a name of the journal's own. Unavailable."""
        if taken := set(OWN_META) & set(meta):
            raise ValueError(f"meta names {sorted(taken)} are the journal's own")
        self._write([(META + name.encode(), value) for name, value in meta.items()], sync=True)

    def cover(self, session_no: int = 0, file_id: int = 0, generation: int = 0) -> None:
        """See to it that these ids are not used again, whatever happens. Free, except once in 32,768 ids.

        `commit` does it for its own. Before an id is shown to the world without a commit, call this. Raises: Unavailable.
        """
        with self._lock:
            ids = (session_no, file_id, generation)
            if all(one + MARK_STEP // 2 < mark for one, mark in zip(ids, self._marks, strict=True)):
                return
            marks = tuple(max(one + MARK_STEP, mark) for one, mark in zip(ids, self._marks, strict=True))
            self._write([(META + b"marks", MARKS.pack(*marks))], sync=True)
            self._marks = (marks[0], marks[1], marks[2])

    def close(self) -> None:
        """Twice is fine."""
        self._records.close()

    def _write(self, puts: Puts, deletes: Sequence[bytes] = (), *, sync: bool = False) -> None:
        if self._failure:
            raise Unavailable(f"the journal is not written any more: {self._failure}")
        if not puts and not deletes:
            return
        try:
            self._records.write(puts, deletes, sync=sync)
        except FlatCakeError as error:
            self._failure = str(error)
            raise


class RocksRecords:
    """A RocksDB as `RecordStore`. Raises: Unavailable: another process has it, or the disk fails. Corrupt: unreadable."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._path = path
        self._closed = False
        self._shadow: tempfile.TemporaryDirectory[str] | None = None
        access = AccessType.read_write()
        if read_only:
            path = self._shadowed(path)
            access = AccessType.read_only(False)
        try:
            with _RocksErrors(f"the journal {self._path} cannot be opened", opening=True):
                self._db = Rdict(str(path), _options(), access_type=access)
        except BaseException:
            self._drop_shadow()
            raise
        self._synced = WriteOptions()
        self._synced.sync = True

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        options = ReadOptions()
        options.set_iterate_upper_bound(bytes((prefix[0] + 1,)))
        options.set_readahead_size(_READAHEAD_BYTES)
        key: Any = prefix
        with _RocksErrors(f"the journal {self._path} cannot be read"):
            for key, value in self._db.items(from_key=prefix, read_opt=options):
                yield key, value
            # That iterator ends at a damaged block as at the end. So look once more, where it ended, with one that tells.
            after = self._db.iter(options)
            after.seek(key)
            if after.valid() and after.key() == key:
                after.next()
            ended_early = after.valid()
            after.status()
        if ended_early:
            raise Corrupt(f"the journal {self._path} could not be read to its end; {ADVICE}")

    def write(self, puts: Puts, deletes: Sequence[bytes], *, sync: bool) -> None:
        batch = WriteBatch(raw_mode=True)
        for key, value in puts:
            batch.put(key, value)
        for key in deletes:
            batch.delete(key)
        with _RocksErrors(f"the journal {self._path} cannot be written"):
            if sync:
                self._db.write(batch, self._synced)
                self._db.flush()
            else:
                self._db.write(batch)

    def close(self) -> None:
        """Never raises: what closing could not write to a table is in the log, and read from there."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(FlatCakeError), _RocksErrors(f"the journal {self._path} cannot be closed"):
                self._db.close()
            self._drop_shadow()

    def _shadowed(self, path: Path) -> Path:
        """A directory of links to the database. Opening leaves traces where it opens, even read-only: in there, not here."""
        try:
            names = [
                entry.name for entry in os.scandir(path) if entry.name != "LOCK" and not entry.name.endswith(".json")
            ]
        except OSError as error:
            raise Corrupt(f"there is no journal at {path}: {error.strerror}; {ADVICE}") from error
        if "CURRENT" not in names:
            raise Corrupt(f"{path} is no complete RocksDB: CURRENT is missing; {ADVICE}")
        self._shadow = tempfile.TemporaryDirectory(prefix="flatcake-check-")
        for name in names:
            Path(self._shadow.name, name).symlink_to(path.resolve() / name)
        return Path(self._shadow.name)

    def _drop_shadow(self) -> None:
        if self._shadow is not None:
            self._shadow.cleanup()


def make_journal(path: Path) -> bool:
    """Make an empty journal unless one is there; whether it did. Killed half way, it leaves nothing at `path`.

    Raises: Corrupt: what is there is incomplete, or a rebuild was interrupted. Unavailable.
    """
    old, new = path.with_name(path.name + ".old"), path.with_name(path.name + ".new")
    try:
        if path.exists() and any(path.iterdir()):
            if not (path / "CURRENT").exists():
                raise Corrupt(f"the journal {path} is incomplete: CURRENT is missing; {ADVICE}")
            return False
        if old.exists():
            raise Corrupt(f"{path} is missing and {old} is there: a rebuild was interrupted; {ADVICE}")
        if new.exists():
            shutil.rmtree(new)
        records = RocksRecords(new)
        records.write([(META + b"format", FORMAT)], [], sync=True)
        records.close()
        new.rename(path)
        sync_directory(path.parent)
    except OSError as error:
        raise Unavailable(f"the journal {path} cannot be made: {error.strerror or error}") from error
    return True


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_boot_id() -> bytes:
    """16 bytes that differ after each start of the machine; where it does not tell, after each call."""
    try:
        return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    except (OSError, ValueError):
        return uuid.uuid4().bytes


def _options() -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_wal_recovery_mode(DBRecoveryMode.point_in_time())
    options.set_write_buffer_size(_WRITE_BUFFER_BYTES)
    options.set_max_write_buffer_number(2)
    options.set_max_total_wal_size(4 * _WRITE_BUFFER_BYTES)
    options.set_target_file_size_base(_TABLE_BYTES)
    options.set_compression_type(DBCompressionType.none())  # keys are hashes: nothing to gain
    options.set_max_open_files(256)
    options.set_max_background_jobs(2)
    options.set_keep_log_file_num(2)
    options.set_max_log_file_size(1 << 20)
    options.set_stats_dump_period_sec(0)
    options.set_skip_stats_update_on_db_open(True)
    # Dropped sessions leave tombstones at the old end, where no new record would ever cause a merge.
    options.add_compact_on_deletion_collector_factory(1024, 512, 0.5)
    table = BlockBasedOptions()
    table.set_block_cache(Cache(_CACHE_BYTES))
    table.set_block_size(32 << 10)
    options.set_block_based_table_factory(table)
    return options


class _RocksErrors:
    """Translates in a `with`: rocksdict raises `Exception` itself, and its text tells a damaged database from a failing disk."""

    def __init__(self, what: str, *, opening: bool = False) -> None:
        self._what = what
        self._opening = opening

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, FlatCakeError):
            return
        text = str(error)
        # On opening, a file that is not there is a table or manifest that the database counts on.
        missing = self._opening and "No such file" in text
        damaged = not text.startswith("IO error") if self._opening else text.startswith("Corruption")
        if damaged or missing:
            raise Corrupt(f"{self._what}: {text}; {ADVICE}") from error
        raise Unavailable(f"{self._what}: {text}") from error
