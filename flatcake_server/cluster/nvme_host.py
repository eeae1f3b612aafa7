"""The kernel's NVMe-oF initiator: connects to peers' subsystems and opens the namespaces of leased session files.

`nvme connect` needs root, and an engine has none: the daemon connects once a peer and hands its clients a read-only O_DIRECT
descriptor of the block device, as it hands them files of its own. Byte offset on the device = byte offset in the file.

A namespace is known by its UUID, which the owner makes anew for each export. The device's name is not enough: after a
withdrawal the same name may be another session's. So the UUID is asked of the very device that was opened.

Faults survived: a peer that is gone (reads fail after `io_fail_s`, connecting after the caller's timeout), a daemon that
was killed (its connections are found by their names and used again), no module, no root, no nvme-cli.

Blocking; for one thread at a time.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import UUID

from flatcake_server.cluster.nvmet import NvmePort
from flatcake_transport.errors import Unavailable

SYS: Final = Path("/sys")
SUBSYSTEMS_MAX: Final = 256  # peers read from over NVMe-oF at once
IO_FAIL_S: Final = 5  # how long reads wait for a peer that went away
_LOOK_S: Final = 0.002  # a namespace appears 8 to 20 ms after its export
_NQN_FILE: Final = "subsysnqn"


@dataclass(frozen=True, slots=True)
class HostStats:
    connected: int
    connects_total: int
    opened_total: int
    failures_total: int


class NvmeHost:
    """Connections to peers' subsystems.

    Args:
        host_nqn: our name, which peers have in their `allowed_hosts`.
        io_fail_s: reads of a peer that is gone fail after this many seconds.
        tool: nvme-cli's command line, as words.
    """

    def __init__(
        self, host_nqn: str, *, io_fail_s: int = IO_FAIL_S, tool: tuple[str, ...] = ("nvme",), sys: Path = SYS
    ) -> None:
        self._host_nqn = host_nqn
        self._io_fail_s = io_fail_s
        self._tool = tool
        self._sys = sys
        self._connected: set[str] = set()
        self._connects_total = self._opened_total = self._failures_total = 0

    def connect(self, nqn: str, port: NvmePort, timeout_s: float) -> None:
        """Connect to a subsystem, unless we are. Raises: Unavailable: no tool, no right, nobody there, not allowed."""
        if nqn in self._connected and self._controllers(nqn):
            return
        if nqn not in self._connected and len(self._connected) >= SUBSYSTEMS_MAX:
            raise Unavailable(f"connected to {SUBSYSTEMS_MAX} NVMe-oF subsystems already")
        if not self._controllers(nqn):
            self._run(
                timeout_s,
                "connect",
                f"--transport={port.transport}",
                f"--traddr={port.address}",
                f"--trsvcid={port.service}",
                f"--nqn={nqn}",
                f"--hostnqn={self._host_nqn}",
                f"--ctrl-loss-tmo={2 * self._io_fail_s}",
                f"--keep-alive-tmo={self._io_fail_s}",
                "--reconnect-delay=1",
            )
            self._connects_total += 1
        self._connected.add(nqn)
        for controller in self._controllers(nqn):
            with contextlib.suppress(OSError):  # kernels before 5.11: reads fail with the controller instead
                (controller / "fast_io_fail_tmo").write_text(str(self._io_fail_s))

    def open(self, nqn: str, uuid: UUID, timeout_s: float, *, now_s: Callable[[], float] = time.monotonic) -> int:
        """Open the namespace with this UUID, read-only and O_DIRECT, waiting until it has appeared.

        Returns: a descriptor, the caller's to close.
        Raises: Unavailable: it did not appear in time, or cannot be opened.
        """
        deadline_s = now_s() + timeout_s
        while True:
            for device in self._devices(nqn):
                if _uuid_of(device) == uuid:
                    fd = self._opened(device.name, uuid)
                    if fd is not None:
                        self._opened_total += 1
                        return fd
            if now_s() >= deadline_s:
                self._failures_total += 1
                raise Unavailable(f"namespace {uuid} of {nqn} did not appear within {timeout_s:g} s")
            time.sleep(_LOOK_S)

    def disconnect(self, nqn: str, timeout_s: float) -> None:
        """Let go of a subsystem. Unknown ones are fine. Raises: Unavailable: it stays connected."""
        self._connected.discard(nqn)
        if self._controllers(nqn):
            self._run(timeout_s, "disconnect", f"--nqn={nqn}")

    def close(self, timeout_s: float) -> None:
        """Disconnect from all. Twice is fine."""
        for nqn in list(self._connected):
            with contextlib.suppress(Unavailable):
                self.disconnect(nqn, timeout_s)

    def stats(self) -> HostStats:
        return HostStats(
            connected=len(self._connected),
            connects_total=self._connects_total,
            opened_total=self._opened_total,
            failures_total=self._failures_total,
        )

    def _run(self, timeout_s: float, *words: str) -> None:
        command = [*self._tool, *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        except FileNotFoundError as error:
            self._failures_total += 1
            raise Unavailable(f"{self._tool[0]} is missing: install nvme-cli, or set nvmeof = off") from error
        except subprocess.TimeoutExpired as error:
            self._failures_total += 1
            raise Unavailable(f"{' '.join(command[:2])} took longer than {timeout_s:g} s") from error
        if done.returncode:
            self._failures_total += 1
            said = " ".join((done.stderr or done.stdout).split())
            raise Unavailable(f"{' '.join(command[:2])} failed: {said or f'status {done.returncode}'}")

    def _subsystems(self, nqn: str) -> Iterator[Path]:
        for entry in _within(self._sys / "class/nvme-subsystem", "*"):
            if _read(entry / _NQN_FILE) == nqn:
                yield entry

    def _controllers(self, nqn: str) -> list[Path]:
        """Live connections. A lost one stays for a while, and is no connection."""
        found = [each for entry in self._subsystems(nqn) for each in _within(entry, "nvme*")]
        return [each for each in found if _read(each / "state") in {"live", "connecting", "resetting", "new"}]

    def _devices(self, nqn: str) -> Iterator[Path]:
        """Namespaces: below the subsystem with native multipath, below a controller without."""
        for entry in self._subsystems(nqn):
            for place in (entry, *_within(entry, "nvme*")):
                for device in _within(place, "nvme*n*"):
                    if (device / "dev").is_file():  # a hidden path of multipath has none
                        yield device

    def _opened(self, name: str, uuid: UUID) -> int | None:
        """A descriptor, if what was opened is the namespace with this UUID; None if it is gone again."""
        try:
            fd = os.open(f"/dev/{name}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            return None
        device = os.fstat(fd).st_rdev
        if _uuid_of(self._sys / f"dev/block/{os.major(device)}:{os.minor(device)}") == uuid:
            return fd
        os.close(fd)
        return None


def _uuid_of(device: Path) -> UUID | None:
    with contextlib.suppress(ValueError):
        return UUID(_read(device / "uuid"))
    return None


def _within(place: Path, pattern: str) -> list[Path]:
    """What there is; of a place that goes meanwhile nothing."""
    try:
        return list(place.glob(pattern))
    except OSError:
        return []


def _read(attribute: Path) -> str:
    try:
        return attribute.read_text().strip()
    except OSError:
        return ""
