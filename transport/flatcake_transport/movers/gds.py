"""Files straight to and from GPU memory, through kvikio's cuFile. Thin: kvikio has the fallbacks.

    file span <-> memory span (CUDA tensor, or anything with __cuda_array_interface__)

Whether bytes really go from disk to GPU by DMA is cuFile's decision (nvidia-fs loaded, the file system, O_DIRECT, alignment);
`stats().path` says what cuFile itself answers: "gds", or "gds-compat" where it or kvikio copies through host memory.

Each device has a line of its own (pool.py), as in the posix mover, with a thread of ours that waits for each command. But kvikio
does them in threads that all devices share: it gets more of them than one device may have commands, so that one that hangs, with all
it has, leaves some to others. Run on a GPU this was never: what is tested is how we wait for a kvikio of our own (tests/unit).

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
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from flatcake_transport.errors import Unavailable
from flatcake_transport.layout import ALIGN_BYTES
from flatcake_transport.mover import FileSpan, MemorySpan, Move, MoverStats, Region
from flatcake_transport.movers.pool import Batch, Command, Commands

HANDLES_MAX: Final = 64  # two descriptors and a cuFile registration each
COMMANDS_MAX: Final = 8  # under way to one device
IN_FLIGHT_BYTES_MAX: Final = 32 << 20  # the same, in the 4 MiB that kvikio cuts them into
THREADS: Final = 4 * COMMANDS_MAX  # kvikio's own default is 1; those of three devices that hang leave a fourth its own


def gds_available() -> str | None:
    """Why the GDS mover cannot be used here, for people; None where it can."""
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
        self._lines = Commands("gds", COMMANDS_MAX, IN_FLIGHT_BYTES_MAX)
        self._lock = threading.Lock()
        self._files: OrderedDict[tuple[int, int, bool], Any] = OrderedDict()
        self._moves = self._commands = self._bytes = self._failures = 0

    def register(self, region: Region) -> None:
        """Register device memory with cuFile once, so that reads into it are not staged."""
        if region.device != "cpu" and region.keep is not None:
            self._kvikio.buffer.memory_register(region.keep)

    def submit(self, moves: Sequence[Move]) -> Batch:
        """Start file <-> device memory moves.

        Raises:
            ValueError: other kinds of spans, host memory, unequal sizes, or a direct span that is not on 4 KiB.
            Unavailable: closed.
        """
        commands = [self._command(move) for move in moves]
        batch = self._lines.submit(commands, yields=all(isinstance(move.target, FileSpan) for move in moves))
        with self._lock:
            self._moves += len(moves)
        return batch

    def _command(self, move: Move) -> Command:
        file, memory = _checked(move)
        writes = file is move.target
        return file.device, file.size_bytes, partial(self._transfer, file, memory, writes=writes)

    def _transfer(self, span: FileSpan, memory: MemorySpan, *, writes: bool) -> None:
        moved = 0
        try:
            file = self._file(span.fd, writes=writes)
            command = file.pwrite if writes else file.pread
            moved = int(command(memory.data, span.size_bytes, span.offset).get())
        except RuntimeError as error:
            raise Unavailable(f"bytes could not be moved by cuFile: {error}") from error
        finally:
            with self._lock:
                self._commands += 1
                self._bytes += moved
                self._failures += moved != span.size_bytes
        if moved != span.size_bytes:
            raise Unavailable(f"{moved} of {span.size_bytes} bytes moved: the file ended or took no more")

    def _file(self, fd: int, *, writes: bool) -> Any:
        """The cuFile handle of a descriptor's file. Dropped ones close when their last transfer is gone.

        Opened and closed without the lock: either may take as long as a device hangs.
        """
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino, writes)
        with self._lock:
            known = self._files.get(key)
        made = known or self._kvikio.CuFile(f"/proc/self/fd/{fd}", "r+" if writes else "r")
        dropped = []
        with self._lock:
            file = self._files.setdefault(key, made)
            self._files.move_to_end(key)
            while len(self._files) > HANDLES_MAX:
                dropped.append(self._files.popitem(last=False))
        return file

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
        self._lines.close()
        with self._lock:
            files = list(self._files.values())
            self._files.clear()
        del files  # closed without the lock


def _checked(move: Move) -> tuple[FileSpan, MemorySpan]:
    """Raises: ValueError: not a move of ours."""
    source, target = move.source, move.target
    if move.checks is not None:
        raise ValueError("gds takes no checksums: the memory mover does, where it gathers")
    if isinstance(source, FileSpan) and isinstance(target, MemorySpan):
        file, memory = source, target
    elif isinstance(source, MemorySpan) and isinstance(target, FileSpan):
        file, memory = target, source
    else:
        kinds = f"{type(source).__name__} to {type(target).__name__}"
        raise ValueError(f"gds moves between files and memory, not {kinds}")  # noqa: TRY004 - see Mover.submit
    if not hasattr(memory.data, "__cuda_array_interface__"):
        raise ValueError("gds moves to and from CUDA memory; host memory goes through posix")
    if file.direct and (file.offset % ALIGN_BYTES or file.size_bytes % ALIGN_BYTES):
        raise ValueError(f"a direct span starts and ends on {ALIGN_BYTES}: {file}")
    if source.size_bytes != target.size_bytes:
        raise ValueError(f"{source.size_bytes} bytes to {target.size_bytes} bytes")
    return file, memory
