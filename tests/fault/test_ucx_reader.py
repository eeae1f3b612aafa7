"""The process that reads for an engine dies, is stopped, cannot start, outlives nobody: the engine's side goes on, within its time."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from ucx_peer import OPTIONS, PATIENT_S, PEER_TIMEOUT_S, Peer, pattern, ucx_here
from waiting import until

from flatcake_transport.errors import Unavailable
from flatcake_transport.mover import MemorySpan, Move
from flatcake_transport.movers import ucx_child, ucx_link
from flatcake_transport.movers.ucx import UcxMover, UcxTransfer
from flatcake_transport.movers.ucx_lib import CHOICE
from flatcake_transport.movers.ucx_words import PIECES_MAX
from flatcake_transport.remote import RemoteMemory

SIZE = 16 << 20


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    ucx_here()
    with Peer(SIZE) as peer:
        yield peer


@pytest.fixture
def victim() -> Iterator[Peer]:
    """UCX may end one whose reader is killed in a get, a moment later (see ucx_process.py): others read from another one."""
    ucx_here()
    with Peer(SIZE) as peer:
        yield peer


@pytest.fixture
def mover() -> Iterator[UcxMover]:
    mover = UcxMover(options=OPTIONS, peer_timeout_s=PATIENT_S)
    yield mover
    mover.close()


def fetch(mover: UcxMover, memory: RemoteMemory, target: np.ndarray) -> UcxTransfer:
    return mover.submit([Move(memory.span(0, len(target)), MemorySpan(target))])


def connected(mover: UcxMover, peer: Peer) -> np.ndarray:
    """A window that something was read into."""
    window = mover.window(SIZE)
    fetch(mover, peer.memory, window).wait(30)
    assert np.array_equal(window, pattern(SIZE))
    window[:] = 0
    return window


def gone(process_id: int) -> bool:
    return not Path(f"/proc/{process_id}").exists()


def test_killed_in_a_get_it_is_a_miss_and_comes_back(
    mover: UcxMover, peer: Peer, victim: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    window = connected(mover, victim)
    first = mover.process_id
    mover._link._pause_s = 600.0  # the moment ends when the test says so
    victim.signal(signal.SIGSTOP)  # so that they are under way for certain
    transfers = [fetch(mover, victim.memory, window) for _ in range(16)]
    os.kill(first, signal.SIGKILL)
    with pytest.raises(Unavailable, match="ended"):
        transfers[-1].wait(10)
    assert all(transfer.done() for transfer in transfers)
    assert gone(first), "reaped before anybody uses its memory again"
    assert not mover.up
    with pytest.raises(Unavailable, match="a moment ago"):
        fetch(mover, peer.memory, window).wait(10)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    mover._link._retry_s = 0.0
    assert mover.up
    window[:] = 0
    fetch(mover, peer.memory, window).wait(30)
    assert np.array_equal(window, pattern(SIZE))
    assert mover.process_id != first
    assert mover.stats().fallbacks["its process died"] == 1


def test_stopped_it_is_killed_in_time(victim: Peer) -> None:
    mover = UcxMover(options=OPTIONS, peer_timeout_s=PEER_TIMEOUT_S)
    window = connected(mover, victim)
    stopped = mover.process_id
    os.kill(stopped, signal.SIGSTOP)
    transfer, started_s = fetch(mover, victim.memory, window), time.monotonic()
    with pytest.raises(Unavailable, match="answered nothing"):
        transfer.wait(4 * PEER_TIMEOUT_S)
    assert time.monotonic() - started_s < 2 * PEER_TIMEOUT_S + 1.0
    assert gone(stopped)
    mover.close()


def test_one_that_was_stopped_for_a_moment_loses_nothing(mover: UcxMover, peer: Peer) -> None:
    """And whoever submits meanwhile does not wait, however much it is."""
    window, reader = connected(mover, peer), mover.process_id
    small = [
        Move(peer.memory.span(at, 64), MemorySpan(window[at : at + 64])) for at in range(0, 64 * 3 * PIECES_MAX, 64)
    ]
    os.kill(reader, signal.SIGSTOP)
    transfers = [mover.submit(small) for _ in range(8)]  # more than a socket holds: who waited would wait for its end
    assert not any(transfer.done() for transfer in transfers)
    assert not gone(reader)
    os.kill(reader, signal.SIGCONT)
    for transfer in transfers:
        transfer.wait(60)
    assert np.array_equal(window[: 64 * 3 * PIECES_MAX], pattern(SIZE)[: 64 * 3 * PIECES_MAX])
    assert mover.stats().failures == 0


def test_the_time_between_tries_doubles_until_one_succeeds(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx_link, "PAUSE_S", 0.1)
    mover = UcxMover(options=OPTIONS, peer_timeout_s=PATIENT_S)

    def refuse(*_: object) -> subprocess.Popen[bytes]:
        raise OSError("no more processes")

    with monkeypatch.context() as patched:
        patched.setattr(ucx_child, "spawn", refuse)
        for tries in (1, 2):
            until(lambda: mover.up)
            began_s = time.monotonic()
            with pytest.raises(Unavailable, match="no more processes"):
                fetch(mover, peer.memory, np.zeros(64, np.uint8)).wait(10)
            until(lambda: mover.up)
            assert time.monotonic() - began_s >= tries * 0.1
    connected(mover, peer)
    assert mover._link._pause_s == 0.1
    mover.close()


def test_without_ucx_it_is_said_once_and_never_tried_again(
    mover: UcxMover, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(CHOICE, "/nowhere/libucp.so.0")
    assert mover.up
    memory = RemoteMemory(b"peer", b"key", 0, 64)
    for _ in range(2):
        with pytest.raises(Unavailable, match="no UCX can be loaded: path: /nowhere"):
            fetch(mover, memory, np.zeros(64, np.uint8)).wait(30)
        assert not mover.up
    assert [record.getMessage().split(": ")[0] for record in caplog.records] == [
        "blocks of other nodes are recomputed here"
    ]


def test_windows_and_the_process_go_with_their_users(peer: Peer) -> None:
    mover = UcxMover(options=OPTIONS, peer_timeout_s=PATIENT_S)
    window = connected(mover, peer)
    reader = mover.process_id
    maps = Path(f"/proc/{reader}/maps")
    assert "flatcake-window" in maps.read_text()
    part = window[1 << 20 : 2 << 20]
    del window
    fetch(mover, peer.memory, part).wait(30)
    assert np.array_equal(part, pattern(1 << 20))
    del part
    until(lambda: "flatcake-window" not in maps.read_text())
    del mover  # lost, not closed
    until(lambda: gone(reader))


def test_it_has_no_descriptor_of_the_engines(mover: UcxMover, peer: Peer, tmp_path: Path) -> None:
    secret = os.open(tmp_path / "secret", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(secret, True)
    connected(mover, peer)
    held = []
    for entry in Path(f"/proc/{mover.process_id}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            held.append(str(entry.readlink()))
    os.close(secret)
    assert not [name for name in held if "secret" in name]


def test_it_ends_with_the_engine(peer: Peer) -> None:
    """Also when it is stopped. The engine is a process of this file's; a child that it forked has copies of all its descriptors, and lives on."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parents[1])])}
    command = [sys.executable, __file__, peer.memory.sealed().hex()]
    engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
    assert engine.stdout is not None
    reader, forked = map(int, engine.stdout.readline().split())
    assert not gone(reader)
    os.kill(reader, signal.SIGSTOP)
    engine.kill()
    until(lambda: gone(reader))
    assert not gone(forked)
    engine.communicate()  # ends the forked one as well


if __name__ == "__main__":
    from flatcake_transport.remote import unseal_memory

    made = UcxMover(options=OPTIONS)
    fetch(made, unseal_memory(bytes.fromhex(sys.argv[1])), made.window(4096)).wait(30)
    forked_id = os.fork()
    if forked_id:
        print(made.process_id, forked_id, flush=True)
    sys.stdin.read()
    os._exit(0)
