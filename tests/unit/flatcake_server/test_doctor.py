from __future__ import annotations

import errno
import os
import platform
import resource
from dataclasses import replace

import pytest

from flatcake_server import doctor
from flatcake_transport.errors import Unavailable
from flatcake_transport.movers.ucx_describe import UcxHere


@pytest.fixture
def root(tmp_path):
    """A machine of files: writes `root("proc/meminfo", text)`."""

    def write(name: str, text: str = ""):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return tmp_path

    write.path = tmp_path
    return write


def test_memory_is_what_is_free_here_and_in_the_container(root):
    root("proc/meminfo", "MemTotal:  8388608 kB\nMemAvailable:  4194304 kB\n")
    assert doctor.probe_memory(4 << 30, root.path).state == "yes"
    assert doctor.probe_memory((4 << 30) + 1, root.path).state == "fails"
    root("sys/fs/cgroup/memory.max", "max\n")
    assert doctor.probe_memory(4 << 30, root.path).state == "yes"
    root("sys/fs/cgroup/memory.max", f"{2 << 30}\n")
    root("sys/fs/cgroup/memory.current", f"{1 << 30}\n")
    assert doctor.probe_memory(1 << 30, root.path).state == "yes"
    assert doctor.probe_memory((1 << 30) + 1, root.path).state == "fails"
    root("sys/fs/cgroup/memory.stat", f"anon 4096\ninactive_file {1 << 29}\n")  # the kernel gives it back
    assert doctor.probe_memory(3 << 29, root.path).state == "yes"
    root("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "2048\n")
    assert doctor.probe_memory(4 << 30, root.path).state == "yes"
    assert doctor.probe_memory(4 << 30, root.path, huge_pages="off").state == "fails"
    assert doctor.probe_memory(4 << 30, root.path, huge_pages="on").state == "yes"
    root("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "0\n")
    assert "raise vm.nr_hugepages" in doctor.probe_memory(1 << 20, root.path, huge_pages="on").advice


def test_huge_pages_are_reserved_or_transparent_or_none(root):
    shmem = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    root("proc/meminfo", "HugePages_Total:  9\nHugePages_Free:  8\nHugepagesize:  2048 kB\n")
    assert "16 MiB" in doctor.probe_huge_pages(root.path).detail
    root("proc/meminfo", "HugePages_Free:  0\nHugepagesize:  2048 kB\n")
    assert doctor.probe_huge_pages(root.path).state == "no"
    root(shmem, "always within_size advise [never] deny force\n")
    assert doctor.probe_huge_pages(root.path).state == "no"
    root(shmem, "always within_size [advise] never deny force\n")
    assert doctor.probe_huge_pages(root.path).state == "yes"


def test_locked_memory_and_open_files(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for limit, state in ((64 << 10, "no"), (1 << 30, "yes"), (resource.RLIM_INFINITY, "yes")):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert doctor.probe_memlock().state == state
    for limit, state in ((1024, "no"), (4096, "yes"), (resource.RLIM_INFINITY, "yes")):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert doctor.probe_open_files().state == state


def test_a_good_directory_passes_and_nothing_is_left_in_it(tmp_path):
    assert doctor.probe_direct(tmp_path).state in ("yes", "no")
    assert doctor.probe_fallocate(tmp_path).state in ("yes", "no")
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_o_direct_is_a_no(tmp_path, monkeypatch):
    really = os.open

    def refuse(path, flags, *rest, **keywords):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return really(path, flags, *rest, **keywords)

    monkeypatch.setattr(os, "open", refuse)
    finding = doctor.probe_direct(tmp_path)
    assert (finding.state, finding.advice != "") == ("no", True)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_reads_something_else_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "preadv", lambda *_: 4096)
    assert doctor.probe_direct(tmp_path).state == "fails"


def test_a_missing_directory_fails_everywhere(tmp_path):
    missing = tmp_path / "missing"
    for probe in (doctor.probe_direct, doctor.probe_fallocate, doctor.probe_device):
        finding = probe(missing)
        assert finding.state == "fails"
        assert finding.advice


def test_a_device_shows_its_limits_and_the_container_s(root, tmp_path):
    number = tmp_path.stat().st_dev
    queue = f"sys/dev/block/{os.major(number)}:{os.minor(number)}/queue"
    root(f"{queue}/scheduler", "[none] mq-deadline\n")
    root(f"{queue}/nr_requests", "1023\n")
    root(f"{queue}/rotational", "0\n")
    root("sys/fs/cgroup/io.max", "259:0 rbps=1000 wbps=max\n")
    finding = doctor.probe_device(tmp_path, root.path)
    assert finding.state == "yes"
    assert "scheduler none, requests 1023" in finding.detail
    assert "rbps=1000" in finding.detail
    root(f"{queue}/rotational", "1\n")
    assert doctor.probe_device(tmp_path, root.path).state == "no"


def test_memory_is_no_disk(root, tmp_path):
    number = tmp_path.stat().st_dev
    mount = f"36 35 {os.major(number)}:{os.minor(number)} / /mnt rw,noatime shared:1 - {{}} none rw\n"
    root("proc/self/mountinfo", mount.format("ext4"))
    assert doctor.probe_device(tmp_path, root.path).state == "yes"
    root("proc/self/mountinfo", "1 2 0:1 / / rw - proc proc rw\nbroken\n" + mount.format("tmpfs"))
    finding = doctor.probe_device(tmp_path, root.path)
    assert (finding.state, finding.advice) == ("no", "give a directory on a disk")


def test_nvmeof_tells_missing_from_not_loaded_from_there(root):
    assert "no configfs" in doctor.probe_nvmeof_target(root.path).detail
    root("sys/kernel/config/x")
    assert "no nvmet module" in doctor.probe_nvmeof_target(root.path).detail
    root(
        f"lib/modules/{platform.release()}/modules.dep",
        "kernel/drivers/nvme/target/nvmet.ko.xz: kernel/x.ko\nkernel/nvme-fabrics.ko:\n",
    )
    assert "not loaded" in doctor.probe_nvmeof_target(root.path).detail
    assert "not loaded" in doctor.probe_nvmeof_host(root.path).detail
    root("sys/kernel/config/nvmet/x")
    root("dev/nvme-fabrics")
    assert doctor.probe_nvmeof_target(root.path).state == "yes"
    assert doctor.probe_nvmeof_host(root.path).state == "yes"


def test_gpu_and_gds_say_why_not(monkeypatch):
    def no_library(name):
        raise OSError(f"{name}: cannot open")

    monkeypatch.setattr(doctor.ctypes, "CDLL", no_library)
    assert doctor.probe_gpu().state == "no"
    assert "libcuda.so.1: cannot open" in doctor.probe_gpu().detail
    assert "posix mover" in doctor.probe_gds().detail


def test_ucx_says_which_and_warns_of_cards_it_cannot_use(monkeypatch, root):
    def none(_):
        raise Unavailable("no UCX can be loaded: wheel: not installed")

    monkeypatch.setattr(doctor, "describe_ucx", none)
    finding = doctor.probe_ucx(root.path)
    assert (finding.state, "not installed" in finding.detail, "flatcake[ucx]" in finding.advice) == ("no", True, True)
    wheel = UcxHere("UCX 1.22.0 (wheel, /x)", "wheel", ("tcp/eth0", "tcp/lo"))
    monkeypatch.setattr(doctor, "describe_ucx", lambda _: wheel)
    finding = doctor.probe_ucx(root.path)
    assert finding.state == "yes"
    assert "UCX 1.22.0 (wheel, /x); transports: tcp/eth0, tcp/lo; RDMA cards: none" in finding.detail
    root("sys/class/infiniband/mlx5_0/x")
    finding = doctor.probe_ucx(root.path)
    assert finding.state == "no"
    assert "FLATCAKE_UCX_LIB=system" in finding.advice
    system = UcxHere("UCX 1.13.1 (system, /y)", "system", ("rc_verbs/mlx5_0:1", "tcp/lo"))
    monkeypatch.setattr(doctor, "describe_ucx", lambda _: system)
    assert doctor.probe_ucx(root.path).state == "yes"
    monkeypatch.setattr(doctor, "describe_ucx", lambda _: replace(system, transports=("tcp/lo",)))
    assert "ibv_devinfo" in doctor.probe_ucx(root.path).advice


def test_every_finding_that_costs_something_says_what_to_do(tmp_path):
    findings = doctor.examine([tmp_path, tmp_path / "missing"], 1 << 60)
    assert len({finding.name for finding in findings}) == len(findings)
    assert all(finding.detail for finding in findings)
    assert all(finding.advice for finding in findings if finding.state == "fails")
