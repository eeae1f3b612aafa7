"""The wire, server side: proto <-> dataclass, error -> status. With the other rpc modules and cluster/ all that knows gRPC.

Every handler runs to its end even when its caller gives up waiting, so that no reservation is half made; a turn begun for a
caller that is gone is given back.

    FAILED_PRECONDITION  "stale: ..." another incarnation, or an unknown client: say Hello again
    NOT_FOUND            space or turn not known here
    INVALID_ARGUMENT     ValueError          RESOURCE_EXHAUSTED  Overloaded
    UNAVAILABLE          Unavailable         DATA_LOSS           Corrupt
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol

import grpc
import numpy as np

from flatcake_proto.v1 import store_pb2, store_pb2_grpc
from flatcake_server.clients import StaleClient, UnknownSpace, UnknownTurn
from flatcake_server.records import KeyArray, Suspect
from flatcake_server.segments import SegmentRun
from flatcake_server.store import Store
from flatcake_server.turns import Turn, TurnRequest
from flatcake_transport.address import Address
from flatcake_transport.errors import Corrupt, Overloaded, Unavailable
from flatcake_transport.space import FINGERPRINT_BYTES, Fingerprint, SpaceSpec

log = logging.getLogger(__name__)

PROTOCOL: Final = 1
KEY_BYTES: Final = 16
SESSION_NAME_BYTES_MAX: Final = 4096

Context = grpc.aio.ServicerContext[Any, Any]

_STATUS: Final = (
    (StaleClient, grpc.StatusCode.FAILED_PRECONDITION),
    (UnknownSpace, grpc.StatusCode.NOT_FOUND),
    (UnknownTurn, grpc.StatusCode.NOT_FOUND),
    (ValueError, grpc.StatusCode.INVALID_ARGUMENT),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
    (Corrupt, grpc.StatusCode.DATA_LOSS),
)


@dataclass(frozen=True, slots=True)
class Identity:
    """What the hello says of this daemon."""

    version: str
    incarnation: bytes
    node_id: int
    handover_path: str
    boot_id: bytes
    arena_bytes: int
    lease_ttl_s: float
    verify: str
    cluster_fingerprint: bytes
    memory_checksums: bool = False
    peers: bool = False
    peer_timeout_s: float = 0.0


class Timings:
    """Calls and seconds by verb."""

    def __init__(self) -> None:
        self.by_verb: dict[str, tuple[int, float]] = {}

    def add(self, verb: str, seconds: float) -> None:
        count, total = self.by_verb.get(verb, (0, 0.0))
        self.by_verb[verb] = (count + 1, total + seconds)


async def _refuse(context: Context, error: BaseException) -> NoReturn:
    for kind, code in _STATUS:
        if isinstance(error, kind):
            await context.abort(code, str(error.args[0]) if error.args else str(error))
    log.error("a call failed in a way nobody foresaw", exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")


class Edge:
    """Where a verb meets the wire: its errors become statuses, its time is counted."""

    def __init__(self, context: Context, timings: Timings, verb: str) -> None:
        self._context, self._timings, self._verb = context, timings, verb
        self._started_s = time.perf_counter()

    async def __aenter__(self) -> None:
        return

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._timings.add(self._verb, time.perf_counter() - self._started_s)
        if isinstance(error, Exception):
            await _refuse(self._context, error)


def keys_of(data: bytes) -> KeyArray:
    if len(data) % KEY_BYTES:
        raise ValueError(f"keys of {len(data)} bytes: expected n x {KEY_BYTES}")
    return np.frombuffer(data, np.uint8).reshape(-1, KEY_BYTES)


def _fingerprint(data: bytes) -> Fingerprint:
    if len(data) != FINGERPRINT_BYTES:
        raise ValueError(f"a fingerprint has {FINGERPRINT_BYTES} bytes, not {len(data)}")
    return Fingerprint(data)


def _left_s(context: Context) -> float:
    """How long the caller waits."""
    left_s = context.time_remaining()
    return float("inf") if left_s is None else left_s


class Remote(Protocol):
    """The other nodes. Nothing here raises, or takes more than half of the caller's `time_s`: what cannot be had there, or
    not in time, is a shorter hit.
    """

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
        """Add the runs of the node that holds most of what is missing behind block `held`, and what is needed to read them."""
        ...  # fmt: skip

    async def renewed(self, lease_ids: Sequence[int], *, time_s: float) -> list[int]:
        """These leases were renewed here; of which all that hangs on them elsewhere is alive."""
        ...

    def released(self, lease_ids: Sequence[int]) -> None: ...

    async def stage(self, client_id: int, request: store_pb2.StageRequest, time_s: float) -> store_pb2.StageReply:
        """Have ranges of another node's files read there. This one raises: Overloaded, Unavailable."""
        ...

    def unstage(self, client_id: int, request: store_pb2.UnstageRequest) -> None: ...

    def doubted(self, segments: Sequence[store_pb2.Suspect]) -> None:
        """Bytes of these segments, of other nodes, differ from their checksums."""
        ...


