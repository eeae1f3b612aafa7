"""bench/peers/lmcache.py drives the real thing: bytes back as they went in, from memory and SSD, and nothing left behind."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from peer_system import check_peer

pytestmark = pytest.mark.skipif(
    find_spec("lmcache") is None, reason="LMCache's adapter was not tested: run make test-lmcache"
)


@pytest.mark.filterwarnings("ignore")  # of LMCache and what it imports
def test_lmcache_as_a_system_of_replay(tmp_path: Path) -> None:
    check_peer("lmcache", tmp_path)
