"""The kernel's NVMe-oF target: exports session files as namespaces for as long as peers lease them. Through configfs.

    /sys/kernel/config/nvmet/subsystems/<nqn>/namespaces/<nsid>   one a session file, made by `export`, gone with `withdraw`
                                             /allowed_hosts       the peers that may connect; nobody else
                            /ports/<n>/subsystems/<nqn>           where they connect to

The session's file itself backs its namespace, so byte offset = file offset, what is not written reads as zeros, and an append
made with O_DIRECT is seen at once. Each export has a UUID of its own: a reader that knows it can never take the next file
under the same namespace id for the one it leased. When `withdraw` returns, no read of the file is under way and none will
begin (the kernel drains the namespace), so its space may be given to others.

Faults survived: a daemon that was killed (the next one on its directories withdraws what is exported of them, `start` clears what
the subsystem has), a namespace that cannot be withdrawn (it stays counted, and its id is not used until `withdraw`,
tried anew, has ended it), a file system without O_DIRECT, no kernel module, no root.

Blocking, and for one thread. Needs write access to configfs, and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import UUID

from flatcake_transport.errors import Overloaded, Unavailable

log = logging.getLogger(__name__)

CONFIGFS: Final = Path("/sys/kernel/config/nvmet")
NAMESPACES_MAX: Final = 1024  # NVMET_MAX_NAMESPACES in drivers/nvme/target/nvmet.h
PORTS_MAX: Final = 65_535


@dataclass(frozen=True, slots=True)
class NvmePort:
    """Where a subsystem is reached: `transport` is tcp or rdma, `service` a port number."""

    transport: str
    address: str
    service: int

    @property
    def family(self) -> str:
        return "ipv6" if ":" in self.address else "ipv4"


def parse_port(text: str) -> NvmePort | None:
    """`tcp://10.0.0.7:4420` or `rdma://[fd00::7]:4420`; None for "off". Raises: ValueError: neither."""
    if text in ("", "off"):
        return None
    transport, _, rest = text.partition("://")
    host, _, service = rest.rpartition(":")
    if transport not in ("tcp", "rdma") or not host or not service.isdecimal():
        raise ValueError(f"nvmeof is {text!r}: write tcp://ADDRESS:4420, rdma://ADDRESS:4420 or off")
    return NvmePort(transport, host.strip("[]"), int(service))


def host_nqn(cluster: str, node: str | int) -> str:
    """What a node is called that reads over NVMe-oF; what is such a name already stays."""
    return str(node) if str(node).startswith("nqn.") else f"nqn.2026-11.flatcake:{cluster}:host:{node}"


def subsystem_nqn(cluster: str, node_id: int) -> str:
    return f"nqn.2026-11.flatcake:{cluster}:node:{node_id}"


@dataclass(frozen=True, slots=True)
class TargetStats:
    exported: int
    exports_total: int
    withdrawals_total: int
    stuck: int  # withdrawn in vain; the file is still readable by allowed hosts
    leftovers_total: int  # found of a daemon that was killed, and cleared


class NvmeTarget:
    """One subsystem of the kernel's target, with a namespace for each leased session file."""

    def __init__(
        self,
        nqn: str,
        ports: Sequence[NvmePort],
        allowed_hosts: Sequence[str],
        *,
        root: Path = CONFIGFS,
        namespaces_max: int = NAMESPACES_MAX,
    ) -> None:
        """Raises: ValueError: no port, or no host that may connect."""
        if not ports or not allowed_hosts:
            raise ValueError(f"NVMe-oF export of {nqn} needs a port and at least one allowed host NQN")
        self.nqn = nqn
        self.ports = tuple(ports)
        self._allowed_hosts = tuple(allowed_hosts)
        self._root = root
        self._subsystem = root / "subsystems" / nqn
        self._namespaces_max = namespaces_max
        self._exports: dict[int, UUID] = {}
        self._stuck: set[int] = set()
        self._last = 0
        self._exports_total = self._withdrawals_total = self._leftovers_total = 0

    def start(self) -> None:
        """Make the subsystem and its ports; what a killed daemon left under this name is cleared first.

        Raises: Unavailable: no target in this kernel, or no right to steer it; the message says what to do.
        """
        if not self._root.is_dir():
            raise Unavailable(
                f"{self._root} is missing: run 'modprobe nvmet nvmet-tcp' (or nvmet-rdma) and mount configfs, "
                f"or set nvmeof = off"
            )
        try:
            self._leftovers_total += self._clear()
            self._subsystem.mkdir()
            _put(self._subsystem / "attr_allow_any_host", "0")
            for host in self._allowed_hosts:
                known = self._root / "hosts" / host
                known.mkdir(exist_ok=True)
                (self._subsystem / "allowed_hosts" / host).symlink_to(known)
            for port in self.ports:
                (self._port(port) / "subsystems" / self.nqn).symlink_to(self._subsystem)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._clear()
            raise Unavailable(f"the kernel's NVMe target cannot be set up: {_told(error)}") from error

    def export(self, path: Path, uuid: UUID) -> int:
        """Export a file to the allowed hosts, read by them as the namespace with this UUID. Some milliseconds.

        Returns: the namespace id.
        Raises: Overloaded: as many as may be are exported. Unavailable: the kernel refuses the file.
        """
        nsid = self._free_nsid()
        namespace = self._namespace(nsid)
        try:
            namespace.mkdir()
            _put(namespace / "device_path", str(path.resolve()))  # see `withdraw_leftovers`
            _put(namespace / "device_uuid", str(uuid))
            _put(namespace / "buffered_io", "0")
            _put(namespace / "enable", "1")
        except OSError as error:
            with contextlib.suppress(OSError):
                namespace.rmdir()
            raise Unavailable(f"{path} cannot be exported over NVMe-oF: {_told(error)}") from error
        self._exports[nsid] = uuid
        self._exports_total += 1
        return nsid

    def withdraw(self, nsid: int) -> None:
        """End an export: when this returns nobody reads the file any more. Unknown ones are fine.

        Raises: Unavailable: it may still be read. It stays known: try again.
        """
        if self._exports.pop(nsid, None) is None and nsid not in self._stuck:
            return
        try:
            _remove_namespace(self._namespace(nsid))
        except OSError as error:
            self._stuck.add(nsid)
            raise Unavailable(f"namespace {nsid} cannot be withdrawn: {_told(error)}") from error
        self._stuck.discard(nsid)
        self._withdrawals_total += 1

    def stop(self) -> None:
        """Withdraw all and remove the subsystem. Twice is fine. Raises: Unavailable: something stays."""
        try:
            self._clear()
        except OSError as error:
            raise Unavailable(f"the NVMe subsystem {self.nqn} cannot be removed: {_told(error)}") from error
        self._exports.clear()
        self._stuck.clear()

    def stats(self) -> TargetStats:
        return TargetStats(
            exported=len(self._exports),
            exports_total=self._exports_total,
            withdrawals_total=self._withdrawals_total,
            stuck=len(self._stuck),
            leftovers_total=self._leftovers_total,
        )

    def _namespace(self, nsid: int) -> Path:
        return self._subsystem / "namespaces" / str(nsid)

    def _entries(self) -> list[Path]:
        parent = self._subsystem / "namespaces"
        return list(parent.iterdir()) if parent.is_dir() else []

    def _free_nsid(self) -> int:
        """The next id after the last that is free: one withdrawn a moment ago is the last to come again."""
        for step in range(1, self._namespaces_max + 1):
            nsid = (self._last + step - 1) % self._namespaces_max + 1
            if nsid not in self._exports and nsid not in self._stuck:
                self._last = nsid
                return nsid
        raise Overloaded(f"{self._namespaces_max} session files are exported already")

    def _clear(self) -> int:
        """Remove our subsystem, whoever made it, and ports of ours that serve nothing else. Returns namespaces removed."""
        if not self._subsystem.is_dir():
            return 0
        entries = self._entries()
        for entry in entries:
            _remove_namespace(entry)
        for port in self._root.glob("ports/*"):
            link = port / "subsystems" / self.nqn
            if link.is_symlink():
                link.unlink()
                if _port_of(port) in self.ports and not any((port / "subsystems").iterdir()):
                    port.rmdir()
        for link in (self._subsystem / "allowed_hosts").iterdir():
            link.unlink()
            with contextlib.suppress(OSError):  # another subsystem knows the host, too
                (self._root / "hosts" / link.name).rmdir()
        self._subsystem.rmdir()
        return len(entries)

    def _port(self, port: NvmePort) -> Path:
        """The port's directory: one with this address, or a new one."""
        taken = {entry.name: _port_of(entry) for entry in self._root.glob("ports/*")}
        for name, known in taken.items():
            if known == port:
                return self._root / "ports" / name
        number = next(n for n in range(1, PORTS_MAX + 1) if str(n) not in taken)
        made = self._root / "ports" / str(number)
        made.mkdir()
        _put(made / "addr_trtype", port.transport)
        _put(made / "addr_adrfam", port.family)
        _put(made / "addr_traddr", port.address)
        _put(made / "addr_trsvcid", str(port.service))
        return made


