"""Another node's memory, by one-sided gets: neither side's Python touches a byte.

    remote span -> memory span     get
    memory span -> remote span     put, and a flush of it: it rests when the peer's memory has it

Memory spans are in host memory, or on a CUDA device where this UCX knows CUDA. What was registered is given to UCX with its
handle; other memory works too, slower over RDMA. Moves are cut into pieces, so that a peer's silence is noticed early and
one large get does not fill the wire's queue. See ucx_endpoint.py for what holds when a peer dies.
"""

from __future__ import annotations

import bisect
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final

from flatcake_transport.errors import Unavailable
from flatcake_transport.mover import MemorySpan, Move, MoverStats, Region
from flatcake_transport.movers.ucx_endpoint import CHUNK_BYTES, Piece, UcxTransfer
from flatcake_transport.movers.ucx_lib import FLAGS, UcxLibrary, load_ucx
from flatcake_transport.movers.ucx_worker import PEER_TIMEOUT_S, Mapped, UcxWorker
from flatcake_transport.paged import contiguous_bytes, on_device
from flatcake_transport.remote import RemoteSpan

_CUDA: Final = 1 << FLAGS["UCS_MEMORY_TYPE_CUDA"]


class UcxMover:
    """A `Mover` between remote memory and memory here. Thread-safe.

    Args:
        library: what `load_ucx` gives; by default it is asked.
        options: UCX options without the prefix, over our defaults and under the user's UCX_*.
        peer_timeout_s: a peer that answers nothing for so long is an error.
        chunk_bytes: a move is cut into gets of at most this size.
    """

    def __init__(
        self,
        library: UcxLibrary | None = None,
        *,
        options: Mapping[str, str] | None = None,
        peer_timeout_s: float = PEER_TIMEOUT_S,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Raises: Unavailable: no UCX here, or it does not start. ValueError: chunks of no bytes."""
        if chunk_bytes < 1:
            raise ValueError(f"chunk_bytes is {chunk_bytes}: expected 1 or more")
        self._worker = UcxWorker(library or load_ucx(), options=options, peer_timeout_s=peer_timeout_s)
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self._moves = 0
        self._regions = _Regions()

    def register(self, region: Region) -> None:
        """Register memory that gets will land in. One whose `keep` is a weak reference is given back when it goes.

        Raises: Unavailable: UCX or a card refuses it (locked memory, most often), or the mover is closed.
        """
        weak = isinstance(region.keep, weakref.ref)
        owner = region.keep() if isinstance(region.keep, weakref.ref) else region.keep
        if not region.size_bytes or (weak and owner is None) or not self.takes(region.device):
            return
        mapped = self._worker.map(region.address, region.size_bytes, device=region.device)
        self._regions.add(region.address, region.size_bytes, mapped)
        if weak:
            weakref.finalize(owner, _drop, self._regions, self._worker, region.address).atexit = False
        else:
            self._regions.keep(region)

    def takes(self, device: str) -> bool:
        """Whether gets may land in memory of that device ("cpu", "cuda:0")."""
        return device == "cpu" or (device.startswith("cuda") and bool(self._worker.memory_types & _CUDA))

    def submit(self, moves: Sequence[Move]) -> UcxTransfer:
        """Start the moves; those of one call that go to one peer fail together when it dies.

        Raises:
            ValueError: other kinds of spans, unequal sizes, beyond the remote region, read-only or scattered memory.
            Unavailable: closed.
        """
        spans = [self._checked(move) for move in moves]
        cut = [(remote, range(0, remote.size_bytes, self._chunk_bytes), put) for remote, _, _, put in spans]
        flushes = {remote.memory.worker for remote, steps, put in cut if put and steps}
        transfer = UcxTransfer(sum(len(steps) for _, steps, _ in cut) + len(flushes), moves)
        by_peer: dict[bytes, list[Piece]] = {}
        for remote, local, device, put in spans:
            pieces = by_peer.setdefault(remote.memory.worker, [])
            memh, base = self._regions.find(local, remote.size_bytes), remote.memory.base + remote.offset
            for at in range(0, remote.size_bytes, self._chunk_bytes):
                size = min(self._chunk_bytes, remote.size_bytes - at)
                pieces.append(Piece(transfer, local + at, size, base + at, remote.memory.rkey, memh, device, put))
        for peer in flushes:
            by_peer[peer].append(Piece(transfer, 0, 0, 0, b"", None, False, True))
        if self._worker.closed:
            raise Unavailable("the ucx mover is closed")
        for peer, pieces in by_peer.items():
            told_s = min(remote.memory.told_s for remote, _, _, _ in spans if remote.memory.worker == peer)
            self._worker.send(peer, pieces, told_s)
        with self._lock:
            self._moves += len(moves)
        return transfer

    def _checked(self, move: Move) -> tuple[RemoteSpan, int, bool, bool]:
        """The remote span, the local address, whether that is on a device, and whether it is a put."""
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
        return remote, *self._local(memory.data, writable=not put), put

    def _local(self, data: Any, *, writable: bool) -> tuple[int, bool]:
        if on_device(data):
            if not self.takes(str(data.device)):
                raise ValueError(f"this UCX cannot move memory of {data.device}: use a window in host memory")
            if not data.is_contiguous() or data.element_size() != 1:
                raise ValueError("a memory span on a device is contiguous bytes")
            return int(data.data_ptr()), True
        host = contiguous_bytes(data)
        if writable and not host.flags.writeable:
            raise ValueError("the target of a move must be writable")
        return int(host.ctypes.data), False

    def forget(self, worker: bytes, reason: str) -> None:
        """A peer is known to be gone: what moves there fails at once, and its connection is closed."""
        self._worker.forget(worker, reason)

    def endpoints(self) -> int:
        """Connections that are open, or being closed."""
        return self._worker.endpoints()

    def stats(self) -> MoverStats:
        counts = self._worker.counts()
        with self._lock:
            return MoverStats(
                path=f"ucx-{'.'.join(map(str, self._worker.library.version))}-{self._worker.library.origin}",
                moves=self._moves,
                commands=counts.commands,
                bytes_moved=counts.bytes_moved,
                failures=counts.failures,
                fallbacks={"peers lost": counts.endpoints_failed} if counts.endpoints_failed else {},
            )

    def close(self) -> None:
        self._worker.close()


class _Regions:
    """Registered memory by address. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may run within
        self._starts: list[int] = []
        self._by_start: dict[int, tuple[int, Mapped]] = {}
        self._kept: list[Region] = []

    def add(self, address: int, size_bytes: int, mapped: Mapped) -> None:
        with self._lock:
            if address not in self._by_start:
                bisect.insort(self._starts, address)
            self._by_start[address] = (size_bytes, mapped)

    def keep(self, region: Region) -> None:
        self._kept.append(region)

    def find(self, address: int, size_bytes: int) -> int | None:
        """The handle of the region that holds these bytes."""
        with self._lock:
            at = bisect.bisect_right(self._starts, address) - 1
            if at < 0:
                return None
            start = self._starts[at]
            region_bytes, mapped = self._by_start[start]
            return mapped.handle if address + size_bytes <= start + region_bytes else None

    def take(self, address: int) -> Mapped | None:
        with self._lock:
            entry = self._by_start.pop(address, None)
            if entry is not None:
                self._starts.remove(address)
            return entry[1] if entry else None


def _drop(regions: _Regions, worker: UcxWorker, address: int) -> None:
    mapped = regions.take(address)
    if mapped is not None:
        worker.unmap(mapped)
