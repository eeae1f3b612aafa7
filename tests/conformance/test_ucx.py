from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance.movers import Setting, check_mover
from ucx_peer import OPTIONS, PATIENT_S, Peer, ucx_here

from flatcake_transport.errors import Unavailable
from flatcake_transport.mover import MemorySpan, Move
from flatcake_transport.movers.ucx import UcxMover
from flatcake_transport.movers.ucx_describe import describe_ucx
from flatcake_transport.movers.ucx_lib import CHOICE
from flatcake_transport.remote import RemoteMemory


@pytest.fixture(params=[OPTIONS], ids=[""])
def peers(request: pytest.FixtureRequest) -> Iterator[Callable[[np.ndarray], tuple[np.ndarray, RemoteMemory]]]:
    """Serves bytes from another process: its memory as we see it, and as a mover names it."""
    ucx_here()
    with contextlib.ExitStack() as stack:

        def expose(content: np.ndarray) -> tuple[np.ndarray, RemoteMemory]:
            peer = stack.enter_context(Peer(content, request.param))
            return peer.content, peer.memory

        yield expose


class Windows:
    """A setting whose memory is windows of the mover that was made last."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes

    def make(self) -> UcxMover:
        self._mover = UcxMover(options=OPTIONS, peer_timeout_s=PATIENT_S, chunk_bytes=self._chunk_bytes)
        return self._mover

    def to(self, host: np.ndarray) -> np.ndarray:
        window = self._mover.window(len(host))
        window[:] = host
        return window


@pytest.mark.parametrize("chunk_bytes", [4 << 20, 100_003], ids=["as shipped", "small gets"])
def test_ucx(peers: Any, chunk_bytes: int) -> None:
    windows = Windows(chunk_bytes)
    check_mover(Setting(windows.make, windows.to, lambda a: a), None, peers)


def test_ucx_and_any_memory(peers: Any) -> None:
    check_mover(Setting(lambda: UcxMover(options=OPTIONS), lambda a: a, lambda a: a), None, peers)


def test_ucx_with_cpu_tensors(peers: Any) -> None:
    torch = pytest.importorskip("torch", reason="gets into CPU tensors were not tested")
    setting = Setting(lambda: UcxMover(options=OPTIONS), torch.from_numpy, lambda t: t.numpy())
    check_mover(setting, None, peers)


def test_memory_of_a_device_is_refused() -> None:
    """A meta tensor stands for one."""
    torch = pytest.importorskip("torch", reason="that memory of a device is refused was not tested")
    mover = UcxMover(options=OPTIONS)
    data = torch.zeros(16, dtype=torch.uint8, device="meta")
    with pytest.raises(ValueError, match="window in host memory"):
        mover.submit([Move(RemoteMemory(b"", b"", 0, 16).span(0, 16), MemorySpan(data))])
    mover.close()


@pytest.mark.parametrize("peers", [{}], indirect=True)
def test_shared_memory_takes_part_where_ucx_has_it(peers: Any) -> None:
    """Without options UCX chooses: within one machine that may be its shared memory, cma or tcp."""
    check_mover(Setting(UcxMover, lambda a: a, lambda a: a), None, peers)


def test_what_is_here_is_described() -> None:
    here = ucx_here()
    assert here.library.startswith("UCX 1.")
    assert here.origin in ("system", "wheel", "path")
    assert any(transport.startswith("tcp/") for transport in here.transports)


def test_what_is_not_here_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHOICE, "/nowhere/libucp.so.0")
    with pytest.raises(Unavailable, match="no UCX can be loaded: path: /nowhere"):
        describe_ucx(60.0)


@pytest.mark.timeout(300)
def test_the_systems_ucx_too() -> None:
    """One process has one UCX: the other one runs the same tests in a process of its own."""
    if CHOICE in os.environ:
        pytest.skip(f"{CHOICE} is set: only that UCX was tested")
    env = {**os.environ, CHOICE: "system"}
    fault = Path(__file__).parents[1] / "fault"
    tests = [str(Path(__file__)), str(fault / "test_ucx_peers.py"), str(fault / "test_ucx_process.py")]
    probe = "from flatcake_transport.movers.ucx_lib import load_ucx; print(load_ucx().origin)"
    found = subprocess.run([sys.executable, "-c", probe], env=env, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(f"no system UCX (libucx0) here: {found.stderr.strip().splitlines()[-1]}")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not tensors and not flaps and not closing and not many_descriptors", *tests],
        env=env, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:]
