"""The wire, server side: proto <-> dataclass, error -> status. The only module of the daemon that knows gRPC.

Every handler runs to its end even when its caller gives up waiting, so that no reservation is half made; a turn begun for a
caller that is gone is given back.

    FAILED_PRECONDITION  "stale: ..." another incarnation, or an unknown client: say Hello again
    NOT_FOUND            space or turn not known here
    INVALID_ARGUMENT     ValueError          RESOURCE_EXHAUSTED  Overloaded
    UNAVAILABLE          Unavailable         DATA_LOSS           Corrupt
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import grpc
import numpy as np
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from flatcake_proto.v1 import admin_pb2, admin_pb2_grpc, store_pb2, store_pb2_grpc
from flatcake_server.clients import StaleClient
from flatcake_server.law import Progress
from flatcake_server.records import KeyArray
from flatcake_server.store import Store, UnknownSpace, UnknownTurn
from flatcake_server.turns import Turn, TurnRequest
from flatcake_transport.address import Address
from flatcake_transport.errors import Corrupt, Overloaded, Unavailable
from flatcake_transport.space import FINGERPRINT_BYTES, Fingerprint, SpaceSpec

log = logging.getLogger(__name__)

PROTOCOL: Final = 1
KEY_BYTES: Final = 16
SESSION_NAME_BYTES_MAX: Final = 4096
LIST_MAX: Final = 1000

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


@dataclass(frozen=True, slots=True)
class Views:
    """What operators may ask; each returns what JSON can hold."""

    status: Callable[[], Any]
    spaces: Callable[[], list[dict[str, Any]]]
    sessions: Callable[[Fingerprint | None, int], list[dict[str, Any]]]
    session: Callable[[str], dict[str, Any]]
    drop: Callable[[Sequence[str]], Awaitable[dict[str, Any]]]
    check: Callable[[bool, Progress], Awaitable[dict[str, Any]]]


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


class _Edge:
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


def _keys(data: bytes) -> KeyArray:
    if len(data) % KEY_BYTES:
        raise ValueError(f"keys of {len(data)} bytes: expected n x {KEY_BYTES}")
    return np.frombuffer(data, np.uint8).reshape(-1, KEY_BYTES)


def _fingerprint(data: bytes) -> Fingerprint:
    if len(data) != FINGERPRINT_BYTES:
        raise ValueError(f"a fingerprint has {FINGERPRINT_BYTES} bytes, not {len(data)}")
    return Fingerprint(data)


class StoreService(store_pb2_grpc.StoreServicer):
    def __init__(self, store: Store, identity: Identity, timings: Timings) -> None:
        self._store = store
        self._identity = identity
        self._timings = timings

    def _edge(self, context: Context, verb: str) -> _Edge:
        return _Edge(context, self._timings, verb)

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
            self._store.open_space(spec, _fingerprint(request.fingerprint))
            return store_pb2.OpenSpaceReply(fingerprint=spec.fingerprint)

    async def Lookup(self, request: store_pb2.LookupRequest, context: Context) -> store_pb2.LookupReply:  # noqa: N802
        async with self._edge(context, "lookup"):
            client_id = self._known(request)
            found = self._store.lookup(
                client_id, _fingerprint(request.fingerprint), _keys(request.keys), pin=request.pin
            )
            reply = store_pb2.LookupReply(lease_id=found.lease_id, incarnation=self._identity.incarnation)
            add = reply.runs.add  # a copy less a run than a list of them
            for segment, first_block, blocks in found.runs:
                add(
                    segment=segment.address,
                    segment_blocks=len(segment.keys),
                    first_block=first_block,
                    blocks=blocks,
                    segment_bytes=segment.total_bytes,
                    file_id=segment.file_id,
                    file_offset=segment.file_offset,
                )
            return reply

    async def Renew(self, request: store_pb2.RenewRequest, context: Context) -> store_pb2.RenewReply:  # noqa: N802
        async with self._edge(context, "renew"):
            return store_pb2.RenewReply(alive=self._store.renew(self._known(request), request.lease_ids))

    async def Release(self, request: store_pb2.ReleaseRequest, context: Context) -> store_pb2.ReleaseReply:  # noqa: N802
        async with self._edge(context, "release"):
            self._store.release(self._known(request), request.lease_ids)
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
        keys = _keys(request.keys)
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
        )
        return await self._store.begin_turn(client_id, _fingerprint(request.fingerprint), turn_request)

    def _give_back(self, request: store_pb2.BeginTurnRequest, begun: asyncio.Future[Turn | None]) -> None:
        """Nobody waits for this turn any more, so nobody will write it."""
        if not begun.cancelled() and begun.exception() is None and (turn := begun.result()) is not None:
            self._store.retirement.spawn(
                self._store.abort_turn(request.client_id, turn.turn_id, request.shard, failure="")
            )

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
            work = self._store.abort_turn(self._known(request), request.turn_id, request.shard, request.failure)
            await asyncio.shield(work)
            return store_pb2.AbortTurnReply()

    async def ReportCorrupt(  # noqa: N802
        self, request: store_pb2.ReportCorruptRequest, context: Context
    ) -> store_pb2.ReportCorruptReply:
        async with self._edge(context, "report_corrupt"):
            self._known(request)
            await asyncio.shield(self._store.report_corrupt([Address(segment) for segment in request.segments]))
            return store_pb2.ReportCorruptReply()


class AdminService(admin_pb2_grpc.AdminServicer):
    def __init__(self, views: Views, timings: Timings) -> None:
        self._views = views
        self._timings = timings

    async def _json(self, context: Context, verb: str, view: Callable[[], Any]) -> admin_pb2.JsonReply:
        async with _Edge(context, self._timings, verb):
            answer = view()
            if asyncio.iscoroutine(answer):
                answer = await asyncio.shield(answer)
            return admin_pb2.JsonReply(json=json.dumps(answer))

    async def Status(self, request: admin_pb2.StatusRequest, context: Context) -> admin_pb2.JsonReply:  # noqa: ARG002, N802
        return await self._json(context, "status", lambda: dataclasses.asdict(self._views.status()))

    async def ListSpaces(  # noqa: N802
        self,
        request: admin_pb2.ListSpacesRequest,  # noqa: ARG002
        context: Context,
    ) -> admin_pb2.JsonReply:
        return await self._json(context, "list_spaces", self._views.spaces)

    async def ListSessions(  # noqa: N802
        self, request: admin_pb2.ListSessionsRequest, context: Context
    ) -> admin_pb2.JsonReply:
        fingerprint = Fingerprint(request.fingerprint) or None
        limit = request.limit or LIST_MAX
        return await self._json(context, "list_sessions", lambda: self._views.sessions(fingerprint, limit))

    async def ShowSession(  # noqa: N802
        self, request: admin_pb2.ShowSessionRequest, context: Context
    ) -> admin_pb2.JsonReply:
        return await self._json(context, "show_session", lambda: self._views.session(request.session))

    async def DropSessions(  # noqa: N802
        self, request: admin_pb2.DropSessionsRequest, context: Context
    ) -> admin_pb2.JsonReply:
        return await self._json(context, "drop_sessions", lambda: self._views.drop(list(request.sessions)))

    async def Check(  # noqa: N802
        self, request: admin_pb2.CheckRequest, context: Context
    ) -> AsyncIterator[admin_pb2.CheckProgress]:
        steps: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        check = asyncio.ensure_future(
            self._views.check(request.data, lambda done, total: steps.put_nowait((done, total)))
        )
        while not check.done():
            step = asyncio.ensure_future(steps.get())
            await asyncio.wait({check, step}, return_when=asyncio.FIRST_COMPLETED)
            if step.done():
                done, total = step.result()
                yield admin_pb2.CheckProgress(done=done, total=total)
            step.cancel()
        async with _Edge(context, self._timings, "check"):
            yield admin_pb2.CheckProgress(done=1, total=1, json=json.dumps(check.result()))


class RpcServer:
    """gRPC on the unix socket and, if asked, on TCP; with health and reflection."""

    def __init__(self, services: tuple[StoreService, AdminService], *, message_bytes_max: int, rpcs_max: int) -> None:
        options = [
            ("grpc.max_receive_message_length", message_bytes_max),
            ("grpc.max_send_message_length", message_bytes_max),
            ("grpc.so_reuseport", 0),  # a second daemon on the same port must fail, not share it
        ]
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=rpcs_max)
        store_pb2_grpc.add_StoreServicer_to_server(services[0], self._server)
        admin_pb2_grpc.add_AdminServicer_to_server(services[1], self._server)
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._names = [
            store_pb2.DESCRIPTOR.services_by_name["Store"].full_name,
            admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name,
        ]
        reflection.enable_server_reflection([*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)

    async def start(self, socket_path: str, socket_mode: int, tcp: str | None) -> int:
        """Listen. `tcp` is `host:port`, brackets round IPv6; port 0 takes a free one. Returns the port, 0 without.

        Raises: Unavailable: an address cannot be taken.
        """
        port = 0
        try:
            self._server.add_insecure_port(f"unix:{socket_path}")
            if tcp is not None:
                port = self._server.add_insecure_port(tcp)
        except RuntimeError as error:
            raise Unavailable(
                f"cannot listen on {tcp or socket_path}: {error}: choose another with --grpc-listen"
            ) from error
        await self._server.start()
        os.chmod(socket_path, socket_mode)  # noqa: PTH101
        await self.set_serving(serving=True)
        return port

    async def set_serving(self, *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)
