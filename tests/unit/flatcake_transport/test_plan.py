from __future__ import annotations

import pytest

from flatcake_transport.layout import segment_layout
from flatcake_transport.plan import (
    GAP_BYTES_MAX,
    Extent,
    FileRun,
    buffer_bytes_min,
    one_by_one,
    plan_reads,
    plan_restore,
    plan_writes,
)
from flatcake_transport.space import SpaceSpec

KIB, MIB = 1 << 10, 1 << 20


def layout_of(blocks: int, *plane_bytes: int):
    return segment_layout(SpaceSpec("m", "u8", 16, plane_bytes), blocks)


def test_gaps_up_to_64_kib_are_read_along_and_no_larger() -> None:
    near = [Extent(1, 0, 4096), Extent(1, 4096 + 64 * KIB, 4096)]
    far = [Extent(1, 0, 4096), Extent(1, 8192 + 64 * KIB, 4096)]
    assert len(plan_reads(near, gap_bytes_max=GAP_BYTES_MAX, read_bytes_max=MIB)) == 1
    assert len(plan_reads(far, gap_bytes_max=GAP_BYTES_MAX, read_bytes_max=MIB)) == 2


def test_files_are_never_merged() -> None:
    reads = plan_reads([Extent(2, 4096, 4096), Extent(1, 0, 4096)], gap_bytes_max=MIB, read_bytes_max=MIB)
    assert [(r.file, r.offset, r.extents) for r in reads] == [(1, 0, (1,)), (2, 4096, (0,))]


def test_one_segment_is_one_read_a_layer() -> None:
    layout = layout_of(64, *[256 * KIB] * 32)  # 16 MiB a plane
    steps = list(plan_restore([FileRun(1, 4096, layout, 0, 64, 0)], range(32), buffer_bytes=16 * MIB))
    assert [len(step.reads) for step in steps] == [1] * 32
    assert [step.layers_done for step in steps] == list(range(1, 33))
    assert {step.size_bytes for step in steps} == {16 * MIB}


def test_small_planes_share_a_read() -> None:
    layout = layout_of(10, *[10_000] * 32)
    steps = list(plan_restore([FileRun(1, 0, layout, 0, 10, 0)], range(32), buffer_bytes=32 * MIB))
    assert [(len(s.reads), len(s.pieces), s.layers_done) for s in steps] == [(1, 32, 32)]
    assert steps[0].size_bytes == layout.data_bytes, "nothing is read twice and nothing besides"


