"""A disk that is kept busy by reads: writes wait, then are dropped with a count, and every read comes back whole."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hits import FakeHit, hit_buffer_bytes_min
from homes import FakeHome
from images import Chain
from waiting import until

from flatcake_client.file_path import ReadTools
from flatcake_client.restore import Restore
from flatcake_client.writer import Turn, WriteTools
from flatcake_transport.errors import Unavailable
from flatcake_transport.mover import FileSpan, MemorySpan, Move
from flatcake_transport.movers import posix
from flatcake_transport.movers.memory import MemoryMover
from flatcake_transport.movers.posix import PosixMover
from flatcake_transport.movers.precedence import PASSES_MAX
from flatcake_transport.space import SpaceSpec
from flatcake_transport.window import StagingPool

SPEC = SpaceSpec("m", "u8", 4, (64 << 10, 64 << 10))
BLOCKS, READERS, COMMAND, GRANULE = 8, 6, 64 << 10, 256 << 10


class Disk:
    """Commands go one by one, when the test lets them; `order` tells who went."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lets = threading.Semaphore(0)
        self.order: list[str] = []
        self.waiting = 0
        for name in ("_preadv", "_pwritev"):
            monkeypatch.setattr(posix, name, self._slow(name.strip("_"), getattr(posix, name)))

    def _slow(self, name, real):
        def command(fd, memory, offset):
            self.waiting += 1
            self.lets.acquire()
            self.waiting -= 1
            self.order.append(name)
            return real(fd, memory, offset)

        return command

    def let(self, commands: int = 1) -> None:
        self.lets.release(commands)


class Readers:
    """Restores of one hit, over and over until stopped, more of them than there are windows; each compares all its bytes."""

    def __init__(self, hit: FakeHit, tools: ReadTools) -> None:
        self.hit, self.tools = hit, tools
        self.stop = threading.Event()
        self.whole = self.failed = 0
        self.threads = [threading.Thread(target=self._read, daemon=True) for _ in range(READERS)]
        for thread in self.threads:
            thread.start()

    def _read(self) -> None:
        pages = [np.zeros((BLOCKS, size), np.uint8) for size in SPEC.plane_bytes]
        while not self.stop.is_set():
            usable = Restore(self.hit, self.tools, pages, np.arange(BLOCKS), 0, 60.0, now_s=self.hit.clock).wait()
            same = all(np.array_equal(kv, page) for kv, page in zip(self.hit.chain.kv, pages, strict=True))
            self.whole += usable == BLOCKS and same
            self.failed += not (usable == BLOCKS and same)


@pytest.fixture
def disk(monkeypatch):
    slow = Disk(monkeypatch)
    yield slow
    slow.let(1 << 20)


@pytest.fixture
def story(tmp_path: Path, disk):
    """Readers and a turn on one mover of two threads, with two windows for reads and one for writes."""
    chain = Chain(SPEC, tmp_path, np.random.default_rng(0))
    chain.add(file_id=1, before=0, blocks=BLOCKS, behind=0)
    hit = FakeHit(chain)
    files, memory = (
        PosixMover(threads=2, command_bytes_max=COMMAND, in_flight_bytes_max=COMMAND),
        MemoryMover(threads=0),
    )
    buffer = hit_buffer_bytes_min(hit)
    reading = StagingPool(4 * buffer, buffer)
    writing = WriteTools(files, memory, StagingPool(2 * GRANULE, GRANULE))
    (tmp_path / "home").mkdir()
    home = FakeHome(SPEC, tmp_path / "home")
    readers = Readers(hit, ReadTools(files, memory, reading))
    until(lambda: reading.stats().waits)  # more restores than windows: reads are as many as there may be
    yield readers, home, writing
    readers.stop.set()
    disk.let(1 << 20)
    for thread in readers.threads:
        thread.join(30)
    files.close()
    memory.close()
    hit.close()


def turn_of(home: FakeHome, writing: WriteTools, timeout_s: float) -> Turn:
    return Turn(home, home.grant([(0, 4, False)]), SPEC, 0, writing, checksums=True, timeout_s=timeout_s)


def source() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (4, 64 << 10), np.uint8)


def test_writes_that_wait_too_long_are_dropped_and_no_read_is(story, disk) -> None:
    readers, home, writing = story
    turn = turn_of(home, writing, 0.1)
    for layer in range(SPEC.layers):
        turn.write_layer(layer, source(), np.arange(4))
    with pytest.raises(Unavailable, match=r"in time|yielded"):
        turn.commit()
    assert "pwritev" not in disk.order
    disk.let(40 * PASSES_MAX)  # the writes come to rest, and only then is their space given back
    assert home.linger.settle(10)
    assert home.outcomes == ["yielded"]
    assert home.aborted == [""]
    assert not home.committed
    readers.stop.set()
    disk.let(1 << 20)
    for thread in readers.threads:
        thread.join(30)
    assert (readers.failed, readers.whole >= READERS) == (0, True)
    assert writing.staging.open_window(5.0)


def test_writes_are_passed_by_reads_and_still_come_to_their_end(story, disk) -> None:
    """Under full load a turn takes longer, and is stored."""
    readers, home, writing = story
    turn = turn_of(home, writing, 60.0)
    done = threading.Event()

    def write() -> None:
        for layer in range(SPEC.layers):
            turn.write_layer(layer, source(), np.arange(4))
        turn.commit()
        done.set()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    lines = writing.files._lines._lines
    while not done.is_set():
        # A command goes while a read waits for its turn: the disk is never idle for want of one.
        until(lambda: done.is_set() or (disk.waiting and lines.waiting()))
        disk.let()
        until(lambda: done.is_set() or not disk.lets._value)
    thread.join(30)
    assert home.outcomes == ["committed"]
    reads = disk.order[: len(disk.order) - disk.order[::-1].index("pwritev")].count("preadv")
    assert reads > 4 * disk.order.count("pwritev"), "writes had as much of the disk as reads"
    assert readers.failed == 0


def test_a_read_passes_a_write_that_waits_for_its_share_of_the_disk(tmp_path, disk) -> None:
    """There are threads for both."""
    files = PosixMover(threads=4, in_flight_bytes_max=COMMAND)
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(4 * COMMAND)
        moves = []
        for number, kind in enumerate(("read", "write", "read")):
            span = FileSpan(file.fileno(), number * COMMAND, COMMAND)
            memory = MemorySpan(np.zeros(COMMAND, np.uint8))
            moves.append(files.submit([Move(span, memory) if kind == "read" else Move(memory, span)]))
            until(lambda number=number: disk.waiting == 1 and files._lines._lines.waiting() == number)
        disk.let(3)
        for move in moves:
            move.wait(10)
    assert disk.order == ["preadv", "preadv", "pwritev"]
    files.close()
