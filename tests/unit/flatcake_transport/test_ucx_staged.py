"""Files that another node reads for us, with a node that is here: packing, bounds, order, and every way it can fail."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from conformance.movers import Setting, check_life

from flatcake_transport.errors import Overloaded, Unavailable
from flatcake_transport.mover import FileSpan, MemorySpan, Move, MoverStats
from flatcake_transport.movers import pool
from flatcake_transport.movers.pool import Batch
from flatcake_transport.movers.posix import PosixMover
from flatcake_transport.movers.ucx_staged import BySpan, StagedMover
from flatcake_transport.remote import RemoteMemory
from flatcake_transport.served import RANGES_MAX, STAGED_BYTES_MAX, FileRange, ServedFile, StagedRanges

PAGE = 4096
MIB = 1 << 20


class Node:
    """A `RangeServer` with two slots, and the mover that gets from them."""

    node_id = 1

    def __init__(self, files: dict[int, np.ndarray]) -> None:
        self.files = files
        self.bounce = np.zeros(2 * STAGED_BYTES_MAX, np.uint8)
        self.lock = threading.Lock()
        self.free = [0, 1]
        self.out: dict[int, int] = {}
        self.asked: list[list[FileRange]] = []
        self.ttl_s = 10.0
        self.error: Exception | None = None
        self.refusals = 0

    def stage(self, ranges: Sequence[FileRange], timeout_s: float) -> StagedRanges:
        assert timeout_s == 1.0
        with self.lock:
            if self.error is not None:
                raise self.error
            if not self.free:
                self.refusals += 1
                raise Overloaded("no slot is free")
            slot = self.free.pop()
            self.asked.append(list(ranges))
            number = len(self.asked)
            self.out[number] = slot
        start = at = slot * STAGED_BYTES_MAX
        for each in ranges:
            self.bounce[at : at + each.size_bytes] = self.files[each.file_id][each.offset :][: each.size_bytes]
            at += each.size_bytes
        return StagedRanges(RemoteMemory(b"w", b"k", 0, len(self.bounce)), start, number, self.ttl_s)

    def unstage(self, staged_ids: Sequence[int]) -> None:
        with self.lock:
            self.free += [self.out.pop(number) for number in staged_ids]


class Gets:
    """The UCX mover, as far as this one uses it."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.error = ""
        self.gate = threading.Event()
        self.gate.set()

    def submit(self, moves: Sequence[Move]) -> Batch:
        def get(move: Move) -> None:
            assert self.gate.wait(10)
            if self.error:
                raise Unavailable(self.error)
            at = move.source.offset
            move.target.data[:] = self.node.bounce[at : at + move.source.size_bytes]

        batch = Batch([lambda move=move: get(move) for move in moves])
        batch.work()
        return batch

    def register(self, region: object) -> None: ...

    def stats(self) -> MoverStats:
        return MoverStats("gets")

    def close(self) -> None:
        raise AssertionError("it is not the staged mover's to close")


@pytest.fixture
def node():
    random = np.random.default_rng(0)
    return Node({n: random.integers(0, 256, 12 * MIB, np.uint8) for n in (1, 2)})


@pytest.fixture
def gets(node):
    return Gets(node)


def made(gets, **options):
    return StagedMover(gets, **{"stage_timeout_s": 1.0, "patience_s": 10.0} | options)


@pytest.fixture
def mover(gets):
    mover = made(gets)
    yield mover
    mover.close()


def move(node, file_id, offset, size):
    return Move(ServedFile(node, file_id).span(offset, size), MemorySpan(np.zeros(size, np.uint8)))


def arrived(node, each):
    source = each.source
    expected = node.files[source.file_id][source.offset : source.offset + source.size_bytes]
    return np.array_equal(each.target.data, expected)


def test_it_lives_and_ends_as_every_mover_does(gets):
    check_life(Setting(lambda: made(gets), lambda a: a, lambda a: a))


def test_large_reads_are_cut_and_small_ones_go_together(node, mover):
    moves = [move(node, 1, PAGE, 9 * MIB), *(move(node, 2, n * 3 * PAGE, PAGE) for n in range(100))]
    mover.submit(moves).wait(10)
    assert all(arrived(node, each) for each in moves)
    assert sorted(sum(each.size_bytes for each in ranges) for ranges in node.asked) == [
        MIB + 100 * PAGE,
        4 * MIB,
        4 * MIB,
    ]
    stats = mover.stats()
    assert (stats.moves, stats.commands, stats.bytes_moved, stats.failures) == (101, 3, 9 * MIB + 100 * PAGE, 0)
    assert stats.path == "staged+gets"
    assert not node.out


def test_no_staging_is_larger_than_it_may_be(node, mover):
    sizes = [3 * MIB, MIB, 2 * MIB, 3 * MIB, PAGE, 4 * MIB, *([PAGE] * (RANGES_MAX + 3))]
    moves = [move(node, 1, 0, size) for size in sizes]
    mover.submit(moves).wait(10)
    assert all(arrived(node, each) for each in moves)
    for ranges in node.asked:
        assert len(ranges) <= RANGES_MAX
        assert sum(each.size_bytes for each in ranges) <= STAGED_BYTES_MAX


def test_two_nodes_in_one_call(node, mover):
    other = Node({1: node.files[2]})
    near, far = move(node, 1, 0, PAGE), move(other, 1, 0, PAGE)
    mover.submit([near, far]).wait(10)
    assert arrived(node, near)
    assert len(other.asked) == 1, "each is asked for its own"


