from __future__ import annotations

import gc
import threading
from pathlib import Path

import numpy as np
import pytest
from landings import Hand, Landing
from waiting import until

from flatcake_transport.errors import Overloaded, Unavailable
from flatcake_transport.mover import FileSpan
from flatcake_transport.plan import Piece, Step, StepRead
from flatcake_transport.window import HUGE_PAGE_BYTES, OpenFile, ReadStream, StagingPool, aligned_buffer

PAGE = 4096


FILE = np.repeat(np.arange(64, dtype=np.uint8), PAGE)  # page n is full of n


def step(n: int, reads: int = 1) -> Step:
    """Step n reads page n (and its followers) of file 5."""
    return Step(
        tuple(StepRead(5, (n + i) * PAGE, PAGE, i * PAGE) for i in range(reads)), (Piece(0, 0, n, 1, 0, PAGE),), (), n
    )


def stream_of(steps: list[Step], mover: Hand, pool: StagingPool) -> ReadStream:
    return ReadStream(iter(steps), {5: OpenFile(77, direct=True)}, mover, pool.open_window(0))


def test_buffers_are_aligned_touched_and_writable() -> None:
    buffer = aligned_buffer(3 * PAGE)
    assert buffer.ctypes.data % HUGE_PAGE_BYTES == 0
    assert len(buffer) == 3 * PAGE
    assert buffer.dtype == np.uint8
    assert buffer.flags.writeable
    assert not buffer.any()


def test_large_buffers_lie_on_huge_pages_where_the_kernel_has_them() -> None:
    modes = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not modes.exists() or "[never]" in modes.read_text():
        pytest.skip("this kernel gives no transparent huge pages: their use was not tested")
    buffer = aligned_buffer(4 * HUGE_PAGE_BYTES)
    address, huge_kib, mine = buffer.ctypes.data, 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            mine = low <= address < high
        elif mine and line.startswith("AnonHugePages"):
            huge_kib = int(line.split()[1])
    assert huge_kib >= 2048, "staging on small pages reads at buffer the rate"


def test_a_pool_needs_room_for_one_window() -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        StagingPool(2 * PAGE - 1, PAGE)
    with pytest.raises(ValueError, match="cannot hold"):
        StagingPool(PAGE, 0)
    assert StagingPool(4 * PAGE, 100).buffer_bytes == PAGE


def test_windows_are_kept_for_reuse_and_their_buffers_are_apart() -> None:
    pool = StagingPool(2 * PAGE, PAGE)
    with pool.open_window(0) as window:
        first = window.buffers
        assert window.buffer_bytes == PAGE
        assert not np.shares_memory(*first)
        assert all(len(buffer) == PAGE and buffer.ctypes.data % PAGE == 0 for buffer in first)
    with pool.open_window(0) as window:
        assert window.buffers[0] is first[0]
    assert pool.stats().bytes_made == 2 * PAGE


def test_beyond_the_bound_one_waits_until_the_deadline() -> None:
    pool = StagingPool(2 * PAGE, PAGE)
    window = pool.open_window(0)
    with pytest.raises(Overloaded, match="staging"):
        pool.open_window(0.01)
    stats = pool.stats()
    assert (stats.windows_out, stats.refusals, stats.waits) == (1, 1, 1)
    window.close()
    window.close()
    assert pool.stats().windows_out == 0
    pool.open_window(0).close()


def test_who_waits_gets_the_window_that_comes_back_in_order_of_asking() -> None:
    pool = StagingPool(2 * PAGE, PAGE)
    window = pool.open_window(0)
    served: list[int] = []
    asked = threading.Semaphore(0)

    def ask(number: int) -> None:
        asked.release()
        with pool.open_window(30):
            served.append(number)

    threads = []
    for number in range(5):
        threads.append(threading.Thread(target=ask, args=(number,), daemon=True))
        threads[-1].start()
        asked.acquire()
        while pool.stats().waits <= number:  # it stands in the queue before the next one comes
            threading.Event().wait(0.001)
    window.close()
    for thread in threads:
        thread.join(30)
    assert served == [0, 1, 2, 3, 4]


def test_a_window_under_a_transfer_is_out_until_it_rests() -> None:
    pool = StagingPool(2 * PAGE, PAGE)
    flying = Landing()
    window = pool.open_window(0)
    window.close([flying])
    assert (pool.stats().windows_out, pool.stats().windows_lingering) == (1, 1)
    with pytest.raises(Overloaded):
        pool.open_window(0)
    flying.landed = True
    with pool.open_window(0) as again:
        assert again.buffers is window.buffers
        assert (pool.stats().windows_out, pool.stats().windows_lingering) == (1, 0)


