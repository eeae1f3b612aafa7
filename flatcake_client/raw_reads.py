"""What the disk itself can do: O_DIRECT preadv of a fresh file into touched buffers, in several settings."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from flatcake_transport.window import aligned_buffer

# As DESIGN section 5 compares: the best of a sweep.
READ_BYTES: Final = (256 << 10, 1 << 20, 4 << 20, 8 << 20)
READ_THREADS: Final = (1, 4, 16)
WRITE_BYTES: Final = 4 << 20


def raw_read_rates(directory: Path, size_bytes: int, rounds: int) -> Iterator[tuple[str, float]]:
    """Read a fresh file of a size with O_DIRECT preadv into touched buffers: setting and bytes a second, each of `rounds`.

    Raises: OSError: the file system has no O_DIRECT, or no room.
    """
    path = directory / "raw-reads"
    buffers = [aligned_buffer(max(READ_BYTES)) for _ in range(max(READ_THREADS))]
    for buffer in buffers:
        buffer[:] = 1
    try:
        with path.open("wb") as file:
            for start in range(0, size_bytes, WRITE_BYTES):
                file.write(buffers[0][: min(WRITE_BYTES, size_bytes - start)].tobytes())
            file.flush()
            os.fsync(file.fileno())
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            for _, read_bytes, threads in itertools.product(range(rounds), READ_BYTES, READ_THREADS):
                offsets = iter(range(0, size_bytes, read_bytes))  # `next` on it is atomic
                seconds = _together_s(_reader(fd, offsets, buffer[:read_bytes]) for buffer in buffers[:threads])
                yield f"{read_bytes >> 10} KiB x {threads}", size_bytes / seconds
        finally:
            os.close(fd)
    finally:
        path.unlink(missing_ok=True)


def _reader(fd: int, offsets: Iterator[int], buffer: Any) -> Callable[[], None]:
    def read() -> None:
        for offset in offsets:
            os.preadv(fd, [buffer], offset)

    return read


def _together_s(tasks: Iterator[Callable[[], None]]) -> float:
    threads = [threading.Thread(target=task) for task in tasks]
    started_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started_s
