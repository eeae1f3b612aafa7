"""File systems that refuse, fill up and fail: by wrappers, and for real where this machine lets us."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from disk_path import DiskPath, raw_file

from flatcake_server import offline, session
from flatcake_server.session import SessionFiles
from flatcake_transport.errors import Overloaded, Unavailable

MIB = 1 << 20


def failing(real: Callable[..., Any], code: int, *, at: int = 1, times: int = 10**9) -> Callable[..., Any]:
    """Fails from the `at`-th call on, `times` times."""
    calls = [0]

    def call(*a: Any, **k: Any) -> Any:
        calls[0] += 1
        if at <= calls[0] < at + times:
            raise OSError(code, os.strerror(code))
        return real(*a, **k)

    return call


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a small file system; skipped where that is not allowed."""
    mounted: list[Path] = []

    def mount_one(*options: str) -> Path:
        target = tmp_path / f"mount{len(mounted)}"
        target.mkdir()
        done = subprocess.run(["mount", *options, str(target)], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(
                f"nothing can be mounted here: {done.stderr.strip()}; a file system that is really full is not tested"
            )
        mounted.append(target)
        return target

    yield mount_one
    for target in mounted:
        subprocess.run(["umount", "-l", str(target)], check=True)


def refuse_direct(real: Callable[..., int], code: int) -> Callable[..., int]:
    def call(path: Any, flags: int, *a: Any, **k: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *a, **k)

    return call


def test_no_direct_at_open(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "open", refuse_direct(os.open, errno.EINVAL))
    works_without_direct(tmp_path, "O_DIRECT: Invalid argument")


def test_no_direct_at_the_first_read(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "preadv", failing(os.preadv, errno.EINVAL))
    works_without_direct(tmp_path, "O_DIRECT in units of 4096: Invalid argument")


def test_direct_that_lies(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "preadv", lambda _fd, buffers, _at: len(buffers[0]))
    works_without_direct(tmp_path, "O_DIRECT: what was written is not what is read")


def works_without_direct(tmp_path, reason):
    files = SessionFiles(tmp_path)
    assert not files.direct
    assert files.stats().direct_refusal == reason
    files.create(1, MIB)
    fd = files.open_write(1)
    assert os.pwrite(fd, b"unaligned", 1) == 9
    os.close(fd)
    files.close()


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
def test_no_fallocate(tmp_path, monkeypatch, code):
    monkeypatch.setattr(session, "fallocate", failing(session.fallocate, code))
    files = SessionFiles(tmp_path)
    assert files.stats().preallocation_refusal == f"fallocate: {os.strerror(code)}"
    files.create(1, 64 * MIB)
    assert files.list() == {1: 64 * MIB}
    assert files.path_of(1).stat().st_blocks == 0, "nothing is written to make it long"
    files.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_a_failing_disk_is_no_refusal(tmp_path, monkeypatch, code):
    with monkeypatch.context() as patch:
        patch.setattr(session, "fallocate", failing(session.fallocate, code))
        with pytest.raises(Unavailable, match=os.strerror(code)):
            SessionFiles(tmp_path)
    SessionFiles(tmp_path).close()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, Overloaded),
        (errno.EDQUOT, Overloaded),
        (errno.EMFILE, Overloaded),
        (errno.ENOMEM, Overloaded),
        (errno.EIO, Unavailable),
    ],
)
@pytest.mark.parametrize("step", ["fallocate", "open"])
def test_a_file_that_cannot_be_made(tmp_path, monkeypatch, code, kind, step):
    files = SessionFiles(tmp_path)
    with monkeypatch.context() as patch:
        where = session if step == "fallocate" else os
        patch.setattr(where, step, failing(getattr(where, step), code))
        with pytest.raises(kind, match=os.strerror(code)):
            files.create(1, MIB)
    assert files.list() == {}
    files.create(1, MIB)
    files.close()


@pytest.mark.parametrize("step", ["open", "pwrite", "fdatasync"])
def test_a_footer_that_cannot_be_written(tmp_path, monkeypatch, step):
    files = SessionFiles(tmp_path)
    files.create(1, MIB)
    with monkeypatch.context() as patch:
        patch.setattr(os, step, failing(getattr(os, step), errno.EIO))
        with pytest.raises(Unavailable, match="Input/output error"):
            files.write_footer(1, 0, bytes(4096))
    files.close()


def test_a_footer_written_in_pieces(tmp_path, monkeypatch):
    files = SessionFiles(tmp_path)
    files.create(1, MIB)
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:1000], at))
    files.write_footer(1, 4096, bytes(range(256)) * 16)
    assert raw_file(tmp_path, 1).read_bytes()[:12288] == bytes(4096) + bytes(range(256)) * 16 + bytes(4096)
    files.close()


