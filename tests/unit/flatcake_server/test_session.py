"""Session files on the disk of this machine."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from disk_path import raw_file, snapshot

from flatcake_server import session as module
from flatcake_server.session import DiskFull, PathInUse, SessionFiles
from flatcake_transport.errors import Overloaded, Unavailable

MIB = 1 << 20


@pytest.fixture
def files(tmp_path):
    made = SessionFiles(tmp_path / "ssd")
    yield made
    made.close()


def test_a_file_is_there_at_full_length(files, tmp_path):
    files.create(0x123456, MIB)
    path = raw_file(tmp_path / "ssd", 0x123456)
    assert path == tmp_path / "ssd/sessions/12/34/0000000000123456.kv" == files.path_of(0x123456)
    assert path.stat().st_size == MIB
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_blocks * 512 >= MIB
    assert path.read_bytes() == bytes(MIB)
    assert files.list() == {0x123456: MIB}


def test_an_id_is_used_once(files, tmp_path):
    files.create(1, 4096)
    raw_file(tmp_path / "ssd", 1).write_bytes(b"x" * 4096)
    with pytest.raises(ValueError, match="never used twice"):
        files.create(1, 8192)
    assert raw_file(tmp_path / "ssd", 1).read_bytes() == b"x" * 4096


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (errno.ENOSPC, DiskFull, "No space left"),
        (errno.EMFILE, Overloaded, "Too many open files"),
        (errno.EFBIG, Overloaded, "LimitFSIZE"),
        (errno.EIO, Unavailable, "Input/output"),
    ],
)
def test_a_full_disk_is_told_from_what_a_process_may_not(files, monkeypatch, code, kind, words):
    def fails(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(module, "fallocate", fails)
    with pytest.raises(kind, match=words) as said:
        files.create(1, MIB)
    assert type(said.value) is kind
    assert files.list() == {}


@pytest.mark.parametrize(("size", "kept"), [(1 << 40, module.KEPT_BYTES_MAX), (64 * MIB, MIB)])
def test_the_last_bytes_of_a_file_system_are_left_to_the_journal(files, monkeypatch, size, kept):
    """Without them its path would be lost."""
    free = kept + MIB
    monkeypatch.setattr(
        os, "statvfs", lambda _: SimpleNamespace(f_frsize=4096, f_blocks=size // 4096, f_bavail=free // 4096)
    )
    files.create(1, MIB)
    free -= 4096
    with pytest.raises(DiskFull, match="left to the journal"):
        files.create(2, MIB)
    assert files.list() == {1: MIB}


@pytest.mark.parametrize("size", [0, -4096, 1, 4097])
def test_sizes_are_whole_pages(files, size):
    with pytest.raises(ValueError, match="multiple"):
        files.create(1, size)
    assert files.list() == {}


def test_descriptors_read_and_write(files):
    files.create(7, MIB)
    writer, reader = files.open_write(7), files.open_read(7)
    try:
        with mmap.mmap(-1, 4096) as page:
            page[:] = b"a" * 4096
            assert os.pwrite(writer, page, 8192) == 4096
            page[:] = bytes(4096)
            assert os.preadv(reader, [page], 8192) == 4096
            assert page[:] == b"a" * 4096
            with pytest.raises(OSError, match="Bad file"):
                os.pwrite(reader, page, 0)
        assert files.stats().direct == files.direct == direct_flag(reader)
        assert direct_flag(writer) == files.direct
        assert not os.get_inheritable(reader)
        assert not os.get_inheritable(writer)
    finally:
        os.close(writer)
        os.close(reader)


def direct_flag(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.mark.parametrize("sync", [True, False])
def test_a_footer_lands_where_it_belongs(files, tmp_path, sync):
    files.create(7, MIB)
    files.write_footer(7, 8192, b"f" * 8192, sync)
    data = raw_file(tmp_path / "ssd", 7).read_bytes()
    assert data == bytes(8192) + b"f" * 8192 + bytes(MIB - 16384)


def test_cutting(files, tmp_path):
    files.create(7, MIB)
    reader = files.open_read(7)
    files.truncate(7, 8192)
    assert files.list() == {7: 8192}
    with mmap.mmap(-1, 4096) as page:
        assert os.preadv(reader, [page], 8192) == 0, "a reader gets nothing beyond the cut"
    os.close(reader)
    files.truncate(7, 8192)
    with pytest.raises(Unavailable, match="8192 bytes, fewer than the 12288"):
        files.truncate(7, 12288)
    assert raw_file(tmp_path / "ssd", 7).stat().st_size == 8192


def test_deleting(files, tmp_path):
    for file_id in (0x100, 0x101, 0x10000):
        files.create(file_id, MIB)
    reader = files.open_read(0x100)
    files.delete(0x100)
    with mmap.mmap(-1, 4096) as page:
        assert os.preadv(reader, [page], 0) == 0, "whoever has it open reads nothing"
    os.close(reader)
    assert files.list() == {0x101: MIB, 0x10000: MIB}
    files.delete(0x100)
    files.delete(0x999)
    files.delete(0x101)
    assert not raw_file(tmp_path / "ssd", 0x101).parent.exists(), "an empty directory is not walked at each start"
    files.create(0x102, MIB)
    assert files.list() == {0x102: MIB, 0x10000: MIB}


def test_what_is_not_there_is_unavailable(files):
    for call in (
        lambda: files.open_read(1),
        lambda: files.open_write(1),
        lambda: files.write_footer(1, 0, bytes(4096)),
        lambda: files.truncate(1, 0),
    ):
        with pytest.raises(Unavailable, match="No such file"):
            call()


def test_only_its_own_files_are_listed(files, tmp_path):
    files.create(0x55, MIB)
    folder = raw_file(tmp_path / "ssd", 0x55).parent
    (folder / "0000000000000056.kv.bak").write_bytes(b"x")
    (folder / "notes").write_bytes(b"x")
    (folder / "0000000000000057.kv").symlink_to(folder / "notes")
    (folder / "0000000000000058.kv").mkdir()
    (tmp_path / "ssd/sessions/zz").mkdir()
    (tmp_path / "ssd/sessions/00/note").write_bytes(b"x")
    assert files.list() == {0x55: MIB}


def test_a_process_of_its_own_holds_the_path(files, tmp_path):
    before = snapshot(tmp_path)
    with pytest.raises(PathInUse, match=f"in use by process {os.getpid()}"):
        SessionFiles(tmp_path / "ssd")
    code = "import sys; from pathlib import Path; from flatcake_server.session import SessionFiles; SessionFiles(Path(sys.argv[1]))"
    other = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "ssd")], capture_output=True, text=True, check=False
    )
    assert (
        f"PathInUse: {tmp_path / 'ssd'} is in use by process {os.getpid()}: stop that first, one daemon a path"
        in other.stderr
    )
    assert snapshot(tmp_path) == before, "who is refused leaves no trace"
    assert (tmp_path / "ssd/flatcake.lock").read_text() == f"{os.getpid()}\n"


def test_the_holder_is_named_where_the_kernel_does_not_tell(files, tmp_path, monkeypatch):
    monkeypatch.setattr("pathlib.Path.read_text", lambda *_a, **_k: "no locks to be seen")
    with pytest.raises(PathInUse, match=f"process {os.getpid()}"):
        SessionFiles(tmp_path / "ssd")
    (tmp_path / "ssd/flatcake.lock").write_bytes(b"")
    with pytest.raises(PathInUse, match="another process"):
        SessionFiles(tmp_path / "ssd")


def test_closing_gives_the_path_back(tmp_path):
    for _ in range(2):
        files = SessionFiles(tmp_path / "ssd")
        with pytest.raises(Unavailable):
            SessionFiles(tmp_path / "ssd")
        files.close()
        files.close()
    SessionFiles(tmp_path / "ssd").close()


def test_a_path_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(Unavailable, match="cannot be used"):
        SessionFiles(tmp_path / "file")
    (tmp_path / "ssd/sessions").mkdir(parents=True)
    (tmp_path / "ssd/flatcake.lock").mkdir()
    with pytest.raises(Unavailable, match="cannot be locked"):
        SessionFiles(tmp_path / "ssd")


def test_nothing_is_left_of_the_probe(files, tmp_path):
    assert list((tmp_path / "ssd/sessions").iterdir()) == []
