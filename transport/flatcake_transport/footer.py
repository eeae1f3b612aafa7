"""The footer of a segment: what makes its bytes say whose they are. Pure.

A footer stands on 4 KiB right behind the data of its segment (`base + layout.data_bytes`) and is written last. It names
the space in full, the session, the place it was written to and the keys, so that a lost journal is rebuilt from session
files alone, and so that a reader can tell its data from any other. FORMAT.md in flatcake_server has the bytes.

Invariants:
- `footer_bytes` depends on the space, the session's name and the block count only: known before a byte is written.
- `encode_footer` and `decode_footer` are inverses, and `decode_footer` accepts nothing but what `encode_footer` writes:
  every byte, padding too, is under the footer's own checksum, and every size in it must agree with every other.
- A footer is bound to its place: file id and offset are in it, so bytes copied elsewhere are not taken for a segment.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from flatcake_transport.errors import Corrupt
from flatcake_transport.layout import ALIGN_BYTES, SEGMENT_BLOCKS_MAX, SegmentLayout, align_up, segment_layout
from flatcake_transport.space import FINGERPRINT_BYTES, SpaceSpec

MAGIC: Final = b"FLATCAKE"
FORMAT_VERSION: Final = 1
KEY_BYTES: Final = 16
SESSION_BYTES_MAX: Final = 4096
# The largest space spec: four names of 4 KiB, each byte escaped to six ("\u0000"), and 4096 planes of 11 characters.
SPEC_BYTES_MAX: Final = 256 << 10

CHECKSUM_NONE: Final = 0
CHECKSUM_XXH3: Final = 1
CHECKSUM_WORDSUM: Final = 2
ALGORITHMS: Final = (CHECKSUM_NONE, CHECKSUM_XXH3, CHECKSUM_WORDSUM)

# magic, version, head bytes | own checksum, footer bytes | fingerprint | parent key | file id, file offset, generation,
# data bytes, first block | blocks, turn, shards, planes, granules, spec bytes, session bytes, zero
_HEAD: Final = struct.Struct("<8sII QQ 16s 16s QQQQQ IIIIIIII")
_CHECKSUM_AT: Final = 16
_CHECKSUM_END: Final = 24
_PLANE: Final = np.dtype([("offset", "<u8"), ("plane_bytes", "<u4"), ("granule_blocks", "<u4")])

KeyArray = NDArray[np.uint8]  # (n, 16)
ChecksumArray = NDArray[np.uint64]
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, eq=False)
class Footer:
    """One segment described.

    Attributes:
        file_id: of the session file; 0 in memory.
        file_offset: of the segment's base in that file; in memory, in the arena.
        first_block: position of `keys[0]` in its key chain; 0 is the first block of a context.
        parent_key: 16 bytes: the key before `keys[0]`; of the first block, the chain's root key.
        keys: (n, 16) uint8, one a block.
        algorithms: one byte a shard, who each compute their own planes: 0 none, 1 xxh3_64, 2 wordsum.
        checksums: one u64 a granule, in the order of `SegmentLayout.granule_first`; meaningless where the algorithm is 0.
    """

    spec: SpaceSpec
    session: str
    turn: int
    generation: int
    file_id: int
    file_offset: int
    first_block: int
    parent_key: bytes
    keys: KeyArray
    algorithms: bytes
    checksums: ChecksumArray

    @property
    def blocks(self) -> int:
        return len(self.keys)

    @property
    def layout(self) -> SegmentLayout:
        return segment_layout(self.spec, len(self.keys))

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole segment, this footer included."""
        return self.layout.data_bytes + footer_bytes(self.spec, self.session, len(self.keys))


def footer_bytes(spec: SpaceSpec, session: str, blocks: int) -> int:
    """Bytes a segment's footer takes, a multiple of 4 KiB. Raises: ValueError: a name too long, blocks out of range."""
    return _total_bytes(spec.to_json(), _session_name(session), spec.shards, segment_layout(spec, blocks))


