"""Where a daemon is found: endpoints as people write them, and the sockets tried when nobody names one. Pure.

Client, operator's commands and daemon use the same list, so that what one side makes the other side finds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import quote

from flatcake_transport.units import PORT_MAX

SOCKET_NAME: Final = "flatcake.sock"
ENDPOINT_VARIABLE: Final = "FLATCAKE_ENDPOINT"


def grpc_target(endpoint: str) -> str:
    """What gRPC dials for `unix:///path`, a bare path, or `host:port` (IPv6 in brackets).

    Raises: ValueError: none of them.
    """
    if endpoint.startswith(("/", "unix:")):
        path = endpoint.removeprefix("unix:")
        path = path.removeprefix("//") if path != endpoint else path
        if not path or "," in path:  # to gRPC a comma begins another address, however it is written
            raise ValueError(
                f"endpoint {endpoint!r} names no path, or one with a comma: write unix:///run/flatcake/flatcake.sock"
            )
        return f"unix:{quote(str(Path(path).absolute()))}"  # to gRPC it is a URI, in which # and % mean something
    host, _, port = endpoint.rpartition(":")
    named = host and port.isdecimal() and int(port) <= PORT_MAX and (":" not in host or host.startswith("["))
    if "://" in endpoint or not named:
        raise ValueError(f"endpoint {endpoint!r} is neither unix:///path nor host:port (IPv6 as [::1]:7450)")
    return f"dns:///{endpoint}"


def socket_candidates(environ: Mapping[str, str], user_id: int) -> list[Path]:
    """Where the daemon's socket may be when nobody says, best first: the system's, then this user's."""
    runtime = environ.get("XDG_RUNTIME_DIR")
    private = Path(runtime) / "flatcake" if runtime else Path(environ.get("TMPDIR", "/tmp")) / f"flatcake-{user_id}"  # noqa: S108
    return [Path("/run/flatcake") / SOCKET_NAME, private / SOCKET_NAME]


def is_private(directory: Path, user_id: int) -> bool:
    """Whether nobody but this user and root can have put a socket there. Raises: OSError: no such directory."""
    found = directory.stat()
    return found.st_uid in (0, user_id) and not found.st_mode & 0o022


def default_endpoint(environ: Mapping[str, str], user_id: int) -> str:
    """`FLATCAKE_ENDPOINT`; else the first candidate that is there; else the system's.

    This user's own counts only in a directory of its own: in /tmp anybody could have put a daemon there that hands out bytes
    of its choice.
    """
    named = environ.get(ENDPOINT_VARIABLE)
    if named:
        return named
    system, private = socket_candidates(environ, user_id)
    ours = not _is_there(system) and _is_there(private) and is_private(private.parent, user_id)
    return f"unix://{private if ours else system}"


def _is_there(path: Path) -> bool:
    """Also where the directory is closed to us, for which `exists` raises: then it is not, to us."""
    with contextlib.suppress(OSError):
        return path.exists()
    return False
