"""FC-CIO: which long reads bring a hit's bytes, and which aligned writes store a plane. Pure.

A restore reads layer by layer. For each plane, the bytes a hit wants of one segment are one range; ranges are sorted by
(file, offset), ranges that touch are merged, and gaps of at most `gap_bytes_max` are read along because a further command
costs more. Reads go into window buffers; what lands in one buffer is one `Step`:

    buffer  | read 0 ............................ | read 1 ....... | free |
            | slack | piece (layer 0, run 0) | gap | piece | ..
    every read: offset, size and place in the buffer are multiples of 4 KiB, so O_DIRECT takes it

Invariants: every wanted block of every plane is in exactly one piece; a step's reads fit one buffer and do not overlap there;
layers complete in order; a range that fits a buffer is never cut, so there are at most layers x segments reads, plus one
for each further buffer that a plane larger than a buffer needs. Cuts fall between blocks, or between granules where whole
granules are asked for (a checksum needs all of its bytes).

Loops here run over ranges and reads, never over blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from flatcake_transport.layout import ALIGN_BYTES, SegmentLayout, align_up

GAP_BYTES_MAX: Final = 64 << 10  # reading 64 KiB along costs less than another command: FlatCake paper, FC-CIO


class Extent(
    NamedTuple
):  # here and below: made by the thousand, and a dataclass that cannot change takes five times as long
    """Bytes of a file. `file` is the caller's name of it: any integer."""

    file: int
    offset: int
    size_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.size_bytes


@dataclass(frozen=True, slots=True)
class Read:
    """One read command. `extents` are the positions, in the planned sequence, of the extents it brings."""

    file: int
    offset: int
    size_bytes: int
    extents: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.offset + self.size_bytes


def plan_reads(
    extents: Sequence[Extent], *, gap_bytes_max: int, read_bytes_max: int, align_bytes: int = ALIGN_BYTES
) -> list[Read]:
    """Merge extents of one or more files into reads, filling gaps that cost less than another command.

    Args:
        extents: in bytes; any order; may touch and overlap.
        gap_bytes_max: bytes we accept to read and drop between two extents, counted after both are aligned.
        read_bytes_max: no merge makes a read larger than this; an extent that is larger by itself is one read.
        align_bytes: reads start and end on multiples of this. Two reads may then share one aligned page.

    Returns:
        Reads by (file, offset). Every extent is in exactly one.
    """
    reads: list[Read] = []
    members: list[int] = []
    file = start = end = -1
    for i in sorted(range(len(extents)), key=lambda i: (extents[i].file, extents[i].offset)):
        extent = extents[i]
        first = extent.offset // align_bytes * align_bytes
        last = max(end, align_up(extent.end, align_bytes))
        if members and extent.file == file and first - end <= gap_bytes_max and last - start <= read_bytes_max:
            members.append(i)
            end = last
            continue
        if members:
            reads.append(Read(file, start, end - start, tuple(members)))
        file, start, end, members = extent.file, first, align_up(extent.end, align_bytes), [i]
    if members:
        reads.append(Read(file, start, end - start, tuple(members)))
    return reads


@dataclass(frozen=True, slots=True, eq=False)
class FileRun:
    """Consecutive blocks of one segment that a hit wants, in one file.

    Attributes:
        file: the caller's name of the file, e.g. its file id.
        offset: of the segment's base in the file; a multiple of 4 KiB.
        layout: of the segment, all its blocks.
        first_block: within the segment.
        blocks: how many.
        position: of the first block in the restore: its slot is `slots[position]`.
    """

    file: int
    offset: int
    layout: SegmentLayout
    first_block: int
    blocks: int
    position: int


def one_by_one(run: FileRun) -> list[FileRun]:
    """The run's blocks, each a run of its own. With `gap_bytes_max` -1 each is then a read of its own: what FC-CIO saves."""
    return [
        replace(run, first_block=run.first_block + i, blocks=1, position=run.position + i) for i in range(run.blocks)
    ]


class StepRead(NamedTuple):
    """Read `size_bytes` at `offset` of `file` to `target` bytes into the buffer. All three are multiples of 4 KiB."""

    file: int
    offset: int
    size_bytes: int
    target: int


class Piece(NamedTuple):
    """Blocks of one layer, contiguous in the buffer: scatter them to `slots[position : position + blocks]` of the layer."""

    layer: int
    run: int  # position in the planned runs
    position: int
    blocks: int
    offset: int  # in the buffer
    plane_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.blocks * self.plane_bytes


class Check(NamedTuple):
    """Whole granules in the buffer, or up to the segment's end: `blocks` of a plane, `size_bytes` from `offset`."""

    run: int
    plane: int
    first_block: int  # of the first granule, within the segment
    blocks: int
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """What one window buffer brings. When it is scattered, layers `0 .. layers_done - 1` have all their bytes."""

    reads: tuple[StepRead, ...]
    pieces: tuple[Piece, ...]  # in the buffer's order
    checks: tuple[Check, ...]  # empty unless whole granules were asked for
    layers_done: int

    @property
    def size_bytes(self) -> int:
        """Bytes used of the buffer, and bytes read."""
        return self.reads[-1].target + self.reads[-1].size_bytes


