"""What one option cannot say of itself: whether options fit each other; and how a refusal reads. Each says what to do."""

from __future__ import annotations

import difflib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from flatcake_server.cluster.nvmet import parse_port
from flatcake_server.machine import ROOT, free_huge_pages_bytes, huge_pages_bytes, total_memory_bytes
from flatcake_transport.errors import Unavailable
from flatcake_transport.units import (
    Listen,
    approximate_size,
    format_duration,
    format_size,
    parse_duration,
    parse_listen,
    parse_size,
)

REDIS_SCHEMES: Final = ("redis://", "rediss://", "unix://")

if TYPE_CHECKING:
    from flatcake_server.config import NodeConfig


def refuse_bad_cluster(node: NodeConfig) -> None:
    """Raises: ValueError: a directory without what it needs, half of TLS, or a node open to everybody."""
    tls = [name for name in ("tls_cert_file", "tls_key_file", "tls_ca_file") if getattr(node, name)]
    if len(tls) in (1, 2):
        raise ValueError(f"{tls[0]} is set, but TLS needs tls_cert_file, tls_key_file and tls_ca_file: give all three")
    _refuse_bad_addresses(node)
    _refuse_export_to_nobody(node)
    if node.directory == "none":
        return
    listen = parse_listen(node.grpc_listen)
    if listen is None:
        raise ValueError(
            "grpc_listen is off, but peers must reach this node: give it host:port, or set directory to none"
        )
    wanted = {"static": "peers", "redis": "redis_url"}[node.directory]
    if not getattr(node, wanted):
        raise ValueError(f"directory is {node.directory}, which needs {wanted}: set it")
    for url in filter(None, (word.strip() for word in node.redis_url.split(","))):
        if not url.startswith(REDIS_SCHEMES):
            raise ValueError(
                f"redis_url {url!r} is no URL of Redis: write redis://host:6379, rediss://... or unix:///path"
            )
    if not listen.loopback and not tls and not node.cluster_token_file:
        raise ValueError(
            f"grpc_listen {node.grpc_listen} is reachable from other machines, and anybody there could read every block: set "
            "cluster_token_file, or the three tls_*_file, or both (see docs/security.md)"
        )


def _refuse_bad_addresses(node: NodeConfig) -> None:
    for option, addresses in (("peers", node.peers), ("advertise", [node.advertise] if node.advertise else [])):
        for address in addresses:
            if _listen(option, address) is None:
                raise ValueError(f"{option}: {address!r} is no address of a node: write host:port")
    _listen("ucx_listen", node.ucx_listen)


def _listen(option: str, address: str) -> Listen | None:
    try:
        return parse_listen(address)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error


def _refuse_export_to_nobody(node: NodeConfig) -> None:
    if parse_port(node.nvmeof) is not None and not node.nvmeof_allowed_hosts:
        raise ValueError("nvmeof exports to nobody: set nvmeof_allowed_hosts to the numbers of the nodes that may read")


def refuse_bad_paths(socket: Path, ssd_paths: Sequence[Path], socket_bytes_max: int) -> None:
    """By their names alone, since a disk may hang. Raises: ValueError: a socket too long to bind, a relative path, or disks that lie in each other."""
    if len(os.fsencode(socket)) > socket_bytes_max:
        raise ValueError(f"socket {socket} is longer than {socket_bytes_max} bytes: choose a shorter path")
    if "," in str(socket):
        raise ValueError(f"socket {socket} has a comma in it: choose a path without")
    for path in (socket, *ssd_paths):
        if not path.is_absolute():
            raise ValueError(f"path {path} is relative: write it from the root, like /mnt/nvme0/flatcake")
    plain = [Path(os.path.normpath(path)) for path in ssd_paths]
    for i, path in enumerate(plain):
        for other in plain[i + 1 :]:
            if path == other or path in other.parents or other in path.parents:
                raise ValueError(
                    f"ssd_paths {path} and {other} lie in each other: give each disk one directory of its own"
                )


