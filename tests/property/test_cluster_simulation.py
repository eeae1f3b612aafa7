"""Membership, directory and leases under delays, drops, crashes, cuts, twins and skewed clocks: the world comes right.

A few seconds of seeds by default; thousands with `make soak`. A failure names its seed.
"""

from __future__ import annotations

from collections import Counter

import cluster_world
import pytest
from cluster_network import NODE_TTL_S, holder_of
from cluster_world import World
from hypothesis import settings

from flatcake_server.lease import LeaseTable

SEEDS = max(5, (settings().max_examples - 100) // 5)  # in each batch; in a soak 980


def quiet(world: World) -> None:
    """No new work; what is under way ends, and what was told arrives, or is found missing."""
    world.directory.lose_some()
    for node in world.living:
        node._work = lambda: None  # type: ignore[method-assign]
    sweep_s = 2 * NODE_TTL_S + 2 * cluster_world.SWEEP_PERIOD_S
    world.network.run(world.network.now_s + sweep_s + 4.0)


def run_some() -> None:
    for seed in range(30):
        World(seed).run(steps=15)


@pytest.mark.parametrize("batch", range(5))
def test_a_world_comes_right_and_nobody_trusts_other_bytes(batch):
    counts: Counter[str] = Counter()
    for seed in range(batch, 5 * SEEDS, 5):
        world = World(seed)
        world.run(steps=15)
        quiet(world)
        assert world.settled() == [], f"seed {seed}"
        for node in world.living:
            assert node.leases.stats().leases == 0, f"seed {seed}: a lease outlived its reader"
            assert len(node.loans) == 0, f"seed {seed}: a loan outlived its reader"
        joined = [node for node in world.living if node.membership.holder is None]
        held = {(key, holder_of(node.me)) for node in joined for key in node.publisher.wants()}
        told = world.directory.anchors
        assert held <= told, f"seed {seed}: the directory lacks {len(held - told)} anchors"
        # A withdrawal may be overtaken by what it withdraws; whom that misleads takes it out. Of the dead nothing is left.
        dead = {holder for _, holder in told} - {holder_of(node.me) for node in joined}
        assert not dead, f"seed {seed}: entries of the dead {dead}"
        counts["left over"] += len(told - held)
        counts.update(world.counts)
    assert counts["blocks read"] > 100 * SEEDS, "the world did something"
    assert counts["stale hints"], "also what goes wrong"
    assert counts["reads given up"]
    assert counts["entries swept"]
    assert counts["left over"] < SEEDS


def test_an_owner_that_forgets_its_leases_is_found_out(monkeypatch):
    """The simulation sees wrong data when leases do not hold."""
    monkeypatch.setattr(LeaseTable, "pins", lambda self, session: 0)
    with pytest.raises(AssertionError, match="trusted"):
        run_some()


def test_a_promise_longer_than_the_lease_is_found_out(monkeypatch):
    monkeypatch.setattr(cluster_world, "PACE", 3.0)
    with pytest.raises(AssertionError, match="trusted"):
        run_some()
