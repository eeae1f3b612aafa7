"""A process that serves memory over UCX, to be killed, stopped and asked; and the UCX that is here."""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import pytest

from flatcake_transport.errors import Unavailable
from flatcake_transport.movers.ucx_child import map_shared
from flatcake_transport.movers.ucx_describe import UcxHere, describe_ucx
from flatcake_transport.movers.ucx_lib import load_ucx
from flatcake_transport.movers.ucx_server import expose, serve
from flatcake_transport.movers.ucx_worker import UcxWorker
from flatcake_transport.remote import RemoteMemory, unseal_memory

OPTIONS = {"TLS": "tcp", "NET_DEVICES": "lo"}  # loopback only
PEER_TIMEOUT_S = 1.5  # a peer on a busy machine may be silent for a second
PATIENT_S = 20.0  # where no peer is meant to be lost


@functools.cache
def described() -> UcxHere | Unavailable:
    try:
        return describe_ucx(60.0)
    except Unavailable as error:
        return error


def ucx_here() -> UcxHere:
    """Skips where there is none. It is never loaded into the tests' own process."""
    here = described()
    if isinstance(here, Unavailable):
        pytest.skip(f"UCX was not tested: {here}")
    return here


def pattern(size: int) -> np.ndarray:
    """Every byte differs from the one 1, 8, 4096 and 4 MiB on."""
    at = np.arange(size, dtype=np.uint32)
    return ((at * np.uint32(2654435761)) >> np.uint32(24)).astype(np.uint8)


class Peer:
    """A process that serves `content`, writable, and another copy of it after each `flap`. `within`: a command that runs it."""

    def __init__(
        self, content: np.ndarray | int, options: Mapping[str, str] = OPTIONS, within: Sequence[str] = ()
    ) -> None:
        content = pattern(content) if isinstance(content, int) else content
        fd = os.memfd_create("peer")
        os.ftruncate(fd, max(1, len(content)))
        self.content = np.frombuffer(mmap.mmap(fd, 0), np.uint8)[: len(content)]  # shared with the process
        self.content[:] = content
        self._process = subprocess.Popen(
            [*within, sys.executable, __file__, str(fd), str(len(content)), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[fd],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])},
        )
        os.close(fd)
        self.memory = self._memory()

    def _memory(self) -> RemoteMemory:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # what UCX itself has to say
                return unseal_memory(bytes.fromhex(line.strip()))
        raise AssertionError(f"the peer ended with {self._process.wait()}")

    def flap(self) -> None:
        """It ends its UCX, with whoever reads from it, and begins another one; `memory` is what that is told by."""
        assert self._process.stdin is not None
        self._process.stdin.write("again\n")
        self._process.stdin.flush()
        self.memory = self._memory()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main(fd: int, size: int, options: Mapping[str, str]) -> None:
    library, address, told = load_ucx(), map_shared(fd, size), b"again"
    while told:
        worker = UcxWorker(library, options=options, peer_timeout_s=PEER_TIMEOUT_S)
        print(expose(worker, address, size, writable=True).sealed().hex(), flush=True)
        told = serve(worker, sys.stdin.fileno())
        worker.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
