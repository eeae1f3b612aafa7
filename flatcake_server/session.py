"""Session files of one SSD path: made at full length, written by clients, deleted whole.

    PATH/flatcake.lock                          flock: one daemon a path; holds its pid
    PATH/sessions/ab/cd/<file id, 16 hex>.kv    ab, cd: bits 16-23 and 8-15 of the id, so a directory has few entries

Bytes of a file mean nothing by themselves: the journal says which are committed, and each segment's footer repeats it.

Faults survived, and how:
- The process is killed at any step. A file made but not journaled is an orphan that the next start deletes; a file cut to
  nothing but not unlinked is one too. The lock goes with the process.
- The file system refuses O_DIRECT or fallocate (tmpfs, overlays, network mounts). Both are tried for real at the start,
  on a file, with data read back; without them files are opened buffered, or made sparse.
- The disk is full but for what the journal needs, or a quota met, when a file is made: `DiskFull`, and no file is left. In a sparse
  file that error comes later, to the writer.
- A write or fsync fails: `Unavailable`. The store seals the file: after a failed fsync the kernel may have dropped the
  pages and call the next fsync a success, so nobody asks again.
- A file cannot be truncated or unlinked (immutable, read-only remount, EIO): `Unavailable`; it stays listed, its space
  stays counted, deleting it may be tried again. Truncating comes first, so whoever still has it open reads nothing.
- Power is lost: what was not synced is gone. The caller syncs data and footer before it journals a segment, so the
  journal may know less than the disk and never more. A new file's directory entry is synced with its first footer.
Not survived: two machines on one shared file system that ignores flock; bits that rot in data (footers have checksums).

Thread-safe: no call shares state with another. Two calls on one file are the caller's to order.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from flatcake_server.records import FileId
from flatcake_transport.errors import Overloaded, Unavailable
from flatcake_transport.layout import ALIGN_BYTES

LOCK_NAME: Final = "flatcake.lock"
SESSIONS_NAME: Final = "sessions"
# Of a file system, not taken by session files: a journal that cannot be written costs the whole path. RocksDB needs room for what it
# merges, 64 MiB at a time; where the file system is small, a 64th of it must do.
KEPT_BYTES_MAX: Final = 64 << 20
KEPT_PART: Final = 64
_PROBE_NAME: Final = ".probe"
_PROBE_BYTES: Final = 64 << 10
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
# Of this process or machine, or of one file's size: they say nothing of the disk, and would cost it all its sessions.
_SHORT: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EFBIG)
_TOO_LARGE: Final = (
    "raise the daemon's limit (LimitFSIZE= of its unit, ulimit -f), or take a file system for large files: ext4, XFS"
)
_NOT_OFFERED: Final = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV)
_FILE_NAME: Final = re.compile(r"[0-9a-f]{16}\.kv")
_DIRECTORY_NAME: Final = re.compile(r"[0-9a-f]{2}")
_RETRIES: Final = 8  # of making a directory that a concurrent delete takes away as empty


class PathInUse(Unavailable):
    """Another process has the path. Waiting does not help while it lives."""


class DiskFull(Overloaded):
    """The file system, or a quota of it, has no room."""


@dataclass(frozen=True, slots=True)
class SessionFilesStats:
    direct: bool  # files are opened O_DIRECT
    preallocated: bool  # files have their blocks from the start; else they are sparse
    direct_refusal: str  # why not, in the file system's words
    preallocation_refusal: str


class SessionFiles:
    """The files below `root`, which is made if it is not there. Holds the path's lock until `close`.

    Raises: Unavailable: the path cannot be used, or belongs to another process (named by its pid).
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._sessions = root / SESSIONS_NAME
        with _unavailable(f"SSD path {root} cannot be used"):
            self._sessions.mkdir(parents=True, exist_ok=True)
        self._lock_fd = lock_path(root)
        self._direct_refusal = self._preallocation_refusal = ""
        try:
            with _unavailable(f"SSD path {root} cannot be written"):
                self._probe()
        except BaseException:
            self.close()
            raise

    @property
    def direct(self) -> bool:
        """Descriptors of `open_read` and `open_write` are O_DIRECT: offsets and sizes are multiples of 4 KiB."""
        return not self._direct_refusal

    def stats(self) -> SessionFilesStats:
        return SessionFilesStats(
            direct=self.direct,
            preallocated=not self._preallocation_refusal,
            direct_refusal=self._direct_refusal,
            preallocation_refusal=self._preallocation_refusal,
        )

    def path_of(self, file_id: FileId) -> Path:
        return file_path(self.root, file_id)

    def create(self, file_id: FileId, size_bytes: int) -> None:
        """Make a file of this length, its blocks allocated where the file system can.

        Raises:
            DiskFull: the disk or a quota is; no file is left.
            Overloaded: there is no descriptor or memory to be had, or no file may be so large; no file is left.
            Unavailable: the disk failed; no file is left unless it cannot even be unlinked.
            ValueError: the id was used before.
        """
        if size_bytes <= 0 or size_bytes % ALIGN_BYTES:
            raise ValueError(f"a session file has a positive multiple of {ALIGN_BYTES} bytes, not {size_bytes}")
        path = self.path_of(file_id)
        try:
            self._leave_last_bytes(path, size_bytes)
            fd = self._open_new(path)
        except FileExistsError as error:
            raise ValueError(f"{path} is there: a file id is never used twice") from error
        except OSError as error:
            raise _translated(error, f"{path} cannot be made") from error
        try:
            self._extend(fd, size_bytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink()
            raise _translated(error, f"{path} cannot be made {size_bytes} bytes long") from error
        finally:
            os.close(fd)

    def open_read(self, file_id: FileId) -> int:
        """A descriptor of the caller's, read only. Raises: Unavailable."""
        return self._open(file_id, os.O_RDONLY)

    def open_write(self, file_id: FileId) -> int:
        """A descriptor of the caller's, read and write. Raises: Unavailable."""
        return self._open(file_id, os.O_RDWR)

    def write_footer(self, file_id: FileId, offset: int, data: bytes, sync: bool = True) -> None:
        """Write a segment's footer; with `sync`, it and all data written to the file before are on the disk on return.

        Raises: Unavailable: they may not be. Seal the file: it must not be tried again.
        """
        path = self.path_of(file_id)
        with _unavailable(f"the footer at {offset} of {path} cannot be written"):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                view = memoryview(data)
                while view:
                    written = os.pwrite(fd, view, offset)
                    view, offset = view[written:], offset + written
                if sync:
                    os.fdatasync(fd)
            finally:
                os.close(fd)

    def truncate(self, file_id: FileId, size_bytes: int) -> None:
        """Cut a file. Whoever has it open reads nothing beyond. Raises: Unavailable: it is as long as it was, or shorter already."""
        path = self.path_of(file_id)
        with _unavailable(f"{path} cannot be cut to {size_bytes} bytes"):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                size = os.fstat(fd).st_size
                if size < size_bytes:
                    raise Unavailable(f"{path} has {size} bytes, fewer than the {size_bytes} to keep")
                os.ftruncate(fd, size_bytes)
            finally:
                os.close(fd)

    def delete(self, file_id: FileId) -> None:
        """Cut a file to nothing, then unlink it. A file that is not there is deleted. Raises: Unavailable: try again."""
        path = self.path_of(file_id)
        with _unavailable(f"{path} cannot be deleted"):
            try:
                os.truncate(path, 0)
                path.unlink()
            except FileNotFoundError:
                return
        # The directory goes with its last file, or a node of long life would walk 65,536 empty ones at each start.
        with contextlib.suppress(OSError):
            path.parent.rmdir()

    def folders(self) -> Sequence[Path]:
        """What `list` is done in pieces by: the files of a large node are some thousand in each. Raises: Unavailable."""
        with _unavailable(f"{self._sessions} cannot be listed"):
            return list(_directories(self._sessions))

    def list(self, *folders: Path) -> dict[FileId, int]:
        """Length of every file that is there, journaled or not; or of those in some folders. Raises: Unavailable."""
        with _unavailable(f"{self._sessions} cannot be listed"):
            walk = chain.from_iterable(map(_walk_folder, folders)) if folders else walk_files(self.root)
            return {file_id: entry.stat(follow_symlinks=False).st_size for file_id, entry in walk}

    def is_gone(self, file_id: FileId) -> bool:
        """Whether the file system says so: one that it cannot tell of may be there."""
        try:
            self.path_of(file_id).stat()
        except OSError as error:
            return error.errno == errno.ENOENT
        return False

    def close(self) -> None:
        """Give the path back. Twice is fine. Descriptors handed out stay open."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _open(self, file_id: FileId, flags: int) -> int:
        with _unavailable(f"{self.path_of(file_id)} cannot be opened"):
            return os.open(self.path_of(file_id), flags | os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0))

    def _leave_last_bytes(self, path: Path, size_bytes: int) -> None:
        stat = os.statvfs(self._sessions)
        free_bytes, kept_bytes = stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize // KEPT_PART
        if free_bytes - size_bytes < min(kept_bytes, KEPT_BYTES_MAX):
            raise DiskFull(
                f"{path} cannot be made {size_bytes} bytes long: its file system has {free_bytes} bytes free, of which "
                "the last are left to the journal"
            )

    def _open_new(self, path: Path) -> int:
        for attempt in range(_RETRIES):
            try:
                return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                if attempt == _RETRIES - 1:
                    raise
                path.parent.mkdir(parents=True, exist_ok=True)
        raise AssertionError("unreachable")

    def _extend(self, fd: int, size_bytes: int) -> None:
        if not self._preallocation_refusal:
            fallocate(fd, size_bytes)
        else:
            os.ftruncate(fd, size_bytes)

    def _probe(self) -> None:
        """Try on a file, with data, what the file system can do: some accept a flag and fail the first read."""
        path = self._sessions / _PROBE_NAME
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fallocate(fd, _PROBE_BYTES)
            except OSError as error:
                if error.errno not in _NOT_OFFERED:
                    raise
                self._preallocation_refusal = f"fallocate: {error.strerror}"
                os.ftruncate(fd, _PROBE_BYTES)
            self._direct_refusal = _direct_refusal(path)
        finally:
            os.close(fd)
            path.unlink()


def file_path(root: Path, file_id: FileId) -> Path:
    return root / SESSIONS_NAME / f"{file_id >> 16 & 0xFF:02x}" / f"{file_id >> 8 & 0xFF:02x}" / f"{file_id:016x}.kv"


def walk_files(root: Path) -> Iterator[tuple[FileId, os.DirEntry[str]]]:
    """Every session file below a path, in no order; other names are not ours and are passed over. Raises: OSError."""
    for first in _directories(root / SESSIONS_NAME):
        yield from _walk_folder(first)


def _walk_folder(first: Path) -> Iterator[tuple[FileId, os.DirEntry[str]]]:
    for second in _directories(first):
        with os.scandir(second) as entries:
            for entry in entries:
                if _FILE_NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    yield FileId(int(entry.name[:16], 16)), entry


def _directories(parent: Path) -> Iterator[Path]:
    with os.scandir(parent) as entries:
        names = [e.name for e in entries if _DIRECTORY_NAME.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    return (parent / name for name in names)


def number_of_now() -> int:
    """Where files are counted from: microseconds since 1970. Nobody makes one in each, so what was counted before, here or elsewhere, is below."""
    return time.time_ns() // 1000


def sync_file(path: Path) -> None:
    """See to it that what was written to a file outlives the machine. Raises: Unavailable."""
    with _unavailable(f"{path} cannot be synced"):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)


def lock_path(root: Path, *, shared: bool = False) -> int:
    """Take a path for this process, until the descriptor returned is closed. `shared`: among those who only look.

    Raises: PathInUse: another process has it; the message names its pid. Unavailable: it cannot be locked.
    """
    path = root / LOCK_NAME
    with _unavailable(f"{path} cannot be locked"):
        # Who only looks creates nothing; where no daemon ever was, none can be running.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC if shared else os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            if not shared:
                os.ftruncate(fd, 0)
                os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        except BlockingIOError as error:
            holder = _holder(fd)
            os.close(fd)
            raise PathInUse(
                f"{root} is in use by {holder}: stop that first, one daemon a path and no path twice"
            ) from error
        except BaseException:
            os.close(fd)
            raise
        return fd


def _holder(fd: int) -> str:
    """Who holds the lock: from the kernel, or from what the holder wrote where the kernel shows other namespaces nothing."""
    stat = os.fstat(fd)
    inode = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == inode and int(fields[4]) > 0:
                return f"process {fields[4]}"
    text = os.pread(fd, 32, 0).strip()
    return f"process {int(text)}" if text.isdigit() else "another process"


def fallocate(fd: int, size_bytes: int) -> None:
    """The system call itself: `os.posix_fallocate` would write every block where the file system cannot. Raises: OSError."""
    while _libc.fallocate(fd, 0, 0, size_bytes):
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def _direct_refusal(path: Path) -> str:
    """Why O_DIRECT in units of 4 KiB does not work on this file; empty if it does."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise
        return f"O_DIRECT: {error.strerror}"
    pattern = os.urandom(ALIGN_BYTES)
    try:
        with mmap.mmap(-1, ALIGN_BYTES) as page:  # a page of its own: aligned
            page[:] = pattern
            written = os.pwrite(fd, page, ALIGN_BYTES)
            page[:] = bytes(ALIGN_BYTES)
            read = os.preadv(fd, [page], ALIGN_BYTES)
            if (written, read) != (ALIGN_BYTES, ALIGN_BYTES) or page[:] != pattern:
                return "O_DIRECT: what was written is not what is read"
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise
        return f"O_DIRECT in units of {ALIGN_BYTES}: {error.strerror}"
    finally:
        os.close(fd)
    return ""


def _translated(error: OSError, what: str) -> Overloaded | Unavailable:
    kind = DiskFull if error.errno in _FULL else Overloaded if error.errno in _SHORT else Unavailable
    return kind(f"{what}: {error.strerror or error}" + (f": {_TOO_LARGE}" if error.errno == errno.EFBIG else ""))


@contextlib.contextmanager
def _unavailable(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unavailable(f"{what}: {error.strerror or error}") from error
