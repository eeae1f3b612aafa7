"""Gets that land in CUDA memory. Where UCX has no CUDA they go through host windows, and `takes` says so."""

from __future__ import annotations

from functools import partial

import pytest
from conformance.movers import Setting, check_mover
from devices import needs_cuda
from ucx_peer import OPTIONS, ucx_here

from flatcake_transport.mover import MemorySpan, Move
from flatcake_transport.movers.ucx import UcxMover
from flatcake_transport.movers.ucx_server import UcxServer
from flatcake_transport.remote import RemoteMemory

torch = pytest.importorskip("torch", reason="no torch: gets into CUDA memory were not tested")


@pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=needs_cuda)])
def test_ucx_into_cuda_memory(device: str) -> None:
    library = ucx_here()
    options = {**OPTIONS, "TLS": "tcp,cuda_copy"}
    server, probe = UcxServer(library, options=options), UcxMover(library, options=options)
    takes = probe.takes(device)
    probe.close()
    if not takes:
        server.close()
        pytest.skip(f"{library.named} has no CUDA: gets into its memory were not tested")
    setting = Setting(
        lambda: UcxMover(library, options=options),
        lambda array: torch.from_numpy(array).to(device),
        lambda tensor: tensor.cpu().numpy(),
    )
    check_mover(setting, None, partial(server.expose, writable=True))
    server.close()


def test_memory_of_a_device_that_ucx_does_not_know_is_refused() -> None:
    """A meta tensor stands for one: it is on a device, and UCX here has no CUDA, or not that."""
    mover = UcxMover(ucx_here(), options=OPTIONS)
    data = torch.zeros(16, dtype=torch.uint8, device="meta")
    memory = RemoteMemory(b"", b"", 0, 16)
    with pytest.raises(ValueError, match="window in host memory"):
        mover.submit([Move(memory.span(0, 16), MemorySpan(data))])
    assert mover.takes("cpu")
    assert not mover.takes("meta")
    mover.close()
