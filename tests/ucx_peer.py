"""A process that serves memory over UCX, to be killed, stopped and asked; and the UCX that is here."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

import numpy as np
import pytest

from flatcake_transport.errors import Unavailable
from flatcake_transport.movers.ucx_lib import UcxLibrary, load_ucx
from flatcake_transport.movers.ucx_server import UcxServer
from flatcake_transport.remote import RemoteMemory, unseal_memory

OPTIONS = {"TLS": "tcp", "NET_DEVICES": "lo"}  # loopback only
PEER_TIMEOUT_S = 1.5  # a peer on a busy machine may be silent for a second
PATIENT_S = 20.0  # where no peer is meant to be lost


def ucx_here() -> UcxLibrary:
    try:
        return load_ucx()
    except Unavailable as error:
        pytest.skip(f"UCX was not tested: {error}")


def pattern(size: int) -> np.ndarray:
    """Every byte differs from the one 1, 8, 4096 and 4 MiB on."""
    at = np.arange(size, dtype=np.uint32)
    return ((at * np.uint32(2654435761)) >> np.uint32(24)).astype(np.uint8)


class Peer:
    """A process that serves `pattern(size)`."""

    def __init__(self, size: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])},
        )
        self.memory = self._memory()

    def _memory(self) -> RemoteMemory:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # what UCX itself has to say
                return unseal_memory(bytes.fromhex(line.strip()))
        raise AssertionError(f"the peer ended with {self._process.wait()}")

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


def main(size: int) -> None:
    server = UcxServer(options=OPTIONS, peer_timeout_s=PEER_TIMEOUT_S)
    print(server.expose(pattern(size)).sealed().hex(), flush=True)
    sys.stdin.read()
    server.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
