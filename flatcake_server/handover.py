"""Hands file descriptors to local clients: the arena, the session files of a lease, those of a turn.

One SOCK_SEQPACKET connection a client (words: flatcake_transport.handoff). It is the client's life line: when it ends, the
client is gone and all it held is given back. Descriptors are read-only for a lease, and both for a turn: who
wrote a session reads it next, and need not ask. No path is ever named to a client. Opening may block on a disk, so it runs in the disk's threads.

Faults survived: a client that speaks nonsense, never attaches, or floods (its connection is closed); one that dies while its answer waits; a file that cannot
be opened or whose path hangs (to read: it is left out, and its blocks are a miss; to write: a reply that says so); descriptors that
the system does not pass on now (the same).
"""

from __future__ import annotations

import array
import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from flatcake_server.arena import Arena
from flatcake_server.clients import StaleClient
from flatcake_server.disk import Disk
from flatcake_server.records import FileId
from flatcake_server.sockets import owner_only
from flatcake_server.store import Store
from flatcake_server.tasks import end
from flatcake_transport.errors import FlatCakeError, Overloaded, Unavailable
from flatcake_transport.handoff import (
    FDS_MAX,
    MESSAGE_BYTES_MAX,
    Reply,
    Request,
    Status,
    Verb,
    decode_attach,
    decode_request,
    encode_reply,
)

log = logging.getLogger(__name__)

ATTACH_TIMEOUT_S: Final = 10.0
ACCEPT_AGAIN_S: Final = 0.1


