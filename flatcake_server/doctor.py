"""What this machine can do for FlatCake, and why not: one probe a question, each returns findings and changes nothing.

A finding is `yes` (works), `no` (does not; FlatCake then takes the named slower way), or `fails` (a daemon cannot run like
this). Probes try for real where trying is harmless: a file in the directory is opened O_DIRECT, written, read back and
removed. `root` is where /proc, /sys and /dev are looked for, so that tests can show a machine of their own.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.metadata
import mmap
import os
import platform
import re
import resource
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from flatcake_server.machine import (
    ROOT,
    free_huge_pages_bytes,
    free_memory_bytes,
    is_memory,
    memory_limit_bytes,
    read_meminfo,
    read_number,
)
from flatcake_transport.errors import Unavailable
from flatcake_transport.layout import ALIGN_BYTES
from flatcake_transport.movers.ucx_describe import describe_ucx
from flatcake_transport.movers.ucx_lib import rdma_cards
from flatcake_transport.units import approximate_size

State = Literal["yes", "no", "fails"]

_VERSIONS_OF: Final = (
    "flatcake numpy grpcio protobuf rocksdict uvloop aiohttp xxhash pydantic torch kvikio-cu12 kvikio-cu13 libucx-cu12"
)
_FILES_MIN: Final = 4096  # one a session being read or written, and RocksDB's
# An unlimited or tiny allowance: below this the arena cannot be registered with a network card or pinned for a GPU.
_MEMLOCK_BYTES_MIN: Final = 1 << 30
_PROBE_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    state: State
    detail: str
    advice: str = ""  # what to do about a "no" or "fails"; empty where nothing is lost


def examine(
    ssd_paths: Sequence[Path], memory_bytes: int, root: Path = ROOT, *, huge_pages: str = "auto"
) -> list[Finding]:
    """All probes, in the order people read them."""
    findings = [
        *probe_versions(),
        probe_memory(memory_bytes, root, huge_pages=huge_pages),
        probe_huge_pages(root),
        probe_memlock(),
        probe_open_files(),
        probe_gpu(),
        probe_gds(root),
    ]
    for path in ssd_paths:
        findings += [probe_fallocate(path), probe_direct(path), probe_device(path, root)]
    return [*findings, probe_ucx(root), probe_nvmeof_target(root), probe_nvmeof_host(root)]


def probe_versions() -> list[Finding]:
    found = []
    for name in _VERSIONS_OF.split():
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    here = f"Python {platform.python_version()}, {platform.system()} {platform.release()} {platform.machine()}"
    linux = platform.system() == "Linux" and hasattr(os, "memfd_create")
    return [
        Finding(
            "system", "yes" if linux else "fails", here, "" if linux else "the daemon needs Linux with memfd_create"
        ),
        Finding("versions", "yes", ", ".join(found)),
    ]


def probe_memory(memory_bytes: int, root: Path = ROOT, *, huge_pages: str = "auto") -> Finding:
    """Whether an arena of `memory_bytes` fits beside what runs here; a container's limit counts too."""
    huge_bytes = free_huge_pages_bytes(root) if huge_pages != "off" else 0
    arena = approximate_size(memory_bytes)
    if memory_bytes <= huge_bytes:
        return Finding("memory", "yes", f"{approximate_size(huge_bytes)} of huge pages free for an arena of {arena}")
    if huge_pages == "on":
        detail = f"{approximate_size(huge_bytes)} of huge pages free for an arena of {arena}, and huge_pages is on"
        advice = "raise vm.nr_hugepages, or set huge_pages to auto; a daemon that runs here has its arena already"
        return Finding("memory", "fails", detail, advice)
    free_bytes, limit = free_memory_bytes(root), memory_limit_bytes(root)
    detail = f"{approximate_size(free_bytes)} free for an arena of {arena}"
    if limit is not None:
        detail += f", container limit {approximate_size(limit)}"
    if memory_bytes <= free_bytes:
        return Finding("memory", "yes", detail)
    advice = "lower memory_bytes, or raise the container's memory limit; a daemon that runs here has its arena already"
    return Finding("memory", "fails", detail, advice)


