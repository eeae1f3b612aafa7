"""Peers that die, stop and vanish while they are read from. Each time: an error in time, nothing written afterwards, no leak."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from ucx_peer import OPTIONS, PATIENT_S, PEER_TIMEOUT_S, Peer, pattern, ucx_here
from waiting import pause, until

from flatcake_transport.errors import Unavailable
from flatcake_transport.mover import MemorySpan, Move
from flatcake_transport.movers.ucx import UcxMover
from flatcake_transport.remote import RemoteMemory, RemoteSpan

SIZE = 16 << 20
FLAPS = 500
LATE_S = PEER_TIMEOUT_S + 4.0  # two busy cores


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    ucx_here()


@pytest.fixture
def mover() -> Iterator[UcxMover]:
    mover = UcxMover(options=OPTIONS, peer_timeout_s=PEER_TIMEOUT_S)
    yield mover
    mover.close()


@pytest.fixture(scope="module")
def well() -> Iterator[Peer]:
    """A peer that nothing happens to."""
    with Peer(SIZE) as peer:
        yield peer


def fetch(mover: UcxMover, memory: RemoteMemory, target: np.ndarray, offset: int = 0):
    return mover.submit([Move(RemoteSpan(memory, offset, len(target)), MemorySpan(target))])


def used(mover: UcxMover) -> tuple[int, int]:
    """Open files, and resident bytes, of us and of the process that reads."""
    gc.collect()
    homes = [Path("/proc/self"), Path(f"/proc/{mover.process_id}")]
    files = sum(len(list((home / "fd").iterdir())) for home in homes)
    return files, sum(int((home / "statm").read_text().split()[1]) * 4096 for home in homes)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("when", ["connected", "before"])
def test_a_peer_that_is_gone_is_an_error_in_time(mover: UcxMover, well: Peer, how: signal.Signals, when: str) -> None:
    with Peer(SIZE) as peer:
        target = mover.window(SIZE)
        if when == "connected":
            fetch(mover, peer.memory, target).wait(30)
            assert np.array_equal(target, pattern(SIZE))
        else:
            peer.signal(how)
        under_way = [fetch(mover, peer.memory, target) for _ in range(4)]
        peer.signal(how)
        started_s = time.monotonic()
        for transfer in under_way:
            with contextlib.suppress(Unavailable):  # the first may have been faster than the signal
                transfer.wait(LATE_S)
        with pytest.raises(Unavailable):
            fetch(mover, peer.memory, target).wait(LATE_S)
        assert time.monotonic() - started_s < LATE_S

        def left_alone() -> bool:
            """Whoever tries at once does not wait for the same silence again. This machine may be late for "at once"."""
            with pytest.raises(Unavailable) as told:
                fetch(mover, peer.memory, target).wait(LATE_S)
            return "a moment ago" in str(told.value)

        if how is signal.SIGSTOP:
            until(left_alone, LATE_S)
        target[:] = 0  # ours again, and it stays as we left it
        if how is signal.SIGSTOP:
            peer.signal(signal.SIGCONT)  # what it had to say comes late
        page = np.zeros(4096, np.uint8)
        fetch(mover, well.memory, page).wait(30)
        pause(0.1)
        assert np.array_equal(page, pattern(4096))
        assert not target.any(), "written after the transfer had come to rest"
        if how is signal.SIGSTOP:
            pause(PEER_TIMEOUT_S)
            try:
                fetch(mover, peer.memory, target).wait(30)  # it is back, and read anew
                assert np.array_equal(target, pattern(SIZE))
            except (
                Unavailable
            ):  # UCX 1.13 may crash where readers went while it was stopped: UcxProcess starts it again
                until(lambda: not peer.alive())


def test_a_stopped_peer_holds_up_no_other(mover: UcxMover, well: Peer) -> None:
    with Peer(SIZE) as stopped:
        a, b = np.zeros(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
        fetch(mover, well.memory, b).wait(30)
        stopped.signal(signal.SIGSTOP)
        held = fetch(mover, stopped.memory, a)
        b[:] = 0
        started_s = time.monotonic()
        fetch(mover, well.memory, b).wait(30)
        waited_s = time.monotonic() - started_s
        assert np.array_equal(b, pattern(SIZE))
        with pytest.raises(Unavailable, match="answered nothing"):
            held.wait(LATE_S)
        assert waited_s < LATE_S


def test_closing_lands_what_moves_and_gives_up_on_the_stopped(well: Peer) -> None:
    with Peer(SIZE) as peer:
        mover = UcxMover(options=OPTIONS, peer_timeout_s=PEER_TIMEOUT_S)
        a, b = np.zeros(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
        peer.signal(signal.SIGSTOP)
        bad, good = fetch(mover, peer.memory, a), fetch(mover, well.memory, b)
        started_s = time.monotonic()
        mover.close()
        assert time.monotonic() - started_s < 2 * PEER_TIMEOUT_S + LATE_S
        good.wait(0)
        assert np.array_equal(b, pattern(SIZE))
        with pytest.raises(Unavailable):
            bad.wait(0)
        with pytest.raises(Unavailable, match="closed"):
            fetch(mover, well.memory, b)


def test_a_cancelled_get_holds_its_memory_until_it_rests(mover: UcxMover) -> None:
    """Nobody waits and nobody else holds the array: it may not be freed while a late answer could be written to it."""
    with Peer(SIZE) as peer:
        target = np.zeros(SIZE, np.uint8)
        peer.signal(signal.SIGSTOP)
        transfer = fetch(mover, peer.memory, target)
        holders = sys.getrefcount(target)
        transfer.cancel()
        assert not transfer.done()
        assert sys.getrefcount(target) == holders
        until(transfer.done)
        with pytest.raises(Unavailable):
            transfer.wait(0)
        until(lambda: sys.getrefcount(target) < holders)


def test_cancelling_begins_no_further_piece(well: Peer) -> None:
    mover = UcxMover(options=OPTIONS, peer_timeout_s=PATIENT_S)
    target = np.zeros(SIZE, np.uint8)
    moves = [Move(RemoteSpan(well.memory, 0, SIZE), MemorySpan(target))] * 64
    transfer = mover.submit(moves)
    transfer.cancel()
    with pytest.raises(Unavailable, match="cancelled"):
        transfer.wait(30)
    assert mover.stats().bytes_moved < 64 * SIZE
    mover.close()


def test_flaps_leave_nothing_behind() -> None:
    """A peer comes, is read from, and goes in the middle of a get, again and again: what has grown is neither us nor the process."""
    mover = UcxMover(options=OPTIONS, peer_timeout_s=PATIENT_S)
    size = 1 << 20
    target, settled = mover.window(size), (0, 0)
    with Peer(size) as peer:
        for flap in range(FLAPS):
            fetch(mover, peer.memory, target).wait(30)
            left = fetch(mover, peer.memory, target) if flap % 2 else None
            peer.flap()
            if left is not None:
                with contextlib.suppress(Unavailable):
                    left.wait(30)
            if flap == FLAPS // 5:
                settled = used(mover)
        assert mover.stats().fallbacks.keys() <= {"peers lost"}, "the process that reads is the first one still"
        until(lambda: used(mover)[0] <= settled[0] + 4)
        assert used(mover)[1] <= settled[1] + (16 << 20)
    assert mover.stats().bytes_moved >= FLAPS * size
    mover.close()
