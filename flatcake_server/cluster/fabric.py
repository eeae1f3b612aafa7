"""How peers reach the bytes of this node: one-sided UCX gets from the arena and from a bounce buffer that ranges of session files
are read into (serving.py), answered by a process of its own.

What peers are told changes when that process is started again, so it goes with each lookup's reply and not with the greeting.
While nobody serves the arena, a peer's hit here is told that its memory cannot be read, which is a miss there.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import ipaddress
import logging
import mmap
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flatcake_proto.v1 import store_pb2
from flatcake_server.arena import Arena
from flatcake_transport.errors import Unavailable
from flatcake_transport.movers.ucx_process import UcxProcess
from flatcake_transport.remote import RemoteMemory
from flatcake_transport.units import Listen

log = logging.getLogger(__name__)

# UCX takes the first free port of a range: one for the process that serves, more for one that is started again while the
# connections of the last one linger.
PORTS: Final = 8
_SIOCGIFCONF: Final = 0x8912  # all IPv4 addresses, each in a struct ifreq
_IFREQ_BYTES: Final = 40
_ADDRESSES_MAX: Final = 4096
_EVERY_ADDRESS: Final = ("0.0.0.0", "::")  # noqa: S104


class Fabric:
    """Belongs to the event loop. `listen` None: nothing is served."""

    def __init__(self, listen: Listen | None, arena: Arena, peer_timeout_s: float, bounce_bytes: int = 0) -> None:
        """`bounce_bytes` 0: no session files are served."""
        self._listen = listen
        self._bounce_bytes = bounce_bytes
        self._bounce_fd = -1
        self.nvme = ("", "")  # subsystem and address of exported files, once there are such
        self.bounce: NDArray[np.uint8] | None = None  # once it is served
        self._arena = arena
        self._peer_timeout_s = peer_timeout_s
        self._process: UcxProcess | None = None

    async def start(self) -> None:
        """Serve the arena. Raises: Unavailable: no UCX here, or no such address."""
        if self._listen is None:
            return
        options = ucx_options(self._listen)
        regions = [(self._arena.fd, self._arena.size_bytes)]
        bounce = None
        if self._bounce_bytes:
            self._bounce_fd, bounce = _shared(self._bounce_bytes)
            regions.append((self._bounce_fd, self._bounce_bytes))

        def serve() -> UcxProcess:
            return UcxProcess(regions, options=options, peer_timeout_s=self._peer_timeout_s)

        self._process = await asyncio.get_running_loop().run_in_executor(None, serve)
        self.bounce = bounce
        log.info("peers read this node's memory over UCX at %s", self._listen)

    def words(self) -> store_pb2.Fabric:
        """What peers are to be told now."""
        words = store_pb2.Fabric(nvme_subsystem=self.nvme[0], nvme_address=self.nvme[1])
        if self._process is not None:
            with contextlib.suppress(Unavailable):
                words.arena = self._process.memories()[0].sealed()
                words.files = self.bounce is not None
        return words

    def bounced(self) -> RemoteMemory:
        """How peers name the bounce buffer now. Raises: Unavailable: nobody serves it."""
        if self._process is None or self.bounce is None:
            raise Unavailable("no session files are served to peers")
        return self._process.memories()[1]

    @property
    def restarts(self) -> int:
        return self._process.restarts if self._process is not None else 0

    async def close(self) -> None:
        """Twice is fine."""
        process, self._process = self._process, None
        if process is not None:
            await asyncio.get_running_loop().run_in_executor(None, process.close)
        self.bounce = None
        if self._bounce_fd >= 0:
            os.close(self._bounce_fd)
            self._bounce_fd = -1


def _shared(size_bytes: int) -> tuple[int, NDArray[np.uint8]]:
    """A memory file and its mapping, every page touched; the mapping ends with its last view."""
    fd = os.memfd_create("flatcake-bounce", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size_bytes)
        memory = np.frombuffer(mmap.mmap(fd, size_bytes), np.uint8)
    except OSError:
        os.close(fd)
        raise
    memory[:: mmap.PAGESIZE] = 0
    return fd, memory


def ucx_options(listen: Listen) -> Mapping[str, str]:
    """UCX's words for where to listen; the user's own UCX_* come before them. Raises: Unavailable: no such address here."""
    options = {"TCP_PORT_RANGE": f"{listen.port}-{listen.port + PORTS - 1}"} if listen.port else {}
    if listen.host not in _EVERY_ADDRESS:
        device = device_of_address(listen.host)
        if device is None:
            raise Unavailable(
                f"ucx_listen: no network device has the address {listen.host}: give the address of one, or 0.0.0.0"
            )
        options["NET_DEVICES"] = ",".join([device, *rdma_ports(device)])
    return options


def rdma_ports(device: str, sys: Path = Path("/sys")) -> list[str]:
    """The ports of RDMA cards that a network device is of, as UCX names them: it takes no port that is not named."""
    ports = set()
    for entry in sys.glob("class/infiniband/*/ports/*/gid_attrs/ndevs/*"):  # RoCE, also under a VLAN or a bond
        with contextlib.suppress(OSError):  # a place in the card's table that is free
            if entry.read_text().strip() == device:
                ports.add(f"{entry.parts[-6]}:{entry.parts[-4]}")
    port = sys / "class/net" / device / "dev_port"
    for card in sys.glob(f"class/net/{device}/device/infiniband/*"):  # IP over InfiniBand
        with contextlib.suppress(OSError, ValueError):
            ports.add(f"{card.name}:{int(port.read_text()) + 1}")
    return sorted(ports)


def device_of_address(host: str) -> str | None:
    """The network device that has an address, or is called so; None: there is none."""
    devices = [name for _, name in socket.if_nameindex()]
    if host in devices:
        return host
    try:
        wanted = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return None
    if wanted.is_loopback:
        return next((name for name in devices if name == "lo"), None)
    if wanted.version == 6:
        lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
        return next((words[-1] for words in lines if int(words[0], 16) == int(wanted)), None)
    entries = np.zeros((_ADDRESSES_MAX, _IFREQ_BYTES), np.uint8)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        asked = struct.pack("@iP", entries.nbytes, entries.ctypes.data)
        (size_bytes, _) = struct.unpack("@iP", fcntl.ioctl(asker, _SIOCGIFCONF, asked))
    for entry in entries[: size_bytes // _IFREQ_BYTES]:
        if entry[20:24].tobytes() == wanted.packed:  # behind a name of 16 bytes, a family and a port
            name = bytes(entry[:16]).partition(b"\0")[0].decode()
            return name.partition(":")[0]  # a second address may have a label
    return None
