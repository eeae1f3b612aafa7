"""Operators' questions without their wire."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from core import Yield

from flatcake_proto.v1 import admin_pb2
from flatcake_server.rpc import Timings
from flatcake_server.rpc_views import AdminService, Views

MESSAGE_BYTES_MAX = 4096


class Refused(Exception):
    pass


class Context:
    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        raise Refused(code, text)


def service(**views: Any) -> AdminService:
    asked = dict.fromkeys(Views.__dataclass_fields__, None) | views
    return AdminService(Views(**asked), Timings(), MESSAGE_BYTES_MAX)


def test_an_answer_that_no_message_holds_says_what_to_ask():
    admin = service(sessions=lambda _, limit: [{"name": "x" * 40}] * limit)
    reply = asyncio.run(admin.ListSessions(admin_pb2.ListSessionsRequest(limit=10), Context()))
    assert reply.ByteSize() < MESSAGE_BYTES_MAX
    with pytest.raises(Refused, match="ask for fewer with --limit") as refused:
        asyncio.run(admin.ListSessions(admin_pb2.ListSessionsRequest(limit=100), Context()))
    assert refused.value.args[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_check_ends_with_whoever_waits_for_it(monkeypatch):
    monkeypatch.setattr("flatcake_server.rpc_views.PROGRESS_S", 0.0)
    ended = []

    async def endless(_, progress):
        progress(3, 8)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def look() -> None:
        steps = service(check=endless).Check(admin_pb2.CheckRequest(data=True), Context())
        while (await anext(steps)).total != 8:
            pass
        assert not ended
        await steps.aclose()
        await Yield()
        assert ended

    asyncio.run(look())


def test_what_a_check_raises_is_a_status():
    async def broken(_, __):
        raise ValueError("no such thing")

    async def look() -> None:
        async for _ in service(check=broken).Check(admin_pb2.CheckRequest(), Context()):
            pass

    with pytest.raises(Refused, match="no such thing"):
        asyncio.run(look())
