"""The life of the process that reads for a `UcxMover`: started when it is first needed, killed when it is stuck, buried when it dies.

    down --first order--> starting --Ready--> up --it ends, or answers nothing--> down, for a pause
                              '--Refused: no UCX here--> never again

Invariants:
- An order rests once: when the process says so, or when the process is dead and reaped. Until then its memory may be written.
- A process that is up and has orders answers within its time-outs, or is killed. So every order rests, whatever UCX does.
- During the pause after a death orders fail at once, and `up` says that nobody should count on us. It doubles from death to death.

One thread, which is also the parent that the process dies with.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import json
import logging
import os
import select
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from flatcake_transport.errors import Unavailable
from flatcake_transport.movers import ucx_child
from flatcake_transport.movers.ucx_words import (
    MESSAGE_BYTES_MAX,
    Kind,
    PieceOrder,
    Word,
    decode,
    encode_order,
    encode_word,
)

START_TIMEOUT_S: Final = 30.0  # of a machine under full load: loading numpy and UCX, looking for network cards
PAUSE_S: Final = 0.5  # after a death; doubled up to PAUSE_S_MAX
PAUSE_S_MAX: Final = 30.0
_MODULE: Final = "flatcake_transport.movers.ucx_reader"
_WORDS_BYTES_MAX: Final = 500  # of what it said last, for the log

log = logging.getLogger(__name__)


@dataclass(slots=True)
class LinkCounts:
    """Since the link was made, over all its processes."""

    commands: int = 0
    bytes_moved: int = 0
    failures: int = 0
    peers_lost: int = 0
    deaths: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Out:
    """An order that has not come to rest."""

    rested: Callable[[str], None]
    commands: int
    size_bytes: int


class ReaderLink:
    """Thread-safe. Nothing is started before the first order, or `start`."""

    def __init__(self, options: Mapping[str, str], peer_timeout_s: float, chunk_bytes: int) -> None:
        self._settings = (dict(options), peer_timeout_s, chunk_bytes)
        self._peer_timeout_s = peer_timeout_s
        self._lock = threading.Lock()
        self._wake = _Wake()
        self._thread: threading.Thread | None = None
        self._wanted = self._closing = False
        self._ids = itertools.count(1)
        self._windows: dict[int, tuple[int, int]] = {}  # id -> descriptor, size
        self._dropped: deque[int] = deque()
        self._out: dict[int, _Out] = {}
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._socket: socket.socket | None = None  # while a process is up
        self._untold = ""  # why that one cannot be told anything
        self.process_id = 0  # of that
        self._heard_s = self._retry_s = 0.0
        self._asked_s: float | None = None  # since when an answer to a ping is awaited
        self._pause_s = PAUSE_S
        self._lost_before = 0  # peers, by earlier processes
        self._counts = LinkCounts()
        self.refusal = ""  # why there will never be a process
        self.library = ""  # the UCX that is read with

    # Any thread.

    @property
    def up(self) -> bool:
        """Whether it makes sense to order now."""
        return not self.refusal and time.monotonic() >= self._retry_s

    @property
    def closed(self) -> bool:
        return self._closing

    def counts(self) -> LinkCounts:
        with self._lock:
            return replace(self._counts)

    def start(self) -> None:
        """Have the process started, unless it is up, or died a moment ago; nobody waits for it."""
        with self._lock:
            if self.up:
                self._want()

    def add_window(self, fd: int, size_bytes: int) -> int:
        """Let orders name a piece of shared memory; the descriptor is ours from here on."""
        window_id = next(self._ids)
        with self._lock:
            if self._closing:  # nobody will move there
                os.close(fd)
                return window_id
            self._windows[window_id] = (fd, size_bytes)
            if self._socket is not None:
                self._send(encode_word(Word(Kind.WINDOW, window_id, size_bytes)), [fd])
        return window_id

    def drop_window(self, window_id: int) -> None:
        """Takes no lock and does not wait: finalizers call it. Nothing may be moving there."""
        self._dropped.append(window_id)
        self._wake.set()

    def order(self, order: PieceOrder, rested: Callable[[str], None]) -> int:
        """Begin an order, whose id is set here and returned. `rested` is called once, with what failed; perhaps before we return.

        Raises: Unavailable: closed.
        """
        order_id = next(self._ids)
        message = encode_order(replace(order, id=order_id))
        with self._lock:
            if self._closing:
                raise Unavailable("the ucx mover is closed")
            failure = self.refusal
            if time.monotonic() < self._retry_s:
                failure = "the process that reads other nodes' memory died a moment ago"
            if not failure and not self._want():
                failure = "no thread is left for the process that reads other nodes' memory"
            if failure:
                self._counts.failures += len(order.pieces)
            else:
                if not self._out:
                    self._heard_s, self._asked_s = time.monotonic(), None
                self._out[order_id] = _Out(rested, len(order.pieces), sum(piece[2] for piece in order.pieces))
                self._send(message)
        if failure:
            rested(failure)
        return order_id

    def cancel(self, order_id: int) -> None:
        with self._lock:
            if order_id in self._out:
                self._send(encode_word(Word(Kind.CANCEL, order_id)))

    def end(self) -> None:
        """Land what moves, then end; does not wait. For finalizers: nobody else has us any more."""
        self._closing = True
        self._wake.set()
        if self._thread is None:
            self._let_go()

    def close(self) -> None:
        """Land what moves, within two time-outs, and end. Twice is fine."""
        with self._lock:
            self._closing = True  # nobody begins an order after this
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        else:
            self._let_go()

    # With the lock.

    def _want(self) -> bool:
        """False: there is no thread that would attend to a process; whoever comes next tries again."""
        self._wanted = True
        if self._thread is None and not self._closing:
            thread = threading.Thread(target=self._run, name="flatcake-ucx-link", daemon=True)
            with contextlib.suppress(RuntimeError):  # no more threads, or the interpreter ends
                thread.start()
                self._thread = thread
        elif self._socket is None:
            self._wake.set()
        return self._thread is not None

    def _send(self, message: bytes, fds: list[int] | None = None) -> None:
        """At once where there is room, else in the thread. In the order of calls."""
        self._unsent.append((message, fds or []))
        if len(self._unsent) == 1 and not self._flush():
            self._wake.set()

    def _flush(self) -> bool:
        """False: no process is up, or it takes no more now."""
        while self._unsent:
            if self._socket is None:
                return False
            message, fds = self._unsent[0]
            try:
                handed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
                self._socket.sendmsg([message], handed, socket.MSG_DONTWAIT)
            except (BlockingIOError, ConnectionError):  # full; or the process is dead, which the thread will see
                return False
            except OSError as error:  # e.g. a message that this machine's sockets never take
                self._untold = f"cannot be told: {error}"
                return False
            self._unsent.popleft()
        return True

    def _forget_dropped(self) -> None:
        while self._dropped:
            window_id = self._dropped.popleft()
            fd, _ = self._windows.pop(window_id)
            unsent = len(self._unsent)
            self._unsent = deque(entry for entry in self._unsent if fd not in entry[1])
            os.close(fd)
            if self._socket is not None and len(self._unsent) == unsent:  # else it has never heard of the window
                self._send(encode_word(Word(Kind.DROP, window_id)))

    def _let_go(self) -> None:
        """At the end: the windows are those of their users only."""
        while self._windows:
            os.close(self._windows.popitem()[1][0])

    # The thread.

    def _run(self) -> None:
        idle = select.poll()
        idle.register(self._wake.descriptor, select.POLLIN)
        while not self._closing:
            with self._lock:
                self._forget_dropped()
                wanted = self._wanted and not self.refusal
            if wanted:
                try:
                    why = self._live()
                except Exception as error:  # noqa: BLE001 - the edge of a thread: orders must rest, whatever it is
                    why = f"cannot be attended: {error!r}"
                self._bury(why)
            else:
                idle.poll()
                self._wake.clear()
        self._bury("")
        with self._lock:
            self._let_go()

    def _live(self) -> str:
        """One process, from its start to its end. Returns: why it ended; nothing if we wanted it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                order = json.dumps([theirs.fileno(), os.getpid(), *self._settings])
                child = ucx_child.spawn(_MODULE, order, [theirs.fileno()])
            try:
                return self._attend(child, ours)
            finally:
                with self._lock:
                    self._socket, self.process_id, self._untold = None, 0, ""
                if self._closing:  # it gives its connections back, so that peers see no reader that died
                    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                        ours.shutdown(socket.SHUT_RDWR)
                        child.wait(self._peer_timeout_s)
                ucx_child.end(child)

    def _attend(self, child: subprocess.Popen[bytes], ours: socket.socket) -> str:
        assert child.stdout is not None
        os.set_blocking(child.stdout.fileno(), False)
        poller = select.poll()
        for descriptor in (self._wake.descriptor, child.stdout.fileno()):
            poller.register(descriptor, select.POLLIN)
        started_s, give_up_s, said = time.monotonic(), None, b""
        watched = 0
        while True:
            with self._lock:
                self._forget_dropped()
                full = self._socket is not None and not self._flush()
                moving = bool(self._out)
                why, sleep_s = self._patience(started_s)
            if why:
                return why
            if self._closing:
                give_up_s = give_up_s or time.monotonic() + 2 * self._peer_timeout_s + 1.0
                if not moving or time.monotonic() > give_up_s:
                    return ""
            if watched != (events := select.POLLIN | (select.POLLOUT if full else 0)):
                poller.register(ours, events)
                watched = events
            ready = {descriptor for descriptor, _ in poller.poll(sleep_s * 1e3 + 1.0)}
            if self._wake.descriptor in ready:
                self._wake.clear()
            heard = child.stdout.read(_WORDS_BYTES_MAX) if child.stdout.fileno() in ready else None
            said = (said + (heard or b""))[-_WORDS_BYTES_MAX:]
            alive = self._hear(ours) and heard != b""
            if self.refusal:
                return self.refusal
            if not alive:
                ucx_child.end(child)
                return f"ended with {child.returncode}, last words: {ucx_child.last_line(said)}"

    def _patience(self, started_s: float) -> tuple[str, float]:
        """With the lock. Why it is given up, if it is: it answered nothing for too long; and how long to sleep if nothing happens.

        Asks whether it is there when it was silent for half a timeout; orders are sent past us, so we look now and then.
        """
        now_s, half_s = time.monotonic(), self._peer_timeout_s / 2
        if self._socket is None:
            since_s, due_s = started_s, started_s + START_TIMEOUT_S
        elif not self._out:
            since_s, due_s = now_s, now_s + half_s
        else:
            since_s = self._heard_s
            if self._asked_s is None and now_s - since_s > half_s:
                self._asked_s = now_s
                self._send(encode_word(Word(Kind.PING)))
            due_s = since_s + half_s if self._asked_s is None else self._asked_s + self._peer_timeout_s
        silence = f"answered nothing for {now_s - since_s:.1f} s" if now_s > due_s else ""
        return self._untold or silence, max(0.0, due_s - now_s)

    def _hear(self, ours: socket.socket) -> bool:
        """Take in what the process says. False: it has ended."""
        while True:
            try:
                message = ours.recv(MESSAGE_BYTES_MAX, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not message:
                return False
            word = decode(message)
            assert isinstance(word, Word)
            out = self._take_in(word, ours)
            if out is not None:
                out.rested(word.text)

    def _take_in(self, word: Word, ours: socket.socket) -> _Out | None:
        with self._lock:
            self._heard_s, self._asked_s = time.monotonic(), None
            if word.kind is Kind.READY:
                self.library = word.text
                windows = [(encode_word(Word(Kind.WINDOW, at, size)), [fd]) for at, (fd, size) in self._windows.items()]
                self._unsent.extendleft(reversed(windows))
                self._socket, self.process_id = ours, word.number
            elif word.kind is Kind.REFUSED:
                self.refusal = word.text
            elif word.kind is Kind.RESTED:
                out, counts = self._out.pop(word.id), self._counts
                counts.peers_lost = self._lost_before + word.number
                if word.text:
                    counts.failures += out.commands
                else:
                    counts.commands += out.commands
                    counts.bytes_moved += out.size_bytes
                    self._pause_s = PAUSE_S
                return out
        return None

    def _bury(self, why: str) -> None:
        """The process is dead: what it was ordered to do has failed, and nothing touches its memory any more."""
        with self._lock:
            out, self._out = list(self._out.values()), {}
            self._unsent.clear()
            self._wanted = False
            self._lost_before = self._counts.peers_lost
            self._counts.failures += sum(each.commands for each in out)
            if why and not self.refusal:
                died_s = time.monotonic()
                self._counts.deaths += 1
                self._retry_s, self._pause_s = died_s + self._pause_s, min(2 * self._pause_s, PAUSE_S_MAX)
        failure = "the mover was closed"
        if self.refusal and why:
            failure = why
            log.warning("blocks of other nodes are recomputed here: %s", why)
        elif why:
            failure = f"the process that reads other nodes' memory {why}"
            log.warning("%s; blocks under way are recomputed", failure)
        for each in out:
            each.rested(failure)


class _Wake:
    """An eventfd that is closed with its last user: a number that was closed too early may be somebody else's file."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self) -> None:
        os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def __del__(self) -> None:
        os.close(self.descriptor)