def encode_footer(footer: Footer) -> bytes:
    """Exactly `footer_bytes(spec, session, blocks)` bytes, to be written at `base + layout.data_bytes`.

    Raises: ValueError: a shape that does not belong to the space, or a number out of range.
    """
    spec, keys = footer.spec, footer.keys
    if keys.ndim != 2 or keys.shape[1] != KEY_BYTES or keys.dtype != np.uint8:
        raise ValueError(f"keys are (n, {KEY_BYTES}) uint8, not {keys.shape} {keys.dtype}")
    layout = segment_layout(spec, len(keys))
    if footer.checksums.shape != (layout.granules,):
        raise ValueError(f"{layout.granules} granules need as many checksums, not {footer.checksums.shape}")
    if len(footer.algorithms) != spec.shards or not set(footer.algorithms) <= set(ALGORITHMS):
        raise ValueError(f"algorithms {footer.algorithms!r}: expected {spec.shards} bytes, each of {ALGORITHMS}")
    if len(footer.parent_key) != KEY_BYTES:
        raise ValueError(f"a parent key has {KEY_BYTES} bytes, not {len(footer.parent_key)}")
    text, name = spec.to_json(), _session_name(footer.session)
    total = _total_bytes(text, name, spec.shards, layout)
    try:
        head = _HEAD.pack(
            MAGIC, FORMAT_VERSION, _HEAD.size, 0, total, spec.fingerprint, footer.parent_key,
            footer.file_id, footer.file_offset, footer.generation, layout.data_bytes, footer.first_block,
            len(keys), footer.turn, spec.shards, layout.planes, layout.granules, len(text), len(name), 0,
        )  # fmt: skip
    except struct.error as error:
        raise ValueError(f"a number of the footer does not fit its field: {error}") from error
    body = b"".join(
        (
            head,
            _plane_table(layout).tobytes(),
            np.ascontiguousarray(keys).tobytes(),
            footer.checksums.astype("<u8").tobytes(),
            footer.algorithms,
            text,
            name,
        )
    )
    data = bytearray(body.ljust(total, b"\0"))
    struct.pack_into("<Q", data, _CHECKSUM_AT, _own_checksum(memoryview(data)))
    return bytes(data)


def peek_footer_bytes(head: Buffer) -> int | None:
    """Length of the footer that seems to begin here, or None where none does. A hint: only `decode_footer` proves it.

    Args: head: the first 4 KiB at a multiple of 4 KiB, or more.
    """
    if len(head) < _HEAD.size or bytes(head[: len(MAGIC)]) != MAGIC:
        return None
    total = int(struct.unpack_from("<Q", head, _CHECKSUM_END)[0])
    return total if 0 < total <= _TOTAL_BYTES_MAX and total % ALIGN_BYTES == 0 else None


