"""The engine's end of the process that reads: what the machine refuses, and what is dropped half way. No process is started."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Iterator

import pytest

from flatcake_transport.errors import Unavailable
from flatcake_transport.mover import MemorySpan, Move
from flatcake_transport.movers import ucx
from flatcake_transport.movers.ucx import UcxMover
from flatcake_transport.movers.ucx_link import ReaderLink
from flatcake_transport.movers.ucx_words import MESSAGE_BYTES_MAX, Kind, Word, decode
from flatcake_transport.remote import RemoteMemory

PAGE = 4096


@pytest.fixture
def mover() -> Iterator[UcxMover]:
    mover = UcxMover()
    yield mover
    mover.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.setblocking(False)
        yield ours, theirs


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_without_a_thread_for_it_a_get_fails_and_the_next_one_tries_again(
    mover: UcxMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = mover.window(PAGE)
    monkeypatch.setattr(ReaderLink, "_run", lambda _: None)
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", no_thread)
        mover.start()
        transfer = mover.submit([Move(RemoteMemory(b"w", b"k", 0, PAGE).span(0, PAGE), MemorySpan(window))])
        with pytest.raises(Unavailable, match="no thread is left"):
            transfer.wait(0)
    assert mover._link._want()


def test_a_message_that_no_socket_takes_ends_the_process_with_the_reason(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, _ = pair
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    link = ReaderLink({}, 1.0, PAGE)
    link._socket = ours
    link._send(bytes(64 << 10))
    link._closing = True  # else it would be tried for ever
    with subprocess.Popen(["sleep", "30"], stdout=subprocess.PIPE) as child:
        try:
            assert "cannot be told" in link._attend(child, ours)
        finally:
            child.kill()


def test_a_window_that_goes_before_its_word_was_sent_is_not_spoken_of(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    link = ReaderLink({}, 1.0, PAGE)
    link._socket = ours
    known = link.add_window(os.memfd_create("known"), PAGE)
    with contextlib.suppress(BlockingIOError):
        while True:
            ours.send(bytes(1000), socket.MSG_DONTWAIT)
    unknown = link.add_window(os.memfd_create("unknown"), PAGE)
    link.drop_window(unknown)
    link.drop_window(known)
    link._forget_dropped()
    said = []
    with contextlib.suppress(BlockingIOError):
        while True:
            said.append(theirs.recv(MESSAGE_BYTES_MAX))
    assert link._flush()
    words = [decode(said[0]), decode(theirs.recv(MESSAGE_BYTES_MAX))]
    assert words == [Word(Kind.WINDOW, known, PAGE), Word(Kind.DROP, known)]
    with pytest.raises(BlockingIOError):
        theirs.recv(MESSAGE_BYTES_MAX)


def test_a_window_is_found_while_another_is_collected(mover: UcxMover, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = sorted((mover.window(PAGE) for _ in range(3)), key=lambda window: int(window.ctypes.data))
    highest = windows.pop()
    real = ucx.bisect.bisect_right

    def collecting(starts: list[int], address: int) -> int:
        found = real(starts, address)
        windows.clear()
        return found

    monkeypatch.setattr(ucx.bisect, "bisect_right", collecting)
    found = mover._windows.find(highest)
    assert found is not None
    assert found[1] == 0
    assert mover._windows.find(highest) == found


def test_a_finalizer_of_a_window_waits_for_no_lock(mover: UcxMover) -> None:
    """In a forked child its holder is not there."""
    windows = [mover.window(PAGE)]
    dropping = threading.Thread(target=windows.clear, daemon=True)
    with mover._windows._lock:
        dropping.start()
        dropping.join(5)
        assert not dropping.is_alive()
