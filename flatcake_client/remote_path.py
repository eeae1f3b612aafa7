"""Another node in a restore: its memory is read as a file is, where the file is that node's arena; its files by its own hand.

    arena there --one-sided get--> buffer --check--> slots        one is scattered while the others fill
    files there --staged there, one-sided get--> buffer ...
    files there --NVMe-oF, preadv of the namespace--> buffer ...        where they are exported

So everything that `file_path.py` keeps to holds here: long reads in layer order, nothing in the engine's memory but by our own
copy from a window, a buffer trusted only when the lease was alive after its gets had landed, checksums compared where the
node says so. A window goes back to its pool only when no get touches it any more, also when the peer is dead.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from flatcake_client.connection import Connection
from flatcake_client.file_path import ReadTools
from flatcake_client.handover import Descriptors
from flatcake_client.lease import Lease
from flatcake_client.linger import Linger
from flatcake_client.records import Run
from flatcake_transport.address import Medium
from flatcake_transport.errors import FlatCakeError, Unavailable
from flatcake_transport.mover import Transfer
from flatcake_transport.remote import RemoteMemory
from flatcake_transport.served import FileRange, ServedFile, StagedRanges
from flatcake_transport.window import Readable

log = logging.getLogger(__name__)

UNSTAGE_TIMEOUT_S: Final = 1.0


@dataclass(slots=True, eq=False)
class RemoteArena:
    """One node's memory, for one hit: a `restore.RemoteSource`.

    Attributes:
        node_id: whose runs come from there.
        memory: its arena, as the node's daemon gave it out with the lease.
        lease: at that node; it hangs on the hit's.
        tools: of `Tools.remote`.
        verify: compare with the checksums in the footers.
        report_corrupt: tells that node of segments that differ from them.
    """

    node_id: int
    memory: RemoteMemory
    lease: Lease
    tools: ReadTools
    verify: bool
    report_corrupt: Callable[[Sequence[Run]], None]
    medium: Medium = Medium.MEMORY

    def files(self, timeout_s: float) -> Mapping[int, Readable]:
        """The arena under the file id that memory runs have; nothing to wait for."""
        del timeout_s
        return {0: self.memory}


class RemoteFiles:
    """One node's session files, for one hit: a `restore.RemoteSource`.

    Args:
        file_ids: of the hit's runs there.
        server: reads them for us; None: it does not.
        opened: asks for descriptors of those that are exported over NVMe-oF, with a timeout; None: none is.
        lease, verify, report_corrupt: as for `RemoteArena`.
        tools: of `Tools.served`.
    """

    medium = Medium.SSD

    def __init__(
        self,
        node_id: int,
        file_ids: Collection[int],
        server: LeasedFiles | None,
        opened: Callable[[float], Descriptors] | None,
        lease: Lease,
        tools: ReadTools,
        *,
        verify: bool,
        report_corrupt: Callable[[Sequence[Run]], None],
    ) -> None:
        self.node_id, self.lease, self.tools, self.verify = node_id, lease, tools, verify
        self.report_corrupt = report_corrupt
        self._served: dict[int, Readable] = {}
        if server is not None:
            self._served = {file_id: ServedFile(server, file_id) for file_id in file_ids}
        self._opened = opened
        self._lock = threading.Lock()
        self._descriptors: Descriptors | None = None

    def files(self, timeout_s: float) -> Mapping[int, Readable]:
        """Exported ones by descriptor, asked for once; the others as the node serves them, where each read asks for itself."""
        if not self._lock.acquire(timeout=max(0.0, timeout_s)):
            return self._served
        try:
            if self._descriptors is None and self._opened is not None:
                self.lease.check()
                self._descriptors = self._opened(timeout_s)
            return self._served | (self._descriptors.files if self._descriptors is not None else {})
        except Unavailable as error:
            log.info("files of node %d are not read over NVMe-oF: %s", self.node_id, error)
            self._opened = None
            return self._served
        finally:
            self._lock.release()

    def close(self, transfers: Sequence[Transfer], linger: Linger) -> None:
        """After the lease: let the descriptors go once the transfers that use them rest. Twice is fine."""
        with self._lock:
            if self._descriptors is not None:
                self._descriptors.close(transfers, linger)


class LeasedFiles:
    """A `served.RangeServer`: the files of a lease at another node, asked for through our daemon. Thread-safe."""

    def __init__(self, connection: Connection, local_lease_id: int, node_id: int, lease: Lease) -> None:
        self._connection = connection
        self._local_lease_id = local_lease_id
        self.node_id = node_id
        self._lease = lease

    def stage(self, ranges: Sequence[FileRange], timeout_s: float) -> StagedRanges:
        self._lease.check()
        connection = self._connection
        try:
            return connection.rpc.stage(connection.welcome, self._local_lease_id, self.node_id, ranges, timeout_s)
        except ValueError as error:
            raise Unavailable(f"node {self.node_id} does not serve what it named: {error}") from error

    def unstage(self, staged_ids: Sequence[int]) -> None:
        connection = self._connection
        if self._lease.alive():  # else they have ended with it
            with contextlib.suppress(FlatCakeError, ValueError):
                connection.rpc.unstage(
                    connection.welcome, self._local_lease_id, self.node_id, staged_ids, UNSTAGE_TIMEOUT_S
                )
