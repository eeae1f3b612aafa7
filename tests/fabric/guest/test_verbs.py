"""Another node's memory over verbs: soft RDMA between two processes of the guest, with the device's own counters as witness."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import until

from flatcake_server.cluster.fabric import ucx_options
from flatcake_transport.errors import Unavailable
from flatcake_transport.mover import MemorySpan, Move
from flatcake_transport.movers.ucx import UcxMover
from flatcake_transport.movers.ucx_process import UcxProcess
from flatcake_transport.remote import RemoteMemory, RemoteSpan
from flatcake_transport.units import Listen

MIB = 1 << 20
SIZE = 4 * MIB
PACKET_BYTES = 4096  # RoCE's largest
# As a daemon that listens at the card's address serves; no other way than RDMA, and the reader is one that was told nothing.
# GID 0: with the IPv4-mapped one that UCX 1.13 picks by itself, endpoints of one host never see each other's packets.
OPTIONS = {"TLS": "rc"}
SENT = Path("/sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts")


@pytest.fixture(scope="module")
def served(soft_rdma: str):
    """A process that serves 4 MiB of noise, as a daemon's does its arena; and the noise."""
    os.environ["UCX_IB_GID_INDEX"] = "0"
    fd = os.memfd_create("arena")
    os.ftruncate(fd, SIZE)
    noise = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)
    np.frombuffer(mmap.mmap(fd, SIZE), np.uint8)[:] = noise
    os.environ["FLATCAKE_UCX_LIB"] = "system"
    options = OPTIONS | ucx_options(Listen(soft_rdma, 0))
    assert options["NET_DEVICES"] == "roce0,rxe0:1"
    process = UcxProcess([(fd, SIZE)], options=options, peer_timeout_s=20)
    yield process, noise
    process.close()


def test_memory_is_got_over_rdma(served) -> None:
    process, noise = served
    mover = UcxMover(options=OPTIONS, peer_timeout_s=20)
    try:
        buffer = mover.window(SIZE)
        sent = int(SENT.read_text())
        memory = process.memories()[0]
        pieces = [(at, MIB // 2) for at in range(0, SIZE, MIB // 2)]
        moves = [
            Move(RemoteSpan(memory, at, size), MemorySpan(buffer[at : at + size])) for at, size in reversed(pieces)
        ]
        mover.submit(moves).wait(60)
        assert np.array_equal(buffer, noise)
        assert int(SENT.read_text()) - sent >= SIZE // PACKET_BYTES, "the bytes went over RDMA"
    finally:
        mover.close()


def test_the_doctor_sees_the_card() -> None:
    from flatcake_server.doctor import probe_ucx

    finding = probe_ucx()
    assert "rxe0" in finding.detail


def get(mover: UcxMover, memory: RemoteMemory, size: int) -> np.ndarray:
    buffer = np.zeros(size, np.uint8)
    mover.submit([Move(RemoteSpan(memory, 0, size), MemorySpan(buffer))]).wait(60)
    return buffer


def test_the_other_process_need_not_even_run(served) -> None:
    """One-sided: a peer that is stopped is read all the same, once it is connected."""
    process, noise = served
    mover = UcxMover(options=OPTIONS, peer_timeout_s=20)
    memory = process.memories()[0]
    get(mover, memory, 4096)
    os.kill(process._child.pid, signal.SIGSTOP)
    try:
        assert np.array_equal(get(mover, memory, MIB), noise[:MIB])
    finally:
        os.kill(process._child.pid, signal.SIGCONT)
        mover.close()


def test_a_peer_that_stops_before_it_is_connected_is_a_miss_in_time(served) -> None:
    """UCX 1.13 aborts then: it would have been us. The process that reads is another one after that."""
    process, noise = served
    mover = UcxMover(options=OPTIONS, peer_timeout_s=3)
    mover.start()
    until(lambda: mover.process_id != 0)
    memory, reader = process.memories()[0], mover.process_id
    os.kill(process._child.pid, signal.SIGSTOP)
    began_s = time.monotonic()
    try:
        with pytest.raises(Unavailable) as caught:
            get(mover, memory, 4096)
        took_s = time.monotonic() - began_s
    finally:
        os.kill(process._child.pid, signal.SIGCONT)
    print(
        f"the get failed after {took_s:.1f} s: {caught.value}; the process {'lives' if mover.process_id == reader else 'died'}"
    )
    assert took_s < 30, "an emulated processor is slow"

    def again() -> bool:
        with contextlib.suppress(Unavailable):
            return np.array_equal(get(mover, memory, MIB), noise[:MIB])
        return False

    until(again, 60)
    mover.close()


def test_a_peer_that_is_killed_is_an_error(served) -> None:
    process, _ = served
    mover = UcxMover(options=OPTIONS, peer_timeout_s=3)
    memory = process.memories()[0]
    get(mover, memory, 4096)
    child = process._child
    child.kill()
    until(lambda: child.returncode is not None)
    with pytest.raises(Unavailable):
        get(mover, memory, 4096)
    mover.close()
