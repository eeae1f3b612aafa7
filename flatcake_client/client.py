"""The client of one daemon, embedded in an engine.

It greets the daemon when it is first needed, and again when another one answers; until then lookups are misses and turns are
refused, at once or within the caller's deadline. The engine sees nothing else of a daemon's death: descriptors and arena it
holds stay valid, a read under a dead daemon's lease is an error by itself.

Threads: the client's own state is under one lock, held over a Hello only by the thread that says it; what it hands out is
thread-safe by itself. After a fork the child has nothing: connections are closed there and every call raises RuntimeError.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from flatcake_client.connection import Connection
from flatcake_client.deadline import deadline
from flatcake_client.hit import RELEASE_WAIT_S, Hit
from flatcake_client.linger import Linger
from flatcake_client.rpc import Rpc, Stale, Unknown
from flatcake_client.space import Space
from flatcake_client.tools import BUFFER_BYTES, BUFFERS, STAGING_BYTES, Tools
from flatcake_client.worth import Bandwidths
from flatcake_client.writer import ABORT_TIMEOUT_S, Turn
from flatcake_transport.endpoint import default_endpoint
from flatcake_transport.errors import FlatCakeError, Unavailable
from flatcake_transport.mover import MoverStats
from flatcake_transport.plan import GAP_BYTES_MAX
from flatcake_transport.space import SpaceSpec
from flatcake_transport.window import StagingStats

log = logging.getLogger(__name__)

TIMEOUT_S: Final = 2.0  # a lookup takes a millisecond; an engine that waits longer had better recompute
TRANSFER_TIMEOUT_S: Final = 60.0  # 100 GB from one good SSD
GREET_PAUSE_S: Final = 1.0  # between two Hellos after one that led nowhere
SAY_PAUSE_S: Final = 10.0  # between two log lines that say that the daemon is out of reach

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ClientStats:
    """Counts since `connect`; `turns_begun` are those stored, committed, failed, yielded, aborted or still open."""

    connected: bool
    incarnation: str
    greetings: int  # daemons greeted; more than one: it was restarted
    lookups: int
    lookups_failed: int  # the daemon could not be asked: misses
    lookup_blocks: int
    hit_blocks: int
    declined_blocks: int  # other nodes have them, and computing them takes less time than fetching
    copied_blocks: int  # of other nodes, hot here: written here from where they were restored to
    restores: int
    read_commands: int
    bytes_read: int  # from files, with alignment and gaps
    corrupt_segments: int
    turns_begun: int
    turns_refused: int
    turns_stored: int  # everything was stored already
    turns_committed: int
    turns_failed: int
    turns_yielded: int  # dropped: their writes waited too long, for reads or for the disk
    turns_aborted: int  # given up by the engine, at any point
    movers: dict[str, MoverStats]
    staging: dict[str, StagingStats]


class Counts:
    """Named counters. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._values[name] += count

    def __getitem__(self, name: str) -> int:
        return self._values[name]


