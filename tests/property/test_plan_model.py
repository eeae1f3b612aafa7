"""The planner beside a naive rule: bytes of a made-up file, moved as the plan says, must come out as the blocks they are."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flatcake_transport.layout import ALIGN_BYTES, segment_layout
from flatcake_transport.plan import (
    Extent,
    FileRun,
    buffer_bytes_min,
    plan_reads,
    plan_restore,
    plan_writes,
)
from flatcake_transport.space import SpaceSpec

PLANE_BYTES = st.one_of(st.integers(1, 9000), st.sampled_from([4096, 8192, 4095, 4097, 1 << 17]))
SPECS = st.builds(
    lambda planes, shards: SpaceSpec("m", "u8", 1, tuple(planes), shards=shards),
    st.lists(PLANE_BYTES, min_size=1, max_size=3),
    st.integers(1, 2),
)

# Buffers hold a granule of 256 KiB at least, so it takes many small planes, or a few of this size, to fill one to the last page.
MIDDLING = st.integers(30_000, 140_000)


@st.composite
def extent_lists(draw: st.DrawFn) -> list[Extent]:
    """Extents that do not overlap, on one or two files, in any order."""
    extents = []
    for file in range(draw(st.integers(1, 2))):
        at = 0
        for gap, size in draw(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), max_size=6)):
            extents.append(Extent(file, at + gap, size))
            at += gap + size
    return draw(st.permutations(extents))


@given(extent_lists(), st.integers(0, 10), st.integers(1, 60), st.sampled_from([1, 4, 8]))
def test_reads_against_the_naive_rule(extents: list[Extent], gap: int, most: int, align: int) -> None:
    reads = plan_reads(extents, gap_bytes_max=gap, read_bytes_max=most, align_bytes=align)
    assert sorted(i for read in reads for i in read.extents) == list(range(len(extents)))
    assert [(r.file, r.offset) for r in reads] == sorted((r.file, r.offset) for r in reads)
    for read in reads:
        mine = [extents[i] for i in read.extents]
        assert {e.file for e in mine} == {read.file}
        # No byte more than alignment asks for at either end.
        assert read.offset == min(e.offset for e in mine) // align * align
        assert read.end == -(-max(e.end for e in mine) // align) * align
        assert read.size_bytes <= most or len(mine) == 1
        ordered = sorted(mine, key=lambda e: e.offset)
        for before, after in itertools.pairwise(ordered):
            assert after.offset // align * align - -(-before.end // align) * align <= gap
    for before, after in itertools.pairwise(reads):
        mergeable = before.file == after.file and after.offset - before.end <= gap
        first_of_after = min((extents[i] for i in after.extents), key=lambda e: e.offset)
        # What could have been merged was: one more extent would have made the read too large.
        assert not mergeable or max(before.end, -(-first_of_after.end // align) * align) - before.offset > most


@st.composite
def hits(draw: st.DrawFn) -> tuple[SpaceSpec, list[FileRun]]:
    """Runs of a hit over a few segments of two files; several runs may lie in one segment."""
    spec = draw(SPECS)
    runs: list[FileRun] = []
    position = 0
    for file in range(draw(st.integers(1, 2))):
        base = draw(st.sampled_from([0, 4096, 40960]))
        for blocks in draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)):
            layout = segment_layout(spec, blocks)
            at = 0
            while at < blocks:
                skip, count = draw(st.integers(0, 2)), draw(st.integers(1, 9))
                first = at + skip
                count = min(count, blocks - first)
                if count > 0:
                    runs.append(FileRun(file, base, layout, first, count, position))
                    position += count
                at = first + max(count, 1)
            base += layout.data_bytes + 4096
    return spec, draw(st.permutations(runs))


def stamp(run: FileRun, plane: int, block: int) -> np.ndarray:
    """What one block's bytes are in one plane."""
    seed = [run.file, run.offset, plane, block]
    return np.random.default_rng(seed).integers(0, 256, int(run.layout.plane_bytes[plane]), dtype=np.uint8)


