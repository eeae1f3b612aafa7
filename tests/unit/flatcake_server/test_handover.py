"""The daemon's end of a client's life line."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from types import SimpleNamespace

import pytest
from core import Core, Yield, chain

from flatcake_server import handover as handover_module
from flatcake_server.handover import Handover
from flatcake_transport.errors import Unavailable
from flatcake_transport.handoff import Attach, Reply, Request, Status, Verb, decode_reply, encode_attach, encode_request
from flatcake_transport.space import SpaceSpec

ONE = SpaceSpec("one", "u8", 16, (4096,))


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


class Openable:
    """A disk whose files are all there; `refused` cannot be opened to read."""

    def __init__(self, path, refused=0):
        self.opened = []
        self._path, self._refused = path, refused
        self.files = SimpleNamespace(direct=False, open_read=self._open_read, open_write=self._open_write)

    def admit(self):
        pass

    async def run(self, work, *arguments):
        return work(*arguments)

    def _open_write(self, file_id):
        self.opened.append(os.open(self._path, os.O_RDWR | os.O_CREAT))
        return self.opened[-1]

    def _open_read(self, file_id):
        if file_id == self._refused:
            raise Unavailable("it is gone")
        return self._open_write(file_id)


def both(disk):
    return disk.files.open_write, disk.files.open_read


def test_descriptors_of_one_file_come_in_one_message(tmp_path, monkeypatch):
    monkeypatch.setattr(handover_module, "FDS_MAX", 4)
    files = dict.fromkeys((1, 2, 3), Openable(tmp_path / "kv"))
    for start, ids, more in ((0, (1, 1, 2, 2), True), (2, (3, 3), False)):
        reply, fds = asyncio.run(handover_module._opened(files, start, both))
        assert (reply.file_ids, reply.more, len(reply.direct)) == (ids, more, len(fds))
        for fd in fds:
            os.close(fd)


def test_a_file_that_opens_in_one_way_only_leaves_no_descriptor(tmp_path):
    disk = Openable(tmp_path / "kv", refused=2)
    with pytest.raises(Unavailable, match="gone"):
        asyncio.run(handover_module._opened({1: disk, 2: disk}, 0, both))
    assert len(disk.opened) == 3
    for fd in disk.opened:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)


def test_a_client_that_dies_behind_a_disk_that_hangs_is_gone_at_once(tmp_path):
    """What it held elsewhere is given back; what is opened for it later is closed."""
    core, hang, opened = Core(tmp_path), asyncio.Event(), []
    core.open(ONE)
    core.put(ONE, [1, 2])
    client = core.store.clients.hello("engine", core.now_s)
    handover = Handover(core.store, core.node.arena, core.node.config.handover_path, 0o600, 1)
    disk = core.node.disks[1]
    real = disk.run

    async def run(work, *arguments):
        await hang.wait()
        opened.append(await real(work, *arguments))
        return opened[-1]

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for each in (ours, theirs):
        each.setblocking(False)

    async def story() -> None:
        loop = asyncio.get_running_loop()
        serving = asyncio.ensure_future(handover._serve(theirs))
        await loop.sock_sendall(ours, encode_attach(Attach(client.client_id, client.token)))
        await loop.sock_recv(ours, 1 << 16)
        lease = core.store.lookup(client.client_id, ONE.fingerprint, chain(ONE, [1, 2]), pin=True).lease_id
        disk.run = run
        await loop.sock_sendall(ours, encode_request(Request(Verb.LEASE, lease, 0)))
        ours.close()
        await asyncio.wait_for(serving, 30)
        for _ in range(100):
            await Yield()
        assert core.store.leases.get(lease) is None
        assert not opened
        hang.set()
        for _ in range(100):
            await Yield()

    core.do(story())
    disk.run = real
    ((fd,),) = opened
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    core.close()


def test_an_end_that_meets_an_answer_leaves_no_descriptor(tmp_path):
    """Told to end in the turn of the loop in which its answer is ready."""
    core, opened = Core(tmp_path), []
    handover = Handover(core.store, core.node.arena, core.node.config.handover_path, 0o600, 1)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for each in (ours, theirs):
        each.setblocking(False)

    async def story() -> None:
        async def answer(_client_id, _request):
            opened.append(os.dup(core.node.arena.fd))
            serving.cancel()
            return Reply(), opened

        handover._answer = answer
        serving = asyncio.ensure_future(handover._answer_all(theirs, 1))
        await asyncio.get_running_loop().sock_sendall(ours, encode_request(Request(Verb.ARENA)))
        with pytest.raises(asyncio.CancelledError):
            await serving
        await Yield()

    core.do(story())
    (fd,) = opened
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    ours.close()
    theirs.close()
    core.close()


def test_connections_that_cannot_be_accepted_are_said_once(tmp_path, monkeypatch, caplog):
    core, tries = Core(tmp_path), []
    handover = Handover(core.store, core.node.arena, core.node.config.handover_path, 0o600, 1)
    monkeypatch.setattr(handover_module, "ACCEPT_AGAIN_S", 0)

    async def accept(_listener):
        tries.append(1)
        if len(tries) > 3:
            raise asyncio.CancelledError
        raise OSError(errno.EMFILE, "Too many open files")

    async def story() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "sock_accept", accept)
        with pytest.raises(asyncio.CancelledError):
            await handover._accept(None)

    core.do(story())
    assert caplog.text.count("Too many open files") == 1
    core.close()
