"""Session files read for what they say themselves: footers found and checked, data compared with its checksums.

Used offline, without a daemon; nothing here writes. A footer proves itself (its own checksum) and its place (file id and
offset are in it), so what is found is a segment that was written whole and committed, or given up after its footer.

Finding the next footer needs no reading of the data between: with the space known, the footer of a segment of n blocks can only
be at `data_bytes(n)`, so one page a candidate is read. Only where that fails (a space not met before, the hole of an
aborted turn) are pages read one by one, and then only those the file system has data for.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from flatcake_server.records import FileId
from flatcake_transport.checksum import granule_checksums
from flatcake_transport.errors import Corrupt, Unavailable
from flatcake_transport.footer import CHECKSUM_NONE, MAGIC, Footer, decode_footer, peek_footer_bytes
from flatcake_transport.layout import ALIGN_BYTES, SEGMENT_BLOCKS_MAX
from flatcake_transport.space import SpaceSpec

_CHUNK_BYTES: Final = 8 << 20
_SPECS_TRIED: Final = 8  # spaces met last, for the first segment of a file; the others are found page by page
_MAGIC_WORD: Final = np.frombuffer(MAGIC, "<u8")[0]


@dataclass(frozen=True, slots=True)
class DataCheck:
    """Granules of one segment: how many there are, differ from their checksum, and have none."""

    granules: int
    bad: int
    unchecked: int


class SessionFileReader:
    """One session file, open for reading while in a `with`. Raises: Unavailable: it cannot be read."""

    def __init__(self, path: Path, file_id: FileId) -> None:
        self.path = path
        self.file_id = file_id
        self._fd = -1
        self.size_bytes = 0

    def __enter__(self) -> Self:
        with self._readable():
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            self.size_bytes = os.fstat(self._fd).st_size
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)  # pages far apart, or long reads of ours
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def footer_at(self, offset: int) -> Footer:
        """Raises: Corrupt: there is none, it is damaged, or it speaks of another place."""
        head = self._read(offset, ALIGN_BYTES)
        total = peek_footer_bytes(head)
        if total is not None and total > len(head) and offset + total <= self.size_bytes:
            head = self._read(offset, total)
        footer = decode_footer(head)
        if footer.file_id != self.file_id:
            raise Corrupt(f"the footer is of file {footer.file_id:x}")
        if footer.file_offset + footer.layout.data_bytes != offset:
            raise Corrupt(f"the footer is of a segment at {footer.file_offset}, and stands at {offset}")
        return footer

    def footers(self, specs: list[SpaceSpec]) -> Iterator[Footer]:
        """Footers of all segments that are here, by offset; what is damaged is passed over.

        Args: specs: spaces met so far, latest last; those found are moved to the end.
        """
        at = 0
        here: SpaceSpec | None = None
        while at < self.size_bytes:
            footer = None
            for spec in [here] if here is not None else specs[: -_SPECS_TRIED - 1 : -1]:
                if (footer := self._footer_of(spec, at)) is not None:
                    break
            footer = footer or self._footer_after(at)
            if footer is None:
                return
            here = footer.spec
            if not specs or specs[-1] != here:
                specs[:] = [spec for spec in specs if spec != here] + [here]
            yield footer
            at = footer.file_offset + footer.total_bytes

    def check_data(self, footer: Footer) -> DataCheck:
        """Compare a segment's bytes with its checksums. Reads all of it."""
        layout, shards = footer.layout, np.frombuffer(footer.algorithms, np.uint8)
        layers = footer.spec.layers
        bad = unchecked = 0
        for plane in range(layout.planes):
            algorithm = int(shards[plane // layers])
            first, end = int(layout.granule_first[plane]), int(layout.granule_first[plane + 1])
            if algorithm == CHECKSUM_NONE:
                unchecked += end - first
                continue
            granule_bytes = layout.granule_bytes(plane)
            step = max(1, _CHUNK_BYTES // granule_bytes)
            base = footer.file_offset + int(layout.plane_offset[plane])
            plane_end = base + footer.blocks * int(layout.plane_bytes[plane])
            for granule in range(first, end, step):
                start = base + (granule - first) * granule_bytes
                data = self._read(start, min(step * granule_bytes, plane_end - start))
                expected = footer.checksums[granule : min(granule + step, end)]
                bad += _differing(data, granule_bytes, algorithm, expected)
        return DataCheck(layout.granules, bad, unchecked)

    def _footer_of(self, spec: SpaceSpec, at: int) -> Footer | None:
        """The footer of a segment of this space that begins exactly here, tried block count by block count."""
        limit = min(SEGMENT_BLOCKS_MAX, (self.size_bytes - at) // spec.block_bytes)
        for first in range(1, limit + 1, 4096):
            blocks = np.arange(first, min(first + 4096, limit + 1), dtype=np.int64)
            for offset in (at + _data_bytes(spec, blocks)).tolist():
                if offset >= self.size_bytes:
                    return None
                if (footer := self._footer_if_any(offset)) is not None and footer.file_offset == at:
                    return footer
        return None

    def _footer_after(self, at: int) -> Footer | None:
        """The next footer of a segment that begins here or later, looked for on every page that has data."""
        begin = at
        while (at := self._data_after(at)) < self.size_bytes:
            chunk = self._read(at, min(_CHUNK_BYTES, self.size_bytes - at))
            words = np.frombuffer(chunk, np.uint8, len(chunk) // ALIGN_BYTES * ALIGN_BYTES)
            pages = words.reshape(-1, ALIGN_BYTES)[:, : len(MAGIC)].copy().view("<u8")[:, 0]
            for page in np.flatnonzero(pages == _MAGIC_WORD).tolist():
                footer = self._footer_if_any(at + page * ALIGN_BYTES)
                if footer is not None and footer.file_offset >= begin:
                    return footer
            if not len(pages):
                return None
            at += len(pages) * ALIGN_BYTES
        return None

    def _footer_if_any(self, offset: int) -> Footer | None:
        with contextlib.suppress(Corrupt):
            if self._read(offset, len(MAGIC)) == MAGIC:
                return self.footer_at(offset)
        return None

    def _data_after(self, at: int) -> int:
        """The next page with data in it; unwritten pre-allocated space is a hole to the file system."""
        try:
            return os.lseek(self._fd, at, os.SEEK_DATA) // ALIGN_BYTES * ALIGN_BYTES
        except OSError as error:
            # ENXIO: no data from here on. Anything else: the file system does not tell, and every page is looked at.
            return self.size_bytes if error.errno == errno.ENXIO else at

    def _read(self, offset: int, size_bytes: int) -> bytes:
        with self._readable():
            data = os.pread(self._fd, size_bytes, offset)
            while 0 < len(data) < size_bytes and (
                more := os.pread(self._fd, size_bytes - len(data), offset + len(data))
            ):
                data += more
        return data

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise Unavailable(f"{self.path} cannot be read: {error.strerror or error}") from error


def _differing(data: bytes, granule_bytes: int, algorithm: int, expected: NDArray[np.uint64]) -> int:
    found = granule_checksums(np.frombuffer(data, np.uint8), granule_bytes, algorithm)
    if len(found) < len(expected):  # the file ends before the segment does
        found = np.concatenate([found, ~expected[len(found) :]])
    return int(np.count_nonzero(found != expected))


def _data_bytes(spec: SpaceSpec, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    """`segment_layout(spec, n).data_bytes` for many n at once."""
    sizes, counts = np.unique(np.asarray(spec.plane_bytes, np.int64), return_counts=True)
    ranges = -(-sizes[:, None] * blocks // ALIGN_BYTES) * ALIGN_BYTES
    return np.asarray((ranges * counts[:, None]).sum(axis=0) * spec.shards, np.int64)
