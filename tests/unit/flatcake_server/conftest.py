"""The daemon's core for tests that need no other: small, so that its bounds are met after a few turns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from core import ONE, Core


@pytest.fixture
def core(tmp_path: Path) -> Iterator[Core]:
    """64 pages of SSD, 16 of memory, and a space of one page a block; the law is checked when the test is over."""
    node = Core(tmp_path, ssd_bytes=64 << 12, memory_bytes=16 << 12)
    node.open(ONE)
    yield node
    node.check(data=True)
    node.check_rest()
    node.close()
