"""Lookups that go on at another node: two round trips, each within the caller's time, and a lease that hangs on ours.

    directory   which nodes hold the anchors beyond the local hit
    peer        the node with the longest prefix looks its own index up, and pins what it finds; if it is gone, the next best

Whatever fails is a shorter hit. An entry that is stale costs the second trip; the owner verifies by key, so it never costs more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from uuid import UUID

import numpy as np

from flatcake_proto.v1 import peer_pb2, store_pb2
from flatcake_server.cluster.anchors import anchor_lengths, choose, probes
from flatcake_server.cluster.borrowed import Exports, Loan, Loans
from flatcake_server.cluster.directory import TAG_BYTES, Directory, Holder
from flatcake_server.cluster.hot import HotPrefixes
from flatcake_server.cluster.importer import Importer
from flatcake_server.cluster.members import Member, Membership, State
from flatcake_server.cluster.peers import HURRY_S, Peers
from flatcake_server.cluster.publisher import Batch
from flatcake_server.records import KeyArray
from flatcake_server.store import Store
from flatcake_transport.address import Address
from flatcake_transport.errors import FlatCakeError, Unavailable
from flatcake_transport.space import SpaceSpec

log = logging.getLogger(__name__)

PEER_SHARE: Final = 0.9  # of the time left: it is the peer that was silent, not the caller that gave up
UUID_BYTES: Final = 16
STAGE_S_MAX: Final = 10.0  # for one staging, whatever time the caller has
ASKED_MAX: Final = (
    2  # nodes a lookup: a node that died a moment ago is in the directory still, and others may hold as much
)
DIRECTORY_PAUSE_S: Final = 1.0  # a directory that did not answer a lookup is not asked by the next ones


@dataclass(slots=True)
class RemoteLookup:
    """The wire's `Remote`. Belongs to the event loop."""

    store: Store
    membership: Membership
    directory: Directory
    peers: Peers
    loans: Loans
    counts: Counter[str]
    timeout_s: float
    verify: bool  # what is read from others is compared with its checksums
    now_s: Callable[[], float]
    spawn: Callable[..., None]
    nvme_host: str = ""  # our NQN, if we read over NVMe-oF
    importer: Importer | None = None
    hot: HotPrefixes | None = None  # what is read elsewhere again and again is told to be copied here
    _pause_s: float = float("-inf")

    async def extend(
        self,
        reply: store_pb2.LookupReply,
        client_id: int,
        spec: SpaceSpec,
        keys: KeyArray,
        held: int,
        *,
        pin: bool,
        time_s: float,
    ) -> None:
        """As the wire asks for it (rpc.Remote)."""
        lengths = probes(held, len(keys))
        if not len(lengths) or self.membership.state(self.now_s()) is not State.JOINED:
            return
        self.counts["remote_lookups"] += 1
        deadline_s = self.now_s() + min(self.timeout_s, time_s / 2)
        try:
            async with asyncio.timeout(deadline_s - self.now_s()):
                anchors = [keys[length - 1].tobytes() for length in lengths.tolist()]
                holders = await self._holders(anchors, (deadline_s - self.now_s()) / 2)
                blocks = await self._of_the_best(
                    anchors, holders, partial(self._find, reply, client_id, spec, keys[held:], pin, deadline_s)
                )
            self.counts["remote_hits" if blocks else "remote_misses"] += 1
            self.counts["remote_blocks"] += blocks
            if blocks and self.hot is not None and pin:
                self._tell_hot(self.hot, reply, spec, keys, held)
        except (FlatCakeError, TimeoutError) as error:
            self.counts["remote_failures"] += 1
            log.info("a lookup ends with the local blocks: %s", error or "no answer in time")
        except asyncio.CancelledError:  # the caller gave up
            self.counts["remote_failures"] += 1
            raise
        except Exception as error:  # noqa: BLE001 - the caller has the local blocks
            self.counts["remote_failures"] += 1
            self.store.retirement.background.unforeseen("a lookup ends with the local blocks", error)

    def _tell_hot(
        self, hot: HotPrefixes, reply: store_pb2.LookupReply, spec: SpaceSpec, keys: KeyArray, held: int
    ) -> None:
        """Say in the reply how much of the chain is worth a copy here, if any of it is."""
        ends = np.cumsum([run.blocks for run in reply.runs])  # a shared prompt is a segment of its own at its owner
        lengths = np.union1d(ends[ends > held], anchor_lengths(held, int(ends[-1]))).tolist()
        room_blocks = self.store.reserver.copy_room_bytes() // spec.block_bytes
        told = hot.found(keys, held, lengths, shards=spec.shards, room_blocks=room_blocks, now_s=self.now_s())
        reply.copy_blocks = told
        self.counts["copies_told"] += bool(told)

    async def _holders(self, anchors: Sequence[bytes], peer_time_s: float) -> Sequence[Sequence[Holder]]:
        """Who holds each of these anchors, as the directory has it."""
        if self.membership.beats_failed or self.now_s() < self._pause_s:
            raise Unavailable("the directory does not answer")
        self.counts["directory/probe"] += 1
        asked = False
        try:
            found = await self.directory.probe(anchors, peer_time_s=peer_time_s)
            asked = True
        finally:
            if not asked:  # also when the caller's time was over
                self.counts["directory_failures"] += 1
                if 2 * peer_time_s >= HURRY_S:
                    self._pause_s = self.now_s() + DIRECTORY_PAUSE_S
        return found

    async def _of_the_best(
        self, anchors: Sequence[bytes], holders: Sequence[Sequence[Holder]], find: Callable[[Member], Awaitable[int]]
    ) -> int:
        """Ask the member that holds most of the anchors, and the next best if that one turns out to be gone."""
        tried: set[int] = set()
        while (member := self._best(holders, tried)) is not None:
            tried.add(member.node_id)
            try:
                blocks = await find(member)
                if not blocks:
                    self.counts["stale_hints"] += 1
                    theirs = Holder(member.node_id, member.incarnation[:TAG_BYTES])
                    named = [key for key, each in zip(anchors, holders, strict=True) if theirs in each]
                    self.spawn(_quietly(self._disown(member, named), "stale entries stay in the directory"))
                return blocks  # noqa: TRY300 - the loop goes on with what is caught
            except FlatCakeError as error:
                if len(tried) == ASKED_MAX:
                    raise
                log.info("node %d is not asked again for this lookup: %s", member.node_id, error)
        if tried:
            raise Unavailable("the only node that holds more does not answer")
        return 0

    async def _disown(self, member: Member, named: Sequence[bytes]) -> None:
        """Entries do not expire while their node lives: one that its owner says it does not hold goes when it misled somebody.

        Should the owner have stored it again just now, it finds its entry missing and tells it again.
        """
        held = await self.peers.probe(member, named, self.timeout_s)
        gone = tuple(key for key, has in zip(named, held, strict=False) if not has)
        if gone:
            await self.directory.tell(member, Batch((), gone))

    def _best(self, holders: Sequence[Sequence[Holder]], tried: Collection[int]) -> Member | None:
        """The member that holds most of the anchors, without gaps from the first; not one that failed lately."""
        membership = self.membership
        usable: dict[Holder, bool] = {}
        for holder in {holder for each in holders for holder in each}:
            member = membership.live(*holder)
            usable[holder] = member is not None and holder.node_id not in tried and self.peers.usable(member)
        nodes = [{holder.node_id for holder in each if usable[holder]} for each in holders]
        node_id = choose(nodes, membership.me.node_id)
        return None if node_id is None else membership.known.get(node_id)

    async def _find(
        self,
        reply: store_pb2.LookupReply,
        client_id: int,
        spec: SpaceSpec,
        keys: KeyArray,
        pin: bool,
        deadline_s: float,
        member: Member,
    ) -> int:
        """Ask the member for the exact runs; how many blocks they have."""
        asked_s = self.now_s()
        found = await self.peers.find(
            member, spec.to_json(), keys.tobytes(), pin=pin, nvme_host=self.nvme_host,
            timeout_s=PEER_SHARE * (deadline_s - asked_s),
        )  # fmt: skip
        blocks = _checked(found, member, len(keys), pin=pin)
        if not blocks:
            return 0
        ttl_s = found.lease_ttl_ms / 1000
        if found.lease_id:
            exports = _exports_of(found)
            loan = Loan(member.node_id, member.incarnation, found.lease_id, ttl_s, asked_s + ttl_s, exports)
            try:
                self._hang_on(reply, client_id, loan)
            except FlatCakeError:
                self._give_back([loan])
                raise
        self.counts[f"found_at/{member.node_id}"] += blocks
        reply.runs.extend(found.runs)
        reply.nodes.add(
            node_id=member.node_id,
            incarnation=member.incarnation,
            address=member.address,
            lease_id=found.lease_id,
            lease_ttl_ms=found.lease_ttl_ms,
            lease_spent_ms=int((self.now_s() - asked_s) * 1000) + 1,
            fabric=found.fabric,
            verify=self.verify,
            exported_files=[each.file_id for each in found.exported] if self.importer is not None else (),
        )
        return blocks

    def _hang_on(self, reply: store_pb2.LookupReply, client_id: int, loan: Loan) -> None:
        """Raises: Overloaded: as many leases, here or of other nodes, as there may be; nothing is kept."""
        fresh = 0 if reply.lease_id else self.store.leases.grant(client_id, (), self.now_s()).lease_id
        try:
            self.loans.add(reply.lease_id or fresh, loan)
        except FlatCakeError:
            self.store.release(client_id, [fresh])
            raise
        reply.lease_id = reply.lease_id or fresh

    async def renewed(self, lease_ids: Sequence[int], *, time_s: float) -> list[int]:
        """As the wire asks for it (rpc.Remote)."""
        asked_s, timeout_s = self.now_s(), min(self.timeout_s, time_s / 2)
        by_owner: dict[tuple[int, bytes], dict[int, Loan]] = {}
        for lease_id in lease_ids:
            if (loan := self.loans.get(lease_id, asked_s)) is not None:
                by_owner.setdefault((loan.node_id, loan.incarnation), {})[lease_id] = loan
        alive: list[int] = []

        async def of_one(owner: tuple[int, bytes], loans: dict[int, Loan]) -> None:
            try:
                ids = [loan.lease_id for loan in loans.values()]
                living = set(await self._prolonged(*owner, ids, timeout_s))
            except (FlatCakeError, TimeoutError) as error:
                log.info("leases of node %d are not renewed: %s", owner[0], error)
                return
            except Exception as error:  # noqa: BLE001 - those of other nodes are
                self.store.retirement.background.unforeseen(f"leases of node {owner[0]} are not renewed", error)
                return
            for lease_id, loan in loans.items():
                if loan.lease_id in living:
                    self.loans.renewed(lease_id, loan, asked_s)
                    alive.append(lease_id)
                else:
                    self.loans.end([lease_id])

        await asyncio.gather(*(of_one(owner, loans) for owner, loans in by_owner.items()))
        return alive

    async def _prolonged(
        self, node_id: int, incarnation: bytes, lease_ids: Sequence[int], timeout_s: float
    ) -> list[int]:
        """Also where the link ended: in a large cluster nobody else makes one again."""
        async with asyncio.timeout(timeout_s):
            member = self.membership.known.get(node_id)
            if member is not None and member.incarnation == incarnation and self.peers.usable(member):
                await self.peers.attach(member)
            return await self.peers.prolong(node_id, incarnation, lease_ids, timeout_s=timeout_s)

    def released(self, lease_ids: Sequence[int]) -> None:
        """As the wire asks for it (rpc.Remote)."""
        self._give_back(self.loans.end(id_ for id_ in lease_ids if self.store.leases.get(id_) is None))

    async def stage(self, client_id: int, request: store_pb2.StageRequest, time_s: float) -> store_pb2.StageReply:
        """As the wire asks for it (rpc.Remote)."""
        loan = self._loan(client_id, request.lease_id, request.node_id)
        if loan is None:
            raise Unavailable("the lease at the other node has ended")
        self.counts["stagings"] += 1
        timeout_s = PEER_SHARE * min(time_s, STAGE_S_MAX)
        return await self.peers.stage(loan.node_id, loan.incarnation, loan.lease_id, request.ranges, timeout_s)

    def unstage(self, client_id: int, request: store_pb2.UnstageRequest) -> None:
        """As the wire asks for it (rpc.Remote). What it does not bring about, the end of the lease does."""
        loan = self._loan(client_id, request.lease_id, request.node_id)
        if loan is not None:
            telling = self.peers.unstage(loan.node_id, loan.incarnation, list(request.staged_ids))
            self.spawn(_quietly(telling, "stagings are not given back by word"))

    async def exported_files(self, client_id: int, lease_id: int) -> dict[int, int]:
        """Descriptors of another node's files on a client's lease, the caller's to close. Raises: LookupError: it has ended."""
        lease, loan = self.store.leases.get(lease_id), self.loans.get(lease_id, self.now_s())
        if lease is None or lease.client_id != client_id or loan is None:
            raise LookupError(f"lease {lease_id} has ended")
        if self.importer is None or loan.exports is None:
            return {}
        return await self.importer.open(loan.exports, self.timeout_s)

    def doubted(self, segments: Sequence[store_pb2.Suspect]) -> None:
        """As the wire asks for it (rpc.Remote)."""
        by_node: dict[int, list[store_pb2.Suspect]] = {}
        for each in segments:
            by_node.setdefault(Address(each.segment).node, []).append(each)
        for node_id, of_node in by_node.items():
            member = self.membership.known.get(node_id)
            if member is not None:
                self.counts["doubts_told"] += len(of_node)
                self.spawn(_quietly(self.peers.doubt(member, of_node), "corrupt segments are not told"))

    def _loan(self, client_id: int, lease_id: int, node_id: int) -> Loan | None:
        """What hangs on a client's lease at a node."""
        lease, loan = self.store.leases.get(lease_id), self.loans.get(lease_id, self.now_s())
        mine = lease is not None and lease.client_id == client_id
        return loan if mine and loan is not None and loan.node_id == node_id else None

    def sweep(self) -> None:
        """Give back what hangs on leases that ended without a word: their client died, or they lapsed."""
        self._give_back(self.loans.orphans(lambda lease_id: self.store.leases.get(lease_id) is not None))

    def _give_back(self, loans: Sequence[Loan]) -> None:
        by_owner: dict[tuple[int, bytes], list[int]] = {}
        for loan in loans:
            by_owner.setdefault((loan.node_id, loan.incarnation), []).append(loan.lease_id)
        for owner, lease_ids in by_owner.items():
            self.spawn(_quietly(self.peers.give_back(*owner, lease_ids), "leases are not given back by word"))


