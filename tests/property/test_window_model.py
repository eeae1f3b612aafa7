"""The stream of reads beside its plan: whatever lands when, the caller gets every step's bytes in order, and nobody writes where it looks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from landings import Hand

from flatcake_transport.plan import Step, StepRead
from flatcake_transport.window import OpenFile, ReadStream, StagingPool

PAGE = 4096
FILE = np.random.default_rng(7).integers(0, 256, 64 * PAGE, np.uint8)


def land(mover: Hand, nth: int) -> None:
    mover.transfers.pop(nth % len(mover.transfers)).land()


@st.composite
def steps(draw: st.DrawFn) -> list[Step]:
    """Each of one to three reads of one to six pages, side by side in the buffer."""
    planned = []
    for sizes in draw(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), max_size=5)):
        reads, target = [], 0
        for pages in sizes:
            offset = draw(st.integers(0, 64 - pages)) * PAGE
            reads.append(StepRead(0, offset, pages * PAGE, target))
            target += pages * PAGE
        planned.append(Step(tuple(reads), (), (), 0))
    return planned


@given(steps(), st.integers(1, 3), st.integers(1, 4), st.booleans(), st.data())
def test_every_step_comes_whole_and_in_order(
    planned: list[Step], buffers: int, part_pages: int, releases: bool, data: st.DataObject
) -> None:
    mover, pool = Hand(FILE), StagingPool(buffers * 18 * PAGE, 18 * PAGE, buffers)
    files = {0: OpenFile(3, direct=True)}
    stream = ReadStream(iter(planned), files, mover, pool.open_window(0), part_bytes=part_pages * PAGE)
    came: list[int] = []
    for n, step in enumerate(planned):
        expected = np.concatenate([FILE[read.offset : read.offset + read.size_bytes] for read in step.reads])
        end = 0
        while end < step.size_bytes:
            try:
                got = stream.advance(0)
            except TimeoutError:
                land(mover, data.draw(st.integers(0, 9)))
                continue
            assert got is not None
            assert got[0] is step
            assert end < got[2], "each time there is more of it"
            _, buffer, end = got
            for _ in range(data.draw(st.integers(0, len(mover.transfers)))):
                land(mover, data.draw(st.integers(0, 9)))
            assert np.array_equal(buffer[:end], expected[:end]), "what else lands is not where the caller looks"
            check_ahead(stream, planned, n, end, buffers)
        came.append(end)
        if releases:
            stream.release()
    assert came == [step.size_bytes for step in planned]
    assert stream.advance(0) is None
    assert (stream.bytes_read, stream.reads) == (sum(came), sum(len(step.reads) for step in planned))
    stream.close()
    assert pool.stats().windows_out == 0


def check_ahead(stream: ReadStream, planned: list[Step], n: int, end: int, buffers: int) -> None:
    """The caller looks at step `n`, of which `end` bytes are there: as many steps are under way as there are buffers."""
    begun = planned[: n + buffers]
    assert stream.bytes_read == sum(step.size_bytes for step in begun)
    left = sum(step.size_bytes for step in begun[n:]) - end
    assert stream.bytes_left == (left if len(begun) == len(planned) else None)
