"""Ports of loopback for servers of tests."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path

# Below those that the kernel gives to outgoing connections; so is what Redis Cluster takes, 10000 above.
PORTS = range(12768, 22768)
_FOLDER = Path(tempfile.gettempdir()) / f"flatcake-ports-{os.getuid()}"


def free_port() -> int:
    """A port that nobody has, nor is any other test on this machine given it while this process lives: it may be bound later."""
    _FOLDER.mkdir(exist_ok=True)
    start = os.getpid() * 64 % len(PORTS)
    for port in (*PORTS[start:], *PORTS[:start]):
        taken = os.open(_FOLDER / str(port), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(taken, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for number in (port, port + 10000):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", number))
        except OSError:
            os.close(taken)
            continue
        return port
    raise AssertionError("no free port")
