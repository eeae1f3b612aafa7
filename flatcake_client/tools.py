"""The movers and the staging memory of a client, made when they are first needed and shared by all its spaces.

Reads and writes have staging of their own, so writes never take what a read waits for. Both are bounded; a quarter is for
writes. Halves grow to what a space's planes need when it is opened. Staging and arena are registered with the memory mover,
which pins them if the engine's memory turns out to be on a device.

For an engine on a GPU, session files are read straight into windows on its device where cuFile can (GDS). Not when checksums
are compared: those are computed on the host. Those windows are bounded by `DEVICE_STAGING_BYTES` a device, whatever the
number of requests; a device that has no room for the first one gets host windows, and a log line.

Other nodes' memory and files come through UCX into windows that the process which runs it shares with us, one process a client,
registered with the memory mover as well. Windows of their own each: a restore of both holds one of each, and could else wait for
what only it could give back.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flatcake_client.file_path import ReadTools
from flatcake_client.writer import WriteTools
from flatcake_transport.address import Medium
from flatcake_transport.errors import Overloaded, Unavailable
from flatcake_transport.layout import ALIGN_BYTES, align_up, segment_layout
from flatcake_transport.mover import Mover, MoverStats, Region
from flatcake_transport.movers import mover_for
from flatcake_transport.movers.posix import PosixMover
from flatcake_transport.movers.ucx import UcxMover
from flatcake_transport.movers.ucx_staged import BySpan, StagedMover
from flatcake_transport.plan import GAP_BYTES_MAX, buffer_bytes_min
from flatcake_transport.space import SpaceSpec
from flatcake_transport.window import PART_BYTES, StagingPool, StagingStats, aligned_buffer, device_buffer

log = logging.getLogger(__name__)

# Ranges of several layers are one read where a buffer holds them, and the disk has half a window of commands while a part of the other
# half is scattered. What lands together is less (window.PART_BYTES).
BUFFER_BYTES: Final = 16 << 20
BUFFERS: Final = 2
STAGING_BYTES: Final = 1 << 30
WRITE_SHARE: Final = 4  # one part in four of the staging
DEVICE_STAGING_BYTES: Final = 256 << 20  # eight windows: the engine's KV wants the rest of the device
REMOTE_STAGING_BYTES: Final = 256 << 20  # eight windows

# A staging waits for a slot, a disk and two round trips: one that is told "not now" asks again, one that hears nothing fails.
STAGE_TIMEOUT_S_MIN: Final = 3.0
# Whatever is set: a process may have to wait for a core.
PEER_TIMEOUT_S_MIN: Final = 2.0


class Tools:
    """Thread-safe."""

    def __init__(
        self, buffer_bytes: int, staging_bytes: int, *, gap_bytes_max: int = GAP_BYTES_MAX, buffers: int = BUFFERS
    ) -> None:
        """`gap_bytes_max`, `buffers`: as `connect`.

        Raises: ValueError: sizes below a page, or staging that holds no window for reads and one for writes.
        """
        if buffers < 1 or gap_bytes_max < -1:
            raise ValueError(f"buffers is {buffers} and gap_bytes_max {gap_bytes_max}: expected from 1 and -1")
        self._gap_bytes_max, self._buffers = gap_bytes_max, buffers
        self._lock = threading.RLock()
        self._staging_bytes = staging_bytes
        self._memory: Mover | None = None
        self._files: Mover | None = None
        self._direct: dict[str, tuple[Mover, StagingPool] | None] = {}  # by device; None: not there
        self._remote: tuple[UcxMover, StagingPool] | None = None
        self._served: tuple[StagedMover, StagingPool] | None = None
        self._window_bytes = buffers * buffer_bytes
        self._reading = self._read_pool(max(buffer_bytes, ALIGN_BYTES))
        self._writing = self._write_pool(min(buffer_bytes, PART_BYTES))

    def fit(self, spec: SpaceSpec) -> None:
        """Have buffers that hold a space's planes. Raises: ValueError: the staging is too small for them."""
        need = align_up(buffer_bytes_min(segment_layout(spec, 1), whole_granules=True))
        with self._lock:
            try:
                if need > self._reading.buffer_bytes:
                    self._reading = self._read_pool(need)
                if need > self._writing.buffer_bytes:
                    self._writing = self._write_pool(need)
            except ValueError as error:
                raise ValueError(
                    f"planes of {max(spec.plane_bytes)} bytes need buffers of {need} bytes: raise staging_bytes "
                    f"({self._staging_bytes}) to {4 * need}, or use smaller blocks"
                ) from error

    def reading(self, device: str = "cpu", *, verify: bool = False) -> ReadTools:
        """What brings bytes to an engine's memory on `device`; `verify`: they are checked on the host before."""
        with self._lock:
            direct = None if device == "cpu" or verify else self._direct_to(device)
            if direct is not None:
                return self._read_tools(direct[0], direct[1])
            return self._read_tools(self._file_mover(), self._reading)

    @property
    def reads_peers(self) -> bool:
        """Whether other nodes' blocks can be brought here, as far as is known: nobody looks before the first of them."""
        return self._remote is None or self._remote[0].up

    def remote(self, peer_timeout_s: float) -> ReadTools:
        """What brings other nodes' memory; `peer_timeout_s` counts when it is first asked for.

        Raises: Unavailable: no descriptors are left.
        """
        with self._lock:
            mover = self._remote[0] if self._remote else _reader(max(peer_timeout_s, PEER_TIMEOUT_S_MIN))
            if self._remote is None or self._remote[1].buffer_bytes < self._reading.buffer_bytes:
                self._remote = (mover, self._remote_pool(mover))
            mover.start()
            return self._read_tools(mover, self._remote[1])

    def served(self, peer_timeout_s: float, patience_s: float) -> ReadTools:
        """What brings files that other nodes read for us. Times count when it is first asked for."""
        with self._lock:
            files = self._file_mover()
            self.remote(peer_timeout_s)
            assert self._remote is not None
            gets = self._remote[0]
            if self._served is None:
                stage_timeout_s = max(peer_timeout_s, STAGE_TIMEOUT_S_MIN)
                mover = StagedMover(gets, stage_timeout_s=stage_timeout_s, patience_s=patience_s)
                self._served = (mover, self._remote_pool(gets))
            elif self._served[1].buffer_bytes < self._reading.buffer_bytes:
                self._served = (self._served[0], self._remote_pool(gets))
            return self._read_tools(BySpan(files, self._served[0]), self._served[1])

    def _remote_pool(self, mover: UcxMover) -> StagingPool:
        buffer_bytes = self._reading.buffer_bytes
        buffers = self._buffers_of(buffer_bytes)
        staging_bytes = max(REMOTE_STAGING_BYTES, buffers * buffer_bytes)
        return StagingPool(staging_bytes, buffer_bytes, buffers, allocate=partial(self._buffer, mover.window))

    def _read_tools(self, files: Mover, staging: StagingPool) -> ReadTools:
        part_bytes = PART_BYTES if self._buffers > 1 else staging.buffer_bytes
        return ReadTools(files, self._memory_mover(), staging, gap_bytes_max=self._gap_bytes_max, part_bytes=part_bytes)

    def _direct_to(self, device: str) -> tuple[Mover, StagingPool] | None:
        buffer_bytes = self._reading.buffer_bytes
        if device not in self._direct or (self._direct[device] or (None, self._reading))[1].buffer_bytes < buffer_bytes:
            mover = mover_for(Medium.SSD, device)
            self._direct[device] = None
            if isinstance(mover, PosixMover):  # no GDS here: its host windows are the ones we have
                mover.close()
            else:
                buffers = self._buffers_of(buffer_bytes)
                staging_bytes = max(DEVICE_STAGING_BYTES, buffers * buffer_bytes)
                allocate = partial(self._device_buffer, mover, device)
                pool = StagingPool(staging_bytes, buffer_bytes, buffers, allocate=allocate)
                try:
                    pool.open_window(0.0).close()
                except Overloaded as error:
                    log.warning("files are read through host memory: %s", error)
                    mover.close()
                else:
                    self._direct[device] = (mover, pool)
        return self._direct[device]

    def _device_buffer(self, mover: Mover, device: str, size_bytes: int) -> Any:
        try:
            buffer = device_buffer(size_bytes, device)
        except RuntimeError as error:  # torch's out of memory
            raise Overloaded(f"{device} has no {size_bytes} bytes for a window: {error}") from error
        mover.register(Region(buffer.data_ptr(), size_bytes, device, buffer))
        return buffer

    def writing(self) -> WriteTools:
        with self._lock:
            return WriteTools(self._file_mover(), self._memory_mover(), self._writing)

    def register(self, array: NDArray[np.uint8]) -> None:
        """Memory that will be a source or target of many copies, as long as it lives: it is not kept."""
        self._memory_mover().register(Region(array.ctypes.data, len(array), keep=weakref.ref(_owner(array))))

    def stats(self) -> tuple[dict[str, MoverStats], dict[str, StagingStats]]:
        with self._lock:
            movers = {"memory": self._memory, "files": self._files}
            pools = {"reads": self._reading, "writes": self._writing}
            if self._remote is not None:
                movers["remote"], pools["remote reads"] = self._remote
            if self._served is not None:
                movers["served"], pools["served reads"] = self._served
            for device, direct in self._direct.items():
                if direct is not None:
                    movers[f"files to {device}"], pools[f"reads to {device}"] = direct
            return (
                {name: mover.stats() for name, mover in movers.items() if mover is not None},
                {name: pool.stats() for name, pool in pools.items()},
            )

    def close(self) -> None:
        """End the threads. Only when nothing moves any more: a disk that hangs would hang this."""
        with self._lock:
            direct = [each[0] for each in self._direct.values() if each is not None]
            remote = self._remote[0] if self._remote is not None else None
            served = self._served[0] if self._served is not None else None
            movers: list[Mover | None] = [self._memory, self._files, served, remote, *direct]
        for mover in movers:  # without the lock: who asks for figures or another restore meanwhile has an answer
            if mover is not None:
                mover.close()

    def _memory_mover(self) -> Mover:
        with self._lock:
            if self._memory is None:
                self._memory = mover_for(Medium.MEMORY)
            return self._memory

    def _file_mover(self) -> Mover:
        with self._lock:
            if self._files is None:
                self._files = mover_for(Medium.SSD)
            return self._files

    def _read_pool(self, buffer_bytes: int) -> StagingPool:
        bytes_max = self._staging_bytes - self._staging_bytes // WRITE_SHARE
        buffer = partial(self._buffer, aligned_buffer)
        return StagingPool(bytes_max, buffer_bytes, self._buffers_of(buffer_bytes), allocate=buffer)

    def _write_pool(self, buffer_bytes: int) -> StagingPool:
        """Windows of one buffer: a write takes what it gathers into, and holds no more."""
        buffer = partial(self._buffer, aligned_buffer)
        return StagingPool(self._staging_bytes // WRITE_SHARE, buffer_bytes, 1, allocate=buffer)

    def _buffers_of(self, buffer_bytes: int) -> int:
        """How many a window has: larger ones are fewer, but one is read while another is scattered."""
        return max(min(self._buffers, 2), min(self._buffers, self._window_bytes // buffer_bytes))

    def _buffer(self, allocate: Callable[[int], NDArray[np.uint8]], size_bytes: int) -> Any:
        buffer = allocate(size_bytes)
        with contextlib.suppress(ValueError):
            self.register(buffer)
        return buffer


def _owner(array: NDArray[np.uint8]) -> Any:
    """Whom all views of the memory keep alive, and who goes just before the mapping."""
    owner: Any = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return owner


def _reader(peer_timeout_s: float) -> UcxMover:
    try:
        return UcxMover(peer_timeout_s=peer_timeout_s)
    except OSError as error:
        raise Unavailable(f"other nodes' memory cannot be read: {error}") from error
