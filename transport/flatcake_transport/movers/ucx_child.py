"""Processes that run UCX for us, because UCX may end the process that it runs in. They have what they need and nothing else.

What UCX is known to do to its process: abort when a reader dies between its request and the answer (serving over TCP, 1.13.1 and
1.22.0), abort when a peer stops answering while the first connection to it is made (reading over verbs, 1.13.1), read whatever
address a peer names (serving over TCP).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from flatcake_transport.movers.ucx_lib import CHOICE

_KEPT_VARIABLES: Final = ("PATH", "LD_LIBRARY_PATH", CHOICE)
# What UCX would say of a lost peer is in our errors, and of its own end one line is enough, not a trace of thirty.
_SPARING: Final = {"UCX_LOG_LEVEL": "fatal", "UCX_HANDLE_ERRORS": "none"}
_PR_SET_PDEATHSIG: Final = 1
_MAP_FAILED: Final = (1 << 64) - 1


def spawn(module: str, order: str, descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    """Run a module of ours with one argument. What it says, to both outputs, comes through its `stdout`; we hold its `stdin`.

    No fork of the caller: its memory and threads are never copied. Raises: OSError: it cannot be started.
    """
    kept = {k: v for k, v in os.environ.items() if k.startswith("UCX_") or k in _KEPT_VARIABLES}
    kept["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    kept = _SPARING | kept
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, order],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,  # nothing of what it says may lie in a buffer while we wait for it
        env=kept,
        pass_fds=descriptors,
    )


def last_line(said: bytes) -> str:
    """Of what a child has said."""
    return next(iter(said.decode(errors="replace").strip().splitlines()[-1:]), "none")


def end(child: subprocess.Popen[bytes]) -> None:
    """Kill it. When this returns its memory is nobody's any more, also not a network card's."""
    child.kill()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
    child.wait()


def map_shared(fd: int, size_bytes: int, *, writable: bool = True, populate: bool = True) -> int:
    """In the child: its address. `populate`: every page that is there is mapped at once. Raises: OSError."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
    return _mmap(0, size_bytes, protection, flags, fd)


def mmap_near(address: int, size_bytes: int) -> int:
    """Memory of our own, at that address if it is free. Raises: OSError."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return _mmap(address, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1)


def _mmap(near: int, size_bytes: int, protection: int, flags: int, fd: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    address: int = libc.mmap(near, size_bytes, protection, flags, fd, 0)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), f"{size_bytes} bytes of memory cannot be mapped")
    return address


def unmap_shared(address: int, size_bytes: int) -> None:
    ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes))


def end_with_parent(parent_id: int) -> None:
    """In the child: be killed when the thread that spawned us ends, however it does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_id:  # it ended before that
        os._exit(0)
