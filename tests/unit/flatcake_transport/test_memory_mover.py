from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from flatcake_transport.checksum import granule_checksums
from flatcake_transport.errors import Unavailable
from flatcake_transport.footer import CHECKSUM_WORDSUM, CHECKSUM_XXH3
from flatcake_transport.mover import Checks, FileSpan, MemorySpan, Move, PagedSpan
from flatcake_transport.movers.memory import Joined, MemoryMover
from flatcake_transport.movers.posix import PosixMover


def test_all_moves_are_checked_before_the_first_byte_moves() -> None:
    mover = MemoryMover()
    target = np.zeros(4, np.uint8)
    good = Move(MemorySpan(np.ones(4, np.uint8)), MemorySpan(target))
    for bad in (
        Move(MemorySpan(np.ones(4, np.uint8)), MemorySpan(np.zeros(5, np.uint8))),
        Move(MemorySpan(np.ones(4, np.uint16)), MemorySpan(np.zeros(4, np.uint8))),
        Move(FileSpan(0, 0, 4), MemorySpan(np.zeros(4, np.uint8))),
        Move(MemorySpan(np.ones(4, np.uint8)), PagedSpan(np.zeros((2, 4), np.uint8), np.array([2]), 4)),
    ):
        with pytest.raises(ValueError):
            mover.submit([good, bad])
    assert not target.any()
    assert mover.stats().moves == 0
    mover.close()


@pytest.mark.parametrize("paged", [False, True])
def test_a_read_only_target_is_refused_at_submit(paged: bool) -> None:
    mover = MemoryMover()
    target = np.zeros((1, 4), np.uint8)
    target.flags.writeable = False
    span = PagedSpan(target, np.array([0]), 4) if paged else MemorySpan(target[0])
    with pytest.raises(ValueError, match="writable"):
        mover.submit([Move(MemorySpan(np.ones(4, np.uint8)), span)])
    read_back = PagedSpan(target, np.array([0]), 4) if paged else MemorySpan(target[0])
    mover.submit([Move(read_back, MemorySpan(np.ones(4, np.uint8)))]).wait(30)
    mover.close()


def test_blocks_larger_than_a_task_are_whole() -> None:
    mover = MemoryMover(threads=2, task_bytes=10, inline_bytes=0)
    data = np.arange(90, dtype=np.uint8)
    pages = np.zeros((5, 30), np.uint8)
    mover.submit([Move(MemorySpan(data), PagedSpan(pages, np.array([4, 0, 2]), 30))]).wait(30)
    assert np.array_equal(pages[[4, 0, 2]].reshape(-1), data)
    assert mover.stats().commands == 3
    mover.close()


def test_small_copies_are_there_when_submit_returns() -> None:
    mover = MemoryMover(threads=1)
    target = np.zeros(100, np.uint8)
    transfer = mover.submit([Move(MemorySpan(np.ones(100, np.uint8)), MemorySpan(target))])
    assert transfer.done()
    assert target.all()
    mover.close()


def test_a_large_copy_lands_without_a_waiter() -> None:
    mover = MemoryMover(threads=1)
    target = np.zeros(20 << 20, np.uint8)
    transfer = mover.submit([Move(MemorySpan(np.ones(20 << 20, np.uint8)), MemorySpan(target))])
    mover.close()
    assert transfer.done()
    assert target.all()


@pytest.mark.parametrize("options", [{"task_bytes": 0}, {"threads": -1}])
def test_options(options: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        MemoryMover(**options)


class Fake:
    def __init__(self, error: Exception | None, *, done: bool = True) -> None:
        self.error, self.is_done, self.waited = error, done, False

    def done(self) -> bool:
        return self.is_done

    def wait(self, timeout_s: float | None = None) -> None:
        self.waited = True
        if self.error is not None:
            raise self.error


def test_joined_waits_for_all_and_then_tells_the_failure() -> None:
    first, second = Fake(Unavailable("x")), Fake(None)
    with pytest.raises(Unavailable):
        Joined([first, second]).wait(1)
    assert second.waited, "nothing may touch memory once wait has raised"
    assert Joined([first, second]).done()
    assert not Joined([first, Fake(None, done=False)]).done()


def test_joined_that_is_not_there_yet_is_a_timeout_whatever_failed() -> None:
    with pytest.raises(TimeoutError):
        Joined([Fake(Unavailable("x")), Fake(TimeoutError())]).wait(1)


@pytest.mark.parametrize("algorithm", [CHECKSUM_XXH3, CHECKSUM_WORDSUM])
@pytest.mark.parametrize(
    ("blocks", "plane_bytes", "granule_blocks"),
    [(37, 96, 4), (64, 4096, 8), (3, 5000, 5), (0, 96, 4), (1300, 4096, 64)],
)
@pytest.mark.parametrize("task_bytes", [1, 1000, 8 << 20])
def test_checksums_of_a_gather_are_those_of_its_bytes(
    algorithm, blocks, plane_bytes, granule_blocks, task_bytes
) -> None:
    rng = np.random.default_rng(blocks)
    pages = rng.integers(0, 256, (blocks + 5, plane_bytes), np.uint8)
    slots = rng.permutation(blocks + 5)[:blocks]
    target = np.zeros(blocks * plane_bytes, np.uint8)
    granule_bytes = granule_blocks * plane_bytes
    sums = np.zeros(-(-len(target) // granule_bytes), np.uint64)
    with closing(MemoryMover(task_bytes=task_bytes, inline_bytes=0)) as mover:
        move = Move(PagedSpan(pages, slots, plane_bytes), MemorySpan(target), Checks(granule_bytes, algorithm, sums))
        mover.submit([move]).wait()
    assert np.array_equal(target, pages[slots].reshape(-1))
    assert np.array_equal(sums, granule_checksums(target, granule_bytes, algorithm))


def test_checksums_are_refused_where_none_are_taken() -> None:
    pages, data = np.zeros((4, 64), np.uint8), np.zeros(256, np.uint8)
    paged, memory = PagedSpan(pages, np.arange(4), 64), MemorySpan(data)
    good = Checks(128, CHECKSUM_XXH3, np.zeros(2, np.uint64))
    with closing(MemoryMover()) as mover:
        for move in (
            Move(memory, paged, good),
            Move(MemorySpan(data.copy()), memory, good),
            Move(paged, memory, Checks(100, CHECKSUM_XXH3, np.zeros(3, np.uint64))),
            Move(paged, memory, Checks(0, CHECKSUM_XXH3, np.zeros(3, np.uint64))),
            Move(paged, memory, Checks(128, CHECKSUM_XXH3, np.zeros(3, np.uint64))),
        ):
            with pytest.raises(ValueError, match=r"checksum|granule|u64"):
                mover.submit([move])
    with closing(PosixMover()) as mover, pytest.raises(ValueError, match="checksums"):
        mover.submit([Move(FileSpan(0, 0, 256), memory, good)])
