"""Ways to break the world of a daemon or a client, and to damage what lies on a disk."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

import pytest


def switched(root: Path, code: str) -> Path:
    """A daemon's wrapper: runs `code`, in which `broken()` is true while the file `root/broken` is there.

    Args:
        code: Python; `os` and `errno` are imported.
    """
    path = root / "wrapper.py"
    head = f"import errno, os\nbroken = lambda: os.path.exists({str(root / 'broken')!r})\n"
    path.write_text(head + dedent(code))
    return path


@contextmanager
def broken(root: Path) -> Iterator[None]:
    """What `switched` breaks is broken meanwhile."""
    (root / "broken").touch()
    try:
        yield
    finally:
        (root / "broken").unlink()


def files_of(path: Path) -> list[Path]:
    """Session files below an SSD path, oldest first. A daemon may take them away meanwhile, and their directories."""
    found = (Path(folder, name) for folder, _, names in os.walk(path / "sessions") for name in names)
    return sorted((file for file in found if file.suffix == ".kv"), key=lambda file: file.name)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file; a negative offset counts from its end."""
    with path.open("r+b") as file:
        file.seek(offset, 2 if offset < 0 else 0)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1 << bit]))


@contextmanager
def small_disk(root: Path, size_bytes: int, *, kind: str = "ext4") -> Iterator[Path]:
    """A file system of its own, of that size. Skips where it cannot be mounted."""
    image, where = root / "disk.img", root / "disk"
    where.mkdir()
    if kind == "ext4":
        with image.open("wb") as file:
            file.truncate(size_bytes)
        make = [["mkfs.ext4", "-q", "-m", "0", str(image)], ["mount", "-o", "loop", str(image), str(where)]]
    else:
        make = [["mount", "-t", kind, "-o", f"size={size_bytes}", "flatcake-test", str(where)]]
    for command in make:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no disk of {size_bytes} bytes: {' '.join(command[:1])}: {done.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


@contextmanager
def immutable(path: Path) -> Iterator[None]:
    """A file that even root can neither cut nor unlink. Skips where the file system has no such thing."""
    done = subprocess.run(["chattr", "+i", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"chattr +i does not work here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", str(path)], check=True)
