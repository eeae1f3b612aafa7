"""Files of peers' leases as namespaces of the kernel's NVMe-oF target, for as long as those leases live.

    a pinned lookup of an allowed host  -> its files are exported, within a moment, once for all leases on them
    the end of the last lease on one    -> withdrawn; only then may its session be reclaimed

An exported session is held (`Session.holds`), as one is that is being written to: so it outlasts its lease by the withdrawal, and
its file is neither cut nor deleted under a reader's namespace. One that cannot be withdrawn stays held, and is tried again.

What fails here is no error: such files are read through UCX. The kernel is asked in one thread, so that a target that hangs
costs no lookup more than `WAIT_S`. Belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar
from uuid import UUID

from flatcake_server.catalog import Session
from flatcake_server.cluster.exports import Exports
from flatcake_server.cluster.nvmet import NAMESPACES_MAX, NvmeTarget
from flatcake_server.records import FileId, SessionNo
from flatcake_server.store import Store
from flatcake_transport.errors import FlatCakeError, Unavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

WAIT_S: Final = 0.2  # an export takes milliseconds; a lookup waits no longer, and its reader takes the other way
STOP_S: Final = 10.0


class Exporter:
    """`hosts`: NQNs that files are exported to."""

    def __init__(self, store: Store, target: NvmeTarget, hosts: Collection[str]) -> None:
        self._store = store
        self._target = target
        self._hosts = frozenset(hosts)
        self._thread = ThreadPoolExecutor(1, "flatcake-nvmet")
        self._exports: Exports[FileId, int] = Exports(NAMESPACES_MAX)
        self._leases: set[int] = set()
        self._made: dict[FileId, asyncio.Task[tuple[int, UUID] | None]] = {}
        self._held: dict[FileId, Session] = {}
        self._ending: dict[FileId, asyncio.Task[None]] = {}
        self.failure = "not started"
        self._begun = False  # there may be a target of ours in the kernel
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def nqn(self) -> str:
        return self._target.nqn

    async def start(self) -> None:
        """Make the target; where that cannot be, nothing is exported, and `failure` says why."""
        self._begun = True  # also where nobody waits for it to the end: a thread cannot be given up half way
        try:
            await self._in_thread(self._target.start)
            self.failure = ""
            log.info("session files are exported over NVMe-oF as %s", self._target.nqn)
        except Unavailable as error:
            self._begun, self.failure = False, str(error)
            log.error("session files are not exported over NVMe-oF: %s", error)

    async def exported(self, peer_id: int, lease_id: int, host: str) -> dict[FileId, UUID]:
        """Export the files of a peer's lease to its host. They are the lease's until it ends. Returns: those that are by now.

        Raises: LookupError: the lease has ended, or is another's.
        """
        if self.failure or host not in self._hosts:
            return {}
        files = self._files(peer_id, lease_id)
        wanted = {file_id: session for file_id, session in files.items() if file_id not in self._ending}
        fresh, refused = self._exports.leased(lease_id, wanted)
        self._leases.add(lease_id)
        self.counts["refused"] += len(refused)
        for file_id in fresh:
            session = wanted[file_id]
            session.holds += 1
            self._held[file_id] = session
            self._made[file_id] = asyncio.ensure_future(self._export(file_id, session))
        making = {file_id: self._made[file_id] for file_id in self._exports.exported(lease_id)}
        if making:
            await asyncio.wait(making.values(), timeout=WAIT_S)
        found = {}
        for file_id, task in making.items():
            if task.done() and not task.cancelled() and (made := task.result()) is not None:
                found[file_id] = made[1]
        return found

    def _files(self, peer_id: int, lease_id: int) -> dict[FileId, Session]:
        on_lease = self._store.files_of_lease(peer_id, lease_id)
        lease, sessions = self._store.leases.get(lease_id), self._store.catalog.sessions
        found = [sessions[SessionNo(number)] for number in (lease.sessions if lease else ()) if number in sessions]
        return {file.file_id: session for session in found for file in session.files if file.file_id in on_lease}

    async def _export(self, file_id: FileId, session: Session) -> tuple[int, UUID] | None:
        path = self._store.disks[session.pool].files.path_of(file_id)
        uuid = UUID(bytes=secrets.token_bytes(16), version=4)
        try:
            nsid = await self._in_thread(self._target.export, path, uuid)
        except FlatCakeError as error:
            self.counts["failures"] += 1
            log.warning("session file %x is read through UCX only: %s", file_id, error)
            self._exports.failed(file_id)
            del self._made[file_id]
            await self._let_go(file_id)
            return None
        self.counts["exports"] += 1
        return nsid, uuid

    def sweep(self) -> None:
        """Withdraw what no lease needs any more, and try again what could not be withdrawn."""
        for lease_id in [lease_id for lease_id in self._leases if self._store.leases.get(lease_id) is None]:
            self._leases.discard(lease_id)
            for file_id in self._exports.ended(lease_id):
                self._ending[file_id] = asyncio.ensure_future(self._withdraw(file_id))
        for file_id, task in list(self._ending.items()):
            if task.done():
                self._ending[file_id] = asyncio.ensure_future(self._withdraw(file_id))

    async def _withdraw(self, file_id: FileId) -> None:
        making = self._made.get(file_id)
        made = await making if making is not None else None
        if made is not None:
            try:
                await self._in_thread(self._target.withdraw, made[0])
            except Unavailable as error:
                self.counts["stuck"] += 1
                log.error("session file %x stays exported, and is kept: %s", file_id, error)
                return  # the next sweep tries again
            self.counts["withdrawals"] += 1
            self._made.pop(file_id, None)
            await self._let_go(file_id)
        self._ending.pop(file_id, None)

    async def _let_go(self, file_id: FileId) -> None:
        session = self._held.pop(file_id)
        session.holds -= 1
        await self._store.retirement.settle(session)

    async def stop(self) -> None:
        """Withdraw all. Twice is fine."""
        if self._begun:
            self._begun, self.failure = False, "stopping"
            try:
                await asyncio.wait_for(self._in_thread(self._target.stop), STOP_S)
            except (Unavailable, TimeoutError) as error:
                log.error("exports are left to the next start: %s", error or "the kernel does not answer")
        for session in self._held.values():
            session.holds -= 1
        self._held.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