def test_a_waiter_notices_a_transfer_that_comes_to_rest() -> None:
    pool = StagingPool(2 * PAGE, PAGE)
    flying = Landing()
    pool.open_window(0).close([flying])
    got = []
    waiter = threading.Thread(target=lambda: got.append(pool.open_window(30)), daemon=True)
    waiter.start()
    flying.landed = True
    waiter.join(30)
    assert len(got) == 1


class Blocking:
    """A transfer that lands when the test says so, and lets who waits for it sleep until then."""

    def __init__(self) -> None:
        self._landed = threading.Event()
        self.land = self._landed.set
        self.done = self._landed.is_set

    def wait(self, timeout_s: float | None = None) -> None:
        if not self._landed.wait(timeout_s):
            raise TimeoutError


def test_all_who_wait_behind_a_transfer_are_served_when_it_lands() -> None:
    for _ in range(20):  # whether the second in line or the first looks first is chance
        pool = StagingPool(2 * PAGE, PAGE)
        flying = Blocking()
        pool.open_window(0).close([flying])
        served = []

        def ask(pool: StagingPool = pool, served: list = served) -> None:
            with pool.open_window(20):
                served.append(None)

        waiters = [threading.Thread(target=ask, daemon=True) for _ in range(3)]
        for waiter in waiters:
            waiter.start()
        until(lambda pool=pool: pool.stats().waits == 3)
        flying.land()
        for waiter in waiters:
            waiter.join(5)
        assert len(served) == 3


def test_a_transfer_that_lands_while_it_is_asked_loses_no_window() -> None:
    answers = iter([False, False])  # when it is given back, and at the first look
    first, second = Landing(), Landing()
    second.done = lambda: next(answers, True)
    pool = StagingPool(4 * PAGE, PAGE)
    windows = pool.open_window(0), pool.open_window(0)
    windows[0].close([first])
    windows[1].close([second])
    first.landed = True
    with pool.open_window(1), pool.open_window(1):
        assert (pool.stats().windows_out, pool.stats().windows_lingering) == (2, 0)


def test_who_waits_gets_a_window_that_was_lost_meanwhile() -> None:
    pool = StagingPool(2 * PAGE, PAGE)
    window = pool.open_window(0)
    got = []
    waiter = threading.Thread(target=lambda: got.append(pool.open_window(30)), daemon=True)
    waiter.start()
    until(lambda: pool.stats().waits == 1)
    window.lose([])
    waiter.join(20)
    assert len(got) == 1


def test_no_memory_gives_the_place_back() -> None:
    answers = [MemoryError, PAGE]

    def allocate(size: int) -> np.ndarray:
        if answers.pop(0) is MemoryError:
            raise MemoryError
        return np.zeros(size, np.uint8)

    pool = StagingPool(2 * PAGE, PAGE, allocate=allocate)
    with pytest.raises(MemoryError):
        pool.open_window(0)
    assert (pool.stats().windows_out, pool.stats().bytes_made) == (0, 0)
    pool.open_window(0).close()


def test_where_there_is_no_memory_for_more_those_that_are_there_are_waited_for() -> None:
    answers, asked = [np.zeros(2 * PAGE, np.uint8)], []

    def allocate(size: int) -> np.ndarray:
        asked.append(size)
        return answers.pop() if answers else aligned_buffer(1 << 62)

    pool = StagingPool(64 * PAGE, PAGE, allocate=allocate)
    with pool.open_window(0):
        for _ in range(3):
            with pytest.raises(Overloaded):
                pool.open_window(0.02)
    assert len(asked) == 2