def test_no_room_is_waited_for(node, mover):
    moves = [move(node, 1, n * MIB, MIB) for n in range(12)]
    transfers = [mover.submit([each]) for each in moves]
    for transfer in transfers:
        transfer.wait(10)
    assert all(arrived(node, each) for each in moves)
    held, node.free = node.free, []
    late = mover.submit([move(node, 1, 0, PAGE)])
    while not node.refusals:
        assert not late.done()
    node.free = held
    late.wait(10)
    assert mover.stats().fallbacks["no room there yet"] >= 1


def test_a_node_without_room_holds_up_no_other_and_is_waited_for(node, gets, monkeypatch):
    monkeypatch.setattr(pool, "HANGS_S", 0.0)
    mover = made(gets, patience_s=1000.0, threads=2)
    full = Node(node.files)
    full.node_id, held, full.free = 2, full.free, []
    waiting = [mover.submit([move(full, 1, n * PAGE, PAGE)]) for n in range(4)]
    while not full.refusals:
        assert not any(transfer.done() for transfer in waiting)
    waiting.append(mover.submit([move(full, 1, 0, PAGE)]))
    served = move(node, 1, 0, PAGE)
    mover.submit([served]).wait(10)
    assert arrived(node, served)
    assert not any(transfer.done() for transfer in waiting)
    full.free = held
    for transfer in waiting:
        transfer.wait(10)
    mover.close()


def test_patience_ends(node, gets):
    mover = made(gets, patience_s=0.0)
    node.free = []
    with pytest.raises(Unavailable, match="no slot"):
        mover.submit([move(node, 1, 0, PAGE)]).wait(10)
    mover.close()


def test_closing_ends_the_asking(node, gets):
    mover = made(gets, patience_s=1000.0)
    node.free = []
    transfer = mover.submit([move(node, 1, 0, PAGE)])
    mover.close()
    with pytest.raises(Unavailable, match="no slot"):
        transfer.wait(0)


@pytest.mark.parametrize("error", [Unavailable("the lease has ended"), Unavailable("the file ended")])
def test_a_staging_that_fails_is_unavailable(node, mover, error):
    node.error = error
    with pytest.raises(Unavailable, match=str(error)):
        mover.submit([move(node, 1, 0, PAGE)]).wait(10)
    assert mover.stats().failures == 1


def test_a_get_that_fails_gives_its_slot_back(node, gets, mover):
    gets.error = "the peer is dead"
    with pytest.raises(Unavailable, match="the peer is dead"):
        mover.submit([move(node, 1, 0, PAGE)]).wait(10)
    assert not node.out


def test_what_is_fetched_too_late_is_not_trusted(node, mover):
    node.ttl_s = 0.0
    with pytest.raises(Unavailable, match="too late"):
        mover.submit([move(node, 1, 0, PAGE)]).wait(10)
    assert not node.out


def test_a_transfer_rests_only_when_its_gets_do(node, gets, mover):
    gets.gate.clear()
    transfer = mover.submit([move(node, 1, 0, PAGE)])
    with pytest.raises(TimeoutError):
        transfer.wait(0.05)
    assert not transfer.done()
    gets.gate.set()
    transfer.wait(10)


def test_what_it_does_not_take(node, mover):
    page = np.zeros(PAGE, np.uint8)
    span = ServedFile(node, 1).span
    frozen = page.copy()
    frozen.flags.writeable = False
    for source, target in [
        (span(1, PAGE), MemorySpan(page)),
        (span(0, PAGE), MemorySpan(page[:7])),
        (span(0, PAGE), MemorySpan(frozen)),
        (FileSpan(0, 0, PAGE), MemorySpan(page)),
        (MemorySpan(page), span(0, PAGE)),
    ]:
        with pytest.raises(ValueError):
            mover.submit([Move(source, target)])
    with pytest.raises(ValueError, match="0 threads"):
        StagedMover(Gets(node), stage_timeout_s=1.0, patience_s=1.0, threads=0)


@pytest.fixture
def open_file(node, tmp_path):
    (tmp_path / "file").write_bytes(node.files[2].tobytes())
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    yield fd
    os.close(fd)


def test_files_that_are_open_here_go_with_those_that_are_served(node, mover, open_file):
    files = PosixMover()
    both = BySpan(files, mover)
    here = Move(FileSpan(open_file, PAGE, MIB), MemorySpan(np.zeros(MIB, np.uint8)))
    there = move(node, 1, 0, MIB)
    for moves in ([here], [there], [here, there]):
        here.target.data[:] = there.target.data[:] = 0
        transfer = both.submit(moves)
        transfer.wait(10)
        assert transfer.done()
        assert np.array_equal(here.target.data, node.files[2][PAGE : PAGE + MIB]) is (here in moves)
        assert arrived(node, there) is (there in moves)
    both.submit([]).wait(0)
    both.close()
    files.close()


def test_two_ways_fail_as_one_and_rest_together(node, gets, mover, open_file):
    files = PosixMover()
    both = BySpan(files, mover)
    beyond = Move(FileSpan(open_file, 1 << 40, PAGE), MemorySpan(np.zeros(PAGE, np.uint8)))
    gets.gate.clear()
    transfer = both.submit([beyond, move(node, 1, 0, PAGE)])
    with pytest.raises(TimeoutError):
        transfer.wait(0.05)
    assert not transfer.done()
    gets.gate.set()
    with pytest.raises(Unavailable, match="the file ended"):
        transfer.wait(10)
    assert transfer.done()
    files.close()