def add_runs(to: Any, runs: Sequence[SegmentRun]) -> None:
    """Runs of this store into a message's field."""
    add = to.add  # a copy less a run than a list of them
    for segment, first_block, blocks in runs:
        add(
            segment=segment.address,
            segment_blocks=len(segment.keys),
            first_block=first_block,
            blocks=blocks,
            segment_bytes=segment.total_bytes,
            file_id=segment.file_id,
            file_offset=segment.file_offset,
            generation=segment.generation,
        )


class StoreService(store_pb2_grpc.StoreServicer):
    def __init__(self, store: Store, identity: Identity, timings: Timings, remote: Remote | None = None) -> None:
        self._store = store
        self._identity = identity
        self._timings = timings
        self._remote = remote

    def _edge(self, context: Context, verb: str) -> Edge:
        return Edge(context, self._timings, verb)

    def _known(self, request: Any) -> int:
        """The caller's client id, if it is a client of this incarnation."""
        if request.incarnation != self._identity.incarnation:
            raise StaleClient("stale: the daemon was restarted; say Hello again")
        return self._store.client(request.client_id).client_id

    async def Hello(self, request: store_pb2.HelloRequest, context: Context) -> store_pb2.HelloReply:  # noqa: N802
        async with self._edge(context, "hello"):
            if request.protocol != PROTOCOL:
                raise ValueError(
                    f"the client speaks protocol {request.protocol}, this daemon {PROTOCOL}: update the older"
                )
            client = self._store.hello(request.client_name)
            me = self._identity
            return store_pb2.HelloReply(
                protocol=PROTOCOL,
                version=me.version,
                incarnation=me.incarnation,
                node_id=me.node_id,
                client_id=client.client_id,
                token=client.token,
                handover_path=me.handover_path,
                boot_id=me.boot_id,
                arena_bytes=me.arena_bytes,
                lease_ttl_ms=int(me.lease_ttl_s * 1000),
                verify=me.verify,
                cluster_fingerprint=me.cluster_fingerprint,
                memory_checksums=me.memory_checksums,
                peers=me.peers,
                peer_timeout_ms=int(me.peer_timeout_s * 1000),
            )

    async def OpenSpace(  # noqa: N802
        self, request: store_pb2.OpenSpaceRequest, context: Context
    ) -> store_pb2.OpenSpaceReply:
        async with self._edge(context, "open_space"):
            self._known(request)
            spec = SpaceSpec(
                model=request.model,
                dtype=request.dtype,
                block_tokens=request.block_tokens,
                plane_bytes=tuple(request.plane_bytes),
                shards=request.shards,
                weights=request.weights,
                layout=request.layout,
            )
            self._store.spaces.open(spec, _fingerprint(request.fingerprint))
            return store_pb2.OpenSpaceReply(fingerprint=spec.fingerprint)

    async def Lookup(self, request: store_pb2.LookupRequest, context: Context) -> store_pb2.LookupReply:  # noqa: N802
        async with self._edge(context, "lookup"):
            client_id = self._known(request)
            fingerprint, keys = _fingerprint(request.fingerprint), keys_of(request.keys)
            found = self._store.lookup(client_id, fingerprint, keys, pin=request.pin)
            reply = store_pb2.LookupReply(lease_id=found.lease_id, incarnation=self._identity.incarnation)
            add_runs(reply.runs, found.runs)
            if request.remote and self._remote is not None:
                try:
                    await self._remote.extend(
                        reply, client_id, self._store.spaces.spec(fingerprint), keys, sum(run.blocks for run in found.runs),
                        pin=request.pin, time_s=_left_s(context),
                    )  # fmt: skip
                except asyncio.CancelledError:  # nobody will know of this lease
                    self._store.release(client_id, [reply.lease_id])
                    self._remote.released([reply.lease_id])
                    raise
            return reply

    async def Renew(self, request: store_pb2.RenewRequest, context: Context) -> store_pb2.RenewReply:  # noqa: N802
        async with self._edge(context, "renew"):
            alive = self._store.renew(self._known(request), request.lease_ids)
            remote = await self._remote.renewed(alive, time_s=_left_s(context)) if self._remote is not None else []
            return store_pb2.RenewReply(alive=alive, alive_remote=remote)

    async def Release(self, request: store_pb2.ReleaseRequest, context: Context) -> store_pb2.ReleaseReply:  # noqa: N802
        async with self._edge(context, "release"):
            self._store.release(self._known(request), request.lease_ids)
            if self._remote is not None:
                self._remote.released(request.lease_ids)
            return store_pb2.ReleaseReply()

    async def BeginTurn(  # noqa: N802
        self, request: store_pb2.BeginTurnRequest, context: Context
    ) -> store_pb2.BeginTurnReply:
        async with self._edge(context, "begin_turn"):
            work = asyncio.ensure_future(self._begin(request))
            try:
                turn = await asyncio.shield(work)
            except asyncio.CancelledError:
                work.add_done_callback(lambda done: self._give_back(request, done))
                raise
            if turn is None:
                return store_pb2.BeginTurnReply(session=request.session, incarnation=self._identity.incarnation)
            parts = [
                store_pb2.Part(
                    segment=int(part.address),
                    first_block=part.plan.first_block,
                    blocks=part.plan.blocks,
                    segment_bytes=part.total_bytes,
                    file_id=part.file.file_id if part.file else 0,
                    file_offset=part.file_offset if part.file else 0,
                    reason=part.reason,
                )
                for part in turn.parts
            ]
            return store_pb2.BeginTurnReply(
                turn_id=turn.turn_id, parts=parts, session=turn.session.name, incarnation=self._identity.incarnation
            )

    async def _begin(self, request: store_pb2.BeginTurnRequest) -> Turn | None:
        client_id = self._known(request)
        if len(request.session.encode()) > SESSION_NAME_BYTES_MAX:
            raise ValueError(f"a session's name has at most {SESSION_NAME_BYTES_MAX} bytes")
        if len(request.root_key) != KEY_BYTES:
            raise ValueError(f"root_key has {len(request.root_key)} bytes: expected {KEY_BYTES}")
        keys = keys_of(request.keys)
        if not len(keys):
            return None
        turn_request = TurnRequest(
            shard=request.shard,
            session=request.session,
            keys=keys,
            root_key=request.root_key,
            context_tokens=request.context_tokens if request.HasField("context_tokens") else None,
            previous_reply_tokens=request.previous_reply_tokens if request.HasField("previous_reply_tokens") else None,
            share_counts=list(request.share_counts) or None,
            turn=request.turn if request.HasField("turn") else None,
            request_id=request.request_id,
            copy=request.copy,
        )
        return await self._store.begin_turn(client_id, _fingerprint(request.fingerprint), turn_request)

    def _give_back(self, request: store_pb2.BeginTurnRequest, begun: asyncio.Future[Turn | None]) -> None:
        """Nobody waits for this turn any more, so nobody will write it."""
        if not begun.cancelled() and begun.exception() is None and (turn := begun.result()) is not None:
            self._store.retirement.background.spawn(self._abort_unheard(request, turn))

    async def _abort_unheard(self, request: store_pb2.BeginTurnRequest, turn: Turn) -> None:
        with contextlib.suppress(UnknownTurn):  # its client has gone meanwhile
            await self._store.abort_turn(request.client_id, turn.turn_id, request.shard, failure="")

    async def CommitTurn(  # noqa: N802
        self, request: store_pb2.CommitTurnRequest, context: Context
    ) -> store_pb2.CommitTurnReply:
        async with self._edge(context, "commit_turn"):
            sums = [(part.algorithm, part.checksums) for part in request.parts]
            work = self._store.commit_turn(self._known(request), request.turn_id, request.shard, sums)
            return store_pb2.CommitTurnReply(visible=await asyncio.shield(work))

    async def AbortTurn(  # noqa: N802
        self, request: store_pb2.AbortTurnRequest, context: Context
    ) -> store_pb2.AbortTurnReply:
        async with self._edge(context, "abort_turn"):
            client_id = self._known(request)
            if request.turn_id or not request.request_id:
                work = self._store.abort_turn(client_id, request.turn_id, request.shard, request.failure)
            else:
                work = self._store.abort_unheard(client_id, request.request_id)
            await asyncio.shield(work)
            return store_pb2.AbortTurnReply()

    async def ReportCorrupt(  # noqa: N802
        self, request: store_pb2.ReportCorruptRequest, context: Context
    ) -> store_pb2.ReportCorruptReply:
        async with self._edge(context, "report_corrupt"):
            self._known(request)
            near: list[Suspect] = []
            far: list[store_pb2.Suspect] = []
            for each in request.segments:
                if Address(each.segment).node == self._identity.node_id:
                    near.append(Suspect(each.segment, each.generation))
                else:
                    far.append(each)
            if far and self._remote is not None:
                self._remote.doubted(far)
            await asyncio.shield(self._store.report_corrupt(near))
            return store_pb2.ReportCorruptReply()

    async def Stage(self, request: store_pb2.StageRequest, context: Context) -> store_pb2.StageReply:  # noqa: N802
        async with self._edge(context, "stage"):
            client_id = self._known(request)
            if self._remote is None:
                raise Unavailable("this node is by itself")
            left_s = context.time_remaining()
            return await self._remote.stage(client_id, request, float("inf") if left_s is None else left_s)

    async def Unstage(self, request: store_pb2.UnstageRequest, context: Context) -> store_pb2.UnstageReply:  # noqa: N802
        async with self._edge(context, "unstage"):
            client_id = self._known(request)
            if self._remote is not None:
                self._remote.unstage(client_id, request)
            return store_pb2.UnstageReply()