@pytest.mark.parametrize("step", ["truncate", "unlink"])
def test_a_file_that_cannot_be_deleted(tmp_path, monkeypatch, step):
    files = SessionFiles(tmp_path)
    files.create(1, MIB)
    with monkeypatch.context() as patch:
        patch.setattr(os, step, failing(getattr(os, step), errno.EPERM))
        for _ in range(2):
            with pytest.raises(Unavailable, match="Operation not permitted"):
                files.delete(1)
        assert files.list() == {1: MIB if step == "truncate" else 0}
    files.delete(1)
    assert files.list() == {}
    files.close()


def test_an_immutable_file(tmp_path):
    files = SessionFiles(tmp_path)
    files.create(1, MIB)
    path = raw_file(tmp_path, 1)
    done = subprocess.run(["chattr", "+i", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        files.close()
        pytest.skip(f"chattr does not work here: {done.stderr.strip()}; an undeletable file was tested by wrapper only")
    try:
        with pytest.raises(Unavailable, match="Operation not permitted"):
            files.delete(1)
        with pytest.raises(Unavailable, match="Operation not permitted"):
            files.truncate(1, 0)
        assert files.list() == {1: MIB}
    finally:
        subprocess.run(["chattr", "-i", str(path)], check=True)
    files.delete(1)
    assert files.list() == {}
    files.close()


def test_a_directory_that_goes_while_a_file_is_made(tmp_path, monkeypatch):
    files = SessionFiles(tmp_path)
    real, left = Path.mkdir, [3]

    def mkdir(path: Path, *a: Any, **k: Any) -> None:
        real(path, *a, **k)
        if left[0] and path.exists() and len(path.relative_to(tmp_path).parts) == 3:  # sessions/ab/cd
            left[0] -= 1
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", mkdir)
    files.create(1, MIB)
    assert left == [0]
    left[0] = 100
    with pytest.raises(Unavailable, match="No such file"):
        files.create(0x10000, MIB)
    files.close()


def test_a_list_that_fails(tmp_path, monkeypatch):
    files = SessionFiles(tmp_path)
    monkeypatch.setattr(os, "scandir", failing(os.scandir, errno.EIO))
    with pytest.raises(Unavailable, match="cannot be listed"):
        files.list()
    files.close()


def test_memory_file_system():
    """tmpfs: before Linux 6.6 without O_DIRECT."""
    root = Path("/dev/shm") / f"flatcake-test-{os.getpid()}"
    if not root.parent.is_dir():
        pytest.skip("no /dev/shm here: tmpfs is not tested")
    try:
        with DiskPath(root) as path:
            path.turn("a", 2)
            path.trim("a")
            path.turn("b", 1)
            path.drop("b")
        report = offline.check(root, data=True)
        assert report.findings == []
        assert report.counts["segments"] == 1
        assert offline.rebuild(root)["segments"] == 1
    finally:
        subprocess.run(["rm", "-rf", str(root)], check=True)


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_disk(mount, tmp_path, kind, monkeypatch):
    if kind == "tmpfs":
        root = mount("-t", "tmpfs", "-o", "size=16m", "none")
    else:
        with (tmp_path / "image").open("wb") as image:
            image.truncate(24 * MIB)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(tmp_path / "image")], check=True)
        root = mount("-o", "loop", str(tmp_path / "image"))
    with DiskPath(root) as path:
        path.turn("a", 2)
        path.files.create(0x500, 4 * MIB)
        with pytest.raises(Overloaded, match="left to the journal"):
            path.files.create(0x600, 64 * MIB)
        monkeypatch.setattr(session, "KEPT_BYTES_MAX", -64 * MIB)  # others take what was there a moment ago
        with pytest.raises(Overloaded, match="No space left on device"):
            path.files.create(0x600, 64 * MIB)
        assert 0x600 not in path.files.list()
        free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
        assert free > 2 * MIB, "what a refused file took is given back"
        path.files.delete(0x500)
    assert offline.check(root, data=True).findings == []


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)) == 4096:
            pass


def test_a_journal_on_a_full_disk(mount):
    """Every write is refused from the first that failed; what was acknowledged before is there afterwards."""
    root = mount("-t", "tmpfs", "-o", "size=12m", "none")
    with DiskPath(root) as path:
        path.turn("a", 1)
        session = path.sessions["a"]
        fill(root / "ballast")
        refusal = ""
        acknowledged = session
        for n in range(100_000):
            record = replace(session, turns=n)
            try:
                path.journal.put_session(record)
            except Unavailable as error:
                refusal = str(error)
                break
            acknowledged = record
        assert "No space left" in refusal
        (root / "ballast").unlink()
        with pytest.raises(Unavailable, match="not written any more"):
            path.journal.put_session(session)
    with DiskPath(root) as path:
        assert path.image.sessions[session.session_no] == acknowledged
        assert len(path.image.segments) == 1


def test_a_path_that_turns_read_only(mount):
    root = mount("-t", "tmpfs", "-o", "size=16m", "none")
    with DiskPath(root) as path:
        path.turn("a", 1)
    subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
    with pytest.raises(Unavailable, match="Read-only"):
        SessionFiles(root)
    assert offline.check(root, data=True).ok, "looking needs no writing"
