"""File descriptors from the daemon, and the connection that says we are alive. Words: flatcake_transport.handoff.

The connection is opened after Hello and kept. Its end means, to the daemon, that this client is gone: leases and turns are
given back. So whoever reads under a lease asks `lost()` after the copy, and a connection we close ourselves is marked lost
before it is closed. Requests are answered in order; one whose answer came too late is remembered, and its answer is
received and thrown away before the next request, so that no answer is taken for another. A connection that failed is lost,
and not closed before its owner says so: copies into what the daemon granted over it may be under way.

Session files that were read or written are kept open to be read, so many: the next turn of their sessions asks for nothing. What is read is trusted under a
lease only, whoever opened the file, and a file id is never used twice. Reclaim cuts a file before it unlinks it, so a descriptor
that is kept too long keeps no space.

The arena is mapped once. Its size is sealed by the daemon and checked here, so a mapping never raises SIGBUS, and it outlives
the daemon. Nothing here survives a fork: the child's copies of socket and descriptors are closed at once, else the daemon
would take the child's copy for our life.
"""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import select
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flatcake_client.linger import Linger
from flatcake_transport.errors import Unavailable
from flatcake_transport.handoff import (
    FDS_MAX,
    MESSAGE_BYTES_MAX,
    Attach,
    Reply,
    Request,
    Status,
    Verb,
    decode_reply,
    encode_attach,
    encode_request,
)
from flatcake_transport.mover import Transfer
from flatcake_transport.window import OpenFile, device_number

ANSWER_S: Final = 5.0  # a daemon that hands nothing over in this is a miss, and holds up no close for longer
KEPT_MAX: Final = 128  # a process may often open 1,024, and has other things to
_INT_BYTES: Final = array.array("i").itemsize


class Descriptors:
    """Open session files by file id. They are closed by `close`, or when this is collected."""

    def __init__(self, files: dict[int, OpenFile]) -> None:
        self.files = files

    def close(self, transfers: Sequence[Transfer] = (), linger: Linger | None = None) -> None:
        """Close all once the transfers that use them rest. Twice is fine."""
        files, self.files = self.files, {}
        if not files:
            return
        if linger is None:
            _close_all([file.fd for file in files.values()])
        else:
            linger.when_rested(transfers, lambda: _close_all([file.fd for file in files.values()]))

    def __del__(self) -> None:
        self.close()