def make_files(runs: list[FileRun]) -> dict[int, np.ndarray]:
    files: dict[int, np.ndarray] = {}
    for run in runs:
        end = run.offset + run.layout.data_bytes + 4096
        file = files.setdefault(run.file, np.zeros(0, np.uint8))
        if len(file) < end:
            file = files[run.file] = np.concatenate([file, np.zeros(end - len(file), np.uint8)])
        for plane in range(run.layout.planes):
            for block in range(run.layout.blocks):
                data = stamp(run, plane, block)
                at = run.offset + run.layout.chunk(plane, block)
                file[at : at + len(data)] = data
    return files


class Range(NamedTuple):
    """What one layer wants of one run, widened to granules where whole ones are asked for."""

    first: int
    end: int
    unit: int  # blocks between which it may be cut
    plane_bytes: int
    start: int  # of block 0, in the file

    def size_bytes(self, first: int, end: int) -> int:
        """In a buffer: these blocks with the pages that they lie in."""
        slack = (self.start + first * self.plane_bytes) % ALIGN_BYTES
        return -(-(slack + (end - first) * self.plane_bytes) // ALIGN_BYTES) * ALIGN_BYTES


def range_of(run: FileRun, plane: int, *, whole: bool) -> Range:
    unit = int(run.layout.granule_blocks[plane]) if whole else 1
    first = run.first_block // unit * unit
    end = min(run.layout.blocks, -(-(run.first_block + run.blocks) // unit) * unit)
    return Range(first, end, unit, int(run.layout.plane_bytes[plane]), run.offset + run.layout.chunk(plane, 0))


def buffer_of(data: st.DataObject, spec: SpaceSpec, runs: list[FileRun], planes: range, *, whole: bool) -> int:
    """The least that will do and some pages more, or just as much as one of the ranges takes."""
    layouts = [run.layout for run in runs] or [segment_layout(spec, 1)]
    least = max(buffer_bytes_min(layout, whole_granules=whole) for layout in layouts)
    wanted = [range_of(run, plane, whole=whole) for run in runs for plane in planes]
    exact = sorted(size for each in wanted if (size := each.size_bytes(each.first, each.end)) >= least)
    more = st.integers(0, 8).map(lambda pages: least + pages * ALIGN_BYTES)
    return data.draw(st.one_of(more, st.sampled_from(exact)) if exact else more)


@given(hits(), st.sampled_from([0, 4096, 64 << 10]), st.booleans(), st.data())
def test_restore_brings_every_block_once(
    hit: tuple[SpaceSpec, list[FileRun]], gap: int, whole: bool, data: st.DataObject
) -> None:
    spec, runs = hit
    shard = data.draw(st.integers(0, spec.shards - 1))
    planes = range(shard * spec.layers, (shard + 1) * spec.layers)
    check_restore(spec, runs, planes, buffer_of(data, spec, runs, planes, whole=whole), gap, whole=whole)


@given(
    st.one_of(
        st.tuples(st.lists(st.integers(1, 9000), min_size=60, max_size=120), st.just(1)),
        st.tuples(st.lists(MIDDLING, min_size=1, max_size=2), st.integers(4, 24)),
    ),
    st.booleans(),
    st.data(),
)
def test_full_buffers_hold_what_they_are_to_hold(
    sizes: tuple[list[int], int], whole: bool, data: st.DataObject
) -> None:
    planes, blocks = sizes
    spec = SpaceSpec("m", "u8", 1, tuple(planes))
    first = data.draw(st.integers(0, blocks - 1))
    cut = data.draw(st.integers(first + 1, blocks))  # two runs that touch, perhaps
    bounds = [(start, end) for start, end in ((first, cut), (cut, blocks)) if start < end]
    layout = segment_layout(spec, blocks)
    runs = [FileRun(0, 4096, layout, start, end - start, start - first) for start, end in bounds]
    of_all = range(spec.layers)
    gap = data.draw(st.sampled_from([0, 4096, 64 << 10]))
    check_restore(spec, runs, of_all, buffer_of(data, spec, runs, of_all, whole=whole), gap, whole=whole)


def check_restore(
    spec: SpaceSpec, runs: list[FileRun], planes: range, buffer_bytes: int, gap: int, *, whole: bool
) -> None:
    files = make_files(runs)
    buffer = np.zeros(buffer_bytes, np.uint8)
    seen: set[tuple[int, int]] = set()
    layers_done = 0
    steps = list(plan_restore(runs, planes, buffer_bytes=buffer_bytes, gap_bytes_max=gap, whole_granules=whole))
    for step in steps:
        buffer[:] = 0xEE
        at = 0
        for read in step.reads:
            assert (read.offset % ALIGN_BYTES, read.size_bytes % ALIGN_BYTES, read.target % ALIGN_BYTES) == (0, 0, 0)
            assert read.target == at, "reads stand side by side in the buffer"
            at += read.size_bytes
            source = files[read.file][read.offset : read.offset + read.size_bytes]
            assert len(source) == read.size_bytes, "a read past the end of the segment"
            buffer[read.target : at] = source
        assert step.size_bytes == at <= buffer_bytes
        assert sorted(piece.offset for piece in step.pieces) == [piece.offset for piece in step.pieces]
        for piece in step.pieces:
            run = runs[piece.run]
            for i in range(piece.blocks):
                position = piece.position + i
                assert (piece.layer, position) not in seen
                seen.add((piece.layer, position))
                expected = stamp(run, planes[piece.layer], run.first_block + position - run.position)
                start = piece.offset + i * piece.plane_bytes
                assert np.array_equal(buffer[start : start + piece.plane_bytes], expected)
        assert bool(step.checks) == whole
        for check in step.checks:
            layout = runs[check.run].layout
            unit = int(layout.granule_blocks[check.plane])
            end = check.first_block + check.blocks
            assert check.first_block % unit == 0
            assert end % unit == 0 or end == layout.blocks
            whole_bytes = np.concatenate(
                [stamp(runs[check.run], check.plane, b) for b in range(check.first_block, end)]
            )
            assert np.array_equal(buffer[check.offset : check.offset + check.size_bytes], whole_bytes)
        while layers_done < spec.layers and all((layers_done, p) in seen for p in positions(runs)):
            layers_done += 1
        assert step.layers_done == layers_done, "a layer is done with its last block, neither before nor later"
    assert seen == {(layer, p) for layer in range(spec.layers) for p in positions(runs)}
    assert not steps or steps[-1].layers_done == spec.layers
    check_command_bound(runs, planes, steps, buffer_bytes, whole=whole)
    check_merged(steps, buffer_bytes, gap)
    check_filled(runs, planes, steps, buffer_bytes, whole=whole)


def positions(runs: list[FileRun]) -> list[int]:
    return [run.position + i for run in runs for i in range(run.blocks)]


def check_command_bound(runs: list[FileRun], planes: range, steps: list, buffer_bytes: int, *, whole: bool) -> None:
    """A read a layer and run at most: what fits a buffer is in one piece, what does not in one more than it fills."""
    pieces = Counter((piece.layer, piece.run) for step in steps for piece in step.pieces)
    assert all(len(step.reads) <= len(step.pieces) for step in steps)
    for (r, run), (layer, plane) in itertools.product(enumerate(runs), enumerate(planes)):
        wanted = range_of(run, plane, whole=whole)
        fits = wanted.size_bytes(wanted.first, wanted.end) <= buffer_bytes
        # What is cut may begin in what another left of a buffer, and then lies anywhere in a page.
        each = max(wanted.unit, (buffer_bytes - ALIGN_BYTES + 1) // wanted.plane_bytes // wanted.unit * wanted.unit)
        assert pieces[layer, r] <= (1 if fits else 1 + -(-(wanted.end - wanted.first) // each))


def check_merged(steps: list, buffer_bytes: int, gap: int) -> None:
    """No two reads of a step touch; a gap that is worth it is read along, unless the buffer cannot hold all of those."""
    for step in steps:
        gaps = [b.offset - a.offset - a.size_bytes for a, b in itertools.pairwise(step.reads) if a.file == b.file]
        assert all(between > 0 for between in gaps)
        small = [between for between in gaps if between <= gap]
        assert not small or step.size_bytes + sum(small) > buffer_bytes


def check_filled(runs: list[FileRun], planes: range, steps: list, buffer_bytes: int, *, whole: bool) -> None:
    """A step ends where the next range has no room, or of one that no buffer holds not even the least part."""
    order = sorted(range(len(runs)), key=lambda r: (runs[r].file, runs[r].offset, runs[r].first_block))

    def brings(step: Any) -> list[tuple[int, int, int, int]]:
        """(layer, place of the run, first block, end): each piece with what it is widened to."""
        found = [(check.plane - planes.start, check.run, check.first_block, check.blocks) for check in step.checks] or [
            (
                piece.layer,
                piece.run,
                runs[piece.run].first_block + piece.position - runs[piece.run].position,
                piece.blocks,
            )
            for piece in step.pieces
        ]
        return sorted((layer, order.index(r), first, first + blocks) for layer, r, first, blocks in found)

    def wanted(layer: int, place: int) -> Range:
        return range_of(runs[order[place]], planes[layer], whole=whole)

    for step, following in itertools.pairwise(steps):
        brought, (layer, place, first, _) = brings(step), brings(following)[0]
        room = buffer_bytes - sum(wanted(*at).size_bytes(begin, end) for *at, begin, end in brought)
        rest = wanted(layer, place)
        if first > rest.first:  # cut
            *_, begin, _ = brought[-1]
            assert rest.size_bytes(begin, first + rest.unit) - rest.size_bytes(begin, first) > room
        elif rest.size_bytes(first, rest.end) <= buffer_bytes:
            assert rest.size_bytes(first, rest.end) > room
        else:
            assert rest.size_bytes(first, first + rest.unit) > room


@given(
    st.one_of(SPECS, st.builds(lambda plane: SpaceSpec("m", "u8", 1, (plane,)), MIDDLING)),
    st.integers(1, 40),
    st.integers(0, 5),
    st.data(),
)
def test_writes_put_every_byte_in_its_place(spec: SpaceSpec, blocks: int, more_pages: int, data: st.DataObject) -> None:
    layout = segment_layout(spec, blocks)
    plane = data.draw(st.integers(0, layout.planes - 1))
    buffer_bytes = buffer_bytes_min(layout, whole_granules=False) + more_pages * ALIGN_BYTES
    run = FileRun(0, 0, layout, 0, blocks, 0)
    file = np.full(layout.data_bytes, 0xEE, np.uint8)
    size = int(layout.plane_bytes[plane])
    checked_blocks = 0
    at = int(layout.plane_offset[plane])
    for step in plan_writes(layout, plane, buffer_bytes=buffer_bytes):
        buffer = np.full(buffer_bytes, 0xDD, np.uint8)
        assert step.gather_offset + step.blocks * size + step.zero_bytes <= buffer_bytes
        for i in range(step.blocks):
            start = step.gather_offset + i * size
            buffer[start : start + size] = stamp(run, plane, step.first_block + i)
        end = step.gather_offset + step.blocks * size
        buffer[end : end + step.zero_bytes] = 0
        assert (step.offset % ALIGN_BYTES, step.size_bytes % ALIGN_BYTES, step.source_offset % ALIGN_BYTES) == (0, 0, 0)
        assert step.offset == at
        at += step.size_bytes
        file[step.offset : at] = buffer[step.source_offset : step.source_offset + step.size_bytes]
        assert step.granule_bytes == layout.granule_bytes(plane)
        assert checked_blocks % int(layout.granule_blocks[plane]) == 0, (
            "a granule begins in one step and ends in another"
        )
        checked = range(checked_blocks, step.first_block + step.blocks)
        expected = np.concatenate([stamp(run, plane, block) for block in checked])
        assert np.array_equal(buffer[step.checked_offset : end], expected)
        checked_blocks = checked.stop
    expected = np.concatenate([stamp(run, plane, block) for block in range(blocks)])
    start = int(layout.plane_offset[plane])
    assert np.array_equal(file[start : start + len(expected)], expected)
    assert not file[start + len(expected) : at].any(), "padding is zero"
    assert at == (int(layout.plane_offset[plane + 1]) if plane + 1 < layout.planes else layout.data_bytes)
    assert checked_blocks == blocks