class Held(Generic[T]):
    """What is to be given back at the end, unless it is lost before. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: weakref.WeakSet[T] = weakref.WeakSet()

    def add(self, each: T) -> None:
        with self._lock:
            self._held.add(each)

    def all(self) -> list[T]:
        with self._lock:  # a set that grows while it is listed raises
            return list(self._held)


class Client:
    """A connection to the daemon of this node. Thread-safe; a context manager that closes itself. Made by `connect`."""

    def __init__(
        self,
        endpoint: str,
        name: str,
        timeout_s: float,
        transfer_timeout_s: float,
        tools: Tools,
        prefill_tokens_per_s: float | None = None,
    ) -> None:
        """Raises: ValueError: no endpoint."""
        self._pid = os.getpid()
        self._name = name
        self._endpoint = endpoint
        self._rpc = Rpc(endpoint)
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._open: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._greet_after_s = 0.0
        self._greet_error = ""
        self._reachable = True  # answered since the last log line that said otherwise
        self._say_after_s = 0.0
        self._closed = False
        self.timeout_s = timeout_s
        self.transfer_timeout_s = transfer_timeout_s
        self.tools = tools
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self.bandwidths = Bandwidths()
        self.linger = Linger()
        self.counts = Counts()
        self.turns: Held[Turn] = Held()
        self.hits: Held[Hit] = Held()
        _clients.add(self)

    def open_space(
        self,
        model: str,
        dtype: str,
        block_tokens: int,
        plane_bytes: Sequence[int],
        shards: int = 1,
        shard: int = 0,
        weights: str = "",
        layout: str = "",
    ) -> Space:
        """One model in one layout. Works without a daemon: the space is opened there when it is first asked.

        Args:
            model, dtype, weights, layout: names; any difference is another space, whose blocks are never hits here.
            block_tokens: tokens a block.
            plane_bytes: bytes a block has in each layer of one shard.
            shards: tensor-parallel ranks that write the same blocks.
            shard: the caller's rank.

        Raises:
            ValueError: sizes make no sense, a plane does not fit the staging, or the daemon refuses the space.
        """
        self.guard()
        spec = SpaceSpec(
            model, dtype, int(block_tokens), tuple(int(n) for n in plane_bytes), int(shards), weights, layout
        )
        self.tools.fit(spec)
        space = Space(self, spec, shard)
        try:
            self.ask(spec, None, lambda connection, timeout_s: connection.ensure_space(spec, timeout_s))
        except FlatCakeError as error:
            log.info("space %s is not open on the daemon yet: %s", model, error)
        return space

    def stats(self) -> ClientStats:
        movers, staging = self.tools.stats()
        connection = self._connection
        connected = connection is not None and not connection.lost()
        counts = {name: self.counts[name] for name in ClientStats.__slots__ if name not in _STATE}
        return ClientStats(
            connected=connected,
            incarnation=connection.welcome.incarnation.hex() if connection else "",
            movers=movers,
            staging=staging,
            **counts,
        )

    def close(self, timeout_s: float = 5.0) -> None:
        """Give everything back: turns are aborted, hits released; what is asked later is Unavailable, or a miss.

        Waits for reads and writes under way, at most `timeout_s`: while a write does not land, the connection stays open, so
        that its space is given to nobody, and is closed when it has landed. Twice is fine. In a forked child it does nothing.
        """
        if self.forked():
            return
        deadline_s = deadline(time.monotonic(), timeout_s)
        # Without the lock: who greets has it, may have long to wait for an answer, and looks at this behind it.
        self._closed = True
        for turn in self.turns.all():
            turn.abort(min(ABORT_TIMEOUT_S, max(0.0, deadline_s - time.monotonic())))
        for hit in self.hits.all():
            hit.release(min(RELEASE_WAIT_S, max(0.0, deadline_s - time.monotonic())))
        settled = self.linger.settle(max(0.0, deadline_s - time.monotonic()))
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.retire()
        self._rpc.close()
        if settled:  # as far as is known here: a disk that hangs under what was lost holds up a thread of its own
            closing = threading.Thread(target=self.tools.close, name="flatcake-close", daemon=True)
            with contextlib.suppress(RuntimeError):  # no more threads: the interpreter ends, and all others with it
                closing.start()
                closing.join(max(0.0, deadline_s - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # For spaces, hits and turns.

    def guard(self) -> None:
        """Raises: RuntimeError: in a forked child."""
        if self.forked():
            raise RuntimeError(
                "this FlatCake client belongs to the process that made it, and this is a fork of that: call "
                "flatcake_client.connect() in the child"
            )

    @property
    def closed(self) -> bool:
        return self._closed

    def forked(self) -> bool:
        return os.getpid() != self._pid

    def ask(self, spec: SpaceSpec, timeout_s: float | None, verb: Callable[[Connection, float], T]) -> T:
        """Ask the daemon something about a space; greet it and open the space first if need be.

        Raises: Unavailable, Overloaded: no answer within the timeout, or a refusal. ValueError: the daemon says so.
        """
        deadline_s = deadline(time.monotonic(), self.timeout_s if timeout_s is None else timeout_s)
        for _ in range(2):  # once more if the daemon turns out to be another one
            connection = self._greeted(deadline_s)
            try:
                connection.ensure_space(spec, deadline_s - time.monotonic())
                answer = verb(connection, deadline_s - time.monotonic())
                self._reachable = True
                return answer  # noqa: TRY300 - the loop goes on with what is caught
            except Stale:
                connection.retire()
            except Unknown:
                connection.forget_space(spec)
            except Unavailable as error:
                self._say_unreachable(error)
                raise
        raise Unavailable("the daemon was restarted while it was asked")

    def arena(self, connection: Connection, timeout_s: float) -> NDArray[np.uint8]:
        """A connection's arena, registered with the movers at the first call."""
        fresh = connection.handover.arena_unmapped
        arena = connection.arena(timeout_s)
        if fresh:
            self.tools.register(arena)
        return arena

    def _greeted(self, deadline_s: float) -> Connection:
        connection = self._connection
        if connection is not None and not connection.lost():
            return connection
        if not self._lock.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            raise Unavailable("the daemon is being greeted by another thread")
        try:
            if self._closed:
                raise Unavailable("the client is closed")
            connection = self._connection
            if connection is not None and not connection.lost():
                return connection
            self._connection = None
            if connection is not None:
                connection.retire()
            if time.monotonic() < self._greet_after_s:
                raise Unavailable(f"the daemon is greeted again in a moment: {self._greet_error}")
            connection = self._connection = self._greet(deadline_s)
            if self._closed:
                connection.retire()
                raise Unavailable("the client was closed meanwhile")
            return connection
        finally:
            self._lock.release()

    def _greet(self, deadline_s: float) -> Connection:
        try:
            welcome = self._rpc.hello(self._name, deadline_s - time.monotonic())
            try:
                connection = Connection(self._rpc, welcome, deadline_s - time.monotonic())
            except Unavailable as error:
                # The daemon now knows a client that will not come: do not make it many of them.
                self._greet_error = str(error)
                self._greet_after_s = time.monotonic() + GREET_PAUSE_S
                raise
        except ValueError as error:  # another protocol: nothing an engine could do about
            self._say_unreachable(error)
            raise Unavailable(f"the daemon at {self._endpoint} refuses this client: {error}") from error
        except FlatCakeError as error:
            self._say_unreachable(error)
            raise
        self._open.add(connection)
        self.counts.add("greetings")
        self._reachable = True
        log.info("connected to FlatCake %s at %s", welcome.version, self._endpoint)
        return connection

    def _say_unreachable(self, error: Exception) -> None:
        """One log line when it begins, not one a request; nor two in `SAY_PAUSE_S`, where every other one succeeds."""
        if self._reachable and not self._closed and time.monotonic() >= self._say_after_s:
            self._reachable = False
            self._say_after_s = time.monotonic() + SAY_PAUSE_S
            log.warning("FlatCake at %s is out of reach, blocks are recomputed meanwhile: %s", self._endpoint, error)

    def forget(self) -> None:
        """In a forked child: let go of what belongs to the parent, without a word to the daemon."""
        for connection in list(self._open):
            connection.forget()


