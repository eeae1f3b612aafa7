"""What needs no kernel target; the rest is in tests/fabric/guest, on a real one."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest

from flatcake_server import disk
from flatcake_server.cluster import nvmet
from flatcake_server.cluster.nvme_host import NvmeHost
from flatcake_server.cluster.nvmet import NvmePort, NvmeTarget, subsystem_nqn, withdraw_leftovers
from flatcake_server.disk import Disk
from flatcake_server.session import PathInUse, SessionFiles
from flatcake_transport.errors import Unavailable

PORT = NvmePort("tcp", "127.0.0.1", 4420)
NQN = "nqn.2026-11.flatcake:test:1"


@pytest.mark.parametrize(("ports", "hosts"), [([], ["host"]), ([PORT], [])])
def test_a_target_without_port_or_host_is_refused(ports, hosts):
    with pytest.raises(ValueError, match="at least one allowed host"):
        NvmeTarget(NQN, ports, hosts)


def test_without_a_kernel_target_the_operator_is_told_what_to_do(tmp_path: Path):
    target = NvmeTarget(NQN, [PORT], ["host"], root=tmp_path / "nvmet")
    with pytest.raises(Unavailable, match="modprobe nvmet"):
        target.start()
    target.stop()


def test_a_path_that_is_taken_is_exported_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What a killed daemon left, whatever number and cluster it had; nothing of others, nor of a path that another daemon has."""
    root, path = tmp_path / "nvmet", tmp_path / "ssd"
    loop = tmp_path / "loop"
    loop.symlink_to(loop)  # what lies there cannot be looked at
    mine, others, within, broken, foreign = (
        root / f"subsystems/{subsystem_nqn('c', number)}/namespaces/1" for number in range(5)
    )
    places = {
        mine: path / "sessions/1", others: tmp_path / "ssd2/sessions/1", within: path / "ssd3/sessions/1",
        broken: loop / "sessions/1", foreign: Path("/dev/nvme0n1"),
    }  # fmt: skip
    for namespace, exported in places.items():
        namespace.mkdir(parents=True)
        (namespace / "enable").write_text("1")
        (namespace / "device_path").write_text(f"{exported}\n")
    monkeypatch.setattr(Path, "rmdir", shutil.rmtree)  # as configfs does: with all attributes
    monkeypatch.setattr(disk, "withdraw_leftovers", partial(withdraw_leftovers, root=root))
    path.mkdir()
    with closing(SessionFiles(path)), pytest.raises(PathInUse):
        Disk(path, 1, 1 << 20, 4).open()
    assert mine.exists(), "its owner lives"
    taken = Disk(path, 1, 1 << 20, 4)
    taken.open()
    taken.close()
    assert [namespace.exists() for namespace in places] == [False, True, True, True, True]


def test_what_was_exported_through_a_link_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    namespaces = tmp_path / "nvmet/subsystems" / NQN / "namespaces"
    namespaces.mkdir(parents=True)
    (tmp_path / "disk/sessions").mkdir(parents=True)
    (tmp_path / "ssd").symlink_to(tmp_path / "disk")
    monkeypatch.setattr(Path, "rmdir", shutil.rmtree)
    monkeypatch.setattr(nvmet, "_put", lambda attribute, value: attribute.write_text(value))
    target = NvmeTarget(NQN, [PORT], ["host"], root=tmp_path / "nvmet")
    target.export(tmp_path / "ssd/sessions/1", uuid4())
    withdraw_leftovers(tmp_path / "ssd/sessions", tmp_path / "nvmet")
    assert not list(namespaces.iterdir())


def test_a_port_knows_its_family():
    assert (PORT.family, NvmePort("rdma", "fe80::1", 4420).family) == ("ipv4", "ipv6")


def test_without_nvme_cli_connecting_says_so(tmp_path: Path):
    host = NvmeHost("host", tool=(str(tmp_path / "nvme"),), sys=tmp_path)
    with pytest.raises(Unavailable, match="install nvme-cli"):
        host.connect(NQN, PORT, 5)
    assert host.stats().failures_total == 1


def test_what_nvme_cli_says_is_passed_on(tmp_path: Path):
    host = NvmeHost("host", tool=(sys.executable, "-c", "import sys; sys.exit('no such host')"), sys=tmp_path)
    with pytest.raises(Unavailable, match="no such host"):
        host.connect(NQN, PORT, 20)


def test_a_tool_that_hangs_is_given_up(tmp_path: Path):
    hangs = (sys.executable, "-c", "import signal; signal.pause()")
    with pytest.raises(Unavailable, match=r"longer than 0\.2 s"):
        NvmeHost("host", tool=hangs, sys=tmp_path).connect(NQN, PORT, 0.2)


def test_a_namespace_that_does_not_appear_is_given_up_at_the_deadline(tmp_path: Path):
    host = NvmeHost("host", sys=tmp_path)
    with pytest.raises(Unavailable, match="did not appear"):
        host.open(NQN, uuid4(), 0.01)
    assert (host.stats().failures_total, host.stats().opened_total) == (1, 0)


def test_a_namespace_that_goes_while_it_is_looked_for_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The kernel takes directories away between two calls: seen in the guest."""
    subsystem = tmp_path / "class/nvme-subsystem/nvme-subsys1"
    (subsystem / "nvme1n1").mkdir(parents=True)
    (subsystem / "subsysnqn").write_text(NQN)
    scandir = os.scandir

    def goes(path):
        if Path(path).name == "nvme1n1":
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", goes)
    with pytest.raises(Unavailable, match="did not appear"):
        NvmeHost("host", sys=tmp_path).open(NQN, uuid4(), 0.01)