async def _quietly(telling: Coroutine[Any, Any, None], otherwise: str) -> None:
    """Tell a peer what it finds out by itself in the end: by expiry, or with the link."""
    try:
        await telling
    except FlatCakeError as error:
        log.debug("%s: %s", otherwise, error)


def _exports_of(found: peer_pb2.FindReply) -> Exports | None:
    """What can be read over NVMe-oF. A UUID that is none is of a file that is not exported."""
    uuids = {each.file_id: UUID(bytes=each.uuid) for each in found.exported if len(each.uuid) == UUID_BYTES}
    return Exports(found.fabric.nvme_subsystem, found.fabric.nvme_address, uuids) if uuids else None


def _checked(found: peer_pb2.FindReply, member: Member, asked: int, *, pin: bool) -> int:
    """How many blocks were found. Raises: Unavailable: the reply makes no sense."""
    blocks = 0
    for run in found.runs:
        try:
            node_id = Address(run.segment).node
        except ValueError as error:
            raise Unavailable(f"node {member.node_id} names a medium that this one does not know") from error
        if node_id != member.node_id or run.first_block + run.blocks > run.segment_blocks or not run.blocks:
            raise Unavailable(f"node {member.node_id} names blocks that it cannot hold")
        blocks += run.blocks
    if blocks > asked:
        raise Unavailable(f"node {member.node_id} found more blocks than it was asked for")
    if pin and blocks and not found.lease_id:
        raise Unavailable(f"node {member.node_id} found blocks and pinned none")
    return blocks
