"""Files straight to and from GPU memory, through kvikio's cuFile. Thin: kvikio has the threads and the fallbacks.

    file span <-> memory span (CUDA tensor, or anything with __cuda_array_interface__)

Whether bytes really go from disk to GPU by DMA is cuFile's decision (nvidia-fs loaded, the file system, O_DIRECT, alignment);
`stats().path` says what cuFile itself answers: "gds", or "gds-compat" where it or kvikio copies through host memory.

kvikio opens paths, and we hold descriptors: `/proc/self/fd/N` opens the same file again, with its own flags. That needs the
file's permission, not the directory's. Handles are kept for the files used last; each is bound to the inode, so a number that the
process reuses for another file is noticed.

kvikio without a CUDA driver imports and opens, but every read raises (seen in 25.8, 26.2, 26.10, compat mode too). So
`gds_available` asks libcuda first, and nothing here imports kvikio before.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

from flatcake_transport.errors import Unavailable
from flatcake_transport.layout import ALIGN_BYTES
from flatcake_transport.mover import FileSpan, MemorySpan, Move, MoverStats, Region

HANDLES_MAX: Final = 64  # two descriptors and a cuFile registration each
THREADS: Final = 8  # kvikio's own default is 1
_POLL_S: Final = 50e-6


def gds_available(fd: int | None = None) -> str | None:
    """Why the GDS mover cannot be used here, for people; None where it can.

    Args:
        fd: also try whether this descriptor's file can be opened again, as kvikio will.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no CUDA driver: libcuda.so.1 cannot be loaded"
    code = int(cuda.cuInit(0))
    if code:
        return f"the CUDA driver does not start: cuInit returned {code}"
    try:
        importlib.import_module("kvikio")
    except (ImportError, OSError, RuntimeError) as error:
        return f"kvikio cannot be imported: {error}"
    if fd is not None:
        try:
            os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            return f"session files cannot be opened through /proc/self/fd: {error.strerror}"
    return None


def _import_kvikio() -> Any:
    reason = gds_available()
    if reason is not None:
        raise Unavailable(reason)
    import kvikio
    import kvikio.buffer
    import kvikio.cufile_driver
    import kvikio.defaults

    return kvikio


class GdsMover:
    """A `Mover` between session files and device memory. Thread-safe.

    Args:
        kvikio: the module, for tests; by default it is imported.
    """

    def __init__(self, kvikio: Any = None) -> None:
        """Raises: Unavailable: `gds_available` has a reason why not."""
        kvikio = kvikio or _import_kvikio()
        self._kvikio = kvikio
        if "KVIKIO_NTHREADS" not in os.environ and kvikio.defaults.get("num_threads") < THREADS:
            kvikio.defaults.set("num_threads", THREADS)
        self._lock = threading.Lock()
        self._closed = False
        self._files: OrderedDict[tuple[int, int, bool], Any] = OrderedDict()
        self._flying: weakref.WeakSet[GdsTransfer] = weakref.WeakSet()
        self._moves = self._commands = self._bytes = self._failures = 0

    def register(self, region: Region) -> None:
        """Register device memory with cuFile once, so that reads into it are not staged."""
        if region.device != "cpu" and region.keep is not None:
            self._kvikio.buffer.memory_register(region.keep)

    def submit(self, moves: Sequence[Move]) -> GdsTransfer:
        """Start file <-> device memory moves.

        Raises:
            ValueError: other kinds of spans, host memory, unequal sizes, or a direct span that is not on 4 KiB.
            Unavailable: closed.
        """
        for move in moves:
            _check(move)
        with self._lock:
            if self._closed:
                raise Unavailable("the gds mover is closed")
            self._moves += len(moves)
        transfer = GdsTransfer(self)
        self._flying.add(transfer)
        for move in moves:
            try:
                transfer.add(*self._start(move))
            except (OSError, RuntimeError) as error:
                # Those already started go on; `wait` waits for them and then raises this.
                transfer.fail(error)
                break
        return transfer

    def _start(self, move: Move) -> tuple[Any, int, Any]:
        source, target = move.source, move.target
        writes = isinstance(target, FileSpan)
        span = target if isinstance(target, FileSpan) else source
        memory = source if isinstance(source, MemorySpan) else target
        assert isinstance(span, FileSpan)
        assert isinstance(memory, MemorySpan)
        file = self._file(span.fd, writes=writes)
        command = file.pwrite if writes else file.pread
        return command(memory.data, span.size_bytes, span.offset), span.size_bytes, (file, move)

    def _file(self, fd: int, *, writes: bool) -> Any:
        """The cuFile handle of a descriptor's file. Dropped ones close when their last transfer is gone."""
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino, writes)
        with self._lock:
            file = self._files.get(key)
            if file is None:
                file = self._files[key] = self._kvikio.CuFile(f"/proc/self/fd/{fd}", "r+" if writes else "r")
                while len(self._files) > HANDLES_MAX:
                    self._files.popitem(last=False)
            self._files.move_to_end(key)
            return file

    def landed(self, commands: int, moved_bytes: int, failures: int) -> None:
        """A transfer of ours came to rest."""
        with self._lock:
            self._commands += commands
            self._bytes += moved_bytes
            self._failures += failures

    def stats(self) -> MoverStats:
        try:
            direct = bool(self._kvikio.cufile_driver.get("is_gds_available"))
        except RuntimeError:
            direct = False  # no cuFile at all: kvikio's own POSIX path
        if self._kvikio.defaults.is_compat_mode_preferred():
            direct = False
        with self._lock:
            return MoverStats(
                path="gds" if direct else "gds-compat",
                moves=self._moves,
                commands=self._commands,
                bytes_moved=self._bytes,
                failures=self._failures,
                fallbacks={} if direct else {"no GPUDirect Storage: kvikio copies through host memory": 1},
            )

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for transfer in list(self._flying):
            transfer.rest()
        with self._lock:
            self._files.clear()


