"""Where the bytes of a segment are. Pure.

A segment is the blocks of one turn, contiguous, plane by plane, then its footer; planes are shard-major:

    base                                                                         base + total_bytes
    | plane 0: block 0, 1, .. n-1 | pad | plane 1: ... | pad | ... | footer: keys, checksums | pad |

Each plane range and the footer start on 4 KiB, so O_DIRECT can read any of them whole. The same geometry serves memory
and SSD: `chunk(p, i) = base + plane_offset[p] + i * plane_bytes[p]`, and block i's address is chunk(0, i).

Checksums cover granules: as many whole blocks of one plane as reach 256 KiB, so that one call verifies much and a read
that starts inside a segment needs little more than it asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flatcake_transport.space import SpaceSpec

ALIGN_BYTES: Final = 4096
GRANULE_BYTES_MIN: Final = 256 << 10
SEGMENT_BLOCKS_MAX: Final = 1 << 20

Int64Array = NDArray[np.int64]


def align_up(size_bytes: int, align_bytes: int = ALIGN_BYTES) -> int:
    return -(-size_bytes // align_bytes) * align_bytes


@dataclass(frozen=True, slots=True, eq=False)
class SegmentLayout:
    """Geometry of a segment of `blocks` blocks. Arrays have one entry a plane (shards x layers, shard-major); read only.

    Attributes:
        plane_bytes: bytes of one block in the plane.
        plane_offset: start of the plane range, from the segment's base; a multiple of 4 KiB.
        granule_blocks: blocks one checksum covers in the plane.
        granule_first: index of the plane's first checksum among the segment's; one entry more, the count of all.
        data_bytes: where the footer starts, a multiple of 4 KiB.
    """

    blocks: int
    plane_bytes: Int64Array
    plane_offset: Int64Array
    granule_blocks: Int64Array
    granule_first: Int64Array
    data_bytes: int

    @property
    def planes(self) -> int:
        return len(self.plane_bytes)

    @property
    def granules(self) -> int:
        return int(self.granule_first[-1])

    def chunk(self, plane: int, block: int) -> int:
        """Offset from the segment's base of one block's bytes in one plane."""
        return int(self.plane_offset[plane]) + block * int(self.plane_bytes[plane])

    def granule_bytes(self, plane: int) -> int:
        """Bytes one checksum covers in a plane; the last granule of a segment may be shorter."""
        return int(self.granule_blocks[plane]) * int(self.plane_bytes[plane])

    def granules_of(self, plane: int, first_block: int, blocks: int) -> range:
        """Checksum indices that cover `blocks` blocks from `first_block` of a plane; the first and last may reach beyond."""
        start, size = int(self.granule_first[plane]), int(self.granule_blocks[plane])
        return range(start + first_block // size, start + -(-(first_block + blocks) // size))


def segment_layout(spec: SpaceSpec, blocks: int) -> SegmentLayout:
    """Raises: ValueError: fewer than 1 block or more than a segment may have."""
    if not 1 <= blocks <= SEGMENT_BLOCKS_MAX:
        raise ValueError(f"a segment has 1 to {SEGMENT_BLOCKS_MAX} blocks, not {blocks}")
    plane_bytes = np.tile(np.asarray(spec.plane_bytes, np.int64), spec.shards)
    range_bytes = -(-plane_bytes * blocks // ALIGN_BYTES) * ALIGN_BYTES
    ends = np.cumsum(range_bytes)
    granule_blocks = np.maximum(1, -(-GRANULE_BYTES_MIN // plane_bytes))
    granule_first = np.concatenate(([0], np.cumsum(-(-blocks // granule_blocks)))).astype(np.int64)
    return SegmentLayout(
        blocks=blocks,
        plane_bytes=plane_bytes,
        plane_offset=ends - range_bytes,
        granule_blocks=granule_blocks,
        granule_first=granule_first,
        data_bytes=int(ends[-1]),
    )
