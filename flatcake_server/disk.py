"""One SSD path: its files, its journal, its quota, and the threads that may block on it.

Each path is a failure domain. Everything of a session that is on SSD lives on one path, the journal that knows it too;
when the path fails, its sessions are gone from the index and the node goes on without them.

Accounting, all on the event loop, in extents of the SSD address range: those of sessions' files (`files_bytes`), those being
made (`creating`) and those no longer visible whose bytes are still on the disk (`releasing`). An extent is counted before
its file is made and until after it is gone, so all together never exceed the quota. A file that cannot be deleted stays
in `condemned`, counted as releasing, and is tried again. Extents of a path that failed are `lost`: nobody has them, or gets them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from flatcake_server.catalog import SessionFile
from flatcake_server.cluster.nvmet import withdraw_leftovers
from flatcake_server.config_checks import ssd_path_refusal
from flatcake_server.journal import Journal
from flatcake_server.machine import is_memory
from flatcake_server.records import FileId, FileRecord
from flatcake_server.session import SESSIONS_NAME, SessionFiles
from flatcake_transport.errors import Overloaded, Unavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

# An fsync or a RocksDB write keeps one thread waiting; four keep a disk with a deep queue busy with small work.
THREADS: Final = 4
# A path whose oldest work is under way for so long gets no new session while another path is there; and nothing new begins on it at
# all where it is longer than anybody waits: who asked would be gone, and the turn begun for it would stay.
SLOW_S: Final = 2.0
STUCK_S: Final = 10.0


class Disk:
    def __init__(self, path: Path, pool: int, quota_bytes: int, queue_max: int) -> None:
        self.path = path
        self.pool = pool
        self.quota_bytes = quota_bytes
        self.failure = ""
        self.full = False  # its file system had no room for the last file that was to be made, below the quota
        self.full_told_s = float("-inf")
        self.files_bytes = 0
        self.files_count = 0
        self.creating: dict[int, int] = {}  # base -> bytes
        self.releasing: dict[int, int] = {}
        self.condemned: list[SessionFile] = []
        self.lost: list[tuple[int, int]] = []
        self.room = asyncio.Lock()  # one reclaim at a time
        self._queue_max = queue_max
        self._queued = 0
        self._begun_s: dict[int, float] = {}  # work that may write: when it was handed over, oldest first
        self._works = itertools.count()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix=f"flatcake-disk{pool}")
        self._files: SessionFiles | None = None
        self._journal: Journal | None = None

    @property
    def files(self) -> SessionFiles:
        assert self._files is not None
        return self._files

    @property
    def journal(self) -> Journal:
        assert self._journal is not None
        return self._journal

    @property
    def releasing_bytes(self) -> int:
        return sum(self.releasing.values())

    @property
    def used_bytes(self) -> int:
        return self.files_bytes + sum(self.creating.values()) + self.releasing_bytes

    @property
    def free_bytes(self) -> int:
        return self.quota_bytes - self.used_bytes

    def open(self) -> None:
        """Take the path for this process. Blocks.

        Raises:
            Unavailable: the path cannot be used, or belongs to another daemon.
            Corrupt: its journal cannot be read.
        """
        if refusal := ssd_path_refusal(self.path, self.quota_bytes):
            raise Unavailable(refusal)
        if is_memory(self.path):
            log.warning("SSD path %s is memory, and gone with the machine: give a directory on a disk", self.path)
        self._files = SessionFiles(self.path)
        withdraw_leftovers(self.path / SESSIONS_NAME)  # not all below: another daemon may have a directory in ours
        try:
            self._journal = Journal(self.path / "journal")
        except BaseException:
            self._files.close()
            self._files = None
            raise

    @property
    def waited_s(self) -> float:
        """How long the oldest work that may write has been under way."""
        now_s = time.monotonic()
        return now_s - next(iter(self._begun_s.values()), now_s)

    def admit(self) -> None:
        """Ask before work that a client began; what finishes or frees is never turned away.

        Raises: Overloaded: too much waits for this path, or it hangs.
        """
        if (waited_s := self.waited_s) > STUCK_S:
            raise Overloaded(f"SSD path {self.path} has not ended its oldest operation for {waited_s:.0f} s")
        if self._queued >= self._queue_max:
            raise Overloaded(f"SSD path {self.path} has {self._queued} operations waiting, disk_queue_max is reached")

    async def run(self, work: Callable[..., T], *arguments: object) -> T:
        """Do blocking work of this path in one of its threads: short where the disk is well.

        Raises: Unavailable: the path is out of service. What `work` raises.
        """
        number = next(self._works)
        self._begun_s[number] = time.monotonic()
        try:
            return await self.read(work, *arguments)
        finally:
            del self._begun_s[number]

    async def read(self, work: Callable[..., T], *arguments: object) -> T:
        """As `run`, for work that reads much and says nothing of the disk by how long it takes."""
        if self.failure:
            raise Unavailable(f"SSD path {self.path} is out of service: {self.failure}")
        self._queued += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
        finally:
            self._queued -= 1

    def make_file(self, file_id: FileId, size_bytes: int) -> None:
        """Pre-allocate a file under an id that no crash lets anybody use again. Blocks; raises as both steps do."""
        self.journal.cover(file_id=file_id)
        self.files.create(file_id, size_bytes)

    def cut_files(self, records: Sequence[FileRecord], keep_bytes: Mapping[FileId, int]) -> dict[FileId, Unavailable]:
        """Remember files as shorter, then cut them; those that could not be cut, and why. Blocks.

        Raises: Unavailable: the journal cannot be written; none was cut.
        """
        self.journal.put_file(*records)
        failures = {}
        for file_id, size_bytes in keep_bytes.items():
            try:
                self.files.truncate(file_id, size_bytes)
            except Unavailable as error:
                failures[file_id] = error
        return failures

    def close(self) -> None:
        """Wait for what is under way, but for the reading of a journal, then let go of the path. Blocks, where it hangs for ever. Twice is fine."""
        if self._journal is not None:
            self._journal.stopping = True
        self._threads.shutdown(cancel_futures=True)
        if self._journal is not None:
            self._journal.close()
        if self._files is not None:
            self._files.close()
        self._journal = self._files = None
