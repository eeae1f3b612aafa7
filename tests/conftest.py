"""How all tests run: no wall-clock verdicts from Hypothesis, and a longer profile for `make soak`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon import Daemon
from hypothesis import HealthCheck, settings

# A machine shared with builds is slow at random, so Hypothesis judges no example by its time, nor by how long it takes to make.
TIMELESS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("default", TIMELESS)
settings.register_profile("soak", TIMELESS, max_examples=5000, stateful_step_count=200)
settings.load_profile("default")


# They need the environment of their engine (`make test-engines`), or a kernel of their own (`make test-fabric`).
collect_ignore = ["engines", "fabric/guest"]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A running node on the test's own directory; the law is checked when the test is over."""
    with Daemon(tmp_path) as running:
        yield running
        if running.process is not None and running.process.poll() is None:
            running.check()
