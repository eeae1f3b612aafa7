"""Export on lease over a real kernel's NVMe-oF: what is leased is read as it stands in the file, and nothing else ever."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from conftest import CONFIG

from flatcake_server.cluster.nvme_host import NvmeHost
from flatcake_server.cluster.nvmet import NvmePort, NvmeTarget, withdraw_leftovers
from flatcake_transport.errors import Overloaded, Unavailable

MIB = 1 << 20
NQN = "nqn.2026-11.flatcake:test:7"
HOST = "nqn.2026-11.flatcake:host:8"
TCP = NvmePort("tcp", "127.0.0.1", 4420)

pytestmark = pytest.mark.usefixtures("nothing_left")


def session_file(path: Path, seed: int, written: int = 2 * MIB, size: int = 4 * MIB) -> bytes:
    """A pre-allocated file with some of it written O_DIRECT, as clients do. Returns what it holds."""
    data = (bytes([seed]) + os.urandom(4095)) * (written // 4096)
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600)
    os.posix_fallocate(fd, 0, size)
    write(fd, 0, data)
    os.close(fd)
    return data


def write(fd: int, offset: int, data: bytes) -> None:
    buffer = mmap.mmap(-1, len(data))
    buffer[:] = data
    assert os.pwritev(fd, [buffer], offset) == len(data)


def read(fd: int, offset: int, size: int) -> bytes:
    buffer = mmap.mmap(-1, size)
    return buffer[: os.preadv(fd, [buffer], offset)]


@pytest.fixture
def target(disk: Path):
    made = NvmeTarget(NQN, [TCP], [HOST], namespaces_max=8)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def host(target: NvmeTarget):
    made = NvmeHost(HOST)
    yield made
    made.close(20)


def exported(target: NvmeTarget, path: Path) -> tuple[int, UUID]:
    uuid = uuid4()
    return target.export(path, uuid), uuid


def test_a_leased_file_is_read_appended_to_and_gone(disk: Path, target: NvmeTarget, host: NvmeHost) -> None:
    path = disk / "a"
    data = session_file(path, 1)
    nsid, uuid = exported(target, path)
    host.connect(NQN, TCP, 20)
    fd = host.open(NQN, uuid, 20)
    assert read(fd, 0, len(data)) == data
    assert read(fd, 3 * MIB, MIB) == bytes(MIB), "what is pre-allocated and not written reads as zeros"

    writer = os.open(path, os.O_WRONLY | os.O_DIRECT)
    more = b"more" * 1024
    write(writer, 2 * MIB, more)
    assert read(fd, 2 * MIB, 4096) == more, "an append is seen at once"

    target.withdraw(nsid)
    try:
        late = read(fd, 0, 4096)
    except OSError:
        late = b""
    assert late == b"", "nothing is read after the withdrawal"
    os.close(fd)
    os.close(writer)
    assert (target.stats().exported, target.stats().withdrawals_total) == (0, 1)


def test_the_next_file_under_the_same_id_is_never_taken_for_the_one_leased(
    disk: Path, target: NvmeTarget, host: NvmeHost
) -> None:
    files = {n: session_file(disk / f"b{n}", n) for n in range(1, 4)}
    target._last = 0
    nsid, first = exported(target, disk / "b1")
    host.connect(NQN, TCP, 20)
    held = host.open(NQN, first, 20)
    target.withdraw(nsid)
    (disk / "b1").unlink()
    target._last = nsid - 1  # make the id come again at once
    again, second = exported(target, disk / "b2")
    assert again == nsid
    fd = host.open(NQN, second, 20)
    assert read(fd, 0, MIB) == files[2][:MIB]
    try:
        stale = read(held, 0, 4096)
    except OSError:
        stale = b""
    assert stale == b"", "the old descriptor reads nothing, least of all the new file"
    with pytest.raises(Unavailable, match="did not appear"):
        host.open(NQN, first, 0.2)
    os.close(fd)
    os.close(held)


def test_many_exports_come_and_go_while_connected(disk: Path, target: NvmeTarget, host: NvmeHost) -> None:
    data = {n: session_file(disk / f"c{n}", n, written=MIB, size=MIB) for n in range(9)}
    host.connect(NQN, TCP, 20)
    for _ in range(2):
        leased = [(exported(target, disk / f"c{n}"), n) for n in range(8)]
        with pytest.raises(Overloaded):
            target.export(disk / "c8", uuid4())
        for (nsid, uuid), n in leased:
            fd = host.open(NQN, uuid, 20)
            assert read(fd, 0, MIB) == data[n]
            os.close(fd)
            target.withdraw(nsid)


def test_who_is_not_allowed_does_not_connect(disk: Path, target: NvmeTarget) -> None:
    stranger = NvmeHost("nqn.2026-11.flatcake:host:stranger")
    with pytest.raises(Unavailable, match="connect failed"):
        stranger.connect(NQN, TCP, 20)
    assert stranger.stats().failures_total == 1


def test_what_a_killed_daemon_left_is_cleared_at_the_next_start(disk: Path) -> None:
    path = disk / "e"
    session_file(path, 5)
    code = (
        "import os, pathlib, uuid\n"
        "from flatcake_server.cluster.nvmet import NvmePort, NvmeTarget\n"
        f"target = NvmeTarget({NQN!r}, [NvmePort('tcp', '127.0.0.1', 4420)], [{HOST!r}])\n"
        f"target.start(); target.export(pathlib.Path({str(path)!r}), uuid.uuid4()); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert len(list((CONFIG / f"nvmet/subsystems/{NQN}/namespaces").iterdir())) == 1
    target = NvmeTarget(NQN, [TCP], [HOST])
    target.start()
    assert (target.stats().exported, target.stats().leftovers_total) == (0, 1)
    assert list((CONFIG / f"nvmet/subsystems/{NQN}/namespaces").iterdir()) == []
    target.stop()


def test_a_file_that_the_kernel_refuses_leaves_nothing(disk: Path, target: NvmeTarget) -> None:
    with pytest.raises(Unavailable, match="cannot be exported"):
        target.export(disk / "missing", uuid4())
    in_memory = Path("/run/no_direct_io")
    in_memory.write_bytes(bytes(MIB))
    with pytest.raises(Unavailable, match="cannot be exported"):
        target.export(in_memory, uuid4())
    assert list((CONFIG / f"nvmet/subsystems/{NQN}/namespaces").iterdir()) == []


def test_what_is_exported_of_a_directory_that_is_taken_is_withdrawn(
    disk: Path, target: NvmeTarget, host: NvmeHost
) -> None:
    """As a daemon does with what one of another number left there."""
    (disk / "taken").mkdir()
    session_file(disk / "taken/f", 6)
    session_file(disk / "f", 6)
    nsid, uuid = exported(target, disk / "taken/f")
    other, _ = exported(target, disk / "f")
    host.connect(NQN, TCP, 20)
    fd = host.open(NQN, uuid, 20)
    withdraw_leftovers(disk / "taken")
    try:
        late = read(fd, 0, 4096)
    except OSError:
        late = b""
    assert late == b"", "nothing is read any more"
    os.close(fd)
    left = [entry.name for entry in (CONFIG / f"nvmet/subsystems/{NQN}/namespaces").iterdir()]
    assert left == [str(other)] != [str(nsid)]


def test_over_soft_rdma_the_same_bytes_are_read(disk: Path, soft_rdma: str) -> None:
    path = disk / "g"
    data = session_file(path, 7)
    port = NvmePort("rdma", soft_rdma, 4421)
    target = NvmeTarget(NQN, [port], [HOST])
    target.start()
    host = NvmeHost(HOST)
    counters = Path("/sys/class/infiniband/rxe0/ports/1/hw_counters/sent_pkts")
    try:
        nsid, uuid = exported(target, path)
        host.connect(NQN, port, 30)
        sent = int(counters.read_text())
        fd = host.open(NQN, uuid, 20)
        assert read(fd, 0, len(data)) == data
        os.close(fd)
        assert int(counters.read_text()) - sent >= len(data) // 4096, "the bytes went over RDMA"
        target.withdraw(nsid)
    finally:
        host.close(20)
        target.stop()
