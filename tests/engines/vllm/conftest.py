"""The real vLLM on the CPU, in this process, with a model whose every token depends on far KV, and real daemons."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon import Daemon

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Ranks that are processes would be bound to a NUMA node each, and here there is one.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def pytest_configure(config: pytest.Config) -> None:
    # vLLM and what it imports warn of their own deprecations.
    config.addinivalue_line("filterwarnings", "ignore")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from engines.vllm.running import write_model

    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def expected():
    """Greedy tokens by transformers in float32: what vLLM must say, and a witness that shares no code with it."""
    from engines.vllm.running import Witness

    return Witness()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("node"), memory_bytes=32 << 20, ssd_bytes=256 << 20) as daemon:
        yield daemon
        if daemon.process is not None and daemon.process.poll() is None:
            daemon.check()


@pytest.fixture(scope="module")
def engine(model: Path, node: Daemon):
    """One for a file's tests; each begins with nothing in vLLM's own cache."""
    from engines.vllm.running import Engine

    with Engine(model, node.endpoint) as running:
        yield running


@pytest.fixture(autouse=True)
def _forgotten(request: pytest.FixtureRequest) -> None:
    if "engine" in request.fixturenames:
        running = request.getfixturevalue("engine")
        running.forget()
        running.counts()