def refuse_too_much_memory(memory_bytes: int, huge_pages: str, root: Path = ROOT) -> None:
    """The kernel gives an arena of any size, and ends processes when it is used: engines, for all we know.

    Raises:
        ValueError: this machine or container can never hold it. Where huge pages must do, the arena says so.
        Unavailable: its huge pages could, but others have them now.
    """
    if huge_pages == "on" or (huge_pages == "auto" and memory_bytes <= free_huge_pages_bytes(root)):
        return
    total_bytes = total_memory_bytes(root)
    if not 0 < total_bytes < memory_bytes:
        return
    asked = f"memory_bytes is {approximate_size(memory_bytes)}"
    if huge_pages == "auto" and memory_bytes <= huge_pages_bytes(root):
        raise Unavailable(
            f"{asked}, but {approximate_size(free_huge_pages_bytes(root))} of huge pages are free: end who has the others, "
            "like engines that still map the arena of a daemon before this one"
        )
    raise ValueError(
        f"{asked}, but there are {approximate_size(total_bytes)} of memory here in all: lower it to what the engine leaves"
    )


def ssd_path_refusal(path: Path, quota_bytes: int) -> str:
    """Why an SSD path cannot be used; empty where it can.

    A missing directory is not made: with a disk that failed to mount, the sessions would fill the root file system.
    """
    try:
        if not path.exists():
            return f"{path} does not exist: mount its disk, or make it with mkdir -p {path}"
        if not path.is_dir():
            return f"{path} is no directory: give a directory on the disk"
        if not os.access(path, os.W_OK | os.X_OK):
            if os.statvfs(path).f_flag & os.ST_RDONLY:
                do = "mount its file system writable, or name it in ReadWritePaths of the systemd unit"
            else:
                do = "change its owner, or the user"
            return f"{path} cannot be written by user {os.getuid()}: {do}"
        total_bytes = shutil.disk_usage(path).total
    except OSError as error:
        return f"{path} cannot be examined: {error.strerror}: look at its disk"
    if quota_bytes > total_bytes:
        return (
            f"{path} has {approximate_size(quota_bytes)} of ssd_bytes, but its file system has "
            f"{approximate_size(total_bytes)}: lower ssd_bytes, or mount the disk that was meant"
        )
    return ""


_BOUNDS: Final = {"ge": "is at least", "gt": "is above", "le": "is at most", "lt": "is below"}
_FORMS: Final = {
    "socket_mode": "is three octal digits, like 0660",
    "cluster_name": "is up to 64 letters, digits, dots, dashes and underscores",
}


def one_line(error: ValidationError, reader_of: Callable[[str], object]) -> str:
    """All that is wrong. `reader_of` gives what reads an option's text, which is how its bounds are written, too."""
    lines = []
    for detail in error.errors(include_url=False):
        where = ".".join(str(part) for part in detail["loc"])
        message = _bound_of(where, detail, reader_of(where)) or detail["msg"].removeprefix("Value error, ")
        given = detail.get("input")
        shown = f" (given: {given!r})" if where and detail["type"] != "value_error" else ""
        lines.append(f"{where}: {message}{shown}" if where else message)
    return "; ".join(lines).replace("\n", " ")


def _bound_of(name: str, detail: Mapping[str, Any], reader: object) -> str:
    """A bound in the units in which the option is written, or how its text must look; empty where it is neither."""
    write: Callable[[Any], str] = {parse_size: format_size, parse_duration: format_duration}.get(reader, str)  # type: ignore[call-overload]
    context = detail.get("ctx", {})
    if "pattern" in context:
        return _FORMS[name]
    return next((f"{words} {write(context[key])}" for key, words in _BOUNDS.items() if key in context), "")


def unknown_option(name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    return f"unknown option {name}: {meant}known options are {', '.join(sorted(known))}"