@functools.lru_cache(maxsize=1024)  # every restore asks for each of its segments; a space keeps its layouts
def buffer_bytes_min(layout: SegmentLayout, *, whole_granules: bool) -> int:
    """The smallest buffer with which any restore or write of this space can be planned: one unit and its alignment."""
    blocks = layout.granule_blocks if whole_granules else 1
    read_bytes = align_up(int((layout.plane_bytes * blocks).max())) + ALIGN_BYTES
    return max(read_bytes, *(_write_buffer_bytes_min(layout, plane) for plane in range(layout.planes)))


def plan_restore(
    runs: Sequence[FileRun],
    planes: Sequence[int],
    *,
    buffer_bytes: int,
    gap_bytes_max: int = GAP_BYTES_MAX,
    whole_granules: bool = False,
) -> Iterator[Step]:
    """Plan the reads of one shard's layers through a window, step by step, as they are asked for.

    Args:
        runs: what the hit has on files, any order; may lie in one segment. Memory never comes through here.
        planes: planes of the shard in layer order: `range(shard * layers, (shard + 1) * layers)`.
        buffer_bytes: a multiple of 4 KiB, at least `buffer_bytes_min`.
        whole_granules: widen to whole checksum granules and say in `Step.checks` what can be verified.

    Returns:
        An iterator of steps, none of them empty; no steps when there are no runs.

    Raises:
        ValueError: at the call, not at the first step: a run reaches beyond its segment, a base or the buffer is not
            aligned, or the buffer is too small.
    """
    if buffer_bytes % ALIGN_BYTES:
        raise ValueError(f"buffer_bytes is {buffer_bytes}: expected a multiple of {ALIGN_BYTES}")
    for run in runs:
        if run.first_block < 0 or run.blocks < 1 or run.first_block + run.blocks > run.layout.blocks:
            raise ValueError(
                f"blocks {run.first_block}+{run.blocks} are not in a segment of {run.layout.blocks} blocks"
            )
        if run.offset < 0 or run.offset % ALIGN_BYTES:
            raise ValueError(f"segment at {run.offset} of file {run.file}: expected a multiple of {ALIGN_BYTES}")
        need = buffer_bytes_min(run.layout, whole_granules=whole_granules)
        if buffer_bytes < need:
            raise ValueError(f"buffer_bytes is {buffer_bytes}: this layout needs at least {need}")
    return _steps(runs, planes, buffer_bytes, gap_bytes_max, whole_granules=whole_granules)


class _Want(NamedTuple):
    """One range to bring: blocks `first .. end` (widened to granules) of one run and layer."""

    layer: int
    plane: int
    run: int
    first: int
    end: int


