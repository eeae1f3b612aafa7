"""Session files for peers that cannot read them over NVMe-oF: ranges are read into memory that the peer then gets.

Slots of one bounce buffer, which `UcxProcess` serves. A slot belongs to one staging from `stage` until `close`; one whose read did
not end in time is used again only when the read rests. A peer that gets after its lease has ended may find another range in the
slot: it knows by the lease, and by the checksums, as a reader of any memory does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flatcake_transport.errors import Overloaded, Unavailable
from flatcake_transport.layout import ALIGN_BYTES
from flatcake_transport.mover import FileSpan, MemorySpan, Move, Mover, Transfer
from flatcake_transport.remote import RemoteMemory, RemoteSpan
from flatcake_transport.served import STAGED_BYTES_MAX

_POLL_S: Final = 0.01  # how often a waiter looks whether a read that was given up has come to rest


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """File ranges that lie ready for a peer, one behind the other. `close` once it was fetched, or its lease has ended; twice is not fine."""

    span: RemoteSpan
    close: Callable[[], None]


class FileServing:
    """Thread-safe.

    Args:
        bounce: the buffer, on a page border; at least one slot.
        memory: how peers name it now; raises Unavailable while nobody serves it.
        files: the mover that reads files into host memory.
        range_bytes: bound on the ranges of one staging; rounded down to 4 KiB.
    """

    def __init__(
        self,
        bounce: NDArray[np.uint8],
        memory: Callable[[], RemoteMemory],
        files: Mover,
        *,
        range_bytes: int = STAGED_BYTES_MAX,
    ) -> None:
        """Raises: ValueError: not even one range fits."""
        self.range_bytes = range_bytes // ALIGN_BYTES * ALIGN_BYTES
        slots = len(bounce) // self.range_bytes if self.range_bytes else 0
        if not slots:
            raise ValueError(f"a bounce buffer of {len(bounce)} bytes cannot hold a range of {range_bytes}")
        self._bounce, self._memory, self._files = bounce, memory, files
        self._changed = threading.Condition()
        self._free = list(range(slots))
        self._lingering: list[tuple[int, Transfer, Callable[[], None]]] = []

    @property
    def slots_free(self) -> int:
        return len(self._free)

    def stage(self, sources: Sequence[FileSpan], timeout_s: float, rested: Callable[[], None] = lambda: None) -> Staged:
        """Read ranges, at most `range_bytes` in all, and leave them for a peer to get.

        Args:
            rested: called once, when no read uses the sources' descriptors any more: later than we return if one hangs.

        Raises:
            ValueError: the ranges are larger.
            Overloaded: no slot became free in time.
            Unavailable: they could not be read, or not in time, or nobody serves.
        """
        try:
            size_bytes = self._fitting(sources)
            deadline_s = time.monotonic() + timeout_s
            memory = self._memory()
            slot = self._take(deadline_s)
        except BaseException:
            rested()
            raise
        start = at = slot * self.range_bytes
        try:
            moves = []
            for source in sources:
                moves.append(Move(source, MemorySpan(self._bounce[at : at + source.size_bytes])))
                at += source.size_bytes
            transfer = self._files.submit(moves)
        except BaseException:
            rested()
            self._give(slot)
            raise
        try:
            transfer.wait(max(0.0, deadline_s - time.monotonic()))
        except (TimeoutError, Unavailable) as error:
            self._give(slot, transfer, rested)
            raise Unavailable(f"a file range was not read for a peer: {error}") from error
        rested()
        return Staged(RemoteSpan(memory, start, size_bytes), lambda: self._give(slot))

    def _fitting(self, sources: Sequence[FileSpan]) -> int:
        size_bytes = sum(source.size_bytes for source in sources)
        if size_bytes > self.range_bytes:
            raise ValueError(f"ranges of {size_bytes} bytes: at most {self.range_bytes} are served at once")
        return size_bytes

    def _take(self, deadline_s: float) -> int:
        with self._changed:
            while True:
                for entry in [entry for entry in self._lingering if entry[1].done()]:
                    self._lingering.remove(entry)
                    self._free.append(entry[0])
                    entry[2]()
                if self._free:
                    return self._free.pop()
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise Overloaded("all slots of the bounce buffer are out")
                self._changed.wait(min(left_s, _POLL_S) if self._lingering else left_s)

    def _give(self, slot: int, transfer: Transfer | None = None, rested: Callable[[], None] = lambda: None) -> None:
        with self._changed:
            if transfer is None or transfer.done():
                self._free.append(slot)
                rested()
            else:
                self._lingering.append((slot, transfer, rested))
            self._changed.notify()
