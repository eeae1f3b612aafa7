from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from conformance.movers import Setting, check_mover
from ucx_peer import OPTIONS, PATIENT_S, ucx_here

from flatcake_transport.errors import Unavailable
from flatcake_transport.movers.ucx import UcxMover
from flatcake_transport.movers.ucx_describe import describe_ucx
from flatcake_transport.movers.ucx_lib import CHOICE, UcxLibrary
from flatcake_transport.movers.ucx_server import UcxServer


@pytest.fixture
def library() -> UcxLibrary:
    return ucx_here()


@pytest.fixture
def server(library: UcxLibrary) -> Iterator[UcxServer]:
    server = UcxServer(library, options=OPTIONS)
    yield server
    server.close()


@pytest.mark.parametrize("chunk_bytes", [4 << 20, 100_003], ids=["as shipped", "small gets"])
def test_ucx(library: UcxLibrary, server: UcxServer, chunk_bytes: int) -> None:
    def make() -> UcxMover:
        return UcxMover(library, options=OPTIONS, peer_timeout_s=PATIENT_S, chunk_bytes=chunk_bytes)

    check_mover(Setting(make, lambda a: a, lambda a: a), None, partial(server.expose, writable=True))


def test_ucx_with_cpu_tensors(library: UcxLibrary, server: UcxServer) -> None:
    torch = pytest.importorskip("torch", reason="gets into CPU tensors were not tested")

    def make() -> UcxMover:
        return UcxMover(library, options=OPTIONS)

    check_mover(Setting(make, torch.from_numpy, lambda t: t.numpy()), None, partial(server.expose, writable=True))


def test_shared_memory_takes_part_where_ucx_has_it(library: UcxLibrary) -> None:
    """Without options UCX chooses: within one machine that may be its shared memory, cma or tcp."""
    server = UcxServer(library)
    check_mover(
        Setting(lambda: UcxMover(library), lambda a: a, lambda a: a), None, partial(server.expose, writable=True)
    )
    server.close()


def test_what_is_here_is_described(library: UcxLibrary) -> None:
    here = describe_ucx(60.0)
    assert here.origin == (library.origin if library.origin != "loaded" else here.origin)
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
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not tensors", *tests],
        env=env, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:]