def decode_footer(buffer: Buffer) -> Footer:
    """Read the footer at the start of `buffer`, which may be longer. The arrays are copies, writable and owned.

    Raises: Corrupt: no footer, another version, cut short, or any byte of it differs from what was written.
    """
    view = memoryview(buffer).cast("B")
    if len(view) < _HEAD.size:
        raise Corrupt(f"a footer of {len(view)} bytes is cut short")
    (
        magic, version, head_bytes, checksum, total, fingerprint, parent_key,
        file_id, file_offset, generation, data_bytes, first_block,
        blocks, turn, shards, planes, granules, text_bytes, name_bytes, zero,
    ) = _HEAD.unpack_from(view)  # fmt: skip
    if magic != MAGIC:
        raise Corrupt(f"no footer here: it begins with {magic!r}, not {MAGIC!r}")
    if version != FORMAT_VERSION:
        raise Corrupt(f"footer format {version}: this FlatCake reads format {FORMAT_VERSION}")
    if total > len(view) or total % ALIGN_BYTES or total < _HEAD.size:
        raise Corrupt(f"a footer says it has {total} bytes where {len(view)} are there")
    view = view[:total]
    if _own_checksum(view) != checksum:
        raise Corrupt("the footer differs from its own checksum")

    # From here on the bytes are what some encoder wrote; what is checked below is that it was ours.
    planes_at = head_bytes
    keys_at = planes_at + planes * _PLANE.itemsize
    checksums_at = keys_at + blocks * KEY_BYTES
    algorithms_at = checksums_at + granules * 8
    text_at = algorithms_at + shards
    name_at = text_at + text_bytes
    end = name_at + name_bytes
    if head_bytes != _HEAD.size or zero or align_up(end) != total or not 1 <= blocks <= SEGMENT_BLOCKS_MAX:
        raise Corrupt("the sizes in a footer contradict each other")
    spec = _spec_of(bytes(view[text_at:name_at]), fingerprint)
    layout = segment_layout(spec, blocks)
    if (spec.shards, layout.planes, layout.granules, layout.data_bytes) != (shards, planes, granules, data_bytes):
        raise Corrupt("a footer's counts are not those of its space")
    if bytes(view[planes_at:keys_at]) != _plane_table(layout).tobytes():
        raise Corrupt("a footer's plane table is not that of its space")
    algorithms = bytes(view[algorithms_at:text_at])
    if not set(algorithms) <= set(ALGORITHMS) or any(view[end:]):
        raise Corrupt("a footer names an unknown checksum, or its padding is not zero")
    return Footer(
        spec=spec,
        session=_session_of(bytes(view[name_at:end])),
        turn=turn,
        generation=generation,
        file_id=file_id,
        file_offset=file_offset,
        first_block=first_block,
        parent_key=parent_key,
        keys=np.frombuffer(view[keys_at:checksums_at], np.uint8).reshape(blocks, KEY_BYTES).copy(),
        algorithms=algorithms,
        checksums=np.frombuffer(view[checksums_at:algorithms_at], "<u8").astype(np.uint64),
    )


def _total_bytes(text: bytes, name: bytes, shards: int, layout: SegmentLayout) -> int:
    arrays = layout.planes * _PLANE.itemsize + layout.blocks * KEY_BYTES + layout.granules * 8
    return align_up(_HEAD.size + arrays + shards + len(text) + len(name))


def _plane_table(layout: SegmentLayout) -> NDArray[np.void]:
    table = np.zeros(layout.planes, _PLANE)
    table["offset"] = layout.plane_offset
    table["plane_bytes"] = layout.plane_bytes
    table["granule_blocks"] = layout.granule_blocks
    return table


def _own_checksum(view: memoryview) -> int:
    digest = xxhash.xxh3_64(view[:_CHECKSUM_AT])
    digest.update(view[_CHECKSUM_END:])
    return digest.intdigest()


def _session_name(session: str) -> bytes:
    try:
        name = session.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a session's name is no Unicode text: {session!r}") from error
    if len(name) > SESSION_BYTES_MAX:
        raise ValueError(f"a session's name has {len(name)} bytes, at most {SESSION_BYTES_MAX} are taken")
    return name


def _session_of(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError as error:
        raise Corrupt(f"a footer's session is no Unicode text: {name[:80]!r}") from error


def _spec_of(text: bytes, fingerprint: bytes) -> SpaceSpec:
    try:
        spec = SpaceSpec.from_json(text)
        canonical = spec.to_json()
    except (ValueError, AttributeError, RecursionError) as error:
        raise Corrupt(f"a footer's space is not one: {text[:80]!r}") from error
    if canonical != text or spec.fingerprint != fingerprint or len(fingerprint) != FINGERPRINT_BYTES:
        raise Corrupt("a footer's fingerprint is not that of its space")
    return spec


# The largest footer: the most planes, each with the most granules (one a block). Nobody writes one; it bounds `peek`.
_TOTAL_BYTES_MAX: Final = align_up(
    _HEAD.size + (1 << 22) * _PLANE.itemsize + SEGMENT_BLOCKS_MAX * (KEY_BYTES + 8 * 4096) + SPEC_BYTES_MAX
)
