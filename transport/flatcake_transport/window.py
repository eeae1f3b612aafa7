"""Bounded staging memory, and the stream of reads that a restore drinks from.

A `StagingPool` hands out windows: some buffers of one size, aligned and pre-faulted. It holds at most `bytes_max`; who asks when
all are out waits, in order of asking, until its deadline. A full window makes the next read wait; nothing is cancelled for lack
of staging. Windows are touched when first made (a first touch runs at 0.7 GB/s, so never under a read) and kept for reuse, the one
that came back last first: it is still in the processor's cache.

A `ReadStream` keeps the buffers busy: while the caller scatters one, the others are being filled. A buffer is large, so that ranges of
several layers are one read, but what it brings is submitted in parts, and each is scattered when it has landed:

    time ->    buffer 0: | read a | read b | read c |                    | read g | read h ..
                                  | scatter a | scatter b | scatter c |           | scatter g ..
               buffer 1:                            | read d | read e | read f |
                                                             | scatter d | scatter e | scatter f |

So only the first part and the last scatter of a restore stand alone. Invariants: bytes have one user at a time: the mover from submit
until their transfer rests, then the caller until it asks for the next step. A window goes back to the pool only when no
transfer touches it any more; until then it stays counted as out. Also one whose stream was lost instead of closed: else a few
lost restores would leave no staging to all that follow.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from flatcake_transport.errors import FlatCakeError, Overloaded
from flatcake_transport.mover import FileSpan, MemorySpan, Move, Mover, Span, Transfer
from flatcake_transport.plan import Step

if TYPE_CHECKING:
    import torch

HUGE_PAGE_BYTES: Final = 2 << 20
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; the constant is not in every Python's mmap
_LINGER_POLL_S: Final = 0.01  # how long a waiter watches one transfer before it looks at all windows again
_LIBC: Final = ctypes.CDLL(None)  # once: looking functions up anew costs ten calls
_AT_EMPTY_PATH: Final = 0x1000  # linux/fcntl.h, linux/stat.h
_AT_STATX_DONT_SYNC: Final = 0x4000
_STATX_TYPE: Final = 1
_STATX_BYTES: Final = 256
# Bytes of a step that land together: some 1.5 ms of reading, long beside what a command and a wake-up cost.
PART_BYTES: Final = 4 << 20
_LOOK_S: Final = 0.1  # how long one waits for a word; a lost window gives none


def touched(mapping: mmap.mmap, size_bytes: int, border_bytes: int = 1) -> NDArray[np.uint8]:
    """Part of a fresh mapping, from the first such border, on huge pages where there are some, every page touched.

    The mapping goes with the last view. Raises: OSError: there is no such memory, which touching would end the process for.
    """
    whole = np.frombuffer(mapping, np.uint8)
    start = -whole.ctypes.data % border_bytes
    buffer = whole[start : start + size_bytes]
    with contextlib.suppress(OSError):  # a kernel without transparent huge pages: small pages do
        mapping.madvise(mmap.MADV_HUGEPAGE)
    try:
        mapping.madvise(_MADV_POPULATE_WRITE, start, size_bytes)
    except OSError as error:
        if error.errno != errno.EINVAL:  # an older kernel does not know the word
            raise
        buffer[:: mmap.PAGESIZE] = 0
    return buffer


def aligned_buffer(size_bytes: int) -> NDArray[np.uint8]:
    """Host memory on a 2 MiB border, on huge pages where there are some, every page touched. Freed with its last view."""
    # Private: shared anonymous memory is shmem, which gets huge pages only where the administrator enabled them for it.
    mapping = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return touched(mapping, size_bytes, HUGE_PAGE_BYTES)


def device_buffer(size_bytes: int, device: str) -> torch.Tensor:
    """Memory on a device, for windows that files are read into directly. Raises: RuntimeError: the device has no room."""
    import torch

    return torch.empty(size_bytes, dtype=torch.uint8, device=device)


@dataclass(frozen=True, slots=True)
class StagingStats:
    bytes_max: int
    bytes_made: int  # memory that exists, in use or not
    windows_out: int
    windows_lingering: int  # given back while a transfer still ran
    waits: int  # times somebody had to wait
    refusals: int  # waits that ended at their deadline


class Window:
    """Buffers of one size. Belongs to one caller until `close`."""

    __slots__ = ("_pool", "buffers")

    def __init__(self, pool: StagingPool, buffers: Sequence[Any]) -> None:
        self._pool: StagingPool | None = pool
        self.buffers = buffers  # 1-d uint8: numpy on the host, or what the pool's `allocate` makes

    @property
    def buffer_bytes(self) -> int:
        return len(self.buffers[0])

    def close(self, transfers: Sequence[Transfer] = ()) -> None:
        """Give the window back once all `transfers` rest; returns at once. Twice is fine."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool._give(self.buffers, [t for t in transfers if not t.done()])  # noqa: SLF001 - one idea in two classes

    def lose(self, transfers: Sequence[Transfer]) -> None:
        """`close` for finalizers: takes no lock, and the pool hears of it when it is next asked for a window."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool._lost.append((self.buffers, list(transfers)))  # noqa: SLF001

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class StagingPool:
    """Windows of `buffers` x `buffer_bytes`, at most `bytes_max` in all. Thread-safe, first come first served.

    Args:
        bytes_max: bound on staging memory; at least one window.
        buffer_bytes: rounded up to 4 KiB.
        buffers: of each window. One: nothing is read while the caller scatters.
        allocate: makes a window's memory: `aligned_buffer`, or e.g. a CUDA allocation for GDS. It may also pin what it makes.
    """

    def __init__(
        self,
        bytes_max: int,
        buffer_bytes: int,
        buffers: int = 2,
        *,
        allocate: Callable[[int], Any] = aligned_buffer,
    ) -> None:
        """Raises: ValueError: not even one window fits `bytes_max`."""
        self.buffer_bytes = -(-buffer_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._buffers = buffers
        self._windows_max = bytes_max // self._window_bytes if buffer_bytes > 0 and buffers > 0 else 0
        if self._windows_max < 1:
            raise ValueError(f"staging of {bytes_max} bytes cannot hold a window of {buffers} x {buffer_bytes}")
        self._bytes_max = bytes_max
        self._allocate = allocate
        self._changed = threading.Condition()
        self._free: list[Sequence[Any]] = []
        self._lingering: list[tuple[Sequence[Any], list[Transfer]]] = []
        self._lost: deque[tuple[Sequence[Any], list[Transfer]]] = deque()
        self._waiting: deque[object] = deque()
        self._made = self._out = self._waits = self._refusals = 0

    def open_window(self, timeout_s: float, wanted: Callable[[], bool] = lambda: True) -> Window:
        """Take a window, waiting until one is free.

        Raises: Overloaded: none became free in `timeout_s`, or while `wanted`; or there is no memory for one. 0 asks once.
        """
        deadline = time.monotonic() + timeout_s
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                waited = False
                while self._waiting[0] is not ticket or not self._ready():
                    left = deadline - time.monotonic()
                    if left <= 0 or not wanted():
                        self._refusals += 1
                        raise Overloaded(f"no staging window was free within {timeout_s:g} s")
                    if not waited:
                        waited, self._waits = True, self._waits + 1
                    if self._lingering and self._waiting[0] is ticket:
                        self._await_oldest(min(left, _LINGER_POLL_S))
                    else:
                        self._changed.wait(min(left, _LOOK_S))
                self._out += 1
                buffers = self._free.pop() if self._free else None
                if buffers is None:
                    self._made += 1
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        return Window(self, buffers if buffers is not None else self._make())

    def _await_oldest(self, timeout_s: float) -> None:
        """Wait, without the lock, until the window given back first has come to rest; a free one is looked for after.

        Only for who is next: nobody else takes what has come to rest, and would find it resting for ever, lock in hand.
        """
        transfer = next((t for t in self._lingering[0][1] if not t.done()), None)
        if transfer is None:
            return
        self._changed.release()
        try:
            with contextlib.suppress(TimeoutError, FlatCakeError):  # who submitted it is told
                transfer.wait(timeout_s)
        finally:
            self._changed.acquire()

    def _ready(self) -> bool:
        """Whether a window exists or may be made; reclaims those whose transfers have come to rest meanwhile."""
        while self._lost:
            self._lingering.append(self._lost.popleft())
        moving = []
        for buffers, transfers in self._lingering:  # each is asked once: one that lands meanwhile is seen next time
            if all(t.done() for t in transfers):
                self._free.append(buffers)
                self._out -= 1
            else:
                moving.append((buffers, transfers))
        self._lingering = moving
        return bool(self._free) or self._made < self._windows_max

    @property
    def _window_bytes(self) -> int:
        return self._buffers * self.buffer_bytes

    def _make(self) -> Sequence[Any]:
        """Outside the lock: touching fresh memory takes tens of milliseconds."""
        try:
            whole, size_bytes = self._allocate(self._window_bytes), self.buffer_bytes
            return [whole[n * size_bytes : (n + 1) * size_bytes] for n in range(self._buffers)]
        except BaseException as error:
            with self._changed:
                self._made -= 1
                self._out -= 1
                if self._made and isinstance(error, OSError | Overloaded):
                    self._windows_max = self._made  # there is no room for more: those that are there are waited for
                self._changed.notify_all()
            if isinstance(error, OSError):
                raise Overloaded(f"no memory for a staging window of {self._window_bytes} bytes: {error}") from error
            raise

    def _give(self, buffers: Sequence[Any], transfers: list[Transfer]) -> None:
        with self._changed:
            if transfers:
                self._lingering.append((buffers, transfers))
            else:
                self._free.append(buffers)
                self._out -= 1
            self._changed.notify_all()

    def stats(self) -> StagingStats:
        with self._changed:
            self._ready()
            return StagingStats(
                bytes_max=self._bytes_max,
                bytes_made=self._made * self._window_bytes,
                windows_out=self._out,
                windows_lingering=len(self._lingering),
                waits=self._waits,
                refusals=self._refusals,
            )


def device_number(fd: int) -> int:
    """Of the file system that a file lies on, or of the device that it is; 0: not known.

    Taken from what the kernel knows: `fstat` may wait for a file server, and this is for not waiting.
    """
    found = ctypes.create_string_buffer(_STATX_BYTES)
    try:
        if _LIBC.statx(fd, b"", _AT_EMPTY_PATH | _AT_STATX_DONT_SYNC, _STATX_TYPE, found):
            return 0
    except AttributeError:  # an old libc
        return 0
    (mode,) = struct.unpack_from("=H", found, 28)
    major, minor = struct.unpack_from("=II", found, 128 if stat.S_ISBLK(mode) else 136)
    return os.makedev(major, minor)


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A descriptor to read from. `direct`: it was opened O_DIRECT. `device`: as a `FileSpan` has it."""

    fd: int
    direct: bool
    device: int = 0

    def span(self, offset: int, size_bytes: int) -> FileSpan:
        return FileSpan(self.fd, offset, size_bytes, self.direct, self.device)


