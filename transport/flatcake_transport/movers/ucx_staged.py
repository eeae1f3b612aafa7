"""Another node's session files, where that node reads them and we fetch from its memory: the way that always works.

    served span -> memory span     stage there, get, unstage

Moves of one call are cut into pieces and packed, so that one staging brings many small reads; a few threads keep as many
stagings under way at each node, each of which waits for two round trips and a disk: a node that is slow, or has no room, holds up no
other. A staging that finds no room waits and asks again:
nothing is given up for lack of staging, as long as the lease lives and `patience_s` is not over.

What a get brought is trusted only if it landed while the staged bytes stood; then the lease and the checksums have their say, as
with any read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from flatcake_transport.errors import Overloaded, Unavailable
from flatcake_transport.layout import ALIGN_BYTES
from flatcake_transport.mover import FileSpan, MemorySpan, Move, Mover, MoverStats, Region, Transfer
from flatcake_transport.movers.pool import Batch, Command, Commands
from flatcake_transport.paged import contiguous_bytes
from flatcake_transport.remote import RemoteSpan
from flatcake_transport.served import RANGES_MAX, STAGED_BYTES_MAX, FileRange, RangeServer, ServedSpan

THREADS: Final = 8
PAUSE_S: Final = 0.02  # before one that was refused at once asks again


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    source: FileRange
    target: Any  # 1-d uint8


class StagedMover:
    """A `Mover` from served files to memory. Thread-safe.

    Args:
        gets: moves remote memory; not ours to close.
        stage_timeout_s: of one round trip.
        patience_s: how long a piece asks again where there is no room.
        threads: stagings under way at one node.
    """

    def __init__(
        self,
        gets: Mover,
        *,
        stage_timeout_s: float,
        patience_s: float,
        threads: int = THREADS,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises: ValueError: no threads."""
        if threads < 1:
            raise ValueError(f"{threads} threads: expected 1 or more")
        self._gets = gets
        self._stage_timeout_s, self._patience_s = stage_timeout_s, patience_s
        self._now_s = now_s
        self._lines = Commands("staged", threads, threads * STAGED_BYTES_MAX, patient=True)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._moves = self._commands = self._bytes = self._failures = self._waits = 0

    def register(self, region: Region) -> None:
        """Memory that gets will land in."""
        self._gets.register(region)

    def submit(self, moves: Sequence[Move]) -> Batch:
        """Start the moves.

        Raises:
            ValueError: other kinds of spans, unequal sizes, ranges that are not on 4 KiB, or memory that cannot be written.
            Unavailable: closed.
        """
        by_server: dict[int, tuple[RangeServer, list[_Piece]]] = {}
        for move in moves:
            source, target = _checked(move)
            pieces = by_server.setdefault(id(source.server), (source.server, []))[1]
            for at in range(0, source.size_bytes, STAGED_BYTES_MAX):
                size = min(STAGED_BYTES_MAX, source.size_bytes - at)
                pieces.append(_Piece(FileRange(source.file_id, source.offset + at, size), target[at : at + size]))
        commands: list[Command] = [
            (server.node_id, sum(piece.source.size_bytes for piece in packed), partial(self._bring, server, packed))
            for server, pieces in by_server.values()
            for packed in _packed(pieces)
        ]
        batch = self._lines.submit(commands)
        with self._lock:
            self._moves += len(moves)
        return batch

    def _bring(self, server: RangeServer, pieces: Sequence[_Piece]) -> None:
        """One staging: ask for it, fetch it, give it back."""
        moved = False
        try:
            asked_s, staged = self._staged(server, [piece.source for piece in pieces])
            try:
                moves, at = [], staged.offset
                for piece in pieces:
                    span = RemoteSpan(staged.memory, at, piece.source.size_bytes)
                    moves.append(Move(span, MemorySpan(piece.target)))
                    at += piece.source.size_bytes
                # Without a time of ours: the gets rest by themselves when the peer is silent, and must, before we leave.
                self._gets.submit(moves).wait()
                if self._now_s() >= asked_s + staged.ttl_s:
                    raise Unavailable("a staged range was fetched too late: it may be another one's by now")
                moved = True
            finally:
                server.unstage([staged.staged_id])
        except ValueError as error:  # memory that is not as large as its owner said
            raise Unavailable(f"a staged range cannot be fetched: {error}") from error
        finally:
            with self._lock:
                self._commands += 1
                self._bytes += sum(piece.source.size_bytes for piece in pieces) if moved else 0
                self._failures += not moved

    def _staged(self, server: RangeServer, ranges: Sequence[FileRange]) -> tuple[float, Any]:
        deadline_s = self._now_s() + self._patience_s
        while True:
            asked_s = self._now_s()
            try:
                return asked_s, server.stage(ranges, self._stage_timeout_s)
            except Overloaded:
                with self._lock:
                    self._waits += 1
                if self._now_s() >= deadline_s or self._closing.wait(PAUSE_S):
                    raise

    def stats(self) -> MoverStats:
        with self._lock:
            return MoverStats(
                path="staged+" + self._gets.stats().path,
                moves=self._moves,
                commands=self._commands,
                bytes_moved=self._bytes,
                failures=self._failures,
                fallbacks={"no room there yet": self._waits} if self._waits else {},
            )

    def close(self) -> None:
        self._closing.set()
        self._lines.close()


