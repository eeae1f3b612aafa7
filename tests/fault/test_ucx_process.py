"""The process that serves memory dies, is asked for what is not there, loses its reader in a get; the daemon's side stays well."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from ports import free_port
from ucx_peer import OPTIONS, PATIENT_S, pattern, ucx_here
from waiting import until

from flatcake_transport.errors import Overloaded, Unavailable
from flatcake_transport.mover import FileSpan, MemorySpan, Move
from flatcake_transport.movers.posix import PosixMover
from flatcake_transport.movers.ucx import UcxMover
from flatcake_transport.movers.ucx_files import FileServing
from flatcake_transport.movers.ucx_process import UcxProcess
from flatcake_transport.remote import RemoteMemory, RemoteSpan, unseal_memory

SIZE = 16 << 20


class Served:
    """A memfd that is mapped here and served by a process."""

    def __init__(self, options: Mapping[str, str] = OPTIONS) -> None:
        self.fd = os.memfd_create("served")
        os.ftruncate(self.fd, SIZE)
        self.bytes = np.frombuffer(mmap.mmap(self.fd, SIZE), np.uint8)
        self.bytes[:] = pattern(SIZE)
        self.process = UcxProcess([(self.fd, SIZE)], options=options, peer_timeout_s=PATIENT_S)

    @property
    def memory(self) -> RemoteMemory:
        return self.process.memories()[0]

    def close(self) -> None:
        self.process.close()
        os.close(self.fd)

    def up(self) -> bool:
        try:
            return bool(self.process.memories())
        except Unavailable:
            return False


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One for all tests: it comes back by itself."""
    ucx_here()
    served = Served()
    yield served
    served.close()


@pytest.fixture
def another() -> Iterator[Served]:
    ucx_here()
    served = Served()
    yield served
    served.close()


@pytest.fixture
def mover(served: Served) -> Iterator[UcxMover]:
    del served
    mover = UcxMover(options=OPTIONS, peer_timeout_s=PATIENT_S)
    yield mover
    mover.close()


def fetch(mover: UcxMover, memory: RemoteMemory, target: np.ndarray):
    return mover.submit([Move(RemoteSpan(memory, 0, len(target)), MemorySpan(target))])


def read(mover: UcxMover, served: Served) -> np.ndarray:
    """The whole memory, as soon as somebody serves it."""
    target = np.zeros(SIZE, np.uint8)

    def again() -> bool:
        try:
            fetch(mover, served.memory, target).wait(30)
        except Unavailable:
            return False
        return True

    until(again)
    return target


def test_peers_see_what_the_daemon_writes(served: Served, mover: UcxMover) -> None:
    assert np.array_equal(read(mover, served), pattern(SIZE))
    served.bytes[:] = 7
    assert (read(mover, served) == 7).all()
    served.bytes[:] = pattern(SIZE)


def test_a_dead_one_is_started_again_under_another_address(served: Served, mover: UcxMover) -> None:
    before, restarts = served.memory, served.process.restarts
    os.kill(served.process._child.pid, signal.SIGKILL)
    until(lambda: served.process.restarts == restarts + 1)
    until(served.up)
    assert served.memory.worker != before.worker
    with pytest.raises(Unavailable):
        fetch(mover, before, np.zeros(SIZE, np.uint8)).wait(10)
    assert np.array_equal(read(mover, served), pattern(SIZE))


def test_whoever_comes_with_the_words_of_an_earlier_process_gets_nothing_and_ends_nothing() -> None:
    """At the same port, where UCX gets the same addresses in another arena."""
    ucx_here()
    port = free_port()
    served = Served(OPTIONS | {"TCP_PORT_RANGE": f"{port}-{port}"})
    mover, late = (UcxMover(options=OPTIONS, peer_timeout_s=PATIENT_S) for _ in range(2))
    told, target = served.memory, np.zeros(4096, np.uint8)
    os.kill(served.process._child.pid, signal.SIGKILL)
    until(lambda: served.process.restarts == 1)
    until(served.up)
    for each in (mover, late):  # also one that is connected to the process that is there
        with pytest.raises(Unavailable, match="another process is there"):
            fetch(each, told, target).wait(30)
        assert not target.any()
        fetch(each, served.memory, target).wait(30)
        assert np.array_equal(target, pattern(4096))
        target[:] = 0
        with pytest.raises(Unavailable, match="another process is there"):
            fetch(each, told, target).wait(30)
    assert not target.any()
    assert served.process.restarts == 1
    for each in (mover, late, served):
        each.close()