_STATE: Final = frozenset(("connected", "incarnation", "movers", "staging"))
_clients: Final[weakref.WeakSet[Client]] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client.forget()


os.register_at_fork(after_in_child=_after_fork_in_child)


def connect(
    endpoint: str | None = None,
    timeout_s: float = TIMEOUT_S,
    name: str | None = None,
    *,
    transfer_timeout_s: float = TRANSFER_TIMEOUT_S,
    buffer_bytes: int = BUFFER_BYTES,
    staging_bytes: int = STAGING_BYTES,
    gap_bytes_max: int = GAP_BYTES_MAX,
    buffers: int = BUFFERS,
    prefill_tokens_per_s: float | None = None,
) -> Client:
    """A client of the daemon on this node. Returns at once, whether the daemon is there or not: until it is, all is a miss.

    Args:
        endpoint: `unix:///path` or `host:port`. Default: `FLATCAKE_ENDPOINT`, else the default socket.
        timeout_s: of lookups and other questions, where a call gives no other.
        name: how operators see this client. Default: the program's name and process id.
        transfer_timeout_s: of restores, and of each call that writes, where a call gives no other.
        buffer_bytes: reads are planned for this much at a time; more where a plane's granule needs it.
        buffers: of one restore's window. 1: nothing is read while what was read is scattered, for measuring.
        staging_bytes: bound on host memory for reads and writes of files; made when needed.
        gap_bytes_max: read along between two ranges rather than begin another read; -1: a read for every block and layer.
            Defaults fit; others are for measuring what merging brings (`flatcake replay --ablation no-merge`).
        prefill_tokens_per_s: how fast the engine computes a prompt. Blocks of another node that would take longer to fetch, as
            measured, are left out of hits. None: all that is found is fetched.

    Raises:
        ValueError: an endpoint that names nothing, sizes that hold no window, no speed, a timeout without end.
    """
    for each_s in (timeout_s, transfer_timeout_s):
        deadline(0.0, each_s)
    if prefill_tokens_per_s is not None and not prefill_tokens_per_s > 0:
        raise ValueError(f"prefill_tokens_per_s is {prefill_tokens_per_s}: expected more than 0, or None")
    program = Path(sys.argv[0] if sys.argv else "").name or "python"
    tools = Tools(buffer_bytes, staging_bytes, gap_bytes_max=gap_bytes_max, buffers=buffers)
    return Client(
        endpoint or default_endpoint(os.environ, os.getuid()),
        name or f"{program}[{os.getpid()}]",
        timeout_s,
        transfer_timeout_s,
        tools,
        prefill_tokens_per_s,
    )
