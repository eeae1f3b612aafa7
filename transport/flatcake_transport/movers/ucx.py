"""Another node's memory, by one-sided gets: neither side's Python touches a byte.

    remote span -> memory span     get
    memory span -> remote span     put, and a flush of it: it rests when the peer's memory has it

UCX can end the process that it runs in, so it does not run in ours: a process of its own gets into windows of memory that it shares
with us (`window`), one message a submit and peer. Its death is a failed transfer, and it is started again (ucx_link.py). Other host
memory works too, through a window that is copied from. Memory of a device does not: the process is not there.
"""

from __future__ import annotations

import bisect
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from flatcake_transport.errors import Overloaded, Unavailable
from flatcake_transport.mover import MemorySpan, Move, MoverStats, Region
from flatcake_transport.movers.ucx_endpoint import CHUNK_BYTES
from flatcake_transport.movers.ucx_link import ReaderLink
from flatcake_transport.movers.ucx_words import PIECES_MAX, PieceOrder, Place
from flatcake_transport.movers.ucx_worker import PEER_TIMEOUT_S
from flatcake_transport.paged import contiguous_bytes, on_device
from flatcake_transport.remote import RemoteMemory, RemoteSpan
from flatcake_transport.window import HUGE_PAGE_BYTES, touched


class UcxTransfer:
    """Orders under way: a `Transfer`. Both ends of the moves are held until none of them touches memory any more.

    Args:
        orders: how many must rest.
        landed: called when all have landed, before anybody hears of it.
        keep: what is held.
    """

    __slots__ = ("_cancel", "_error", "_keep", "_landed", "_left", "_lock", "_rested")

    def __init__(self, orders: int, landed: Callable[[], None], keep: object) -> None:
        self._left = orders
        self._landed: Callable[[], None] | None = landed
        self._keep: object = keep
        self._cancel: list[Callable[[], None]] = []
        self._error = ""
        self._lock = threading.Lock()
        self._rested = threading.Event()
        if not orders:
            self._rested.set()

    def done(self) -> bool:
        return self._rested.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """See `Transfer.wait`."""
        if not self._rested.wait(timeout_s):
            raise TimeoutError("the gets have not landed yet")
        if self._error:
            raise Unavailable(self._error)

    def cancel(self) -> None:
        """Begin no further piece; those flying land. It then rests as failed."""
        for each in self._cancel:
            each()

    def cancel_by(self, act: Callable[[], None]) -> None:
        self._cancel.append(act)

    def rest(self, error: str) -> None:
        """One of its orders rests."""
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            if self._left:
                return
        if not self._error and self._landed is not None:
            self._landed()
        self._keep = self._landed = None
        self._rested.set()