def probe_huge_pages(root: Path = ROOT) -> Finding:
    info = read_meminfo(root)
    free = info.get("HugePages_Free", 0) * info.get("Hugepagesize", 0) * 1024
    if free:
        return Finding("huge pages", "yes", f"{approximate_size(free)} reserved and free")
    try:
        text = (root / "sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text(encoding="utf-8")
    except OSError:
        text = ""
    chosen = re.search(r"\[(\w+)\]", text)
    shmem = chosen[1] if chosen else "not supported"
    if shmem in {"always", "within_size", "advise"}:
        return Finding("huge pages", "yes", f"none reserved; transparent ones for shared memory: {shmem}")
    return Finding(
        "huge pages",
        "no",
        f"none reserved; transparent ones for shared memory: {shmem}",
        "sysctl vm.nr_hugepages=N for an arena of N x 2 MiB, or echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
    )


def _limit_text(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else approximate_size(limit)


def probe_memlock() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    detail = f"{_limit_text(soft)} (hard {_limit_text(hard)})"
    if soft == resource.RLIM_INFINITY or soft >= _MEMLOCK_BYTES_MIN or os.geteuid() == 0:
        return Finding("locked memory", "yes", detail + (", but root is not bound by it" if os.geteuid() == 0 else ""))
    advice = (
        "LimitMEMLOCK=infinity in the systemd unit, or ulimit -l unlimited: needed to pin the arena for a GPU or RDMA"
    )
    return Finding("locked memory", "no", detail, advice)


def probe_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= _FILES_MIN or soft == resource.RLIM_INFINITY:
        return Finding("open files", "yes", str(soft))
    return Finding(
        "open files", "no", f"{soft} (hard {hard})", f"LimitNOFILE={_FILES_MIN} or more, or ulimit -n {_FILES_MIN}"
    )


def _cuda_driver() -> tuple[ctypes.CDLL | None, str]:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return None, f"libcuda does not load: {error}"
    status = driver.cuInit(0)
    return (driver, "") if status == 0 else (None, f"libcuda loads, but cuInit fails with error {status}")


def probe_gpu() -> Finding:
    driver, why_not = _cuda_driver()
    if driver is None:
        return Finding("GPU", "no", why_not, "tensors on CPU work; with a GPU install its driver")
    count, version, names = ctypes.c_int(), ctypes.c_int(), []
    driver.cuDeviceGetCount(ctypes.byref(count))
    driver.cuDriverGetVersion(ctypes.byref(version))
    for index in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        if driver.cuDeviceGet(ctypes.byref(device), index) == 0:
            driver.cuDeviceGetName(name, len(name), device)
            names.append(name.value.decode(errors="replace"))
    detail = f"{', '.join(names) or 'no device'}; driver for CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    return Finding("GPU", "yes" if names else "no", detail, "" if names else "the driver sees no device")


def probe_gds(root: Path = ROOT) -> Finding:
    """GPUDirect Storage: kvikio, a CUDA driver, and nvidia-fs, without which cuFile copies through the CPU."""
    kvikio = next((p for p in ("kvikio-cu13", "kvikio-cu12", "kvikio") if _installed(p)), "")
    driver, why_not = _cuda_driver()
    slower = "SSD reads go through the CPU's memory (posix mover)"
    if driver is None:
        return Finding("GPUDirect Storage", "no", f"{why_not}; {slower}")
    if not kvikio:
        return Finding("GPUDirect Storage", "no", f"kvikio is not installed; {slower}", "pip install 'flatcake[gpu]'")
    module = (root / "proc/driver/nvidia-fs").exists()
    detail = f"{kvikio}, nvidia-fs {'loaded' if module else 'not loaded: cuFile in its compat mode'}"
    return Finding("GPUDirect Storage", "yes" if module else "no", detail, "" if module else "modprobe nvidia-fs")


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def probe_fallocate(path: Path) -> Finding:
    name = f"fallocate in {path}"
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            # Not os.posix_fallocate: that writes zeros where the file system cannot allocate.
            libc = ctypes.CDLL(None, use_errno=True)
            refused = libc.fallocate(file.fileno(), 0, ctypes.c_int64(0), ctypes.c_int64(ALIGN_BYTES)) != 0
            code = ctypes.get_errno() if refused else 0
    except OSError as error:
        return Finding(name, "fails", f"{error.strerror}", "give an existing directory that this user can write")
    if code == errno.EOPNOTSUPP:
        return Finding(name, "no", "the file system has none: session files may be scattered", "use ext4 or XFS")
    if code:
        return Finding(name, "fails", os.strerror(code), "make room on this file system")
    return Finding(name, "yes", f"{approximate_size(shutil.disk_usage(path).free)} free")


def probe_direct(path: Path) -> Finding:
    """Writes one page O_DIRECT and reads it back."""
    name = f"O_DIRECT in {path}"
    try:
        descriptor, file = tempfile.mkstemp(prefix=".flatcake-doctor-", dir=path)
    except OSError as error:
        return Finding(name, "fails", f"{error.strerror}", "give an existing directory that this user can write")
    os.close(descriptor)
    page = mmap.mmap(-1, ALIGN_BYTES)  # a mapping starts on a page, as O_DIRECT wants it
    page[:8] = b"flatcake"
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        try:
            same = os.pwritev(descriptor, [page], 0) == ALIGN_BYTES
            page[:8] = bytes(8)
            same = same and os.preadv(descriptor, [page], 0) == ALIGN_BYTES and page[:8] == b"flatcake"
        finally:
            os.close(descriptor)
    except OSError as error:
        detail = f"refused ({error.strerror}): reads go through the page cache"
        return Finding(name, "no", detail, "use ext4 or XFS on a local disk for full speed")
    finally:
        Path(file).unlink()
        page.close()
    if same:
        return Finding(name, "yes", "written and read back")
    return Finding(name, "fails", "what was read differs from what was written", "do not use this path")


def probe_device(path: Path, root: Path = ROOT) -> Finding:
    """The block device under a path and the limits that bound its reads."""
    name = f"device of {path}"
    try:
        number = path.stat().st_dev
    except OSError as error:
        return Finding(name, "fails", f"{error.strerror}", "give an existing directory")
    block = root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    queue = next((q for q in (block / "queue", block / ".." / "queue") if q.exists()), None)
    limits = _io_limits(root)
    if is_memory(path, root):
        return Finding(
            name, "no", "memory: what is stored there is gone with the machine", "give a directory on a disk"
        )
    if queue is None:
        return Finding(name, "yes", f"no block device of its own (network or overlay){limits}")
    facts = []
    for label, entry in (("scheduler", "scheduler"), ("requests", "nr_requests"), ("largest KiB", "max_sectors_kb")):
        try:
            text = (queue / entry).read_text(encoding="utf-8").strip()
        except OSError:
            continue
        chosen = re.search(r"\[(.+?)\]", text)
        facts.append(f"{label} {chosen[1] if chosen else text}")
    spins = read_number(queue / "rotational") == 1 and not block.resolve().name.startswith(("vd", "sd"))
    advice = "a spinning disk: FlatCake is made for SSD" if spins else ""
    return Finding(name, "no" if spins else "yes", f"{block.resolve().name}: {', '.join(facts)}{limits}", advice)


def _io_limits(root: Path) -> str:
    try:
        text = (root / "sys/fs/cgroup/io.max").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
    return f"; container I/O limits: {text.replace(chr(10), ', ')}" if text else ""


def probe_ucx(root: Path = ROOT) -> Finding:
    """Which UCX a cluster would read other nodes' memory with, over what, and whether it reaches the RDMA cards."""
    cards = rdma_cards(root / "sys/class/infiniband")
    told = f"RDMA cards: {', '.join(cards) or 'none'}"
    try:
        ucx = describe_ucx(_PROBE_TIMEOUT_S)
    except Unavailable as error:
        return Finding("UCX", "no", f"{error}; {told}", "needed in clusters only: pip install 'flatcake[ucx]'")
    detail = f"{ucx.library}; transports: {', '.join(ucx.transports) or 'none'}; {told}"
    if not cards or ucx.verbs:
        return Finding("UCX", "yes", detail)
    if ucx.origin == "system":
        return Finding("UCX", "no", detail, "this UCX sees no port of the cards: ibv_devinfo must show one active")
    advice = "this UCX has no verbs: install the system's (libucx0, or MOFED's) and set FLATCAKE_UCX_LIB=system"
    return Finding("UCX", "no", detail, advice)


def _module_present(root: Path, module: str) -> bool:
    """Loaded, built in, or there to be loaded."""
    if (root / f"sys/module/{module}").exists():
        return True
    folder = root / "lib/modules" / platform.release()
    for listing in ("modules.builtin", "modules.dep"):
        try:
            text = (folder / listing).read_text(encoding="utf-8")
        except OSError:
            continue
        if re.search(rf"/{module.replace('_', '[-_]')}\.ko", text):
            return True
    return False


def probe_nvmeof_target(root: Path = ROOT) -> Finding:
    """Whether this node could export session files to peers."""
    name, advice = "NVMe-oF target", "needed in clusters only: modprobe nvmet nvmet-tcp, as root with configfs mounted"
    if (root / "sys/kernel/config/nvmet").exists():
        writable = os.access(root / "sys/kernel/config/nvmet", os.W_OK)
        return Finding(
            name, "yes" if writable else "no", "nvmet in configfs", "" if writable else "run as root to export"
        )
    if not (root / "sys/kernel/config").exists():
        return Finding(name, "no", "no configfs", advice)
    found = _module_present(root, "nvmet")
    return Finding(name, "no", "nvmet is there but not loaded" if found else "this kernel has no nvmet module", advice)


def probe_nvmeof_host(root: Path = ROOT) -> Finding:
    """Whether this node could read session files that a peer exports."""
    if (root / "dev/nvme-fabrics").exists():
        return Finding("NVMe-oF host", "yes", "/dev/nvme-fabrics")
    found = _module_present(root, "nvme_fabrics")
    detail = "nvme-fabrics is there but not loaded" if found else "this kernel has no nvme-fabrics module"
    return Finding("NVMe-oF host", "no", detail, "needed in clusters only: modprobe nvme-tcp")
