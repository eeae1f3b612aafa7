"""Why nobody answers at a unix socket, as far as the file system tells: gRPC has one word for all of it."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote


def unreached(target: str) -> str:
    """What is wrong with a target of `grpc_target`, and what to do. Empty: not a unix socket, or nothing that can be seen."""
    if not target.startswith("unix:"):
        return ""
    path = unquote(target.removeprefix("unix:"))
    try:
        Path(path).stat()
    except PermissionError:
        closed = True
    except OSError:
        return f"no daemon answers at {path}: start one with `flatcake serve`, or name its socket with --endpoint or FLATCAKE_ENDPOINT"
    else:
        closed = not os.access(path, os.W_OK)
    if closed:
        return f"user {os.getuid()} may not connect to {path}: join the group of the daemon's sockets (its option socket_mode)"
    return ""