def withdraw_leftovers(directory: Path, root: Path = CONFIGFS) -> None:
    """End all exports of files below a directory that is this daemon's alone.

    Who made them was killed, and may have had another number, cluster or `nvmeof`; the files are about to be cut and deleted.
    Others' files are not looked at: their disks may hang.
    """
    ours = directory.resolve()
    for namespace in root.glob("subsystems/*/namespaces/*"):
        try:
            exported = Path((namespace / "device_path").read_text().strip())
            if exported.is_relative_to(ours):
                _remove_namespace(namespace)
                log.warning("%s was exported over NVMe-oF by a daemon that is gone; withdrawn", exported)
        except OSError as error:
            log.error("%s is left of a daemon that is gone, maybe, and stays exported: %s", namespace, _told(error))


def _port_of(directory: Path) -> NvmePort | None:
    words = [(directory / name).read_text().strip() for name in ("addr_trtype", "addr_traddr", "addr_trsvcid")]
    return NvmePort(words[0], words[1], int(words[2])) if words[2].isdigit() else None


def _remove_namespace(namespace: Path) -> None:
    _put(namespace / "enable", "0")  # returns when the kernel has drained what was being read
    namespace.rmdir()


def _put(attribute: Path, value: str) -> None:
    """One write(2) a value: configfs takes it whole or not at all."""
    fd = os.open(attribute, os.O_WRONLY)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)


def _told(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return f"{error}: the daemon must be root, or own {CONFIGFS}"
    return str(error)
