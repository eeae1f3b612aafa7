"""Files with preadv and pwritev on a few threads: the path of every machine without GDS.

    file span <-> memory span (host: numpy or CPU tensor)

What is under way shares the disk and lands at about the same time. So `in_flight_bytes_max` is what keeps a disk busy and no
more: else the first bytes come later, and all are scattered in a row when nothing is left to read. And moves are cut into commands
of at most `command_bytes_max`: while one lands the others keep the disk. 16 threads are for small reads.
Buffers on huge pages doubled the rate (raw too): pinning and bios by 2 MiB instead of 4 KiB.

Reads go before writes (precedence.py). Each device has a line of its own (pool.py): one that hangs, or an NVMe-oF peer that does
not answer, holds up no other.

Faults it survives, each of them tested in tests/fault:
    EINTR                    the command is repeated
    short read or write      continued from the last whole 4 KiB page (O_DIRECT) or byte
    end of file, truncation  Unavailable: never a success that moved fewer bytes
    EIO, ENOSPC, EBADF ...   Unavailable, with the OSError chained; other moves of the batch not begun are skipped
    EINVAL under O_DIRECT    O_DIRECT is cleared on the descriptor, the command repeated buffered, and counted in fallbacks
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from flatcake_transport.errors import Unavailable
from flatcake_transport.layout import ALIGN_BYTES
from flatcake_transport.mover import FileSpan, MemorySpan, Move, MoverStats, Region
from flatcake_transport.movers.pool import Batch, Command, Commands
from flatcake_transport.paged import Bytes, contiguous_bytes

THREADS: Final = 16
COMMAND_BYTES_MAX: Final = 1 << 20
IN_FLIGHT_BYTES_MAX: Final = 8 << 20
FALLBACK_BUFFERED: Final = "EINVAL: buffered"


class PosixMover:
    """A `Mover` between session files and host memory. Thread-safe.

    Args:
        threads: commands in flight at most, to one device.
        command_bytes_max: a multiple of 4 KiB; larger moves become several commands.
        in_flight_bytes_max: of all commands under way to one device; a single larger one passes alone.
    """

    def __init__(
        self,
        *,
        threads: int = THREADS,
        command_bytes_max: int = COMMAND_BYTES_MAX,
        in_flight_bytes_max: int = IN_FLIGHT_BYTES_MAX,
    ) -> None:
        """Raises: ValueError: no threads, or commands that are not whole pages."""
        if threads < 1 or command_bytes_max < ALIGN_BYTES or command_bytes_max % ALIGN_BYTES:
            raise ValueError(f"{threads} threads and commands of {command_bytes_max} bytes: expected 1 and whole 4 KiB")
        self._command_bytes_max = command_bytes_max
        self._lines = Commands("posix", threads, in_flight_bytes_max)
        self._lock = threading.Lock()
        self._moves = self._commands = self._direct = self._bytes = self._failures = 0
        self._fallbacks: dict[str, int] = {}

    def register(self, region: Region) -> None:
        """Nothing to do: the kernel pins pages for each command."""

    def submit(self, moves: Sequence[Move]) -> Batch:
        """Start file <-> memory moves.

        Raises:
            ValueError: other kinds of spans, unequal sizes, device memory, or a direct span that is not on 4 KiB.
            Unavailable: closed.
        """
        commands: list[Command] = []
        for move in moves:
            commands += self._commands_of(move)
        batch = self._lines.submit(commands, yields=all(isinstance(move.target, FileSpan) for move in moves))
        with self._lock:
            self._moves += len(moves)
        return batch

    def _commands_of(self, move: Move) -> list[Command]:
        source, target = move.source, move.target
        if move.checks is not None:
            raise ValueError("posix takes no checksums: the memory mover does, where it gathers")
        if isinstance(source, FileSpan) and isinstance(target, MemorySpan):
            file, memory, command = source, contiguous_bytes(target.data), _preadv
            if not memory.flags.writeable:
                raise ValueError("the target of a move must be writable")
        elif isinstance(source, MemorySpan) and isinstance(target, FileSpan):
            file, memory, command = target, contiguous_bytes(source.data), _pwritev
        else:
            kinds = f"{type(source).__name__} to {type(target).__name__}"
            raise ValueError(f"posix moves between files and memory, not {kinds}")  # noqa: TRY004 - see Mover.submit
        if file.size_bytes != len(memory) or file.offset < 0:
            raise ValueError(f"{file.size_bytes} bytes at {file.offset} of a file and {len(memory)} bytes of memory")
        if file.direct and (file.offset % ALIGN_BYTES or file.size_bytes % ALIGN_BYTES):
            raise ValueError(f"a direct span starts and ends on {ALIGN_BYTES}: {file}")
        parts = (
            (at, memory[at : at + self._command_bytes_max]) for at in range(0, len(memory), self._command_bytes_max)
        )
        return [
            (file.device, len(part), partial(self._transfer, command, file.fd, file.offset + at, part, file.direct))
            for at, part in parts
        ]

    def _transfer(
        self, command: Callable[[int, Bytes, int], int], fd: int, offset: int, memory: Bytes, direct: bool
    ) -> None:
        """Move all of `memory`, by as many commands as it takes."""
        moved = commands = 0
        try:
            while moved < len(memory):
                commands += 1
                try:
                    count = command(fd, memory[moved:], offset + moved)
                except InterruptedError:
                    continue
                except OSError as error:
                    # A command beside us may have made it buffered since ours was refused.
                    if error.errno != errno.EINVAL or not (self._make_buffered(fd) or direct):
                        raise
                    direct = False
                    continue
                # A direct command continues only from a whole page; at the end of a file the last one may be partial.
                count = count // ALIGN_BYTES * ALIGN_BYTES if direct and moved + count < len(memory) else count
                if count <= 0:
                    break
                moved += count
        finally:
            with self._lock:
                self._commands += commands
                self._direct += commands if direct else 0
                self._bytes += moved
                self._failures += moved < len(memory)
        if moved < len(memory):
            raise Unavailable(f"{moved} of {len(memory)} bytes at {offset}: the file ended or took no more")

    def _make_buffered(self, fd: int) -> bool:
        """Clear O_DIRECT. False: it was not set, so EINVAL meant something else.

        The flag belongs to the open file description, so all who share it go on buffered: slower, never wrong.
        """
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if not flags & os.O_DIRECT:
            return False
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        with self._lock:
            self._fallbacks[FALLBACK_BUFFERED] = self._fallbacks.get(FALLBACK_BUFFERED, 0) + 1
        return True

    def stats(self) -> MoverStats:
        with self._lock:
            direct, commands = self._direct, self._commands
            path = "posix" if not commands else "posix+direct" if direct == commands else "posix+buffered"
            if 0 < direct < commands:
                path = "posix+mixed"
            return MoverStats(
                path=path,
                moves=self._moves,
                commands=commands,
                bytes_moved=self._bytes,
                failures=self._failures,
                fallbacks=dict(self._fallbacks),
            )

    def close(self) -> None:
        self._lines.close()


def _preadv(fd: int, memory: Bytes, offset: int) -> int:
    """The seam tests put faults into."""
    return os.preadv(fd, [memory.data], offset)


def _pwritev(fd: int, memory: Bytes, offset: int) -> int:
    """The seam tests put faults into."""
    return os.pwritev(fd, [memory.data], offset)