def test_both_buffers_are_read_at_once_and_one_is_refilled_only_when_let_go() -> None:
    mover, pool = Hand(FILE), StagingPool(8 * PAGE, 4 * PAGE)
    stream = stream_of([step(n, reads=2) for n in range(4)], mover, pool)
    assert len(mover.transfers) == 2, "two steps are on their way before anybody asks"
    assert mover.transfers[0].moves[0].source == FileSpan(77, 0, PAGE, direct=True)
    mover.transfers[0].land()
    mover.transfers[1].land()
    got, buffer, end = stream.advance()
    assert end == got.size_bytes
    assert got == step(0, reads=2)
    assert buffer[:PAGE].tolist() == [0] * PAGE
    assert buffer[PAGE : 2 * PAGE].tolist() == [1] * PAGE
    assert len(mover.transfers) == 2, "the caller still looks at this buffer"
    got, other, _ = stream.advance()
    assert (got, len(mover.transfers)) == (step(1, reads=2), 3)
    assert not np.shares_memory(other, buffer)
    assert np.shares_memory(mover.transfers[2].moves[0].target.data, buffer)
    stream.release()
    stream.release()
    assert len(mover.transfers) == 4
    mover.transfers[2].land()
    mover.transfers[3].land()
    assert [stream.advance()[0], stream.advance()[0], stream.advance(), stream.advance()] == [
        step(2, reads=2), step(3, reads=2), None, None,
    ]  # fmt: skip
    assert (stream.reads, stream.bytes_read) == (8, 8 * PAGE)
    stream.close()
    assert pool.stats().windows_out == 0


def test_after_a_timeout_one_asks_again() -> None:
    mover, pool = Hand(FILE), StagingPool(2 * PAGE, PAGE)
    stream = stream_of([step(0)], mover, pool)
    with pytest.raises(TimeoutError):
        stream.advance(0)
    mover.transfers[0].land()
    assert stream.advance(0)[0] == step(0)
    assert stream.advance(0) is None
    stream.close()


def test_after_an_error_no_step_comes() -> None:
    mover, pool = Hand(FILE), StagingPool(2 * PAGE, PAGE)
    stream = stream_of([step(0), step(1), step(2)], mover, pool)
    mover.transfers[0].error = Unavailable("EIO")
    for transfer in mover.transfers:
        transfer.land()
    for _ in range(2):
        with pytest.raises(Unavailable, match="EIO"):
            stream.advance(0)
    assert len(mover.transfers) == 2
    stream.close()
    assert pool.stats().windows_out == 0


def test_closing_early_keeps_the_window_from_others_until_reads_rest() -> None:
    mover, pool = Hand(FILE), StagingPool(2 * PAGE, PAGE)
    stream = stream_of([step(n) for n in range(9)], mover, pool)
    mover.transfers[0].land()
    stream.advance(0)
    mine = Landing()
    stream.close([mine])
    stream.close()
    assert stream.advance(0) is None
    assert len(mover.transfers) == 2
    for last in (mover.transfers[1], mine):
        with pytest.raises(Overloaded):
            pool.open_window(0)
        last.landed = True
    pool.open_window(0).close()


def test_a_mover_that_refuses_leaves_no_window_out() -> None:
    class Refusing(Hand):
        def submit(self, moves: list) -> Landing:
            if self.transfers:
                raise Unavailable("closed")
            return super().submit(moves)

    mover, pool = Refusing(FILE), StagingPool(2 * PAGE, PAGE)
    with pytest.raises(Unavailable):
        stream_of([step(0), step(1)], mover, pool)
    with pytest.raises(Overloaded):
        pool.open_window(0)
    mover.transfers[0].land()
    pool.open_window(0).close()


def test_the_window_of_a_lost_stream_comes_back_when_its_reads_rest() -> None:
    pool, mover = StagingPool(2 * PAGE, PAGE), Hand(FILE)
    stream = stream_of([step(1), step(2)], mover, pool)
    del stream
    gc.collect()
    with pytest.raises(Overloaded):
        pool.open_window(0)
    for transfer in mover.transfers:
        transfer.land()
    pool.open_window(0).close()
    assert pool.stats().windows_out == 0


def test_one_buffer_reads_nothing_while_the_caller_looks_at_it() -> None:
    mover, pool = Hand(FILE), StagingPool(PAGE, PAGE, 1)
    stream = stream_of([step(1), step(2)], mover, pool)
    assert len(mover.transfers) == 1
    mover.transfers[0].land()
    assert stream.advance(1.0)[0].layers_done == 1
    assert len(mover.transfers) == 1
    stream.release()
    assert len(mover.transfers) == 2
    mover.transfers[1].land()
    assert stream.advance(1.0)[0].layers_done == 2
    assert stream.advance(1.0) is None
    stream.close()


def test_one_buffer_whose_step_is_over_has_the_next_to_wait_for() -> None:
    mover, pool = Hand(FILE), StagingPool(PAGE, PAGE, 1)
    stream = stream_of([step(1), step(2)], mover, pool)
    mover.transfers[0].land()
    assert stream.landed
    assert stream.advance(0)[0] == step(1)
    assert not stream.landed, "it is not even under way"
    stream.release()
    assert not stream.landed
    mover.transfers[1].land()
    assert stream.landed
    assert stream.advance(0)[0] == step(2)
    assert stream.landed
    assert stream.advance(0) is None
    stream.close()


