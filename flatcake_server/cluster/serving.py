"""Session files for peers: ranges of the files of a peer's lease, read into a bounce buffer that it then gets over UCX.

The only bulk bytes that the daemon itself touches, and those of peers that have no better way (NVMe-oF). Bounded: so many slots,
a staging each; who finds none waits for its time and is `Overloaded`.

A staging ends by the peer's word, with the lease it was made for, or when it is `STAGED_S` old; the peer
counts from before it asked, so it trusts nothing that it fetched later. What is read may be the end of a file that is being
dropped only if the lease has ended: then the peer does not trust it either.

Belongs to the event loop; reads run in threads of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flatcake_proto.v1 import store_pb2
from flatcake_server.disk import Disk
from flatcake_server.records import FileId
from flatcake_server.store import Store
from flatcake_transport.errors import Overloaded, Unavailable
from flatcake_transport.layout import ALIGN_BYTES
from flatcake_transport.movers.posix import PosixMover
from flatcake_transport.movers.ucx_files import FileServing, Staged
from flatcake_transport.remote import RemoteMemory
from flatcake_transport.served import RANGES_MAX, STAGED_BYTES_MAX, FileRange
from flatcake_transport.window import OpenFile, device_number

log = logging.getLogger(__name__)

STAGED_S: Final = 10.0  # a get takes milliseconds; a reader that was killed leaves its slots for so long at most
STAGED_SHARE: Final = 0.99  # of it that is promised, as of a lease
READ_SHARE: Final = 0.9  # of the asker's time: it hears why
COUNTS: Final = ("staged", "staged_bytes", "staging_full", "staging_failures")


@dataclass(frozen=True, slots=True, eq=False)
class _Out:
    """A staging that a peer has."""

    staged: Staged
    peer_id: int
    lease_id: int
    until_s: float


class FileServer:
    """Made when the fabric serves the bounce buffer.

    Args:
        bounce: the buffer that UCX serves.
        memory: how peers name it now; raises Unavailable.
    """

    def __init__(
        self,
        store: Store,
        bounce: NDArray[np.uint8],
        memory: Callable[[], RemoteMemory],
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._memory = memory
        self._now_s = now_s
        self._files = PosixMover(command_bytes_max=STAGED_BYTES_MAX)
        self._serving = FileServing(bounce, memory, self._files)
        # One a slot: a thread that waits for a slot is one that has nothing to read.
        self._threads = ThreadPoolExecutor(len(bounce) // self._serving.range_bytes, "flatcake-serving")
        self._out: dict[int, _Out] = {}
        self._last_id = 0
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        """Stagings that peers have now."""
        return len(self._out)

    async def stage(
        self, peer_id: int, lease_id: int, ranges: Sequence[FileRange], timeout_s: float
    ) -> store_pb2.StageReply:
        """Read ranges of the files of a lease and leave them for the peer.

        Raises:
            ValueError: no such ranges. LookupError: the lease has ended, or does not cover them.
            Overloaded: no slot became free in time. Unavailable: they could not be read.
        """
        _refuse_bad(ranges)
        deadline_s = self._now_s() + READ_SHARE * timeout_s
        try:
            disks = self._disks(peer_id, lease_id, ranges)
            work = asyncio.get_running_loop().run_in_executor(self._threads, self._read, disks, ranges, deadline_s)
            try:
                staged = await asyncio.shield(work)
            except asyncio.CancelledError:
                work.add_done_callback(_give_back)
                raise
        except Overloaded:
            self.counts["staging_full"] += 1
            raise
        except (LookupError, Unavailable):
            self.counts["staging_failures"] += 1
            raise
        if self._store.leases.get(lease_id) is None:
            staged.close()
            raise LookupError(f"lease {lease_id} has ended")
        self._last_id += 1
        self._out[self._last_id] = _Out(staged, peer_id, lease_id, self._now_s() + STAGED_S)
        self.counts["staged"] += 1
        self.counts["staged_bytes"] += staged.span.size_bytes
        return store_pb2.StageReply(
            memory=staged.span.memory.sealed(),
            offset=staged.span.offset,
            staged_id=self._last_id,
            ttl_ms=int(STAGED_S * STAGED_SHARE * 1000),
        )

    def _disks(self, peer_id: int, lease_id: int, ranges: Sequence[FileRange]) -> dict[int, Disk]:
        """Where the files of the ranges are. Raises: LookupError, Overloaded, Unavailable."""
        files = self._store.files_of_lease(peer_id, lease_id)
        disks: dict[int, Disk] = {}
        for file_id in {each.file_id for each in ranges}:
            disk = files.get(FileId(file_id))
            if disk is None:
                raise LookupError(f"file {file_id:x} is none of lease {lease_id}")
            if disk.failure:
                raise Unavailable(f"SSD path {disk.path} is out of service")
            disk.admit()
            disks[file_id] = disk
        return disks

    def _read(self, disks: dict[int, Disk], ranges: Sequence[FileRange], deadline_s: float) -> Staged:
        """In a thread. `deadline_s` counts also for what waited for the thread."""
        fds: dict[int, int] = {}
        try:
            for file_id, disk in disks.items():
                fds[file_id] = disk.files.open_read(FileId(file_id))
        except BaseException:
            _close(fds)
            raise
        files = {file_id: OpenFile(fd, disks[file_id].files.direct, device_number(fd)) for file_id, fd in fds.items()}
        spans = [files[each.file_id].span(each.offset, each.size_bytes) for each in ranges]
        return self._serving.stage(spans, max(0.0, deadline_s - self._now_s()), partial(_close, fds))

    def unstage(self, peer_id: int, staged_ids: Sequence[int]) -> None:
        """The peer has fetched them. Unknown ones, and those of others, are left as they are."""
        for staged_id in staged_ids:
            if (out := self._out.get(staged_id)) is not None and out.peer_id == peer_id:
                del self._out[staged_id]
                out.staged.close()

    def sweep(self) -> None:
        """Take back what nobody has a right to any more."""
        now_s = self._now_s()
        for staged_id, out in list(self._out.items()):
            if now_s >= out.until_s or self._store.leases.get(out.lease_id) is None:
                del self._out[staged_id]
                out.staged.close()

    async def close(self) -> None:
        """What is read comes to rest first, unless its disk hangs: then its threads are left behind. Twice is fine."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _refuse_bad(ranges: Sequence[FileRange]) -> None:
    size_bytes = 0
    for each in ranges:
        if each.offset % ALIGN_BYTES or each.size_bytes % ALIGN_BYTES or not each.size_bytes:
            raise ValueError(f"{each.size_bytes} bytes at {each.offset} of a file: expected whole {ALIGN_BYTES}")
        size_bytes += each.size_bytes
    if not ranges or len(ranges) > RANGES_MAX or size_bytes > STAGED_BYTES_MAX:
        raise ValueError(
            f"{len(ranges)} ranges of {size_bytes} bytes: at most {RANGES_MAX} of {STAGED_BYTES_MAX} are staged at once"
        )


def _close(fds: dict[int, int]) -> None:
    for fd in fds.values():
        os.close(fd)
    fds.clear()


def _give_back(work: asyncio.Future[Staged]) -> None:
    """Nobody waits for it any more."""
    if not work.cancelled() and work.exception() is None:
        work.result().close()
