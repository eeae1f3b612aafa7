"""Faults of preadv and pwritev, put into the mover's seam: each is survived or told, and none is a success that lied."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conformance.movers import aligned, random_bytes

from flatcake_transport.errors import Unavailable
from flatcake_transport.mover import FileSpan, MemorySpan, Move
from flatcake_transport.movers import posix
from flatcake_transport.movers.posix import FALLBACK_BUFFERED, PosixMover

PAGE = 4096
SIZE = 16 * PAGE
Command = Callable[[int, np.ndarray, int], int]


class Faulty:
    """A command that misbehaves at its n-th call (transient), or from its n-th call on (persistent)."""

    def __init__(
        self, real: Command, fault: Callable[[Command, int, np.ndarray, int], int], at: int, *, once: bool
    ) -> None:
        self.real, self.fault, self.at, self.once, self.calls = real, fault, at, once, 0

    def __call__(self, fd: int, memory: np.ndarray, offset: int) -> int:
        self.calls += 1
        if self.calls == self.at or (self.calls > self.at and not self.once):
            return self.fault(self.real, fd, memory, offset)
        return self.real(fd, memory, offset)


def raising(number: int) -> Callable[..., int]:
    def fault(real: Command, fd: int, memory: np.ndarray, offset: int) -> int:
        raise OSError(number, os.strerror(number))

    return fault


def short(real: Command, fd: int, memory: np.ndarray, offset: int) -> int:
    return real(fd, memory[: max(1, len(memory) // 2)], offset)


def short_by_pages(real: Command, fd: int, memory: np.ndarray, offset: int) -> int:
    return real(fd, memory[: max(PAGE, len(memory) // 2 // PAGE * PAGE)], offset)


def nothing(real: Command, fd: int, memory: np.ndarray, offset: int) -> int:
    return 0


@pytest.fixture
def file(tmp_path: Path) -> tuple[Path, np.ndarray]:
    content = random_bytes(1, SIZE)
    path = tmp_path / "session.kv"
    path.write_bytes(content.tobytes())
    return path, content


def move_once(
    monkeypatch: pytest.MonkeyPatch,
    path: Path,
    fault: Callable[..., int],
    at: int,
    *,
    once: bool,
    writes: bool,
    direct: bool,
) -> tuple[np.ndarray, PosixMover, Faulty]:
    """Move the whole file with a fault in it; the memory end, whatever came of it."""
    seam = "_pwritev" if writes else "_preadv"
    faulty = Faulty(getattr(posix, seam), fault, at, once=once)
    monkeypatch.setattr(posix, seam, faulty)
    mover = PosixMover(threads=2, command_bytes_max=4 * PAGE)
    fd = os.open(path, os.O_RDWR | (os.O_DIRECT if direct else 0))
    memory = aligned(random_bytes(2, SIZE) if writes else np.zeros(SIZE, np.uint8))
    span, data = FileSpan(fd, 0, SIZE, direct), MemorySpan(memory)
    try:
        mover.submit([Move(data, span) if writes else Move(span, data)]).wait(30)
    finally:
        mover.close()
        os.close(fd)
    return memory, mover, faulty


@pytest.mark.parametrize("writes", [False, True], ids=["read", "write"])
@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize(
    ("fault", "direct"),
    [
        (raising(errno.EINTR), False),
        (raising(errno.EINTR), True),
        (short_by_pages, False),
        (short_by_pages, True),
        (short, False),  # direct commands are cut at pages only
    ],
    ids=["EINTR", "EINTR direct", "short by pages", "short by pages direct", "short by bytes"],
)
def test_survived(monkeypatch, file, fault, direct: bool, at: int, writes: bool) -> None:
    path, content = file
    memory, mover, faulty = move_once(monkeypatch, path, fault, at, once=True, writes=writes, direct=direct)
    assert faulty.calls > 4, "the fault was met"
    expected = np.frombuffer(path.read_bytes(), np.uint8) if writes else content
    assert np.array_equal(memory, expected)
    assert mover.stats().failures == 0
    assert mover.stats().bytes_moved == SIZE
    assert mover.stats().fallbacks == {}


@pytest.mark.parametrize("writes", [False, True], ids=["read", "write"])
@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("once", [True, False], ids=["transient", "persistent"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINVAL, errno.EBADF])
def test_told(monkeypatch, file, number: int, once: bool, at: int, writes: bool) -> None:
    path, _ = file
    with pytest.raises(Unavailable) as caught:
        move_once(monkeypatch, path, raising(number), at, once=once, writes=writes, direct=False)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == number


@pytest.mark.parametrize("writes", [False, True], ids=["read", "write"])
def test_a_command_that_moves_nothing_is_no_endless_loop(monkeypatch, file, writes: bool) -> None:
    with pytest.raises(Unavailable, match="bytes at"):
        move_once(monkeypatch, file[0], nothing, 1, once=False, writes=writes, direct=True)


@pytest.mark.parametrize("writes", [False, True], ids=["read", "write"])
def test_where_direct_is_refused_the_bytes_go_buffered_and_are_counted(monkeypatch, file, writes: bool) -> None:
    path, content = file

    def refuse_direct(real: Command, fd: int, memory: np.ndarray, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, memory, offset)

    memory, mover, _ = move_once(monkeypatch, path, refuse_direct, 1, once=False, writes=writes, direct=True)
    expected = np.frombuffer(path.read_bytes(), np.uint8) if writes else content
    assert np.array_equal(memory, expected)
    assert mover.stats().fallbacks[FALLBACK_BUFFERED] >= 1
    assert mover.stats().path != "posix+direct"
    assert mover.stats().failures == 0


def test_commands_that_are_refused_direct_at_once_all_go_buffered(monkeypatch, file) -> None:
    """The first to hear of it clears the flag; the others find it cleared, and that is no other error."""
    path, content = file
    both, refused = threading.Barrier(2), threading.local()

    def refuse_once(fd: int, memory: np.ndarray, offset: int) -> int:
        if not getattr(refused, "once", False):
            refused.once = True
            both.wait(10)
            raise OSError(errno.EINVAL, "Invalid argument")
        return os.preadv(fd, [memory], offset)

    monkeypatch.setattr(posix, "_preadv", refuse_once)
    mover = PosixMover(threads=2, command_bytes_max=SIZE // 2)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    memory = aligned(np.zeros(SIZE, np.uint8))
    mover.submit([Move(FileSpan(fd, 0, SIZE, direct=True), MemorySpan(memory))]).wait(30)
    assert np.array_equal(memory, content)
    assert mover.stats().failures == 0
    mover.close()
    os.close(fd)


def test_direct_with_memory_that_is_not_aligned_still_moves(file) -> None:
    path, content = file
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    mover = PosixMover()
    memory = aligned(np.zeros(SIZE + PAGE, np.uint8))[1 : SIZE + 1]
    mover.submit([Move(FileSpan(fd, 0, SIZE, direct=True), MemorySpan(memory))]).wait(30)
    assert np.array_equal(memory, content)
    mover.close()
    os.close(fd)


def test_a_file_truncated_under_its_readers_is_an_error_and_keeps_direct(file) -> None:
    """What a reader sees when its session is dropped: the file is cut to 0, the descriptor lives on."""
    path, _content = file
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    mover = PosixMover(command_bytes_max=4 * PAGE)
    for left in (SIZE - 100, SIZE - PAGE, 0):
        os.truncate(path, left)
        memory = aligned(np.zeros(SIZE, np.uint8))
        with pytest.raises(Unavailable):
            mover.submit([Move(FileSpan(fd, 0, SIZE, direct=True), MemorySpan(memory))]).wait(30)
    assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
    assert mover.stats().fallbacks == {}
    assert mover.stats().path == "posix+direct"
    mover.close()
    os.close(fd)


def test_after_a_failure_the_commands_not_begun_are_skipped(monkeypatch, file) -> None:
    path, _ = file
    calls = []

    def fail(fd: int, memory: np.ndarray, offset: int) -> int:
        calls.append(offset)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(posix, "_preadv", fail)
    mover = PosixMover(threads=1, command_bytes_max=PAGE)
    fd = os.open(path, os.O_RDONLY)
    transfer = mover.submit([Move(FileSpan(fd, 0, SIZE), MemorySpan(np.zeros(SIZE, np.uint8)))])
    with pytest.raises(Unavailable, match="Input/output"):
        transfer.wait(30)
    assert calls == [0]
    monkeypatch.undo()
    mover.submit([Move(FileSpan(fd, 0, SIZE), MemorySpan(np.zeros(SIZE, np.uint8)))]).wait(30)
    mover.close()
    os.close(fd)


def test_a_direct_command_continues_on_a_page_after_an_odd_end(monkeypatch, file) -> None:
    """File systems differ in what they say of an odd offset; we never ask."""
    path, content = file
    offsets = []

    def odd_once(fd: int, memory: np.ndarray, offset: int) -> int:
        offsets.append(offset)
        return os.preadv(fd, [memory], offset) - (100 if len(offsets) == 1 else 0)

    monkeypatch.setattr(posix, "_preadv", odd_once)
    mover = PosixMover(threads=1)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    memory = aligned(np.zeros(SIZE, np.uint8))
    mover.submit([Move(FileSpan(fd, 0, SIZE, direct=True), MemorySpan(memory))]).wait(30)
    assert offsets == [0, SIZE - PAGE]
    assert np.array_equal(memory, content)
    mover.close()
    os.close(fd)
