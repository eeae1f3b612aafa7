"""One greeted daemon: its incarnation, the handover connection, what is open on it.

A connection is used until it is lost (the daemon ended, or says that it does not know us) and then retired: another is made,
and this one is closed when the turns that were begun on it are over. It must not be closed before: with its end the daemon
may give the space of a turn to somebody else, while our copies into it are still under way.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flatcake_client.handover import Handover
from flatcake_client.records import Welcome
from flatcake_client.rpc import Rpc, Stale
from flatcake_transport.errors import Unavailable
from flatcake_transport.space import Fingerprint, SpaceSpec


class Connection:
    """Thread-safe."""

    def __init__(self, rpc: Rpc, welcome: Welcome, timeout_s: float) -> None:
        """Raises: Unavailable: the daemon is on another machine, or its handover socket cannot be reached."""
        boot_id = local_boot_id()
        if boot_id and welcome.boot_id and welcome.boot_id != boot_id:
            raise Unavailable(
                "the daemon is on another machine: an engine's client talks to the daemon of its own node"
            )
        self.rpc = rpc
        self.welcome = welcome
        self.handover = Handover(welcome.handover_path, welcome.client_id, welcome.token, timeout_s)
        self._lock = threading.Lock()
        self._spaces: set[Fingerprint] = set()
        self._turns = 0
        self._retired = False

    def lost(self) -> bool:
        """Whether the daemon has, or may have, given back what was held through this connection."""
        return self._retired or self.handover.lost()

    def arena(self, timeout_s: float) -> NDArray[np.uint8]:
        return self.handover.arena(self.welcome.arena_bytes, timeout_s)

    def ensure_space(self, spec: SpaceSpec, timeout_s: float) -> None:
        """Open the space if it is not open on this daemon. Raises: as `Rpc.open_space`."""
        if spec.fingerprint not in self._spaces:
            self.rpc.open_space(self.welcome, spec, timeout_s)
            self._spaces.add(spec.fingerprint)

    def forget_space(self, spec: SpaceSpec) -> None:
        self._spaces.discard(spec.fingerprint)

    def turn_begins(self) -> None:
        """Before the daemon is asked for a turn, so that this is not closed between its answer and our knowing of it.

        Raises: Stale: it is retired.
        """
        with self._lock:
            if self._retired:
                raise Stale("the connection was given up meanwhile")
            self._turns += 1

    def turn_ended(self) -> None:
        with self._lock:
            self._turns -= 1
            idle = self._retired and not self._turns
        if idle:
            self.handover.close()

    def retire(self) -> None:
        """Use it no more. Hits that were found through it fail from now on. Twice is fine."""
        with self._lock:
            self._retired = True
            idle = not self._turns
        if idle:
            self.handover.close()

    def forget(self) -> None:
        """In a forked child."""
        self._retired = True
        self.handover.forget()


def local_boot_id() -> bytes:
    """Tells this boot of this machine from any other; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return b""
