"""A hit: what a lookup found. It holds its blocks (its lease) until it is released: no longer than the restore needs.

What lies at another node hangs on a lease of the owner's, which the daemon here holds for us beside our own.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from flatcake_client.connection import Connection
from flatcake_client.copying import keep_copy
from flatcake_client.handover import Descriptors
from flatcake_client.keys import KeyArray
from flatcake_client.lease import Lease
from flatcake_client.records import Found, Run
from flatcake_client.remote_path import LeasedFiles, RemoteArena, RemoteFiles
from flatcake_client.restore import RemoteSource, Restore
from flatcake_transport.errors import FlatCakeError, Unavailable
from flatcake_transport.handoff import Verb
from flatcake_transport.paged import device_of
from flatcake_transport.window import Readable

if TYPE_CHECKING:
    from flatcake_client.client import Client
    from flatcake_client.space import Space

REPORT_TIMEOUT_S: Final = 1.0
RELEASE_WAIT_S: Final = 0.25  # an engine's thread waits no longer; the call goes on without it


class Hit:
    """What a lookup found: the longest stored prefix, in blocks. Thread-safe; a context manager that releases itself.

    Attributes:
        blocks: length of the prefix.
        runs: where its blocks are, in chain order.
        failure: why the daemon could not be asked; None when it was.
    """

    def __init__(
        self,
        space: Space,
        keys: KeyArray,
        *,
        found: Found | None = None,
        connection: Connection | None = None,
        asked_s: float = 0.0,
        failure: FlatCakeError | None = None,
    ) -> None:
        self._space = space
        self._client = space.client
        self._connection = connection
        self._lock = threading.Lock()
        self._descriptors: Descriptors | None = None
        self._restores: list[Restore] = []
        self.spec = space.spec
        self.shard = space.shard
        self.layout_of = space.layout_of
        self.runs: tuple[Run, ...] = found.runs if found else ()
        self.blocks = min(sum(run.blocks for run in self.runs), len(keys))
        # What the footers are compared with later must not change with an array of the caller's.
        self.keys = keys[: self.blocks].copy() if keys.flags.writeable else keys[: self.blocks]
        self.failure = failure
        self._copy_blocks = found.copy_blocks if found and found.copy_blocks <= self.blocks else 0
        self.verify = connection is not None and connection.welcome.verify == "all"
        lease_id = found.lease_id if found else 0
        self.lease = Lease(
            lease_id,
            connection.welcome.lease_ttl_s if connection else 0.0,
            asked_s,
            partial(_renew, connection, lease_id),
            connection.lost if connection else lambda: True,
        )
        self.remote: Sequence[RemoteSource] = ()
        if found is not None and connection is not None:
            self.remote = _sources(space.client, found, connection, asked_s, self.lease)
        if self.lease.lease_id:
            self._client.hits.add(self)

    @property
    def tokens(self) -> int:
        """Tokens that need not be computed."""
        return self.blocks * self.spec.block_tokens

    @property
    def bytes_by_medium(self) -> dict[str, int]:
        """Bytes of this shard, by "memory" and "ssd"."""
        sums = {"memory": 0, "ssd": 0}
        for run in self.runs:
            sums[run.segment.medium.name.lower()] += run.blocks * sum(self.spec.plane_bytes)
        return sums

    def restore(
        self,
        target: Sequence[Any],
        slots: Any,
        first_block: int = 0,
        timeout_s: float | None = None,
        ending: Callable[[], object] | None = None,
    ) -> Restore:
        """Bring the hit's blocks into the engine's paged KV. Nothing is copied until the restore is waited for.

        Args:
            target: one array a layer of the caller's shard: numpy or torch, first axis the slot, a slot holding
                `plane_bytes[layer]` bytes, any strides. It stays alive until the restore has been waited for or closed.
            slots: `slots[i]` is where block i of the hit goes. Fewer than the hit's blocks: only those are brought.
            first_block: blocks before it are in place already and are not touched.
            timeout_s: from now to the end of the restore; past it the usable prefix is what is in place.
            ending: called once, by who waits, when the next restore had better begin (`Scheduler.ending`): so little is left to
                read, or a read hangs. Not when it fails or is closed before. It must not block or raise.

        Raises:
            ValueError: shapes do not fit, a slot is named twice or does not exist, or the hit was not pinned.
        """
        self._client.guard()
        if self.runs and not self.lease.lease_id:
            raise ValueError("this hit is not pinned: look up with pin=True to restore")
        # Windows on a device serve that device only: a model over several gets the host's.
        devices = {device_of(pages) for pages in target}
        restore = Restore(
            self,
            self._client.tools.reading(devices.pop() if len(devices) == 1 else "cpu", verify=self.verify),
            target,
            slots,
            first_block,
            self._client.transfer_timeout_s if timeout_s is None else timeout_s,
            guard=self._client.guard,
            forked=self._client.forked,
            ending=ending,
            ended=self._restored,
        )
        self._restores.append(restore)
        return restore

    def release(self, wait_s: float = RELEASE_WAIT_S) -> None:
        """Give the lease back and end the hit's restores. Twice is fine; raises nothing. In a forked child: nothing.

        Args: wait_s: for the daemon's answer.
        """
        if self._client.forked():
            return
        # First of all: whoever still reads, or begins to, in another thread hears of the end before the descriptors go.
        mine = self.lease.end()
        restores = self._restores.copy()  # who releases beside us finds them until the descriptors are gone
        for restore in restores:
            restore.close()
        moving = [transfer for restore in restores for transfer in restore.moving()]
        with self._lock:
            if self._descriptors is not None:
                self._descriptors.close(moving, self._client.linger)
        for source in self.remote:
            if isinstance(source, RemoteFiles):
                source.close(moving, self._client.linger)
        self._restores.clear()
        connection = self._connection
        if mine and self.lease.lease_id and connection is not None and not connection.lost():
            with contextlib.suppress(FlatCakeError):
                connection.rpc.release(connection.welcome, [self.lease.lease_id], self._client.timeout_s, wait_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    # What a restore asks of its hit (restore.HitSource).

    def arena(self, timeout_s: float) -> NDArray[np.uint8]:
        return self._client.arena(self._reachable(), timeout_s)

    def files(self, timeout_s: float) -> Mapping[int, Readable]:
        # Once, also where two restores ask at the same time: they share the descriptors, and these close with the hit.
        if not self._lock.acquire(timeout=max(0.0, timeout_s)):
            raise Unavailable("another restore of the hit is being handed the descriptors")
        try:
            self.lease.check()
            if self._descriptors is None:
                connection = self._reachable()
                here = connection.welcome.node_id
                file_ids = {run.file_id for run in self.runs if run.file_id and run.segment.node == here}
                self._descriptors = connection.handover.leased(self.lease.lease_id, file_ids, timeout_s)
            return self._descriptors.files
        finally:
            self._lock.release()

    def report_corrupt(self, runs: Sequence[Run]) -> None:
        _report(self._client, self._reachable(), runs)

    def _reachable(self) -> Connection:
        if self._connection is None:
            raise Unavailable("the hit is empty")
        return self._connection

    def _restored(self, restore: Restore) -> None:
        stats = restore.stats
        self._client.counts.add("restores")
        self._client.counts.add("read_commands", stats.read_commands)
        self._client.counts.add("bytes_read", stats.bytes_read)
        for read in restore.remote_reads:
            self._client.bandwidths.add(read, time.monotonic())
        if self._copy_blocks and (brought := restore.brought) is not None:
            timeout_s = min(self._client.timeout_s, restore.left_s())
            copied = keep_copy(self._space, self.keys[: self._copy_blocks], brought, restore.first_block, timeout_s)
            self._client.counts.add("copied_blocks", copied)


def _sources(client: Client, found: Found, connection: Connection, asked_s: float, ours: Lease) -> list[RemoteSource]:
    """Where the hit lies at other nodes. Without a way back to the hit: it ends when nobody has it any more.

    The owner's lease hangs on `ours` here, so it is counted on for no longer than that lives, whatever the owner's ttl.
    """
    sources: list[RemoteSource] = []
    report, peer_timeout_s = partial(_report, client, connection), connection.welcome.peer_timeout_s
    for node in found.nodes:
        renew = partial(_renew_remote, connection, found.lease_id)
        lease = Lease(node.lease_id, node.lease_ttl_s, asked_s, renew, lambda: not ours.alive())
        file_ids = {run.file_id for run in found.runs if run.segment.node == node.node_id and run.file_id}
        if node.arena is not None:
            tools = client.tools.remote(peer_timeout_s)
            sources.append(RemoteArena(node.node_id, node.arena, lease, tools, node.verify, report))
        if file_ids and (node.files or node.exported):
            server = LeasedFiles(connection, found.lease_id, node.node_id, lease) if node.files else None
            opened = partial(connection.handover.files, Verb.REMOTE, found.lease_id) if node.exported else None
            tools = client.tools.served(peer_timeout_s, client.transfer_timeout_s)
            sources.append(
                RemoteFiles(
                    node.node_id, file_ids, server, opened, lease, tools, verify=node.verify, report_corrupt=report
                )
            )
    return sources


def _report(client: Client, connection: Connection, runs: Sequence[Run]) -> None:
    client.counts.add("corrupt_segments", len(runs))
    with contextlib.suppress(FlatCakeError):
        connection.rpc.report_corrupt(connection.welcome, runs, REPORT_TIMEOUT_S)


def _renew(connection: Connection | None, lease_id: int, timeout_s: float) -> bool:
    if connection is None or not lease_id:
        return False
    return lease_id in connection.rpc.renew(connection.welcome, [lease_id], timeout_s)[0]


def _renew_remote(connection: Connection, local_lease_id: int, timeout_s: float) -> bool:
    """The owner's lease hangs on ours: the daemon renews both with one call."""
    return local_lease_id in connection.rpc.renew(connection.welcome, [local_lease_id], timeout_s)[1]
