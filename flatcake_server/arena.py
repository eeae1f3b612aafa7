"""The arena: the memory of a node that holds blocks, shared with local clients as one memfd.

The size is sealed, so nobody can shrink it under a reader: a mapping outlives the daemon and never raises SIGBUS. Pages
are huge when the system has them to give, else normal. They are faulted in behind the daemon's back, chunk by chunk, so
that a node is ready at once whatever its size; a page not yet there costs its first user one fault, nothing else.

Faults survived: no huge pages (normal ones), a machine whose memory is too small (what is left of it is left alone), a chunk that cannot be faulted in (counted; its first user tries again).
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import threading
from typing import Final

from flatcake_server.machine import HUGE_PAGE_BYTES, free_huge_pages_bytes, free_memory_bytes
from flatcake_transport.errors import Unavailable
from flatcake_transport.layout import align_up

log = logging.getLogger(__name__)

# 64 MiB a call: some 20 ms of page clearing, after which a stopping daemon is noticed.
PREFAULT_CHUNK_BYTES: Final = 64 << 20
# Taking the machine's last memory ahead of need would end processes: engines, for all we know.
PREFAULT_LEAVES_BYTES: Final = 512 << 20
_F_ADD_SEALS: Final = 1033
_SEALS: Final = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
_MADV_HUGEPAGE: Final = 14


class Arena:
    """`size_bytes` of shared memory. Reads and writes here are for footers and checks; clients move the blocks."""

    def __init__(self, size_bytes: int, huge_pages: str = "auto") -> None:
        """
        Args:
            size_bytes: 0 is a node that keeps no blocks in memory.
            huge_pages: "auto" takes reserved 2 MiB pages when enough are free, "on" insists on them, "off" never does.
        Raises:
            OSError: the kernel refuses the memory file.
            Unavailable: "on", and too few huge pages are free.
        """
        self.size_bytes = size_bytes
        self.huge_pages = huge_pages != "off" and 0 < size_bytes <= free_huge_pages_bytes()
        if huge_pages == "on" and not self.huge_pages:
            raise Unavailable(
                f"huge_pages is on, but {free_huge_pages_bytes()} bytes of 2 MiB pages are free and {size_bytes} are needed: "
                "raise vm.nr_hugepages or set huge_pages to auto"
            )
        # A mapping of 0 bytes cannot exist; a node without memory blocks still has a (never used) page to hand over.
        mapped_bytes = align_up(max(size_bytes, 1), HUGE_PAGE_BYTES if self.huge_pages else mmap.PAGESIZE)
        try:
            self.fd, self._map = _map_memfd(mapped_bytes, huge=self.huge_pages)
        except OSError:
            if not self.huge_pages or huge_pages == "on":
                raise
            self.huge_pages = False  # somebody took the huge pages in between
            self.fd, self._map = _map_memfd(mapped_bytes, huge=False)
        self._mapped_bytes = mapped_bytes
        self._stop = threading.Event()
        self._prefaulter = threading.Thread(target=self._prefault, name="flatcake-prefault", daemon=True)
        self.prefaulted_bytes = 0
        self.prefault_failures = 0

    def start_prefault(self) -> None:
        if self.size_bytes:
            self._prefaulter.start()

    def read(self, offset: int, size_bytes: int) -> memoryview:
        """A view of the bytes, valid while the arena is open. Raises: ValueError: outside the arena."""
        if offset < 0 or offset + size_bytes > self.size_bytes:
            raise ValueError(f"bytes {offset}..{offset + size_bytes} are outside an arena of {self.size_bytes} bytes")
        return memoryview(self._map)[offset : offset + size_bytes]

    def write(self, offset: int, data: bytes) -> None:
        """Raises: ValueError: outside the arena."""
        self.read(offset, len(data))[:] = data

    def close(self) -> None:
        """Stop faulting and let go of the memory; clients that mapped it keep theirs. Twice is fine."""
        self._stop.set()
        if self._prefaulter.is_alive():
            self._prefaulter.join()
        if self.fd >= 0:
            self._map.close()
            os.close(self.fd)
            self.fd = -1

    def _prefault(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        pointer = ctypes.c_char.from_buffer(self._map)
        base = ctypes.addressof(pointer)
        del pointer  # an exported buffer would keep the map from closing
        for offset in range(0, self._mapped_bytes, PREFAULT_CHUNK_BYTES):
            if self._stop.is_set():
                return
            chunk_bytes = min(PREFAULT_CHUNK_BYTES, self._mapped_bytes - offset)
            if not self.huge_pages and free_memory_bytes() < PREFAULT_LEAVES_BYTES + chunk_bytes:
                log.warning(
                    "memory_bytes is %d, and this machine has no more memory to spare after the first %d: the rest is taken when it is "
                    "used, and the kernel may end processes then; lower memory_bytes",
                    self.size_bytes,
                    offset,
                )
                return
            where = ctypes.c_void_p(base + offset)
            if libc.madvise(where, ctypes.c_size_t(chunk_bytes), _MADV_POPULATE_WRITE) == 0:
                self.prefaulted_bytes += chunk_bytes
                continue
            self.prefault_failures += 1
            if self.prefault_failures == 1:
                reason = os.strerror(ctypes.get_errno())
                log.warning("arena bytes at %#x could not be faulted in: %s; they will be on first use", offset, reason)


def _map_memfd(mapped_bytes: int, *, huge: bool) -> tuple[int, mmap.mmap]:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB | os.MFD_HUGE_2MB if huge else 0)
    fd = os.memfd_create("flatcake-arena", flags)
    try:
        os.ftruncate(fd, mapped_bytes)
        mapped = mmap.mmap(fd, mapped_bytes)
        if not huge:
            try:
                mapped.madvise(_MADV_HUGEPAGE)
            except OSError:
                log.info("this kernel has no transparent huge pages for shared memory")
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd, mapped