class UcxMover:
    """A `Mover` between remote memory and memory here. Thread-safe. Its process is started with the first move, or by `start`.

    Args:
        options: UCX options without the prefix, over our defaults and under the user's UCX_*.
        peer_timeout_s: a peer that answers nothing for so long is an error; so is the process.
        chunk_bytes: a move is cut into gets of at most this size, so that a silence is noticed early.
    """

    def __init__(
        self,
        *,
        options: Mapping[str, str] | None = None,
        peer_timeout_s: float = PEER_TIMEOUT_S,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Raises: ValueError: chunks of no bytes."""
        if chunk_bytes < 1:
            raise ValueError(f"chunk_bytes is {chunk_bytes}: expected 1 or more")
        self._link = ReaderLink(options or {}, peer_timeout_s, chunk_bytes)
        self._windows = _Windows(self._link)
        self._lock = threading.Lock()
        self._moves = 0
        weakref.finalize(self, self._link.end)

    @property
    def up(self) -> bool:
        """False where there is no UCX, and for a moment after its process died: then moves fail at once."""
        return self._link.up

    @property
    def process_id(self) -> int:
        """Of the process that moves; 0: none is up."""
        return self._link.process_id

    def start(self) -> None:
        """Have the process started. Nobody waits for it: moves do, by themselves."""
        self._link.start()

    def window(self, size_bytes: int) -> NDArray[np.uint8]:
        """Memory that is moved to and from without a copy, every page touched; on huge pages where shared memory has them.

        It is freed with its last view, and outlives the mover. Raises: Overloaded: there is no such memory.
        """
        return self._windows.make(size_bytes)

    def register(self, region: Region) -> None:
        """Only windows are known before they are used."""

    def submit(self, moves: Sequence[Move]) -> UcxTransfer:
        """Start the moves; those of one call that go to one peer fail together when it dies.

        Raises:
            ValueError: other kinds of spans, unequal sizes, beyond the remote region, read-only, scattered or device memory.
            Unavailable: closed. Overloaded: no memory for a copy.
        """
        checked = [_checked(move) for move in moves]
        if self._link.closed:
            raise Unavailable("the ucx mover is closed")
        lent: list[tuple[NDArray[np.uint8], NDArray[np.uint8], bool]] = []
        by_peer: dict[tuple[RemoteMemory, bool], list[Place]] = {}
        for remote, local, put in checked:
            if not remote.size_bytes:
                continue
            place = self._windows.find(local)
            if place is None:
                window = self.window(remote.size_bytes)
                place = self._windows.find(window)
                assert place is not None
                if put:
                    window[:] = local
                lent.append((window, local, put))
            pieces = by_peer.setdefault((remote.memory, put), [])
            pieces.append((*place, remote.size_bytes, remote.memory.base + remote.offset))
        orders = [
            PieceOrder(0, memory.worker, memory.rkey, put, pieces[at : at + PIECES_MAX])
            for (memory, put), pieces in by_peer.items()
            for at in range(0, len(pieces), PIECES_MAX)
        ]

        def landed() -> None:
            for window, local, put in lent:
                if not put:
                    local[:] = window

        transfer = UcxTransfer(len(orders), landed, (moves, lent))
        for order in orders:
            order_id = self._link.order(order, transfer.rest)
            transfer.cancel_by(lambda order_id=order_id: self._link.cancel(order_id))  # type: ignore[misc]
        with self._lock:
            self._moves += len(moves)
        return transfer

    def stats(self) -> MoverStats:
        counts = self._link.counts()
        fallbacks = {"peers lost": counts.peers_lost, "its process died": counts.deaths}
        return MoverStats(
            path=f"ucx-{self._link.library or 'not-started'}",
            moves=self._moves,
            commands=counts.commands,
            bytes_moved=counts.bytes_moved,
            failures=counts.failures,
            fallbacks={why: count for why, count in fallbacks.items() if count},
        )

    def close(self) -> None:
        self._link.close()


def _checked(move: Move) -> tuple[RemoteSpan, NDArray[np.uint8], bool]:
    """The remote span, the memory here, and whether it is a put."""
    source, target = move.source, move.target
    if move.checks is not None:
        raise ValueError("ucx takes no checksums: the memory mover does, where it gathers")
    if isinstance(source, RemoteSpan) and isinstance(target, MemorySpan):
        remote, memory, put = source, target, False
    elif isinstance(source, MemorySpan) and isinstance(target, RemoteSpan):
        remote, memory, put = target, source, True
    else:
        kinds = f"{type(source).__name__} to {type(target).__name__}"
        raise ValueError(f"ucx moves between remote memory and memory here, not {kinds}")  # noqa: TRY004 - see Mover
    if remote.size_bytes != memory.size_bytes:
        raise ValueError(f"{remote.size_bytes} bytes of remote memory and {memory.size_bytes} bytes of memory")
    if remote.offset < 0 or remote.offset + remote.size_bytes > remote.memory.size_bytes:
        raise ValueError(f"{remote.size_bytes} bytes at {remote.offset} of a region of {remote.memory.size_bytes}")
    if on_device(memory.data):
        raise ValueError(f"ucx does not move memory of {memory.data.device}: use a window in host memory")
    host: NDArray[np.uint8] = contiguous_bytes(memory.data)
    if not put and not host.flags.writeable:
        raise ValueError("the target of a move must be writable")
    return remote, host, put


class _Windows:
    """Shared memory by address. Thread-safe."""

    def __init__(self, link: ReaderLink) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._gone: deque[int] = deque()  # starts that are to be forgotten: finalizers take no lock
        self._starts: list[int] = []
        self._by_start: dict[int, tuple[int, int]] = {}  # -> id, size

    def make(self, size_bytes: int) -> NDArray[np.uint8]:
        mapped_bytes = -(-max(size_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        if mapped_bytes > HUGE_PAGE_BYTES:
            mapped_bytes = -(-mapped_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        try:
            fd = os.memfd_create("flatcake-window", os.MFD_CLOEXEC)
            try:
                os.ftruncate(fd, mapped_bytes)
                mapping = mmap.mmap(fd, mapped_bytes)
            except OSError:
                os.close(fd)
                raise
        except OSError as error:
            raise Overloaded(
                f"no {size_bytes} bytes of memory to share with the process that reads: {error}"
            ) from error
        window = touched(mapping, size_bytes)
        address, window_id = int(window.ctypes.data), self._link.add_window(fd, mapped_bytes)
        with self._lock:
            self._forget_gone()
            bisect.insort(self._starts, address)
            self._by_start[address] = window_id, mapped_bytes
        # What all views keep alive goes before the mapping: nobody else has the address yet.
        weakref.finalize(window.base, self._drop, address, window_id).atexit = False
        return window

    def find(self, memory: NDArray[np.uint8]) -> tuple[int, int] | None:
        """The window that holds these bytes, and where in it they are."""
        address = int(memory.ctypes.data)
        with self._lock:
            self._forget_gone()
            at = bisect.bisect_right(self._starts, address) - 1
            if at < 0:
                return None
            start = self._starts[at]
            window_id, size_bytes = self._by_start[start]
            return (window_id, address - start) if address + len(memory) <= start + size_bytes else None

    def _drop(self, address: int, window_id: int) -> None:
        """A finalizer: it may run anywhere, also within `find`, and in a forked child where a lock's holder is not."""
        self._gone.append(address)
        self._link.drop_window(window_id)

    def _forget_gone(self) -> None:
        while self._gone:
            address = self._gone.popleft()
            del self._by_start[address]
            self._starts.remove(address)
