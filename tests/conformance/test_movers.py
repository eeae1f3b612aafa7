from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conformance.movers import Setting, check_mover

from flatcake_transport.movers.memory import MemoryMover
from flatcake_transport.movers.posix import PosixMover

torch = pytest.importorskip("torch", reason="moves of CPU tensors were not tested")


def same(array: np.ndarray) -> np.ndarray:
    return array


POSIX = {
    "as shipped": lambda: PosixMover(),
    "one thread": lambda: PosixMover(threads=1),
    "small commands": lambda: PosixMover(threads=3, command_bytes_max=4096, in_flight_bytes_max=8192),
}
MEMORY = {
    "as shipped": lambda: MemoryMover(),
    "no threads": lambda: MemoryMover(threads=0),
    "all in threads": lambda: MemoryMover(threads=2, task_bytes=5000, inline_bytes=0),
}


@pytest.mark.parametrize("make", POSIX.values(), ids=POSIX)
def test_posix(make, tmp_path: Path) -> None:
    check_mover(Setting(make, same, same), tmp_path)


def test_posix_into_cpu_tensors(tmp_path: Path) -> None:
    check_mover(Setting(PosixMover, torch.from_numpy, lambda t: t.numpy()), tmp_path)


@pytest.mark.parametrize("make", MEMORY.values(), ids=MEMORY)
def test_memory(make) -> None:
    check_mover(Setting(make, same, same), None)


def test_memory_of_cpu_tensors() -> None:
    check_mover(Setting(MemoryMover, torch.from_numpy, lambda t: t.numpy()), None)
