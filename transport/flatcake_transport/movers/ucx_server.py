"""The serving side within one process: memory that peers get from. Run by `ucx_process.py`; see there why it runs alone.

A peer that was told a `RemoteMemory` reads it without another word. Exposed memory stays mapped until `close`: over TCP it is
UCX in this process that reads it for the peer, and a late get of memory that is gone would end the process.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from flatcake_transport.movers.ucx_lib import UcxLibrary, load_ucx
from flatcake_transport.movers.ucx_worker import PEER_TIMEOUT_S, READABLE, WRITABLE, UcxWorker
from flatcake_transport.remote import RemoteMemory


class UcxServer:
    """Exposes memory of this process to peers. Thread-safe.

    Args:
        options: UCX options without the prefix, e.g. {"NET_DEVICES": "eth0", "TCP_PORT_RANGE": "7452-7460"}.
    """

    def __init__(
        self,
        library: UcxLibrary | None = None,
        *,
        options: Mapping[str, str] | None = None,
        peer_timeout_s: float = PEER_TIMEOUT_S,
    ) -> None:
        """Raises: Unavailable: no UCX here, or it does not start."""
        self._worker = UcxWorker(library or load_ucx(), options=options, peer_timeout_s=peer_timeout_s)
        self._lock = threading.Lock()
        self._exposed: list[NDArray[np.uint8]] = []

    @property
    def address(self) -> bytes:
        """Of the worker; a new one with each server."""
        return self._worker.address

    def expose(self, memory: NDArray[np.uint8], *, writable: bool = False) -> RemoteMemory:
        """Register host memory for peers to read, until `close`. The array is held.

        Args:
            writable: peers may also put. Where a card checks that, it refuses puts otherwise; over TCP nobody does.

        Raises: Unavailable: it cannot be registered (locked memory, most often), or the server is closed.
        """
        address = int(memory.ctypes.data)
        mapped = self._worker.map(address, len(memory), protection=WRITABLE if writable else READABLE)
        with self._lock:
            self._exposed.append(memory)
        return RemoteMemory(self.address, mapped.rkey, address, len(memory))

    def close(self) -> None:
        """Peers get errors from here on. Twice is fine."""
        self._worker.close()