class Readable(Protocol):
    """Whatever a stream reads from: an open file, or another node's memory."""

    def span(self, offset: int, size_bytes: int) -> Span: ...


class ReadStream:
    """Reads steps into the buffers of a window, as many ahead of the caller as there are others. For one thread at a time.

    The stream borrows `files` and `window` until `close`; it closes the window, never the files. After an error the stream
    gives no further step.
    """

    def __init__(
        self,
        steps: Iterator[Step],
        files: Mapping[int, Readable],
        mover: Mover,
        window: Window,
        *,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self._steps = steps
        self._files = files
        self._mover = mover
        self._window = window
        self._coming: Step | None = None  # planned while those before it are read
        self._part_bytes = part_bytes
        self._flying: deque[tuple[Step, int, deque[tuple[int, Transfer]]]] = (
            deque()
        )  # parts: where each ends, and its reads
        self._landed = 0  # bytes of the first step that flies
        self._idle: deque[int] = deque(range(len(window.buffers)))
        self._held: int | None = None  # the buffer the caller is looking at
        self.reads = 0
        self.bytes_read = 0
        try:
            self._coming = next(steps, None)
            self._fill()
        except BaseException:
            self.close()
            raise

    @property
    def bytes_left(self) -> int | None:
        """What has not landed yet, once the last read is under way; None before."""
        if self._coming is not None:
            return None
        return sum(step.size_bytes for step, _, _ in self._flying) - self._landed

    @property
    def landed(self) -> bool:
        """Whether `advance` would return at once."""
        return self._flying[0][2][0][1].done() if self._flying else self._coming is None

    def _fill(self) -> None:
        while self._idle and self._coming is not None:
            step = self._coming
            index = self._idle.popleft()
            parts: deque[tuple[int, Transfer]] = deque()
            self._flying.append((step, index, parts))
            for end, moves in self._parts(step, self._window.buffers[index]):
                parts.append((end, self._mover.submit(moves)))
            self.reads += len(step.reads)
            self.bytes_read += step.size_bytes
            self._coming = next(self._steps, None)

    def _parts(self, step: Step, buffer: Any) -> Iterator[tuple[int, list[Move]]]:
        """A step's reads, in order of where they land, cut into parts, and where what a part brings ends."""
        moves: list[Move] = []
        begin = 0  # of the part
        for read in step.reads:
            at, last = read.target, read.target + read.size_bytes
            while at < last:
                end = min(last, begin + self._part_bytes)
                source = self._files[read.file].span(read.offset + at - read.target, end - at)
                moves.append(Move(source, MemorySpan(buffer[at:end])))
                at = end
                if at - begin == self._part_bytes:
                    yield at, moves
                    moves, begin = [], at
        if moves:
            yield step.size_bytes, moves

    def advance(self, timeout_s: float | None = None) -> tuple[Step, Any, int] | None:
        """The next step, the buffer for its bytes, and up to where they are there; None after the last step.

        A step comes once for each of its parts, or for several that have landed; the last time it is whole. The bytes that are there may
        be read until the next call of `advance` or `release` after that. Calling again after TimeoutError goes on.

        Raises:
            TimeoutError: the reads have not landed in `timeout_s`.
            Unavailable: bytes could not be read.
        """
        self.release()
        if not self._flying:
            return None
        step, index, parts = self._flying[0]
        end, transfer = parts[0]
        transfer.wait(timeout_s)
        parts.popleft()
        while parts and parts[0][1].done():  # it is scattered along, by several cores
            end, transfer = parts[0]
            transfer.wait()
            parts.popleft()
        self._landed = end
        if not parts:
            self._flying.popleft()
            self._held, self._landed = index, 0
        return step, self._window.buffers[index], end

    def release(self) -> None:
        """The caller is done with the buffer of the last `advance`: it is filled with a later step at once."""
        if self._held is not None:
            self._idle.append(self._held)
            self._held = None
            self._fill()

    def close(self, transfers: Sequence[Transfer] = ()) -> None:
        """Give the window back when reads in flight, and the caller's own `transfers` on it, rest. Twice is fine."""
        self._held, self._coming, self._steps = None, None, iter(())
        self._idle.clear()
        flying = self._transfers()
        self._flying.clear()
        self._window.close([*flying, *transfers])

    def __del__(self) -> None:
        # Not closed: whoever had it lost it. Nothing is there to lose if `__init__` was given nonsense.
        if hasattr(self, "_flying"):
            self._window.lose(self._transfers())

    def _transfers(self) -> list[Transfer]:
        return [transfer for _, _, parts in self._flying for _, transfer in parts]