def test_all_buffers_but_the_callers_are_on_their_way() -> None:
    mover, pool = Hand(FILE), StagingPool(4 * PAGE, PAGE, 4)
    stream = stream_of([step(n) for n in range(6)], mover, pool)
    for landing in range(6):
        assert len(mover.transfers) == min(6, landing + 4)
        mover.transfers[landing].land()
        got, buffer, _ = stream.advance(0)
        assert got == step(landing), "in order, whatever lands first"
        left = len(mover.transfers) - landing - 1
        assert stream.bytes_left == (left * PAGE if len(mover.transfers) == 6 else None)
        assert buffer.tolist() == [landing] * PAGE
        stream.release()
    assert stream.advance(0) is None
    stream.close()
    assert pool.stats().windows_out == 0


def test_a_step_comes_part_by_part_and_its_buffer_is_refilled_after_the_last() -> None:
    """Reads of 3, 2 and 5 pages in parts of 2: a long one is cut, and the last of one lands with the first of the next."""
    sizes, targets = (3, 2, 5), (0, 3, 5)
    reads = tuple(StepRead(5, 10 * t * PAGE, s * PAGE, t * PAGE) for s, t in zip(sizes, targets, strict=True))
    mover, pool = Hand(FILE), StagingPool(10 * PAGE, 10 * PAGE, 1)
    stream = ReadStream(
        iter([Step(reads, (), (), 1), step(7)]),
        {5: OpenFile(77, direct=True)},
        mover,
        pool.open_window(0),
        part_bytes=2 * PAGE,
    )
    parts = [[move.source.size_bytes // PAGE for move in each.moves] for each in mover.transfers]
    assert parts == [[2], [1, 1], [1, 1], [2], [2]]
    assert (stream.reads, stream.bytes_left) == (3, None)
    pages = [0, 1, 2, 30, 31, 50, 51, 52, 53, 54]
    mover.transfers[1].land()
    mover.transfers[4].land()
    with pytest.raises(TimeoutError):
        stream.advance(0)  # in order, also when what is behind has landed
    landed = 0
    for part, pages_there in (0, 4), (2, 6), (3, 10):
        mover.transfers[part].land()
        got, buffer, end = stream.advance(0)
        assert (end, got.size_bytes) == (pages_there * PAGE, 10 * PAGE), "what has landed comes together"
        assert [int(buffer[at * PAGE]) for at in range(landed, pages_there)] == pages[landed:pages_there]
        assert len(mover.transfers) == 5
        landed = pages_there
    stream.release()
    assert (len(mover.transfers), stream.bytes_left) == (6, PAGE)
    mover.transfers[5].land()
    assert stream.advance(0)[0] == step(7)
    assert (stream.bytes_left, stream.advance(0)) == (0, None)
    stream.close()


def test_behind_a_part_that_failed_none_comes_however_often_one_asks() -> None:
    """It had landed with the part before it: both were looked at in one call."""
    mover, pool = Hand(FILE), StagingPool(3 * PAGE, 3 * PAGE, 1)
    stream = ReadStream(
        iter([step(0, reads=3)]), {5: OpenFile(77, direct=True)}, mover, pool.open_window(0), part_bytes=PAGE
    )
    mover.transfers[1].error = Unavailable("EIO")
    for transfer in mover.transfers:
        transfer.land()
    for _ in range(3):
        with pytest.raises(Unavailable, match="EIO"):
            stream.advance(0)
    stream.close()
    assert pool.stats().windows_out == 0


def test_a_part_that_fails_keeps_the_window_until_the_others_rest() -> None:
    mover, pool = Hand(FILE), StagingPool(4 * PAGE, 4 * PAGE, 1)
    stream = ReadStream(
        iter([step(0, reads=4)]), {5: OpenFile(77, direct=True)}, mover, pool.open_window(0), part_bytes=PAGE
    )
    mover.transfers[0].land()
    assert stream.advance(0)[2] == PAGE
    mover.transfers[1].error, mover.transfers[1].landed = Unavailable("EIO"), True
    with pytest.raises(Unavailable, match="EIO"):
        stream.advance(0)
    stream.close()
    for transfer in mover.transfers[2:]:
        with pytest.raises(Overloaded):
            pool.open_window(0)
        transfer.land()
    pool.open_window(0).close()
