"""The code of CUDA devices: conformance, paged slots of every layout, and what only streams and pinned memory have.

All that needs no CUDA runs on CPU tensors, too, through the same code (tests/devices.py).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conformance.movers import Setting, check_mover, random_bytes
from devices import DEVICES, device_path, needs_cuda
from layouts import LAYOUTS, bytes_of, fill, layout_pages, torch_zeros

from flatcake_transport.checksum import granule_checksums
from flatcake_transport.footer import CHECKSUM_WORDSUM, CHECKSUM_XXH3
from flatcake_transport.mover import MemorySpan, Move, PagedSpan, Region
from flatcake_transport.movers.device import UNPINNED, DeviceCopies
from flatcake_transport.movers.gds import GdsMover, gds_available
from flatcake_transport.movers.memory import MemoryMover
from flatcake_transport.window import aligned_buffer, device_buffer

torch = pytest.importorskip("torch", reason="no torch: CUDA paths were not tested")


def setting_of(device: str, make) -> Setting:
    return Setting(make, lambda array: torch.from_numpy(array).to(device), lambda tensor: tensor.cpu().numpy())


@pytest.mark.parametrize("device", DEVICES)
def test_memory_mover_on_the_device(device, monkeypatch) -> None:
    device_path(device, monkeypatch)
    check_mover(setting_of(device, MemoryMover), None)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_cuda)])
def test_gds(device, tmp_path: Path) -> None:
    reason = gds_available()
    if reason is not None:
        pytest.skip(f"GDS was not tested: {reason}")
    check_mover(setting_of(device, GdsMover), tmp_path)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("plane_bytes", [16, 4096, 24])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_slots_of_every_layout(layout, plane_bytes, device, monkeypatch) -> None:
    """Window to slots and back, against a loop over slots; slots that were not named keep what they had."""
    device_path(device, monkeypatch)
    mover = MemoryMover()
    pages = layout_pages(layout, 11, plane_bytes, lambda shape, item: torch_zeros(shape, item, device))
    before = random_bytes(1, 11 * plane_bytes).reshape(11, -1)
    fill(pages, range(11), before)
    slots = np.array([7, 2, 10, 3, 0])
    window = device_buffer(5 * plane_bytes, device) if plane_bytes == 24 else np.zeros(5 * plane_bytes, np.uint8)
    data = random_bytes(2, 5 * plane_bytes)
    window[:] = torch.from_numpy(data).to(device) if plane_bytes == 24 else data
    mover.submit([Move(MemorySpan(window), PagedSpan(pages, slots, plane_bytes))]).wait(30)
    expected = before.copy()
    expected[slots] = data.reshape(5, -1)
    assert np.array_equal(bytes_of(pages), expected)
    window[:] = 0
    mover.submit([Move(PagedSpan(pages, slots[1:], plane_bytes), MemorySpan(window[plane_bytes:]))]).wait(30)
    back = window.cpu().numpy() if plane_bytes == 24 else window
    assert np.array_equal(back, np.concatenate([np.zeros(plane_bytes, np.uint8), data[plane_bytes:]]))
    assert mover.stats().path == f"memory+{device}"
    mover.close()


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_of_a_long_copy(device) -> None:
    """More than the device's staging takes at once."""
    copies = DeviceCopies(torch.device(device), chunk_bytes=100)
    pages = torch.zeros(9, 48, dtype=torch.uint8, device=device)
    slots, data = np.array([8, 0, 3, 1, 7, 2, 5]), random_bytes(3, 7 * 48)
    copies.submit([Move(MemorySpan(data), PagedSpan(pages, slots, 48))]).wait(30)
    assert np.array_equal(bytes_of(pages)[slots].reshape(-1), data)
    back = np.zeros(len(data), np.uint8)
    copies.submit([Move(PagedSpan(pages, slots, 48), MemorySpan(back))]).wait(30)
    assert np.array_equal(back, data)
    assert copies.stats().commands == 8
    copies.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pinned", [True, False])
def test_host_to_paged_slots_and_back(pinned: bool, device, monkeypatch) -> None:
    device_path(device, monkeypatch)
    mover = MemoryMover()
    host = aligned_buffer(8 << 20)
    host[:] = random_bytes(1, len(host))
    if pinned:
        mover.register(Region(host.ctypes.data, len(host), "cpu", host))
    pages = torch.zeros(50, 2, 16, 8, 128, dtype=torch.bfloat16, device=device)
    slots = np.random.default_rng(0).permutation(50)[:40]
    plane_bytes = pages[0].nbytes
    data = host[: 40 * plane_bytes]
    mover.submit([Move(MemorySpan(data), PagedSpan(pages, slots, plane_bytes))]).wait(30)
    assert np.array_equal(bytes_of(pages)[slots].reshape(-1), data)
    back = aligned_buffer(len(data))
    mover.submit([Move(PagedSpan(pages, slots, plane_bytes), MemorySpan(back))]).wait()
    assert np.array_equal(back, data)
    if device == "cuda":
        assert (mover.stats().fallbacks.get(UNPINNED, 0) > 1) == (not pinned)
    mover.close()


@pytest.mark.parametrize("device", DEVICES)
def test_work_queued_on_the_pages_before_submit_is_finished_first(device, monkeypatch) -> None:
    device_path(device, monkeypatch)
    mover = MemoryMover()
    pages = torch.zeros(4, 1 << 20, dtype=torch.uint8, device=device)
    for _ in range(10):
        if device == "cuda":
            torch.cuda._sleep(10_000_000)  # the engine's stream is busy, then clears the pages
        pages.zero_()
        mover.submit([Move(MemorySpan(np.ones(1 << 20, np.uint8)), PagedSpan(pages, np.array([2]), 1 << 20))]).wait(30)
        assert pages[2].all()
    mover.close()


@pytest.mark.parametrize("device", DEVICES)
def test_word_sums_of_device_and_host_agree(device) -> None:
    data = random_bytes(2, 3_000_001)
    for algorithm in (CHECKSUM_WORDSUM, CHECKSUM_XXH3):
        host = granule_checksums(data, 300_000, algorithm)
        assert np.array_equal(granule_checksums(torch.from_numpy(data).to(device), 300_000, algorithm), host)
