"""The CUDA paths on a CUDA device: the same conformance, and what only streams and pinned memory have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conformance.movers import Setting, check_mover, random_bytes

from flatcake_transport.checksum import granule_checksums
from flatcake_transport.footer import CHECKSUM_WORDSUM, CHECKSUM_XXH3
from flatcake_transport.mover import MemorySpan, Move, PagedSpan, Region
from flatcake_transport.movers.device import UNPINNED
from flatcake_transport.movers.gds import GdsMover, gds_available
from flatcake_transport.movers.memory import MemoryMover
from flatcake_transport.window import aligned_buffer

torch = pytest.importorskip("torch", reason="no torch: CUDA paths were not tested")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device: side streams, pinning and GDS were not tested"
    ),
]


def to_device(array: np.ndarray):
    return torch.from_numpy(array).cuda()


def to_host(tensor) -> np.ndarray:
    return tensor.cpu().numpy()


def test_memory_mover_on_the_device() -> None:
    check_mover(Setting(MemoryMover, to_device, to_host), None)


def test_gds(tmp_path: Path) -> None:
    reason = gds_available()
    if reason is not None:
        pytest.skip(f"GDS was not tested: {reason}")
    check_mover(Setting(GdsMover, to_device, to_host), tmp_path)


@pytest.mark.parametrize("pinned", [True, False])
def test_host_to_paged_slots_and_back(pinned: bool) -> None:
    mover = MemoryMover()
    host = aligned_buffer(8 << 20)
    host[:] = random_bytes(1, len(host))
    if pinned:
        mover.register(Region(host.ctypes.data, len(host), "cpu", host))
    pages = torch.zeros(50, 2, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    slots = np.random.default_rng(0).permutation(50)[:40]
    plane_bytes = pages[0].nbytes
    data = host[: 40 * plane_bytes]
    mover.submit([Move(MemorySpan(data), PagedSpan(pages, slots, plane_bytes))]).wait(30)
    expected = torch.from_numpy(data).view(torch.bfloat16).view(40, *pages.shape[1:])
    assert torch.equal(pages[torch.from_numpy(slots).cuda()].cpu().view(torch.int16), expected.view(torch.int16))
    back = aligned_buffer(len(data))
    mover.submit([Move(PagedSpan(pages, slots, plane_bytes), MemorySpan(back))]).wait()
    assert np.array_equal(back, data)
    assert (mover.stats().fallbacks.get(UNPINNED, 0) > 1) == (not pinned)
    mover.close()


def test_work_queued_on_the_pages_before_submit_is_finished_first() -> None:
    mover = MemoryMover()
    pages = torch.zeros(4, 1 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(10):
        torch.cuda._sleep(10_000_000)  # the engine's stream is busy, then clears the pages
        pages.zero_()
        mover.submit([Move(MemorySpan(np.ones(1 << 20, np.uint8)), PagedSpan(pages, np.array([2]), 1 << 20))]).wait(30)
        assert pages[2].all()
    mover.close()


def test_word_sums_of_device_and_host_agree() -> None:
    data = random_bytes(2, 3_000_001)
    for algorithm in (CHECKSUM_WORDSUM, CHECKSUM_XXH3):
        host = granule_checksums(data, 300_000, algorithm)
        assert np.array_equal(granule_checksums(to_device(data), 300_000, algorithm), host)
