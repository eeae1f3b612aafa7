"""What moves bytes: the seam to devices.

A move copies equal numbers of bytes between two spans. A mover takes the pairs of span kinds its module names, and
refuses others with `ValueError` at `submit`. All movers pass `check_mover` (tests/conformance).

    file span   <-> memory span     posix, gds       bytes of a session file and a staging buffer
    memory span <-> memory span     memory           arena, staging buffer, device
    memory span <-> paged span      memory           scatter to, or gather from, an engine's paged slots
    remote span <-> memory span     ucx              one-sided, between another node's memory and a staging buffer
    served span  -> memory span     ucx_staged       another node's file, which that node reads into memory for us

Errors of a move appear in `Transfer.wait`: `Unavailable` when bytes could not be moved (EIO, short read, ENOSPC), with the
OSError chained; never a success that moved fewer bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flatcake_transport.remote import RemoteSpan
from flatcake_transport.served import ServedSpan

Slots = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Region:
    """Memory known before it is used: pinned or registered once. The mover never owns it.

    `keep` is whatever must stay alive for the address to be valid; `device` is "cpu" or e.g. "cuda:0".
    """

    address: int
    size_bytes: int
    device: str = "cpu"
    keep: object = None


@dataclass(frozen=True, slots=True)
class FileSpan:
    """Bytes of an open file. `direct`: the descriptor was opened O_DIRECT, so offset and size are multiples of 4 KiB.

    `device`: any number that files have in common which hang together (`window.device_number`).
    """

    fd: int
    offset: int
    size_bytes: int
    direct: bool = False
    device: int = 0


@dataclass(frozen=True, slots=True)
class MemorySpan:
    """Contiguous bytes as a 1-d uint8 array: numpy (host) or torch (host or CUDA). Writable where it is a target."""

    data: Any  # NDArray[np.uint8] | torch.Tensor

    @property
    def size_bytes(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class PagedSpan:
    """Some slots of one layer's paged KV: numpy or torch, host or CUDA, any strides; first axis is the slot.

    `pages[slots[i]]`, flattened in C order, holds block i's bytes. Slots are distinct. Integer or float pages are
    reinterpreted as bytes, never converted. `rows`: what `paged.prepared` made of the pages, for this span and its parts.
    """

    pages: Any
    slots: Slots
    plane_bytes: int
    rows: Any = field(default=None, repr=False, compare=False)

    def part(self, first: int, end: int) -> PagedSpan:
        """Blocks `first .. end` of it."""
        return PagedSpan(self.pages, self.slots[first:end], self.plane_bytes, self.rows)

    @property
    def size_bytes(self) -> int:
        return len(self.slots) * self.plane_bytes


Span = FileSpan | MemorySpan | PagedSpan | RemoteSpan | ServedSpan


@dataclass(frozen=True, slots=True, eq=False)
class Checks:
    """Checksums to take of the bytes of a gather while they are in the processor's cache: later each would be read again.

    `sums` gets one a granule of the moved bytes, the last of which may be shorter; it is filled when the transfer rests.
    """

    granule_bytes: int  # whole blocks
    algorithm: int  # of footer.ALGORITHMS
    sums: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Move:
    """`checks` only where host memory is gathered, paged span -> memory span; elsewhere they are refused."""

    source: Span
    target: Span
    checks: Checks | None = None


@dataclass(frozen=True, slots=True)
class MoverStats:
    """Counts since the mover was made. `path` is what really carries the bytes, e.g. "posix+direct", "gds", "gds-compat"."""

    path: str
    moves: int = 0
    commands: int = 0  # preadv/pwritev/cuFile calls; copies for memory
    bytes_moved: int = 0
    failures: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)  # reason -> count, e.g. "EINVAL: buffered"


class Transfer(Protocol):
    """Moves under way. Thread-safe."""

    def done(self) -> bool: ...

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when every move has landed.

        Raises:
            Unavailable: some bytes were not moved; every move has come to rest (none is still touching memory).
            TimeoutError: not yet; the moves go on, and both ends must stay alive until a later `wait` returns. Some movers
                say `errors.Hangs`.
        """
        ...


class Mover(Protocol):
    """Copies between two media. Thread-safe. Both ends of a move live until its `wait` returns."""

    def register(self, region: Region) -> None: ...

    def submit(self, moves: Sequence[Move]) -> Transfer:
        """Start the moves and return at once. Raises: ValueError: spans of a kind or size this mover does not take."""
        ...

    def stats(self) -> MoverStats: ...

    def close(self) -> None:
        """Land what is in flight, then free threads and buffers. Twice is fine; `submit` raises Unavailable after."""
        ...