def test_the_more_planes_a_half_holds_the_fewer_commands() -> None:
    layout = layout_of(10, *[100_000] * 32)  # 1 MB a plane: a half holds as many planes as it has room for
    run = FileRun(1, 0, layout, 0, 10, 0)
    plane = layout.data_bytes // 32
    for planes in (1, 2, 5, 16, 32):
        steps = list(plan_restore([run], range(32), buffer_bytes=planes * plane))
        assert [len(step.reads) for step in steps] == [1] * -(-32 // planes)
        assert [step.layers_done for step in steps] == [*range(planes, 32, planes), 32]


def test_a_range_that_fits_a_half_is_not_cut() -> None:
    layout = layout_of(12, *[MIB] * 3)
    steps = list(plan_restore([FileRun(1, 0, layout, 0, 12, 0)], range(3), buffer_bytes=16 * MIB))
    assert [[p.blocks for p in s.pieces] for s in steps] == [[12], [12], [12]]


def test_a_plane_larger_than_a_half_is_cut_between_blocks() -> None:
    layout = layout_of(20, 3 * MIB)
    steps = list(plan_restore([FileRun(1, 0, layout, 0, 20, 100)], range(1), buffer_bytes=16 * MIB))
    assert [[(p.position, p.blocks) for p in s.pieces] for s in steps] == [
        [(100, 5)], [(105, 5)], [(110, 5)], [(115, 5)],
    ]  # fmt: skip
    assert [s.layers_done for s in steps] == [0, 0, 0, 1]


def test_gaps_that_do_not_fit_the_half_are_not_read() -> None:
    layout = layout_of(9, 60 * KIB)
    runs = [FileRun(1, 0, layout, at, 1, i) for i, at in enumerate((0, 2, 4, 6, 8))]
    wide = list(plan_restore(runs, range(1), buffer_bytes=MIB))
    tight = list(
        plan_restore(runs, range(1), buffer_bytes=max(300 * KIB, buffer_bytes_min(layout, whole_granules=False)))
    )
    assert [len(s.reads) for s in wide] == [1]
    assert [len(s.reads) for s in tight] == [5]


def test_no_runs_no_steps() -> None:
    assert list(plan_restore([], range(4), buffer_bytes=MIB)) == []


def test_steps_come_as_they_are_asked_for() -> None:
    layout = layout_of(1024, *[MIB] * 80)  # 80 GiB: planned whole it would be 2,560 steps
    steps = plan_restore([FileRun(1, 0, layout, 0, 1024, 0)], range(80), buffer_bytes=32 * MIB)
    assert next(steps).size_bytes == 32 * MIB


@pytest.mark.parametrize(
    ("run", "half"),
    [
        ((0, 0, 5), 4 * MIB), ((0, 3, 2), 4 * MIB), ((0, -1, 1), 4 * MIB), ((0, 0, 0), 4 * MIB), ((1, 0, 4), 4 * MIB),
        ((-4096, 0, 4), 4 * MIB), ((0, 0, 4), MIB), ((0, 0, 4), 4 * MIB + 1),
    ],
)  # fmt: skip
def test_callers_bugs_are_told_at_the_call(run: tuple[int, int, int], half: int) -> None:
    offset, first, blocks = run
    with pytest.raises(ValueError):
        plan_restore([FileRun(1, offset, layout_of(4, MIB), first, blocks, 0)], range(1), buffer_bytes=half)


@pytest.mark.parametrize("half", [MIB - 4096, 2 * MIB + 1])
def test_writes_need_a_half_of_one_granule(half: int) -> None:
    with pytest.raises(ValueError, match="buffer_bytes"):
        plan_writes(layout_of(4, MIB), 0, buffer_bytes=half)
    assert len(plan_writes(layout_of(4, MIB), 0, buffer_bytes=MIB)) == 4


def test_ranges_of_a_few_bytes_take_a_page_each_of_the_half() -> None:
    layout = layout_of(1, *[100] * 50)
    half = buffer_bytes_min(layout, whole_granules=False)
    steps = list(plan_restore([FileRun(1, 0, layout, 0, 1, 0)], range(50), buffer_bytes=half))
    assert max(step.size_bytes for step in steps) <= half
    assert sum(len(step.pieces) for step in steps) == 50


def test_a_block_asked_for_twice_comes_twice() -> None:
    layout = layout_of(9, 4096)
    runs = [FileRun(1, 0, layout, 0, 9, 0), FileRun(1, 0, layout, 2, 2, 9)]
    (step,) = plan_restore(runs, range(1), buffer_bytes=MIB)
    assert [(read.offset, read.size_bytes) for read in step.reads] == [(0, 9 * 4096)]
    assert [(p.position, p.blocks, p.offset) for p in step.pieces] == [(0, 9, 0), (9, 2, 8192)]


def test_a_read_is_as_large_as_it_may_be_and_no_larger() -> None:
    extents = [Extent(1, 0, 4096), Extent(1, 4096, 4096)]
    assert len(plan_reads(extents, gap_bytes_max=0, read_bytes_max=8192)) == 1
    assert len(plan_reads(extents, gap_bytes_max=0, read_bytes_max=8191)) == 2


def test_without_merging_every_block_of_every_plane_is_a_read() -> None:
    runs = one_by_one(FileRun(1, 4096, layout_of(8, 8192, 8192), 2, 5, 10))
    assert [(run.first_block, run.blocks, run.position) for run in runs] == [(2 + i, 1, 10 + i) for i in range(5)]
    steps = list(plan_restore(runs, range(2), buffer_bytes=16 * MIB, gap_bytes_max=-1))
    reads = [read for step in steps for read in step.reads]
    assert [read.size_bytes for read in reads] == [8192] * 10
    assert len({read.offset for read in reads}) == 10