class _Kept:
    """Read-only files of earlier leases and turns, those used last. Thread-safe. What is given is a copy: it outlives what is kept here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: OrderedDict[int, OpenFile] = OrderedDict()

    def all_of(self, file_ids: Collection[int]) -> Descriptors | None:
        """None: one of them is not kept, or this process can open no more."""
        with self._lock:
            if not all(file_id in self._files for file_id in file_ids):
                return None
            found = Descriptors({})
            for file_id in file_ids:
                self._files.move_to_end(file_id)
                with contextlib.suppress(OSError):
                    found.files[file_id] = _copy(self._files[file_id])
        return found if len(found.files) == len(file_ids) else None

    def keep(self, files: Mapping[int, OpenFile]) -> None:
        with self._lock:
            for file_id, file in files.items():
                if file_id not in self._files:
                    with contextlib.suppress(OSError):
                        self._files[file_id] = _copy(file)
            gone = [self._files.popitem(last=False)[1].fd for _ in range(len(self._files) - KEPT_MAX)]
        _close_all(gone)  # a disk that hangs may keep us here, and nobody who waits for the lock

    def close(self) -> None:
        """Twice is fine."""
        with self._lock:  # one that was closed while it is copied may be another file by then
            files, self._files = self._files, OrderedDict()
        _close_all([file.fd for file in files.values()])

    def forget(self) -> None:
        """In a forked child, where whoever has the lock may be a thread that is not there."""
        _close_all([file.fd for file in self._files.values()])
        self._files = OrderedDict()

    __del__ = forget


def _copy(file: OpenFile) -> OpenFile:
    return replace(file, fd=os.dup(file.fd))


class Handover:
    """One client's connection. Thread-safe."""

    def __init__(self, path: str, client_id: int, token: bytes, timeout_s: float) -> None:
        """Raises: Unavailable: nobody listens, or the daemon does not know us."""
        self._lock = threading.RLock()
        self._lost = False
        self._owed = False  # an answer to a request that nobody waits for any more
        self._arena: NDArray[np.uint8] | None = None
        self._kept = _Kept()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._socket.settimeout(timeout_s)
            self._socket.connect(path)
            self._socket.send(encode_attach(Attach(client_id, token)))
            reply, fds = self._receive()
            _close_all(fds)
        except (OSError, ValueError) as error:
            self._socket.close()
            raise Unavailable(f"no descriptors from {path}: {error}: is the daemon on this machine?") from error
        except Unavailable:
            self._socket.close()
            raise
        if reply.status is not Status.OK:
            self._socket.close()
            raise Unavailable(f"the daemon did not attach this client: {reply.text}")

    def lost(self) -> bool:
        """Whether the daemon has, or may have, given back what we held."""
        self._lost = self._lost or self.ended()
        return self._lost

    def ended(self) -> bool:
        """Whether it is closed, by the daemon or here: what was granted over it may be somebody else's."""
        try:
            watch = select.poll()
            watch.register(self._socket, select.POLLRDHUP)  # and, unasked, POLLHUP and POLLERR
            return bool(watch.poll(0))
        except (OSError, ValueError):  # closed meanwhile
            return True

    @property
    def arena_unmapped(self) -> bool:
        return self._arena is None

    def arena(self, arena_bytes: int, timeout_s: float) -> NDArray[np.uint8]:
        """The node's arena, writable, mapped at the first call. Raises: Unavailable: it cannot be had."""
        deadline_s = time.monotonic() + min(timeout_s, ANSWER_S)
        if self._arena is not None:
            return self._arena
        with self._turn(deadline_s):
            if self._arena is not None:
                return self._arena
            _, fds = self._ask(Request(Verb.ARENA), deadline_s)
            try:
                if len(fds) != 1 or os.fstat(fds[0]).st_size < arena_bytes or arena_bytes < 1:
                    raise Unavailable(f"the daemon has no arena of {arena_bytes} bytes to give")
                mapped = mmap.mmap(fds[0], _mapping_bytes(fds[0], arena_bytes))
            except OSError as error:
                raise Unavailable(f"the arena cannot be mapped: {error}") from error
            finally:
                _close_all(fds)
            self._arena = np.frombuffer(mapped, np.uint8)[:arena_bytes]
            return self._arena

    def files(self, verb: Verb, subject_id: int, timeout_s: float) -> Descriptors:
        """All session files of a lease (to read) or a turn (to write). Raises: Unavailable: it has ended, or no answer."""
        deadline_s = time.monotonic() + min(timeout_s, ANSWER_S)
        found, readable = Descriptors({}), Descriptors({})
        more = True
        while more:
            with self._turn(deadline_s):
                reply, fds = self._ask(Request(verb, subject_id, len(found.files)), deadline_s)
            for file_id, direct, fd in zip(reply.file_ids, reply.direct, fds, strict=True):
                files = found.files if verb is not Verb.TURN or file_id not in found.files else readable.files
                files[file_id] = OpenFile(fd, direct, device_number(fd))
            more = reply.more and bool(fds)
        self._kept.keep(found.files if verb is Verb.LEASE else readable.files)
        return found

    def leased(self, lease_id: int, file_ids: Collection[int], timeout_s: float) -> Descriptors:
        """The session files of a lease, to read: as `files`, or those that are kept, where all of these are."""
        return self._kept.all_of(file_ids) or self.files(Verb.LEASE, lease_id, timeout_s)

    def close(self) -> None:
        """End the connection: the daemon gives back all we held. A mapped arena stays. Twice is fine."""
        self._lost = True
        self._kept.close()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes whoever waits for an answer
        with self._lock:
            self._socket.close()

    def forget(self) -> None:
        """In a forked child: let go of its copy. The connection itself is the parent's and lives on."""
        self._lost = True
        self._socket.close()
        self._kept.forget()

    def __del__(self) -> None:
        # Not closed: its client gave up waiting for a write; whatever held us has landed now.
        if hasattr(self, "_socket"):
            self._socket.close()

    @contextlib.contextmanager
    def _turn(self, deadline_s: float) -> Iterator[None]:
        """The lock, which another caller may have until its own deadline. Raises: Unavailable: not in time."""
        if not self._lock.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            raise Unavailable("the daemon is being asked for descriptors by another thread, and does not answer")
        try:
            yield
        finally:
            self._lock.release()

    def _ask(self, request: Request, deadline_s: float) -> tuple[Reply, list[int]]:
        """One question and its answer, as many descriptors as file ids. The caller has its turn."""
        try:
            if self._owed:
                self._settimeout(deadline_s)
                _close_all(self._receive()[1])
                self._owed = False
            self._settimeout(deadline_s)
            self._socket.send(encode_request(request))
            self._owed = True
            reply, fds = self._receive()
            self._owed = False
        except TimeoutError as error:
            raise Unavailable("the daemon handed over no descriptors in time") from error
        except (OSError, ValueError) as error:
            # Not closed here: it may live on (no room for descriptors, an answer we cannot read), and at its end the daemon
            # gives the space of turns away that are being written through it. Who owns us closes when they are over.
            self._lost = True
            raise Unavailable(f"the connection to the daemon is gone: {error}") from error
        if reply.status is not Status.OK:
            _close_all(fds)
            raise Unavailable(f"the daemon hands over no descriptors: {reply.text}")
        return reply, fds

    def _settimeout(self, deadline_s: float) -> None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._socket.settimeout(left_s)

    def _receive(self) -> tuple[Reply, list[int]]:
        """One answer. Raises: OSError, ValueError: the connection has ended, or this is no answer."""
        message, control, flags, _ = self._socket.recvmsg(
            MESSAGE_BYTES_MAX, socket.CMSG_SPACE(FDS_MAX * _INT_BYTES), socket.MSG_CMSG_CLOEXEC
        )
        fds = array.array("i")
        for level, kind, data in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % _INT_BYTES])
        reply = None
        with contextlib.suppress(ValueError):
            reply = decode_reply(message)
        if reply is None or flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC) or len(fds) != len(reply.file_ids):
            _close_all(fds)
            if not message:
                raise ConnectionResetError("the daemon closed it")
            raise ValueError(
                f"an answer of {len(message)} bytes with {len(fds)} descriptors: is the limit of open files low?"
            )
        return reply, list(fds)


def _mapping_bytes(fd: int, arena_bytes: int) -> int:
    """A mapping of huge pages is whole pages; the file is as long as the daemon mapped it."""
    return max(arena_bytes, os.fstat(fd).st_size)


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