class Handover:
    """Belongs to the event loop."""

    def __init__(self, store: Store, arena: Arena, path: Path, mode: int, connections_max: int) -> None:
        self._store = store
        self._arena = arena
        self._path = path
        self._mode = mode
        self._connections_max = connections_max
        self._listener: socket.socket | None = None
        self._acceptor: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.exported_files: Callable[[int, int], Awaitable[dict[int, int]]] | None = None  # of other nodes
        self.handed_total = 0

    def start(self) -> None:
        """Raises: Unavailable: there can be no socket at the path."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            with owner_only():
                listener.bind(str(self._path))
            self._path.chmod(self._mode)
        except OSError as error:
            listener.close()
            raise Unavailable(
                f"no socket can be made at {self._path}: {error.strerror}: choose another --socket"
            ) from error
        listener.listen(128)
        self._listener = listener
        self._acceptor = asyncio.ensure_future(self._accept(listener))

    async def close(self) -> None:
        await end(task for task in (self._acceptor, *self._connections) if task is not None)
        if self._listener is not None:
            self._listener.close()
            self._path.unlink(missing_ok=True)
            self._listener = None

    async def _accept(self, listener: socket.socket) -> None:
        loop, told = asyncio.get_running_loop(), False
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors: those waiting wait on
                if not told:
                    log.warning("handover connections cannot be accepted for now: %s", error)
                told = True
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            told = False
            connection.setblocking(False)
            if len(self._connections) >= self._connections_max:
                connection.close()
                continue
            task = asyncio.ensure_future(self._serve(connection))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, connection: socket.socket) -> None:
        client_id = 0
        try:
            async with asyncio.timeout(ATTACH_TIMEOUT_S):
                attach = decode_attach(await _receive(connection))
            try:
                client_id = self._store.clients.attach(
                    attach.client_id, attach.token, asyncio.get_running_loop().time()
                ).client_id
            except StaleClient as error:
                await _send(connection, Reply(Status.REFUSED, text=str(error)), [])
                return
            await _send(connection, Reply(), [])
            await self._answer_all(connection, client_id)
        except (OSError, ValueError, TimeoutError) as error:
            log.info("a handover connection ended: %s", error or type(error).__name__)
        finally:
            connection.close()
            if client_id:
                self._store.retirement.background.spawn(self._store.client_gone(client_id))

    async def _answer_all(self, connection: socket.socket, client_id: int) -> None:
        """Until the connection ends, which is heard also while an answer waits for a disk that hangs."""
        receiving = asyncio.ensure_future(_receive(connection))
        answering: asyncio.Future[tuple[Reply, list[int]]] | None = None
        try:
            while message := await receiving:
                receiving = asyncio.ensure_future(_receive(connection))
                answering = asyncio.ensure_future(self._answer(client_id, decode_request(message)))
                await asyncio.wait({answering, receiving}, return_when=asyncio.FIRST_COMPLETED)
                if not answering.done() and receiving.result():  # it asks on before it is answered
                    await asyncio.wait({answering})
                if answering.done():
                    answer, answering = answering.result(), None
                    await self._reply(connection, *answer)
        finally:
            if answering is not None:
                answering.add_done_callback(_close_unsent)
            await end([receiving])

    async def _reply(self, connection: socket.socket, reply: Reply, fds: list[int]) -> None:
        try:
            await _send(connection, reply, fds)
            self.handed_total += len(fds)
        except ConnectionError:
            raise
        except (
            OSError
        ) as error:  # it lives, and may be writing what an end would give to others: only this answer fails
            await _send(connection, Reply(Status.FAILED, text=f"descriptors cannot be sent: {error}"), [])
        finally:
            for fd in fds:
                os.close(fd)

    async def _answer(self, client_id: int, request: Request) -> tuple[Reply, list[int]]:
        """A reply and the descriptors that go with it; the caller closes them."""
        try:
            if request.verb is Verb.ARENA:
                return Reply(file_ids=(0,), direct=(False,)), [os.dup(self._arena.fd)]
            if request.verb is Verb.LEASE:
                files = self._store.files_of_lease(client_id, request.subject_id)
                unopened = partial(self._store.unopened, request.subject_id)
                return await _opened(files, request.start, lambda disk: (disk.files.open_read,), unopened)
            if request.verb is Verb.REMOTE:
                opened = await self.exported_files(client_id, request.subject_id) if self.exported_files else {}
                return _handed(opened)
            turn = self._store.turn(client_id, request.subject_id)
            files = {
                part.file.file_id: self._store.disks[part.session.pool] for part in turn.parts if part.file is not None
            }
            return await _opened(files, request.start, lambda disk: (disk.files.open_write, disk.files.open_read))
        except LookupError as error:
            return Reply(Status.GONE, text=str(error)), []
        except (FlatCakeError, OSError) as error:
            return Reply(Status.FAILED, text=str(error)), []


def _close_unsent(answering: asyncio.Future[tuple[Reply, list[int]]]) -> None:
    """Of an answer that nobody waits for any more."""
    if not answering.cancelled() and answering.exception() is None:
        for fd in answering.result()[1]:
            os.close(fd)


def _handed(opened: dict[int, int]) -> tuple[Reply, list[int]]:
    """As many as a message carries; the others are read in another way."""
    ids = list(opened)
    for file_id in ids[FDS_MAX:]:
        os.close(opened[file_id])
    ids = ids[:FDS_MAX]
    return Reply(file_ids=tuple(ids), direct=(True,) * len(ids)), [opened[file_id] for file_id in ids]


async def _opened(
    files: dict[FileId, Disk],
    start: int,
    openers: Callable[[Disk], Sequence[Callable[[FileId], int]]],
    unopened: Callable[[FileId, FlatCakeError], Awaitable[None]] | None = None,
) -> tuple[Reply, list[int]]:
    """As many of the files from `start` on as a message carries.

    Args:
        openers: for each file a descriptor of each.
        unopened: told of a file that cannot be opened, and takes it out of `files`; without it, that is an error, and so is a path that hangs.
    """
    ids: list[FileId] = []
    fds: list[int] = []
    try:
        for file_id in list(files)[start:]:
            if len(ids) == FDS_MAX:
                break
            try:
                files[file_id].admit()
                opened = await files[file_id].run(_open, file_id, openers(files[file_id]))
            except Unavailable as error:
                if unopened is None:
                    raise
                await unopened(file_id, error)
            except Overloaded:
                if unopened is None:
                    raise
                del files[file_id]  # it may be well: its path hangs, and is not asked
            else:
                fds += opened
                ids += [file_id] * len(opened)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    direct = tuple(files[file_id].files.direct for file_id in ids)
    return Reply(file_ids=tuple(ids), direct=direct, more=start + len(set(ids)) < len(files)), fds


def _open(file_id: FileId, openers: Sequence[Callable[[FileId], int]]) -> list[int]:
    """All of them, or none. Blocks."""
    fds: list[int] = []
    try:
        for opener in openers:
            fds.append(opener(file_id))
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds


async def _receive(connection: socket.socket) -> bytes:
    return await asyncio.get_running_loop().sock_recv(connection, MESSAGE_BYTES_MAX)


async def _send(connection: socket.socket, reply: Reply, fds: list[int]) -> None:
    """Messages are small and one is answered before the next is read, so the socket buffer has room."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.sendmsg([encode_reply(reply)], rights)
