"""How much memory this machine has, or this container may have, and what is no disk but memory.

`root` is where /proc and /sys are looked for, so that tests can show a machine of their own.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

ROOT: Final = Path("/")
HUGE_PAGE_BYTES: Final = 2 << 20
_HUGE_PAGES: Final = "sys/kernel/mm/hugepages/hugepages-2048kB"


def read_number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # "max", or not there
        return None


def read_meminfo(root: Path = ROOT) -> dict[str, int]:
    """In the units of the file: mostly KiB."""
    try:
        text = (root / "proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return {}
    return {name: int(value) for name, value in re.findall(r"^(\w+(?:\(\w+\))?):\s+(\d+)", text, re.MULTILINE)}


def memory_limit_bytes(root: Path = ROOT) -> int | None:
    """Of the container; None: there is none."""
    return read_number(root / "sys/fs/cgroup/memory.max")


def total_memory_bytes(root: Path = ROOT) -> int:
    """What there can ever be in normal pages: those reserved as huge ones are not. 0: it cannot be told."""
    info, limit = read_meminfo(root), memory_limit_bytes(root)
    total = (info.get("MemTotal", 0) - info.get("Hugetlb", 0)) * 1024
    return total if limit is None else min(total, limit)


def free_memory_bytes(root: Path = ROOT) -> int:
    """What could be taken now, beside what runs; reserved huge pages are not in it."""
    available, limit = read_meminfo(root).get("MemAvailable", 0) * 1024, memory_limit_bytes(root)
    return available if limit is None else min(available, max(0, limit - _used_bytes(root)))


def _used_bytes(root: Path) -> int:
    """Of the container, without the file cache that the kernel would give back."""
    used = read_number(root / "sys/fs/cgroup/memory.current") or 0
    try:
        text = (root / "sys/fs/cgroup/memory.stat").read_text(encoding="utf-8")
    except OSError:
        return used
    cache = re.search(r"^inactive_file (\d+)", text, re.MULTILINE)
    return max(0, used - int(cache[1])) if cache else used


def free_huge_pages_bytes(root: Path = ROOT) -> int:
    """Of 2 MiB pages that the system has reserved and nobody uses. A container's memory limit does not count them."""
    return HUGE_PAGE_BYTES * (read_number(root / _HUGE_PAGES / "free_hugepages") or 0)


def huge_pages_bytes(root: Path = ROOT) -> int:
    """Of 2 MiB pages that the system has reserved, in use or not."""
    return HUGE_PAGE_BYTES * (read_number(root / _HUGE_PAGES / "nr_hugepages") or 0)


def is_memory(path: Path, root: Path = ROOT) -> bool:
    """Whether what is written there is memory, and gone with the machine. False where it cannot be told."""
    try:
        number = path.stat().st_dev
        lines = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    mounts = (line.partition(" - ") for line in lines)
    kinds = {ours.split()[2]: theirs.split()[0] for ours, _, theirs in mounts if theirs}
    return kinds.get(f"{os.major(number)}:{os.minor(number)}") in {"tmpfs", "ramfs"}
