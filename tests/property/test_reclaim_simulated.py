"""The node of `flatcake tune` and the daemon's store, the same requests on both: they hit the same blocks, one by one."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
from core import Core
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import traffics

from flatcake_server.placement import Policy
from flatcake_server.traffic.simulate import Node, Rates, share_counts, simulate
from flatcake_server.traffic.spans import gather
from flatcake_server.turns import TurnRequest
from flatcake_transport.errors import Overloaded
from flatcake_transport.space import SpaceSpec

PAGE = 4096
LAYERS = 32
TOKEN_BYTES = LAYERS * PAGE // 16  # a plane of a block of 16 tokens is a page
BLOCK = LAYERS * PAGE
SPEC = SpaceSpec("model", "bfloat16", 16, (PAGE,) * LAYERS)


class Daemon:
    """A store on a disk of so many blocks, and no memory worth the name: all homes are on SSD."""

    def __init__(self, root: Path, ssd_bytes: int) -> None:
        self.core = Core(root, ssd_bytes=ssd_bytes)
        self.core.open(SPEC)

    def ask(self, session: str, turn: int, ids: list[int]) -> int:
        """Blocks hit; what is missing is stored."""
        core, keys = self.core, np.zeros((len(ids), 16), np.uint8)
        keys[:, :8] = np.array(ids, "<u8").view(np.uint8).reshape(-1, 8)
        keys[:, 8] = 1
        found = core.store.lookup(core.clients[0], SPEC.fingerprint, keys, pin=False)
        request = TurnRequest(0, session, keys, bytes(16), turn=turn, context_tokens=1 << 30)
        try:
            begun = core.do(core.store.begin_turn(core.clients[0], SPEC.fingerprint, request))
            if begun is not None:
                core.do(core.commit(begun))
        except Overloaded:
            pass
        return sum(run.blocks for run in found.runs)


@settings(max_examples=10)
@given(traffics(), st.integers(3, 20))
def test_both_hit_the_same(requests, blocks):
    traffic = gather(requests)
    node = Node(1 << 40, blocks * BLOCK, Policy(0, 0), TOKEN_BYTES)
    outcome = simulate(traffic, np.zeros_like(share_counts(traffic)), node, Rates())
    root = Path(tempfile.mkdtemp(prefix="flatcake-simulated-", dir="/dev/shm"))
    daemon = Daemon(root, blocks * BLOCK)
    try:
        hits = sum(daemon.ask(one.session, one.turn, one.ids.tolist()) for one in requests if len(one.ids))
    finally:
        daemon.core.close()
        shutil.rmtree(root)
    assert hits == round(outcome.hit_share * traffic.accesses)
