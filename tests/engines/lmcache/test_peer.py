"""bench/peers/lmcache.py drives the real thing: bytes back as they went in, from memory and SSD, and nothing left behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from peer_system import BLOCK_BYTES, DEADLINE_S, MIB, PLANE_BYTES, PLANES, ROOT, check_peer

from flatcake_client.replay.contents import Contents
from flatcake_client.replay.system import Asked, Budget, open_adapter

pytestmark = [
    pytest.mark.skipif(find_spec("lmcache") is None, reason="LMCache's adapter was not tested: run make test-lmcache"),
    pytest.mark.filterwarnings("ignore"),  # of LMCache and what it imports
]

POLICIES = ("default", "skip_l1")
THREADS, TURNS, BLOCKS = 6, 8, 64


@pytest.mark.parametrize("policy", POLICIES)
def test_lmcache_as_a_system_of_replay(tmp_path: Path, monkeypatch, policy) -> None:
    monkeypatch.setenv("FLATCAKE_PEER_LMCACHE", policy)
    check_peer("lmcache", tmp_path)


@pytest.mark.parametrize("policy", POLICIES)
def test_conversations_at_once_never_get_other_bytes(tmp_path: Path, monkeypatch, policy) -> None:
    """Two at a time have the same context; memory holds a fraction of all; every byte is compared."""
    monkeypatch.setenv("FLATCAKE_PEER_LMCACHE", policy)
    pages = np.zeros((THREADS * BLOCKS, PLANES, PLANE_BYTES), np.uint8)
    budget = Budget(32 * MIB, 1024 * MIB, tmp_path, 64, PLANE_BYTES, PLANES, pages)
    contents = Contents(PLANES, PLANE_BYTES, body_every=1)
    system = open_adapter(ROOT / "bench" / "peers" / "lmcache.py", budget)

    def converse(thread: int) -> tuple[int, int]:
        rng = np.random.default_rng(thread // 2)
        keys, came, wrong = rng.integers(0, 256, (BLOCKS, 16), np.uint8), 0, 0
        for turn in range(1, TURNS + 1):
            count = BLOCKS * turn // TURNS
            slots = thread * BLOCKS + rng.permutation(BLOCKS)[:count]
            asked = Asked(thread, f"s{thread}", turn, keys[:count], 64 * count, None, np.ones(count, np.int64))
            found = system.lookup(asked)
            contents.wipe(pages, slots)
            usable = system.restore(asked, found, pages, slots, DEADLINE_S)
            wrong += contents.wrong_blocks(pages, slots[:usable], keys[:usable])
            contents.fill(pages, slots[usable:], keys[usable:count])
            system.store(asked, usable, pages, slots, DEADLINE_S)
            came += usable
        return came, wrong

    try:
        with ThreadPoolExecutor(THREADS) as together:
            results = list(together.map(converse, range(THREADS)))
    finally:
        system.close()
    assert sum(wrong for _, wrong in results) == 0
    assert sum(came for came, _ in results) * BLOCK_BYTES > budget.memory_bytes
