"""Network namespaces for tests: nodes with a network device of their own, on links that are pulled, or slow."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x00020000
MS_PRIVATE_ALL = 1 << 18 | 1 << 14  # MS_PRIVATE, MS_REC
MNT_DETACH = 2
RUN = os.getpid()
NET = RUN % 250  # two runs on one machine must not take each other's addresses


@dataclass(frozen=True)
class Family:
    """Addresses of a network: `{}` is a machine's number there."""

    pattern: str
    bits: int

    def address(self, number: int) -> str:
        return self.pattern.format(number)

    def add(self, number: int, device: str, *where: str) -> None:
        """Give a device the address."""
        dad = ["nodad"] if self.bits == 64 else []
        ip(*where, "addr", "add", f"{self.address(number)}/{self.bits}", "dev", device, *dad)


def families(network: int) -> dict[str, Family]:
    """Both address families, of the network with this number."""
    return {"IPv4": Family(f"10.{network}.{NET}.{{}}", 24), "IPv6": Family(f"fd{network % 100}:{NET:x}::{{}}", 64)}


def quoted(address: str) -> str:
    """As it stands before a port."""
    return f"[{address}]" if ":" in address else address


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def needed(what: str) -> Iterator[None]:
    """Skips where this kernel has none."""
    try:
        yield
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no {what} here: {error.stderr.decode().strip()}")


def slow(device: str, rate: str, *where: str) -> None:
    """What is sent from a device goes at this rate, as on a link of that speed."""
    for words in (
        ["qdisc", "add", "dev", device, "root", "handle", "1:", "htb", "default", "1"],
        ["class", "add", "dev", device, "parent", "1:", "classid", "1:1", "htb", "rate", rate, "burst", "64k"],
    ):
        subprocess.run(["tc", *where, *words], check=True, capture_output=True)


def need_namespaces(monkeypatch: pytest.MonkeyPatch, *tools: str) -> None:
    """Skips where there are none. UCX goes by TCP then: processes of one machine would share memory, past any network."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    missing = [tool for tool in ("ip", *tools) if not shutil.which(tool)]
    if os.geteuid() or missing:
        pytest.skip(
            "network namespaces need root and iproute2: partitions and slow links were not tested on real devices"
        )
    clear_leftovers()


def clear_leftovers() -> None:
    """A run that was killed leaves its devices, and with them routes to addresses that another run may take."""
    for folder, prefix, kind in (("/run/netns", "fc", "netns"), ("/sys/class/net", "fcn", "link")):
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(folder):  # noqa: PTH208
                owner = re.fullmatch(rf"{prefix}(\d+)(x\d+)?", name)
                if owner and not Path(f"/proc/{owner[1]}").exists():
                    subprocess.run(["ip", kind, "del", name], check=False, capture_output=True)


@dataclass(frozen=True)
class Room:
    """A network namespace with one end of a veth pair in it; the other, `near`, is in the test's own."""

    name: str
    near: str
    away: str
    wrapper: Path  # a file that moves the process that runs it there

    @property
    def where(self) -> tuple[str, str]:
        return "-n", self.name


@contextlib.contextmanager
def room(tmp_path: Path, suffix: str = "") -> Iterator[Room]:
    """Its devices are up, and have no addresses."""
    made = Room(f"fc{RUN}{suffix}", f"fcn{RUN}{suffix}", f"fca{RUN}{suffix}", tmp_path / f"enter{suffix}.py")
    with needed("network namespaces"):
        ip("netns", "add", made.name)
    try:
        ip("link", "add", made.near, "type", "veth", "peer", "name", made.away, "netns", made.name)
        for words in ((made.near,), (made.away, *made.where), ("lo", *made.where)):
            ip(*words[1:], "link", "set", words[0], "up")
        made.wrapper.write_text(
            "import ctypes, os\n"
            "libc = ctypes.CDLL(None)\n"
            f"fd = os.open('/run/netns/{made.name}', os.O_RDONLY)\n"
            f"assert libc.setns(fd, {CLONE_NEWNET}) == 0\n"
            "os.close(fd)\n"
            # UCX looks for network devices in /sys: it must be the one of the namespace.
            f"assert libc.unshare({CLONE_NEWNS}) == 0\n"
            f"assert libc.mount(b'none', b'/', None, {MS_PRIVATE_ALL}, None) == 0\n"
            f"libc.umount2(b'/sys', {MNT_DETACH})\n"
            "assert libc.mount(b'sysfs', b'/sys', b'sysfs', 0, None) == 0\n"
        )
        yield made
    finally:
        subprocess.run(["ip", "netns", "del", made.name], check=False)
        subprocess.run(["ip", "link", "del", made.near], check=False, capture_output=True)
