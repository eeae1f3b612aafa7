"""Session files for peers that cannot read them over NVMe-oF: a range is read into memory that the peer then gets.

Slots of one bounce buffer, which `UcxProcess` serves. A slot belongs to one range from `stage` until `close`; one whose read did
not end in time is used again only when the read rests. A peer that gets after its lease has ended may find another range in the
slot: it knows by the lease, and by the checksums, as a reader of any memory does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flatcake_transport.errors import Overloaded, Unavailable
from flatcake_transport.layout import ALIGN_BYTES
from flatcake_transport.mover import FileSpan, MemorySpan, Move, Mover, Transfer
from flatcake_transport.remote import RemoteMemory, RemoteSpan

RANGE_BYTES: Final = 16 << 20
_POLL_S: Final = 0.01  # how often a waiter looks whether a read that was given up has come to rest


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """A file range that lies ready for a peer. `close` once it was fetched, or its lease has ended; twice is not fine."""

    span: RemoteSpan
    close: Callable[[], None]


class FileServing:
    """Thread-safe.

    Args:
        bounce: the buffer, on a page border; at least one range.
        memory: how peers name it now; raises Unavailable while nobody serves it.
        files: the mover that reads files into host memory.
        range_bytes: bound on one range; rounded down to 4 KiB.
    """

    def __init__(
        self,
        bounce: NDArray[np.uint8],
        memory: Callable[[], RemoteMemory],
        files: Mover,
        *,
        range_bytes: int = RANGE_BYTES,
    ) -> None:
        """Raises: ValueError: not even one range fits."""
        self.range_bytes = range_bytes // ALIGN_BYTES * ALIGN_BYTES
        slots = len(bounce) // self.range_bytes if self.range_bytes else 0
        if not slots:
            raise ValueError(f"a bounce buffer of {len(bounce)} bytes cannot hold a range of {range_bytes}")
        self._bounce, self._memory, self._files = bounce, memory, files
        self._changed = threading.Condition()
        self._free = list(range(slots))
        self._lingering: list[tuple[int, Transfer]] = []

    def stage(self, source: FileSpan, timeout_s: float) -> Staged:
        """Read a range, at most `range_bytes`, and leave it for a peer to get.

        Raises:
            ValueError: the range is larger.
            Overloaded: no slot became free in time.
            Unavailable: it could not be read, or not in time, or nobody serves.
        """
        if source.size_bytes > self.range_bytes:
            raise ValueError(f"a range of {source.size_bytes} bytes: at most {self.range_bytes} are served at once")
        deadline_s = time.monotonic() + timeout_s
        memory = self._memory()
        slot = self._take(deadline_s)
        start = slot * self.range_bytes
        target = MemorySpan(self._bounce[start : start + source.size_bytes])
        try:
            transfer = self._files.submit([Move(source, target)])
        except BaseException:
            self._give(slot)
            raise
        try:
            transfer.wait(max(0.0, deadline_s - time.monotonic()))
        except (TimeoutError, Unavailable) as error:
            self._give(slot, transfer)
            raise Unavailable(f"a file range was not read for a peer: {error}") from error
        return Staged(RemoteSpan(memory, start, source.size_bytes), lambda: self._give(slot))

    def _take(self, deadline_s: float) -> int:
        with self._changed:
            while True:
                for entry in [entry for entry in self._lingering if entry[1].done()]:
                    self._lingering.remove(entry)
                    self._free.append(entry[0])
                if self._free:
                    return self._free.pop()
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise Overloaded("all slots of the bounce buffer are out")
                self._changed.wait(min(left_s, _POLL_S) if self._lingering else left_s)

    def _give(self, slot: int, transfer: Transfer | None = None) -> None:
        with self._changed:
            if transfer is None or transfer.done():
                self._free.append(slot)
            else:
                self._lingering.append((slot, transfer))
            self._changed.notify()