class GdsTransfer:
    """kvikio futures under way. Thread-safe."""

    def __init__(self, mover: GdsMover) -> None:
        self._mover = mover
        self._lock = threading.Lock()
        self._futures: list[tuple[Any, int]] = []
        self._keep: list[Any] = []
        self._error: Exception | None = None
        self._rested = False

    def add(self, future: Any, size_bytes: int, keep: Any) -> None:
        """One more move, before the transfer is handed out."""
        self._futures.append((future, size_bytes))
        self._keep.append(keep)

    def fail(self, error: Exception) -> None:
        """A move could not be started."""
        self._error = error

    def done(self) -> bool:
        return self._rested or all(future.done() for future, _ in self._futures)

    def rest(self) -> None:
        """Block until nothing of this transfer touches memory, and remember the first failure."""
        with self._lock:
            if self._rested:
                return
            moved = failures = 0
            for future, size_bytes in self._futures:
                try:
                    count = int(future.get())
                    moved += count
                    if count != size_bytes:
                        raise EOFError(f"{count} of {size_bytes} bytes moved: the file ended or took no more")  # noqa: TRY301 - one error path
                except (OSError, RuntimeError, EOFError) as error:
                    failures += 1
                    self._error = self._error or error
            self._mover.landed(len(self._futures), moved, failures)
            self._rested = True
            self._futures, self._keep = [], []

    def wait(self, timeout_s: float | None = None) -> None:
        """See `Transfer.wait`. kvikio's futures know no timeout, so one is kept by asking."""
        if timeout_s is not None:
            deadline_s = time.monotonic() + timeout_s
            while not self.done():
                if time.monotonic() >= deadline_s:
                    raise TimeoutError("the moves have not landed yet")
                time.sleep(_POLL_S)
        self.rest()
        if self._error is not None:
            raise Unavailable(f"bytes could not be moved by cuFile: {self._error}") from self._error


def _check(move: Move) -> None:
    if move.checks is not None:
        raise ValueError("gds takes no checksums: the memory mover does, where it gathers")
    kinds = {type(move.source), type(move.target)}
    if kinds != {FileSpan, MemorySpan}:
        raise ValueError(f"gds moves between files and memory, not {type(move.source)} to {type(move.target)}")
    for span in (move.source, move.target):
        if isinstance(span, MemorySpan) and not hasattr(span.data, "__cuda_array_interface__"):
            raise ValueError("gds moves to and from CUDA memory; host memory goes through posix")
        if isinstance(span, FileSpan) and span.direct and (span.offset % ALIGN_BYTES or span.size_bytes % ALIGN_BYTES):
            raise ValueError(f"a direct span starts and ends on {ALIGN_BYTES}: {span}")
    if move.source.size_bytes != move.target.size_bytes:
        raise ValueError(f"{move.source.size_bytes} bytes to {move.target.size_bytes} bytes")
