"""What other nodes ask of this one: who it is, how long a prefix it holds, and a lease on it.

A peer greets, proves that it knows the cluster's token, and stays attached as long as its stream is open. To the store each
incarnation of a peer is a client: its leases are pinned, renewed, released and expire as those of engines. But they do not
end with the stream: its engines read one-sided, past both daemons, and do not hear of a link that broke. They lapse, unless the
peer attaches again and names those that it still holds; the others were given back while we could not be told, and end then. How
our memory and disks are reached (UCX address, rkey, NVMe-oF) is said to attached peers only.

Survived: greetings that are never completed (nothing is kept of one), a peer that restarts or attaches again (its older attachments
end at once), one whose word to attach comes after its next one (it is late, and refused), one that vanishes (keepalive ends
its stream).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import numpy as np

from flatcake_proto.v1 import peer_pb2, peer_pb2_grpc, store_pb2
from flatcake_server.cluster.credentials import Secrets
from flatcake_server.cluster.exporter import Exporter
from flatcake_server.cluster.members import Member
from flatcake_server.cluster.proof import NONCE_BYTES, NUMBER_BYTES, Handshake, Nonces
from flatcake_server.cluster.serving import FileServer
from flatcake_server.records import Suspect
from flatcake_server.rpc import Context, Edge, Timings, add_runs, keys_of
from flatcake_server.store import Store
from flatcake_transport.address import MISSING
from flatcake_transport.errors import Unavailable
from flatcake_transport.served import FileRange
from flatcake_transport.space import SpaceSpec

PROTOCOL: Final = 2
# Of a lease's time that is promised: the reader counts by a clock of its own. Clocks of machines differ in pace by 0.05 % at most.
LEASE_SHARE: Final = 0.99
STAGE_S: Final = 2.0  # for ranges of an asker that names no time
BEAT_S_MIN: Final = 0.1  # however impatient the asker is


async def _within(event: asyncio.Event, timeout_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
    return event.is_set()


@dataclass(frozen=True, slots=True, eq=False)
class _Attachment:
    """An open stream. `client_id`: who the peer is to the store."""

    node_id: int
    client_id: int
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class PeerService(peer_pb2_grpc.PeerServicer):
    """Belongs to the event loop. `refused`: why no peer is served now, or nothing."""

    def __init__(
        self,
        store: Store,
        me: Member,
        cluster: str,
        secrets_: Secrets,
        fabric: Callable[[], store_pb2.Fabric],
        lease_ttl_s: float,
        timings: Timings,
        *,
        refused: Callable[[], str],
        doubted: Callable[[Sequence[Suspect]], None],
    ) -> None:
        self._store = store
        self._me = me
        self._cluster = cluster
        self._token = secrets_.token
        self._fabric = fabric
        self._lease_ttl_s = lease_ttl_s
        self._timings = timings
        self._refused = refused
        self._doubted = doubted
        self.files: FileServer | None = None  # None: peers cannot read session files through UCX
        self.exporter: Exporter | None = None  # None: nor over NVMe-oF
        self._nonces = Nonces(secrets.token_bytes(NONCE_BYTES - NUMBER_BYTES))
        self._attached: dict[int, _Attachment] = {}  # by peer_id
        self._clients: dict[bytes, int] = {}  # by incarnation, also of those whose leases have to lapse yet
        self.counts: Counter[str] = Counter()

    @property
    def attached(self) -> int:
        return len(self._attached)

    def sweep(self) -> None:
        """Take back what hung on leases that have ended, and forget peers that are gone and have none any more."""
        if self.files is not None:
            self.files.sweep()
        if self.exporter is not None:
            self.exporter.sweep()
        here = {each.client_id for each in self._attached.values()}
        for asker, client_id in list(self._clients.items()):
            if client_id not in here and not self._store.leases.held_by(client_id):
                del self._clients[asker]
                self._nonces.forget(asker)
                self._store.clients.remove(client_id)

    def close(self) -> None:
        """End all attachments: the peers know at once."""
        for each in self._attached.values():
            each.ended.set()

    async def Greet(self, request: peer_pb2.GreetRequest, context: Context) -> peer_pb2.GreetReply:  # noqa: N802
        async with Edge(context, self._timings, "peer_greet"):
            me = self._me
            if request.protocol != PROTOCOL:
                raise ValueError(f"the peer speaks protocol {request.protocol}, this node {PROTOCOL}: update the older")
            if request.cluster != self._cluster:
                raise ValueError(f"the peer is of cluster {request.cluster!r}, this node of {self._cluster!r}")
            if len(request.nonce) != NONCE_BYTES or len(request.incarnation) != len(me.incarnation):
                raise ValueError("a greeting has a nonce and an incarnation of 16 bytes each")
            # Who differs in format, or has our own number, is told who we are, and can get no further.
            fits = request.cluster_fingerprint == me.fingerprint and request.node_id != me.node_id
            nonce = self._nonces.give() if fits else secrets.token_bytes(NONCE_BYTES)
            shake = self._shake(request.incarnation, request.node_id, request.nonce, nonce)
            return peer_pb2.GreetReply(
                protocol=PROTOCOL,
                version=me.version,
                cluster_fingerprint=me.fingerprint,
                node_id=me.node_id,
                incarnation=me.incarnation,
                nonce=shake.server_nonce,
                proof=shake.proof(self._token, "server"),
            )

    async def Attach(  # noqa: N802
        self, request: peer_pb2.AttachRequest, context: Context
    ) -> AsyncIterator[peer_pb2.Attached]:
        shake = self._shake(request.incarnation, request.node_id, request.asker_nonce, request.nonce)
        known = shake.proves(self._token, "asker", request.proof)
        self.counts["strangers"] += not known
        if not known or not self._nonces.take(shake.asker, request.nonce):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "greet first, and with the cluster's token")
        await self._serves(context)
        async with Edge(context, self._timings, "peer_attach"):
            client_id = self._client_of(shake)
        for peer_id, other in list(self._attached.items()):
            if other.node_id == shake.asker_node:  # first: nothing that it asked before is answered any more
                other.ended.set()
                del self._attached[peer_id]
        holds = set(request.lease_ids)
        self._store.release(client_id, [each for each in self._store.leases.held_by(client_id) if each not in holds])
        peer_id = secrets.randbits(63) | 1  # knowing it is what proves an attached peer
        attached = self._attached[peer_id] = _Attachment(shake.asker_node, client_id)
        self.sweep()
        try:
            yield peer_pb2.Attached(peer_id=peer_id, incarnation=self._me.incarnation)
            while not await _within(attached.ended, max(request.beat_ms / 1000, BEAT_S_MIN)):
                yield peer_pb2.Attached(incarnation=self._me.incarnation)
        finally:
            self._attached.pop(peer_id, None)

    def _shake(self, asker: bytes, node_id: int, asker_nonce: bytes, nonce: bytes) -> Handshake:
        return Handshake(asker, node_id, asker_nonce, self._me.incarnation, self._me.node_id, nonce)

    def _client_of(self, shake: Handshake) -> int:
        """Who an incarnation of a peer is to the store. Raises: Overloaded: as many clients as there may be."""
        client_id = self._clients.get(shake.asker)
        if client_id is None:
            client = self._store.hello(f"node {shake.asker_node}")
            self._store.clients.attach(client.client_id, client.token, client.seen_s)
            client_id = self._clients[shake.asker] = client.client_id
        return client_id

    async def Probe(self, request: peer_pb2.ProbeRequest, context: Context) -> peer_pb2.ProbeReply:  # noqa: N802
        await self._known(request, context)
        async with Edge(context, self._timings, "peer_probe"):
            held = self._store.catalog.present(keys_of(request.keys)) != np.uint64(MISSING)
            return peer_pb2.ProbeReply(incarnation=self._me.incarnation, held=held.astype(np.uint8).tobytes())

    async def Find(self, request: peer_pb2.FindRequest, context: Context) -> peer_pb2.FindReply:  # noqa: N802
        client_id = await self._known(request, context)
        async with Edge(context, self._timings, "peer_find"):
            spec = SpaceSpec.from_json(request.space)
            fingerprint = spec.fingerprint
            self._store.spaces.open(spec, fingerprint)
            found = self._store.lookup(
                client_id, fingerprint, keys_of(request.keys), pin=request.pin, counts=self._store.peer_counts
            )
            reply = peer_pb2.FindReply(
                incarnation=self._me.incarnation,
                lease_id=found.lease_id,
                lease_ttl_ms=int(self._lease_ttl_s * LEASE_SHARE * 1000),
                fabric=self._fabric(),
            )
            add_runs(reply.runs, found.runs)
            if request.nvme_host and found.lease_id and self.exporter is not None:
                for file_id, uuid in (
                    await self.exporter.exported(client_id, found.lease_id, request.nvme_host)
                ).items():
                    reply.exported.add(file_id=file_id, uuid=uuid.bytes)
            return reply

    async def Prolong(self, request: peer_pb2.ProlongRequest, context: Context) -> peer_pb2.ProlongReply:  # noqa: N802
        client_id = await self._known(request, context)
        async with Edge(context, self._timings, "peer_prolong"):
            alive = self._store.renew(client_id, request.lease_ids)
            return peer_pb2.ProlongReply(incarnation=self._me.incarnation, alive=alive)

    async def GiveBack(self, request: peer_pb2.GiveBackRequest, context: Context) -> peer_pb2.GiveBackReply:  # noqa: N802
        client_id = await self._known(request, context)
        async with Edge(context, self._timings, "peer_give_back"):
            self._store.release(client_id, request.lease_ids)
            self.sweep()
            return peer_pb2.GiveBackReply(incarnation=self._me.incarnation)

    async def StageFiles(  # noqa: N802
        self, request: peer_pb2.StageFilesRequest, context: Context
    ) -> peer_pb2.StageFilesReply:
        client_id = await self._known(request, context)
        async with Edge(context, self._timings, "peer_stage"):
            left_s = context.time_remaining()
            ranges = [FileRange(each.file_id, each.offset, each.size_bytes) for each in request.ranges]
            refusal = "this node serves no session files"
            if self.files is not None:
                try:
                    staged = await self.files.stage(client_id, request.lease_id, ranges, left_s or STAGE_S)
                    return peer_pb2.StageFilesReply(incarnation=self._me.incarnation, staged=staged)
                except (LookupError, Unavailable) as error:
                    refusal = str(error)
        # Of these ranges only: the asker goes on asking for others.
        await context.abort(grpc.StatusCode.ABORTED, refusal)
        raise AssertionError("abort raises")

    async def UnstageFiles(  # noqa: N802
        self, request: peer_pb2.UnstageFilesRequest, context: Context
    ) -> peer_pb2.UnstageFilesReply:
        client_id = await self._known(request, context)
        async with Edge(context, self._timings, "peer_unstage"):
            if self.files is not None:
                self.files.unstage(client_id, request.staged_ids)
            return peer_pb2.UnstageFilesReply(incarnation=self._me.incarnation)

    async def Doubt(self, request: peer_pb2.DoubtRequest, context: Context) -> peer_pb2.DoubtReply:  # noqa: N802
        await self._known(request, context)
        async with Edge(context, self._timings, "peer_doubt"):
            self._doubted([Suspect(each.segment, each.generation) for each in request.segments])
            return peer_pb2.DoubtReply(incarnation=self._me.incarnation)

    async def _known(self, request: Any, context: Context) -> int:
        """The caller's id as a client of the store, if it is an attached peer."""
        attached = self._attached.get(request.peer_id)
        if attached is None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "attach first")
        assert attached is not None
        await self._serves(context)
        return attached.client_id

    async def _serves(self, context: Context) -> None:
        if reason := self._refused():
            await context.abort(grpc.StatusCode.UNAVAILABLE, reason)