class BySpan:
    """A `Mover` of files by what each can be read with: open ones by `files`, served ones by `served`. Neither is ours to close."""

    def __init__(self, files: Mover, served: Mover) -> None:
        self._files, self._served = files, served

    def register(self, region: Region) -> None:
        self._served.register(region)

    def submit(self, moves: Sequence[Move]) -> Transfer:
        """As theirs."""
        here = [move for move in moves if isinstance(move.source, FileSpan)]
        there = [move for move in moves if not isinstance(move.source, FileSpan)]
        if not here or not there:
            return self._files.submit(here) if here else self._served.submit(there)
        return _Both(self._files.submit(here), self._served.submit(there))

    def stats(self) -> MoverStats:
        return self._served.stats()

    def close(self) -> None:
        """Others use them."""


class _Both:
    """Two transfers as one: it rests when both do."""

    def __init__(self, first: Transfer, second: Transfer) -> None:
        self._parts = (first, second)

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def wait(self, timeout_s: float | None = None) -> None:
        """See `Transfer.wait`."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        failure: Unavailable | None = None
        for part in self._parts:
            try:
                part.wait(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
            except Unavailable as error:
                failure = failure or error
        if failure is not None:
            raise failure


def _checked(move: Move) -> tuple[ServedSpan, Any]:
    source, target = move.source, move.target
    if move.checks is not None:
        raise ValueError("staged takes no checksums: the memory mover does, where it gathers")
    if not isinstance(source, ServedSpan) or not isinstance(target, MemorySpan):
        kinds = f"{type(source).__name__} to {type(target).__name__}"
        raise ValueError(f"staged moves from served files to memory, not {kinds}")  # noqa: TRY004 - see Mover.submit
    memory = contiguous_bytes(target.data)
    if source.size_bytes != len(memory):
        raise ValueError(f"{source.size_bytes} bytes of a served file and {len(memory)} bytes of memory")
    if source.offset < 0 or source.offset % ALIGN_BYTES or source.size_bytes % ALIGN_BYTES:
        raise ValueError(
            f"{source.size_bytes} bytes at {source.offset}: a served range starts and ends on {ALIGN_BYTES}"
        )
    if not memory.flags.writeable:
        raise ValueError("the target of a move must be writable")
    return source, memory


def _packed(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """As many in a row as one staging takes."""
    packed: list[_Piece] = []
    room = STAGED_BYTES_MAX
    for piece in pieces:
        if packed and (piece.source.size_bytes > room or len(packed) == RANGES_MAX):
            yield packed
            packed, room = [], STAGED_BYTES_MAX
        packed.append(piece)
        room -= piece.source.size_bytes
    if packed:
        yield packed
