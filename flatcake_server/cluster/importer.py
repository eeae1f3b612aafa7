"""Peers' exported session files, opened here for our clients: an O_DIRECT descriptor of the namespace, handed over as a file is.

The kernel is asked in one thread. The first file of a peer costs a connection (`nvme connect`, some hundred milliseconds); what
does not come in time, or at all, is left out, and its reader takes the way through UCX. Belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from flatcake_server.cluster.borrowed import Exports
from flatcake_server.cluster.nvme_host import NvmeHost
from flatcake_server.cluster.nvmet import parse_port
from flatcake_transport.errors import FlatCakeError

log = logging.getLogger(__name__)

CLOSE_S: Final = 10.0
THREAD_SHARE: Final = 0.9  # of the time: the kernel's own reason is heard before ours
CONNECT_SHARE: Final = 0.7  # of the time there is; the rest is for the namespaces to appear


class Importer:
    def __init__(self, host: NvmeHost) -> None:
        self._host = host
        self._thread = ThreadPoolExecutor(1, "flatcake-nvme")
        self.counts: Counter[str] = Counter()
        self.failure = ""  # the last one

    async def open(self, exports: Exports, timeout_s: float) -> dict[int, int]:
        """Descriptors by file id, the caller's to close; of those files that could be opened in time."""
        deadline_s = time.monotonic() + THREAD_SHARE * timeout_s
        work = asyncio.get_running_loop().run_in_executor(self._thread, self._open, exports, deadline_s)
        try:
            async with asyncio.timeout(timeout_s):
                opened = await asyncio.shield(work)
        except BaseException as error:
            work.add_done_callback(_close)
            if not isinstance(error, TimeoutError):
                raise
            self._failed("no answer of the kernel in time", len(exports.uuids))
            return {}
        self.counts["opened"] += len(opened)
        return opened

    def _open(self, exports: Exports, deadline_s: float) -> dict[int, int]:
        """In the thread."""
        opened: dict[int, int] = {}
        try:
            port = parse_port(exports.port)
            if port is None:
                return opened
            left_s = deadline_s - time.monotonic()
            if left_s > 0:
                self._host.connect(exports.subsystem, port, CONNECT_SHARE * left_s)
            for file_id, uuid in exports.uuids.items():
                opened[file_id] = self._host.open(exports.subsystem, uuid, max(0.0, deadline_s - time.monotonic()))
        except (FlatCakeError, ValueError) as error:
            self._failed(str(error), len(exports.uuids) - len(opened))
        return opened

    def _failed(self, reason: str, files: int) -> None:
        self.counts["failures"] += files
        if reason != self.failure:
            log.warning("files of a peer are read through UCX: %s", reason)
        self.failure = reason

    async def close(self) -> None:
        closing = asyncio.get_running_loop().run_in_executor(self._thread, self._host.close, CLOSE_S / 2)
        try:
            await asyncio.wait_for(closing, CLOSE_S)
        except TimeoutError:
            log.error("NVMe-oF connections are left to the kernel")
        self._thread.shutdown(wait=False, cancel_futures=True)


def _close(work: asyncio.Future[dict[int, int]]) -> None:
    """Nobody waits for them any more."""
    if not work.cancelled() and work.exception() is None:
        for fd in work.result().values():
            os.close(fd)
