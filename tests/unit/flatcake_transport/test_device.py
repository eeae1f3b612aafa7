"""Copies of the memory mover that have an end on a device, on CPU tensors: all but streams and pinning (tests/gpu)."""

from __future__ import annotations

import ctypes
import mmap
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conformance.movers import Setting, check_mover, random_bytes

from flatcake_client.tools import Tools
from flatcake_transport.errors import Unavailable
from flatcake_transport.mover import MemorySpan, Move, PagedSpan, Region
from flatcake_transport.movers import memory
from flatcake_transport.movers.device import DeviceCopies
from flatcake_transport.movers.memory import MemoryMover
from flatcake_transport.space import SpaceSpec

torch = pytest.importorskip("torch", reason="copies to devices were not tested")
CPU = torch.device("cpu")


def copies(chunk_bytes: int = 1 << 20) -> DeviceCopies:
    return DeviceCopies(CPU, chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("chunk_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("host", ["numpy", "torch"])
def test_there_and_back_in_chunks(chunk_bytes: int, host: str) -> None:
    device = copies(chunk_bytes)
    data = random_bytes(1, 7 * 48)
    memory_end = torch.from_numpy(data) if host == "torch" else data
    pages = torch.zeros(9, 3, 8, dtype=torch.bfloat16)
    slots = np.array([8, 0, 3, 1, 7, 2, 5])
    device.submit([Move(MemorySpan(memory_end), PagedSpan(pages, slots, 48))]).wait(1)
    assert np.array_equal(pages.view(torch.uint8).numpy().reshape(9, 48)[slots].reshape(-1), data)
    assert not pages[[4, 6]].view(torch.uint8).any()
    back = np.zeros(len(data), np.uint8)
    transfer = device.submit([Move(PagedSpan(pages, slots, 48), MemorySpan(back))])
    assert transfer.done()
    transfer.wait()
    assert np.array_equal(back, data)
    stats = device.stats()
    assert (stats.moves, stats.bytes_moved, stats.failures, stats.path) == (2, 2 * len(data), 0, "cpu")
    assert stats.commands == 2 * -(-7 // max(1, chunk_bytes // 48))
    device.register(Region(0, 1))
    device.close()


def test_memory_to_memory() -> None:
    source, target = random_bytes(2, 1000), torch.zeros(1000, dtype=torch.uint8)
    copies().submit([Move(MemorySpan(source), MemorySpan(target))]).wait()
    assert np.array_equal(target.numpy(), source)


def test_read_only_sources_are_taken() -> None:
    source = random_bytes(3, 8)
    source.flags.writeable = False
    target = torch.zeros(8, dtype=torch.uint8)
    copies().submit([Move(MemorySpan(source), MemorySpan(target))]).wait()
    assert np.array_equal(target.numpy(), source)


def test_host_pages_do_not_meet_device_memory() -> None:
    with pytest.raises(ValueError, match="through host memory"):
        copies().submit(
            [Move(MemorySpan(torch.zeros(8, dtype=torch.uint8)), PagedSpan(np.zeros((1, 8)), np.array([0]), 64))]
        )


def test_errors_of_torch_are_unavailable_and_counted() -> None:
    device = copies()
    too_short = Move(MemorySpan(torch.zeros(8, dtype=torch.uint8)), MemorySpan(torch.zeros(9, dtype=torch.uint8)))
    with pytest.raises(Unavailable, match="cpu"):
        device.submit([too_short])
    assert device.stats().failures == 1


def test_the_memory_mover_sends_device_moves_there_and_host_moves_to_its_threads(monkeypatch) -> None:
    """CPU tensors stand for CUDA ones: what only they have is told apart by a mark."""
    monkeypatch.setattr(memory, "_device_of", lambda move: CPU if isinstance(move.target.data, torch.Tensor) else None)
    mover = MemoryMover()
    source = random_bytes(4, 64)
    on_device, on_host = torch.zeros(64, dtype=torch.uint8), np.zeros(64, np.uint8)
    mover.register(Region(source.ctypes.data, 64, "cpu", source))
    transfer = mover.submit([Move(MemorySpan(source), MemorySpan(t)) for t in (on_device, on_host)])
    transfer.wait(30)
    assert transfer.done()
    assert np.array_equal(on_device.numpy(), source)
    assert np.array_equal(on_host, source)
    stats = mover.stats()
    assert (stats.path, stats.moves, stats.bytes_moved) == ("memory+cpu", 2, 128)
    mover.close()


def test_all_of_check_mover_on_the_device_path(monkeypatch) -> None:
    monkeypatch.setattr(memory, "_device_of", lambda _: CPU)
    check_mover(Setting(MemoryMover, torch.from_numpy, lambda t: t.numpy()), None)


class Runtime:
    """cudart, as far as pinning goes: what is registered now, and whether its memory was there when it was unregistered."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        self.pinned[address] = size_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        ctypes.string_at(address, self.pinned.pop(address))
        return 0


def test_memory_is_unpinned_before_it_goes() -> None:
    """An arena of a daemon that was restarted, and staging that grew: their addresses come back with other pages."""
    device, runtime, tools = copies(), Runtime(), Tools(1 << 20, 32 << 20)
    device._stream, device._torch = object(), SimpleNamespace(cuda=SimpleNamespace(cudart=lambda: runtime))
    mover: Any = tools._memory_mover()
    mover._devices[CPU] = device
    arena = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)[:4097]
    tools.register(arena)
    assert list(runtime.pinned) == [arena.ctypes.data]
    part = arena[10:20]
    del arena
    assert len(runtime.pinned) == 1, "a copy from it may be under way"
    del part
    assert not runtime.pinned
    held = mover._regions[0]
    device.register(held)
    assert not runtime.pinned, "a device that is used later pins nothing that is gone"
    tools._reading.open_window(0).close()
    assert list(runtime.pinned.values()) == [2 << 20], "a window is one piece"
    tools.fit(SpaceSpec("m", "u8", 1, (2 << 20,)))
    assert not runtime.pinned
    kept = np.zeros(10, np.uint8)
    tools.register(kept)
    device._stream = None
    device.close()
    del kept
    assert not runtime.pinned


def test_moves_to_several_devices_go_to_each(monkeypatch) -> None:
    """Two names of the CPU stand for two GPUs, with the layers of one model on both."""
    other = torch.device("cpu", 0)
    targets = [torch.zeros(64, dtype=torch.uint8) for _ in range(2)]
    monkeypatch.setattr(memory, "_device_of", lambda move: CPU if move.target.data is targets[0] else other)
    mover: Any = MemoryMover()
    source = random_bytes(4, 64)
    mover.submit([Move(MemorySpan(source), MemorySpan(target)) for target in targets]).wait(30)
    assert all(np.array_equal(target.numpy(), source) for target in targets)
    assert [mover._devices[device].stats().moves for device in (CPU, other)] == [1, 1]
    mover.close()
