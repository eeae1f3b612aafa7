"""What operators ask of a running daemon, as it comes over the wire: each answer is one JSON document.

An answer that no message holds is refused with what to ask instead, and a check goes on only while somebody waits for it: it may
read every byte of a node, and nobody stops one that runs for nobody.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from flatcake_proto.v1 import admin_pb2, admin_pb2_grpc
from flatcake_server.law import Progress
from flatcake_server.pace import Pace
from flatcake_server.rpc import Context, Edge, Timings
from flatcake_transport.errors import Overloaded
from flatcake_transport.space import Fingerprint

LIST_MAX: Final = 1000
PROGRESS_S: Final = 0.2  # between two words of a check: a node may have a million sessions
_ENVELOPE_BYTES: Final = 64  # of a message round its document


@dataclass(frozen=True, slots=True)
class Views:
    """What operators may ask; each returns what JSON can hold."""

    status: Callable[[], Any]
    spaces: Callable[[], Awaitable[list[dict[str, Any]]]]
    nodes: Callable[[], list[dict[str, Any]]]
    sessions: Callable[[Fingerprint | None, int], Awaitable[list[dict[str, Any]]]]
    session: Callable[[str], Awaitable[dict[str, Any]]]
    drop: Callable[[Sequence[str]], Awaitable[dict[str, Any]]]
    check: Callable[[bool, Progress], Awaitable[dict[str, Any]]]


class AdminService(admin_pb2_grpc.AdminServicer):
    def __init__(self, views: Views, timings: Timings, message_bytes_max: int) -> None:
        self._views = views
        self._timings = timings
        self._bytes_max = message_bytes_max - _ENVELOPE_BYTES

    async def _json(self, context: Context, verb: str, view: Callable[[], Any]) -> admin_pb2.JsonReply:
        async with Edge(context, self._timings, verb):
            answer = view()
            if asyncio.iscoroutine(answer):
                answer = await asyncio.shield(answer)
            text = await _text(answer)
            if len(text) > self._bytes_max:
                raise Overloaded(
                    f"the answer has {len(text)} bytes, a message at most {self._bytes_max}: ask for fewer with --limit, or "
                    "raise message_bytes_max"
                )
            return admin_pb2.JsonReply(json=text)

    async def Status(self, request: admin_pb2.StatusRequest, context: Context) -> admin_pb2.JsonReply:  # noqa: ARG002, N802
        return await self._json(context, "status", lambda: dataclasses.asdict(self._views.status()))

    async def ListSpaces(  # noqa: N802
        self,
        request: admin_pb2.ListSpacesRequest,  # noqa: ARG002
        context: Context,
    ) -> admin_pb2.JsonReply:
        return await self._json(context, "list_spaces", self._views.spaces)

    async def ListNodes(  # noqa: N802
        self,
        request: admin_pb2.ListNodesRequest,  # noqa: ARG002
        context: Context,
    ) -> admin_pb2.JsonReply:
        return await self._json(context, "list_nodes", self._views.nodes)

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
        done, total = 0, 1

        def progress(now_done: int, now_total: int) -> None:
            nonlocal done, total
            done, total = now_done, now_total

        check = asyncio.ensure_future(self._views.check(request.data, progress))
        try:
            while not (await asyncio.wait({check}, timeout=PROGRESS_S))[0]:
                yield admin_pb2.CheckProgress(done=done, total=total)
        finally:
            check.cancel()  # the operator gave up; where it has ended this does nothing
        async with Edge(context, self._timings, "check"):
            yield admin_pb2.CheckProgress(done=1, total=1, json=json.dumps(check.result()))


async def _text(answer: Any) -> str:
    """As JSON, a row at a time where it is a list."""
    if not isinstance(answer, list):
        return json.dumps(answer)
    rows, pace = [], Pace()
    for row in answer:
        rows.append(json.dumps(row))
        await pace.rest()
    return "[" + ", ".join(rows) + "]"