def _steps(
    runs: Sequence[FileRun], planes: Sequence[int], buffer_bytes: int, gap_bytes_max: int, *, whole_granules: bool
) -> Iterator[Step]:
    order = sorted(range(len(runs)), key=lambda r: (runs[r].file, runs[r].offset, runs[r].first_block))
    layouts = [run.layout for run in runs]
    geometry = [(own.plane_bytes.tolist(), own.plane_offset.tolist(), own.granule_blocks.tolist()) for own in layouts]
    wants: list[_Want] = []
    extents: list[Extent] = []
    used = 0  # an upper bound: each extent aligned by itself, before merging
    for layer, plane in enumerate(planes):
        for r in order:
            run, (sizes, starts, units) = runs[r], geometry[r]
            plane_bytes, unit = sizes[plane], units[plane] if whole_granules else 1
            first = run.first_block // unit * unit
            end = min(run.layout.blocks, -(-(run.first_block + run.blocks) // unit) * unit)
            while first < end:
                start = run.offset + starts[plane] + first * plane_bytes
                slack = start % ALIGN_BYTES
                whole = align_up(slack + (end - first) * plane_bytes)
                room = buffer_bytes - used
                fit = end
                if whole > room:
                    # A range that fits a buffer waits for the next one; only a larger one is cut.
                    blocks = (room - slack) // plane_bytes // unit * unit if whole > buffer_bytes else 0
                    if blocks < 1:
                        yield _step(runs, wants, extents, buffer_bytes, gap_bytes_max, layer, checks=whole_granules)
                        wants, extents, used = [], [], 0
                        continue
                    fit = first + blocks
                wants.append(_Want(layer, plane, r, first, fit))
                extents.append(Extent(run.file, start, (fit - first) * plane_bytes))
                used += align_up(slack + (fit - first) * plane_bytes)
                first = fit
    if wants:
        yield _step(runs, wants, extents, buffer_bytes, gap_bytes_max, len(planes), checks=whole_granules)


def _step(
    runs: Sequence[FileRun],
    wants: Sequence[_Want],
    extents: Sequence[Extent],
    buffer_bytes: int,
    gap_bytes_max: int,
    layers_done: int,
    *,
    checks: bool,
) -> Step:
    planned = plan_reads(extents, gap_bytes_max=gap_bytes_max, read_bytes_max=buffer_bytes)
    if sum(read.size_bytes for read in planned) > buffer_bytes:
        # The gaps do not fit beside the wanted bytes: then each range is read by itself, which always fits.
        planned = plan_reads(extents, gap_bytes_max=0, read_bytes_max=buffer_bytes)
    reads: list[StepRead] = []
    place = [0] * len(extents)
    target = 0
    for read in planned:
        reads.append(StepRead(read.file, read.offset, read.size_bytes, target))
        for i in read.extents:
            place[i] = target + extents[i].offset - read.offset
        target += read.size_bytes
    pieces = [_piece(runs[want.run], want, offset) for want, offset in zip(wants, place, strict=True)]
    pieces.sort(key=lambda piece: piece.offset)
    checked = tuple(_check(runs[want.run], want, offset) for want, offset in zip(wants, place, strict=True) if checks)
    return Step(tuple(reads), tuple(pieces), checked, layers_done)


def _piece(run: FileRun, want: _Want, offset: int) -> Piece:
    """The blocks that were asked for among those that a widened range brings."""
    plane_bytes = int(run.layout.plane_bytes[want.plane])
    first = max(want.first, run.first_block)
    end = min(want.end, run.first_block + run.blocks)
    return Piece(
        layer=want.layer,
        run=want.run,
        position=run.position + first - run.first_block,
        blocks=end - first,
        offset=offset + (first - want.first) * plane_bytes,
        plane_bytes=plane_bytes,
    )


def _check(run: FileRun, want: _Want, offset: int) -> Check:
    return Check(
        run=want.run,
        plane=want.plane,
        first_block=want.first,
        blocks=want.end - want.first,
        offset=offset,
        size_bytes=(want.end - want.first) * int(run.layout.plane_bytes[want.plane]),
    )


@dataclass(frozen=True, slots=True)
class WriteStep:
    """One aligned write of a plane range, through one buffer.

    Gather blocks `first_block .. first_block + blocks` to `gather_offset` of the buffer, zero `zero_bytes` after them (the
    plane's padding), then write `size_bytes` from `source_offset` of the buffer to `offset` from the segment's base. A block
    that crosses the border of two steps is gathered in both. Offsets and size of the write are multiples of 4 KiB.

    What was gathered from `checked_offset` of the buffer on has the plane's next checksums, in granules of `granule_bytes`:
    each granule of the plane is whole in exactly one step.
    """

    first_block: int
    blocks: int
    gather_offset: int
    zero_bytes: int
    source_offset: int
    offset: int
    size_bytes: int
    granule_bytes: int
    checked_offset: int


def plan_writes(layout: SegmentLayout, plane: int, *, buffer_bytes: int) -> list[WriteStep]:
    """Cut one plane of a new segment into writes that each fit one buffer. All bytes of the range, padding included.

    Raises: ValueError: the buffer is not a multiple of 4 KiB, or below `buffer_bytes_min`.
    """
    if buffer_bytes % ALIGN_BYTES or buffer_bytes < _write_buffer_bytes_min(layout, plane):
        raise ValueError(f"buffer_bytes is {buffer_bytes}: too small or not a multiple of {ALIGN_BYTES}")
    plane_bytes, start = int(layout.plane_bytes[plane]), int(layout.plane_offset[plane])
    granule_blocks = int(layout.granule_blocks[plane])
    range_bytes = align_up(layout.blocks * plane_bytes)
    steps = []
    begin = whole = 0  # the range's bytes written, and its blocks checked, by the steps so far
    while begin < range_bytes:
        first, lead = divmod(begin, plane_bytes)
        gather_offset = -lead % ALIGN_BYTES
        last = first + (buffer_bytes - gather_offset) // plane_bytes
        last = layout.blocks if last >= layout.blocks else last // granule_blocks * granule_blocks
        end = range_bytes if last == layout.blocks else last * plane_bytes // ALIGN_BYTES * ALIGN_BYTES
        steps.append(
            WriteStep(
                first_block=first,
                blocks=last - first,
                gather_offset=gather_offset,
                zero_bytes=max(0, end - last * plane_bytes),
                source_offset=gather_offset + lead,
                offset=start + begin,
                size_bytes=end - begin,
                granule_bytes=layout.granule_bytes(plane),
                checked_offset=gather_offset + (whole - first) * plane_bytes,
            )
        )
        begin, whole = end, last
    return steps


def _write_buffer_bytes_min(layout: SegmentLayout, plane: int) -> int:
    """One granule; where blocks are not whole pages, the block before it that the last step began, and a page to align it."""
    plane_bytes, granule_bytes = int(layout.plane_bytes[plane]), layout.granule_bytes(plane)
    return granule_bytes if plane_bytes % ALIGN_BYTES == 0 else align_up(granule_bytes + plane_bytes) + ALIGN_BYTES
