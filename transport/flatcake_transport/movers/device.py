"""Copies with an end on an accelerator, on a side stream of their own. Part of the memory mover.

    host memory -> device memory -> index_copy_ into paged slots         (restore: arena or window to the engine)
    paged slots -> index_select  -> device memory -> host memory         (store)

The side stream first waits for the caller's current stream, so work queued on the pages before `submit` is finished before
we touch them; `wait` returns only after the copies' event, so any work queued after it sees them. Host memory that was
registered is pinned with cudaHostRegister and copied by DMA; other memory is copied through the driver's staging, slower
and not asynchronous, and counted in `fallbacks`. Staging on the device is one chunk of at most CHUNK_BYTES at a time: freed
and taken again in stream order by torch's caching allocator.

What is registered may be given back while the mover lives: the arena of a daemon that was restarted, staging that grew. A
region whose `keep` is a weak reference is unpinned just before its memory goes. If it were not, the address could be mapped
anew, and a DMA to it would move the pages that were there before.

Constructed with a CPU device, the same code runs without streams: that is how it is tested where no GPU is.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from flatcake_transport.errors import Unavailable
from flatcake_transport.mover import MemorySpan, Move, MoverStats, PagedSpan, Region
from flatcake_transport.paged import Bytes, contiguous_bytes, gather_tensor, is_tensor, scatter_tensor

if TYPE_CHECKING:
    import torch

CHUNK_BYTES: Final = 64 << 20
_HOST_REGISTER_PORTABLE: Final = 1
_HOST_REGISTER_READ_ONLY: Final = 8
_POLL_S: Final = 50e-6
UNPINNED: Final = "host memory is not pinned"


class DeviceCopies:
    """Copies to and from one device. Thread-safe."""

    def __init__(self, device: torch.device, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        import torch

        self._torch: Any = torch
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._stream = self._torch.cuda.Stream(device) if device.type == "cuda" else None
        self._lock = threading.Lock()
        self._moves = self._commands = self._bytes = self._failures = 0
        self._fallbacks: dict[str, int] = {}
        self._pinned: dict[int, Region] = {}  # by address

    def register(self, region: Region) -> None:
        """Pin host memory. What cannot be pinned is counted and still works."""
        weak = isinstance(region.keep, weakref.ref)
        owner = region.keep() if isinstance(region.keep, weakref.ref) else region.keep
        if self._stream is None or region.device != "cpu" or (weak and owner is None):
            return
        runtime = self._torch.cuda.cudart()
        for flags in (_HOST_REGISTER_PORTABLE, _HOST_REGISTER_PORTABLE | _HOST_REGISTER_READ_ONLY):
            code = int(runtime.cudaHostRegister(region.address, region.size_bytes, flags))
            if code == 0:
                self._pinned[region.address] = region
                if weak:
                    weakref.finalize(owner, self._unpin, region.address).atexit = False
                return
        self._count(f"cudaHostRegister: {code}")

    def submit(self, moves: Sequence[Move]) -> DeviceTransfer:
        """Queue the copies. Spans were checked. Raises: ValueError: paged host memory with a device's memory."""
        event = None
        keep: list[Any] = [moves]
        try:
            with self._lock, self._in_stream():
                for move in moves:
                    self._copy(move, keep)
                if self._stream is not None:
                    event = self._torch.cuda.Event(blocking=True)
                    event.record(self._stream)
        except RuntimeError as error:  # torch reports every CUDA error as one
            with self._lock:
                self._failures += 1
            self._synchronize()
            raise Unavailable(f"a copy on {self._device} failed: {error}") from error
        with self._lock:
            self._moves += len(moves)
            self._bytes += sum(move.source.size_bytes for move in moves)
        return DeviceTransfer(event, keep)

    @contextlib.contextmanager
    def _in_stream(self) -> Any:
        if self._stream is None:
            yield
            return
        cuda = self._torch.cuda
        self._stream.wait_stream(cuda.current_stream(self._device))
        with cuda.device(self._device), cuda.stream(self._stream):
            yield

    def _copy(self, move: Move, keep: list[Any]) -> None:
        source, target = move.source, move.target
        if isinstance(source, MemorySpan) and isinstance(target, MemorySpan):
            self._tensor(target.data).copy_(self._tensor(source.data), non_blocking=True)
            self._commands += 1
            return
        span = target if isinstance(target, PagedSpan) else source
        memory = source if isinstance(source, MemorySpan) else target
        assert isinstance(span, PagedSpan)
        assert isinstance(memory, MemorySpan)
        if not is_tensor(span.pages) or span.pages.device != self._device:
            raise ValueError(f"paged slots in host memory and memory on {self._device}: move through host memory")
        data = self._tensor(memory.data)
        slots = self._torch.from_numpy(span.slots.copy()).to(self._device, non_blocking=True)
        keep.append(slots)
        blocks = max(1, self._chunk_bytes // span.plane_bytes)
        for at in range(0, len(span.slots), blocks):
            part = data[at * span.plane_bytes : (at + blocks) * span.plane_bytes]
            if span is target:
                scatter_tensor(part.to(self._device, non_blocking=True), span.pages, slots[at : at + blocks])
            elif part.device == self._device:
                gather_tensor(span.pages, slots[at : at + blocks], part)
            else:
                staged = self._torch.empty_like(part, device=self._device)
                gather_tensor(span.pages, slots[at : at + blocks], staged)
                part.copy_(staged, non_blocking=True)
            self._commands += 1

    def _tensor(self, data: Any) -> torch.Tensor:
        tensor: torch.Tensor
        if is_tensor(data):
            tensor = data
        else:
            host = contiguous_bytes(data)
            # Torch knows no read-only tensors and warns of every one: an arena mapped for reading is shown as writable,
            # which is never used, for only a target is written to and targets were checked.
            tensor = self._torch.from_numpy(host if host.flags.writeable else np.asarray(_Writable(host)))
        if self._stream is not None and tensor.device.type == "cpu" and not tensor.is_pinned():
            self._fallbacks[UNPINNED] = self._fallbacks.get(UNPINNED, 0) + 1
        return tensor

    def _count(self, reason: str) -> None:
        with self._lock:
            self._fallbacks[reason] = self._fallbacks.get(reason, 0) + 1

    def _synchronize(self) -> None:
        """After a failure: nothing of ours may still touch memory when the caller hears of it."""
        if self._stream is not None:
            with contextlib.suppress(RuntimeError):
                self._stream.synchronize()

    def stats(self) -> MoverStats:
        with self._lock:
            return MoverStats(
                path=self._device.type,
                moves=self._moves,
                commands=self._commands,
                bytes_moved=self._bytes,
                failures=self._failures,
                fallbacks=dict(self._fallbacks),
            )

    def close(self) -> None:
        self._synchronize()
        for address in list(self._pinned):
            self._unpin(address)

    def _unpin(self, address: int) -> None:
        """Takes no lock: a finalizer runs it, in any thread."""
        if self._pinned.pop(address, None) is not None:
            self._torch.cuda.cudart().cudaHostUnregister(address)


class _Writable:
    """The same bytes, said to be writable."""

    __slots__ = ("__array_interface__",)

    def __init__(self, host: Bytes) -> None:
        interface = host.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


class DeviceTransfer:
    """Copies queued on a stream; `keep` holds what they read and write until they have run."""

    __slots__ = ("_event", "_keep")

    def __init__(self, event: Any, keep: list[Any]) -> None:
        self._event = event  # torch.cuda.Event, or None where there is no stream
        self._keep: list[Any] | None = keep

    def done(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self, timeout_s: float | None = None) -> None:
        """See `Transfer.wait`."""
        try:
            if self._event is not None and timeout_s is None:
                self._event.synchronize()
            elif self._event is not None:
                deadline_s = time.monotonic() + timeout_s if timeout_s is not None else 0.0
                while not self._event.query():
                    if time.monotonic() >= deadline_s:
                        raise TimeoutError("the copies have not landed yet")
                    time.sleep(_POLL_S)
        except RuntimeError as error:
            raise Unavailable(f"a copy on a device failed: {error}") from error
        self._keep = None
