"""The daemon's end of a client's life line."""

from __future__ import annotations

import asyncio
import errno
import socket

from core import Core

from flatcake_server import handover as handover_module
from flatcake_server.handover import Handover
from flatcake_transport.handoff import Attach, Request, Status, Verb, decode_reply, encode_attach, encode_request


def test_an_answer_that_cannot_be_sent_ends_no_client(tmp_path, monkeypatch):
    """It may be writing where it has grants, and that would be given to others."""
    core = Core(tmp_path)
    client = core.store.clients.hello("engine", core.now_s)
    handover = Handover(core.store, core.node.arena, core.node.config.handover_path, 0o600, 1)
    real, refused = handover_module._send, []

    async def send(connection, reply, fds):
        if fds and not refused:
            refused.append(fds)
            raise OSError(errno.ETOOMANYREFS, "Too many references: cannot splice")
        await real(connection, reply, fds)

    monkeypatch.setattr(handover_module, "_send", send)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for each in (ours, theirs):
        each.setblocking(False)

    async def story() -> None:
        loop = asyncio.get_running_loop()
        serving = asyncio.ensure_future(handover._serve(theirs))

        async def ask(message: bytes) -> Status:
            await loop.sock_sendall(ours, message)
            return decode_reply(await asyncio.wait_for(loop.sock_recv(ours, 1 << 16), 30)).status

        assert await ask(encode_attach(Attach(client.client_id, client.token))) is Status.OK
        assert await ask(encode_request(Request(Verb.ARENA))) is Status.FAILED
        assert await ask(encode_request(Request(Verb.ARENA))) is Status.OK
        ours.close()
        await serving

    core.do(story())
    assert len(refused) == 1
    assert handover.handed_total == 1
    core.close()
