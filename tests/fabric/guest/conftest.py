"""In the guest: kernel modules, a file system with O_DIRECT on the emulated NVMe disk, and a clean target for each test."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

DISK = "/dev/nvme0n1"
CONFIG = Path("/sys/kernel/config")


def sh(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "what was waited for never came"
        os.sched_yield()


@pytest.fixture(scope="session")
def disk() -> Path:
    """A directory on ext4 on a real NVMe disk of the guest's."""
    sh("modprobe", "-a", "nvme", "ext4", "nvmet", "nvmet-tcp", "nvme-tcp")
    if not (CONFIG / "nvmet").is_dir():
        sh("mount", "-t", "configfs", "config", str(CONFIG))
    until(lambda: Path(DISK).exists())
    sh("mkfs.ext4", "-q", "-F", DISK)
    mounted = Path("/tmp/ssd")
    mounted.mkdir()
    sh("mount", DISK, str(mounted))
    return mounted


@pytest.fixture(scope="session")
def soft_rdma() -> str:
    """The address of a soft RDMA device over a pair of veth devices."""
    sh("modprobe", "-a", "veth", "rdma_rxe", "rdma_ucm", "ib_uverbs", "nvmet-rdma", "nvme-rdma")
    sh("ip", "link", "add", "roce0", "type", "veth", "peer", "name", "roce1")
    for link in ("roce0", "roce1"):
        sh("ip", "link", "set", link, "mtu", "5000", "up")  # RoCE's largest packet, 4096, and its headers
    sh("ip", "addr", "add", "192.0.2.1/24", "dev", "roce0")
    sh("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "roce0")
    until(lambda: "ACTIVE" in sh("rdma", "link", "show", "rxe0/1"))
    return "192.0.2.1"


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """The kernel's target is as it was before the test."""
    nvmet = CONFIG / "nvmet"

    def left() -> list[Path]:
        return [entry for kind in ("subsystems", "ports", "hosts") for entry in (nvmet / kind).iterdir()]

    assert left() == []
    yield
    assert left() == []
