"""The node's unix sockets: taken from a daemon that was killed, never from one that answers, and open to nobody before their mode is set."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from flatcake_transport.endpoint import is_private, socket_candidates
from flatcake_transport.errors import Unavailable


def take_socket(path: Path) -> None:
    """Have the socket's directory, and no dead socket in it. Raises: Unavailable: it cannot be had, or another daemon answers."""
    own = (
        path == socket_candidates(os.environ, os.getuid())[1]
    )  # by default, maybe in /tmp, where anybody makes directories
    try:
        path.parent.mkdir(mode=0o700 if own else 0o777, parents=True, exist_ok=True)
    except OSError as error:
        raise Unavailable(f"no directory for the socket {path}: {error.strerror}: choose another --socket") from error
    if own and not is_private(path.parent, os.getuid()):
        raise Unavailable(
            f"{path.parent} is another user's, or others can write to it: chmod 700 it, or choose another --socket"
        )
    if path.is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()  # left by a daemon that was killed
            except OSError as error:
                raise Unavailable(
                    f"whether a daemon is at {path} cannot be told: {error.strerror}: choose another --socket"
                ) from error
            else:
                raise Unavailable(f"another daemon answers at {path}: stop it, or choose another --socket")
    elif path.exists():
        raise Unavailable(f"{path} is there and no socket: choose another --socket")
    path.with_name(path.name + ".fds").unlink(missing_ok=True)


@contextlib.contextmanager
def owner_only() -> Iterator[None]:
    """What is made meanwhile is this user's alone. Of the whole process; directories that a thread makes stay usable for it."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