def test_a_get_of_what_is_not_there_costs_that_process_only(served: Served, mover: UcxMover) -> None:
    """UCX compares no key over TCP: whoever reaches the port may name any address."""
    read(mover, served)
    restarts = served.process.restarts
    wild = RemoteMemory(served.memory.worker, served.memory.rkey, 4096, SIZE)
    with pytest.raises(Unavailable):
        fetch(mover, wild, np.zeros(SIZE, np.uint8)).wait(10)
    until(lambda: served.process.restarts == restarts + 1)
    assert np.array_equal(read(mover, served), pattern(SIZE))


def test_nobody_writes_over_tcp_what_is_served_for_reading(served: Served, mover: UcxMover) -> None:
    read(mover, served)
    put = mover.submit([Move(MemorySpan(np.zeros(4096, np.uint8)), RemoteSpan(served.memory, 0, 4096))])
    with pytest.raises(Unavailable):
        put.wait(10)
    assert np.array_equal(served.bytes, pattern(SIZE))


def test_readers_killed_in_a_get(served: Served, mover: UcxMover) -> None:
    """The reader is another process of this file's, which never ends by itself. UCX may abort the one that serves it."""
    for _ in range(4):
        read(mover, served)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parents[1])])}
        command = [sys.executable, __file__, served.memory.sealed().hex()]
        reader = subprocess.Popen(command, stdout=subprocess.PIPE, env=env)
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"reading\n"
        reader.kill()
        reader.communicate()
    assert np.array_equal(read(mover, served), pattern(SIZE))


def test_it_starts_in_a_daemon_with_many_descriptors() -> None:
    ucx_here()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most[1] < 2000:
        pytest.skip("no process may have 2000 descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2000, most[1]))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, most)
        for _ in range(1100):
            stack.callback(os.close, os.open("/dev/null", os.O_RDONLY))
        served = Served()
        stack.callback(served.close)
        assert served.fd > 1024
        assert served.up()


def test_it_ends_with_its_parent(another: Served) -> None:
    child = another.process._child
    assert child.stdin is not None
    another.process._closed.set()  # not to be started again
    child.stdin.close()
    assert child.wait(30) == 0
    with pytest.raises(Unavailable, match="not running"):
        until(lambda: not another.process.memories())


def test_one_that_cannot_start_says_why(another: Served) -> None:
    with pytest.raises(Unavailable, match="does not start") as refused:
        UcxProcess([(another.fd, SIZE)], options={"TLS": "no_such"})
    assert "Traceback" not in str(refused.value)
    with pytest.raises(Unavailable, match="UCX goes over none of nowhere0"):
        UcxProcess([(another.fd, SIZE)], options={"NET_DEVICES": "nowhere0"})


def test_closing_is_final(another: Served) -> None:
    another.process.close()
    another.process.close()
    with pytest.raises(Unavailable):
        another.process.memories()


def test_file_ranges_are_served_through_bounded_slots(served: Served, mover: UcxMover, tmp_path: Path) -> None:
    read(mover, served)
    files = PosixMover()
    serving = FileServing(served.bytes[: 2 << 20], lambda: served.memory, files, range_bytes=1 << 20)
    content = pattern(3 << 20)[::-1].copy()
    name = tmp_path / "session"
    name.write_bytes(content.tobytes())
    fd = os.open(name, os.O_RDONLY)
    staged = [serving.stage([FileSpan(fd, at, 1 << 20)], 10) for at in (0, 1 << 20)]
    for i, range_ in enumerate(staged):
        target = np.zeros(1 << 20, np.uint8)
        mover.submit([Move(range_.span, MemorySpan(target))]).wait(30)
        assert np.array_equal(target, content[i << 20 : (i + 1) << 20])
    with pytest.raises(Overloaded):
        serving.stage([FileSpan(fd, 0, 4096)], 0.01)
    staged[0].close()
    with pytest.raises(Unavailable, match="not read"):
        serving.stage([FileSpan(fd, 3 << 20, 4096)], 10)
    with pytest.raises(ValueError, match="at most"):
        serving.stage([FileSpan(fd, 0, 2 << 20)], 10)
    with pytest.raises(ValueError, match="4096"):
        serving.stage([FileSpan(fd, 1, 4096, direct=True)], 10)
    serving.stage([FileSpan(fd, 1 << 20, 4096)], 10).close()
    with pytest.raises(ValueError, match="cannot hold"):
        FileServing(served.bytes[:4096], lambda: served.memory, files)
    os.close(fd)
    files.close()


if __name__ == "__main__":
    greedy = UcxMover(options=OPTIONS)
    room = greedy.window(SIZE)
    what = unseal_memory(bytes.fromhex(sys.argv[1]))
    fetch(greedy, what, room).wait(30)
    under_way = [fetch(greedy, what, room) for _ in range(16)]
    print("reading", flush=True)
    while True:
        under_way = [*under_way[1:], fetch(greedy, what, room)]
        under_way[0].wait(30)
