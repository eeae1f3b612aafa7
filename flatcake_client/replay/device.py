"""What the disk says it has read and written, beside what the replay asked for.

The counters of the block device that holds a directory (/sys/dev/block/MAJOR:MINOR/stat), so that every process of every system is
counted, and everybody else on the machine, too. Where the file system has no block device of its own (overlay, network), those of
this process (/proc/self/io), which leave out what other processes read for it. `source` says which.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

SECTOR_BYTES: Final = 512
_DROP: Final = Path("/proc/sys/vm/drop_caches")


class Device:
    """Counters since it was made."""

    def __init__(self, directory: Path) -> None:
        number = directory.stat().st_dev
        stat = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat")
        self._stat = stat if stat.exists() else None
        self._before = self._counts()

    def counts(self) -> Mapping[str, Any]:
        """read_bytes and written_bytes, and where they come from."""
        now = self._counts()
        source = "block device" if self._stat else "this process"
        return {"source": source} | {name: now[name] - self._before[name] for name in now}

    def _counts(self) -> dict[str, int]:
        if self._stat is not None:
            fields = [int(field) for field in self._stat.read_text().split()]
            return {
                "read_bytes": fields[2] * SECTOR_BYTES,
                "written_bytes": fields[6] * SECTOR_BYTES,
                "read_commands": fields[0],
            }
        with contextlib.suppress(OSError):
            lines = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
            found = {name: int(value) for name, value in lines}
            return {"read_bytes": found["read_bytes"], "written_bytes": found["write_bytes"]}
        return {}


def drop_caches() -> bool:
    """Have the kernel forget what it has of files, everybody's. Only root may; False: it did not."""
    try:
        os.sync()
        _DROP.write_text("3\n")
    except OSError:
        return False
    return True


def file_system(path: Path) -> str:
    """The type of the file system that holds a path; bytes on tmpfs never see a disk."""
    path = path.resolve()
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    above = [(len(point), kind) for point, kind in mounts if path.is_relative_to(point)]
    return max(above)[1] if above else "unknown"
