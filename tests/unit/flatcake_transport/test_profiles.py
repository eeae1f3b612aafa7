"""Generated traffic has the statistics it is said to have."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from flatcake_server.traffic.reuse import analyse
from flatcake_server.traffic.spans import gather
from flatcake_transport.profiles import PROFILES, Spread, generate


def sample(name, sessions, seed=3):
    traffic = gather(generate(PROFILES[name], sessions=sessions, seed=seed))
    return traffic, analyse(traffic)


def test_a_spread_has_its_quantiles_and_its_ends():
    drawn = Spread(100, 400, 20, 900).draw(np.random.default_rng(1), 20_000)
    assert np.quantile(drawn, 0.5) == pytest.approx(100, rel=0.03)
    assert np.quantile(drawn, 0.9) == pytest.approx(400, rel=0.05)
    assert (drawn.min(), drawn.max()) == (20, 900)


@pytest.mark.parametrize("name", PROFILES)
def test_requests_are_a_trace(name):
    requests = list(generate(PROFILES[name], sessions=25, seed=5))
    arrivals = [r.arrival_s for r in requests]
    assert arrivals == sorted(arrivals)
    turns, parents = {}, {}
    for r in requests:
        turns[r.session] = turns.get(r.session, 0) + 1
        assert r.turn == turns[r.session]
        assert len(r.ids) == r.input_tokens // r.block_tokens
        for before, block in zip([-1, *r.ids.tolist()], r.ids.tolist(), strict=False):
            assert parents.setdefault(block, before) == before
    assert len(turns) == 25


def test_a_seed_gives_the_same_requests_and_another_one_others():
    def of(seed):
        return [(r.arrival_s, r.session, r.ids.tolist()) for r in generate(PROFILES["chat"], sessions=30, seed=seed)]

    assert of(1) == of(1) != of(2)
    with pytest.raises(ValueError, match="-1 sessions"):
        generate(PROFILES["chat"], sessions=-1)


# The published figure of each profile's trace, and how near a sample of so many sessions has to come.
@pytest.mark.parametrize(
    ("name", "sessions", "hit", "once", "turns"),
    [
        ("claude-code", 120, (0.962, 0.015), (0.067, 0.035), (36, 15)),
        ("chat", 2500, (0.366, 0.06), (0.758, 0.06), (1, 0)),
        ("api", 2500, (0.640, 0.07), (0.60, 0.12), (1, 0)),
    ],
)
def test_reuse_is_that_of_the_traces(name, sessions, hit, once, turns):
    traffic, reuse = sample(name, sessions)
    assert reuse.hit_blocks / traffic.accesses == pytest.approx(hit[0], abs=hit[1])
    assert reuse.once_blocks / traffic.unique_blocks == pytest.approx(once[0], abs=once[1])
    assert np.median(reuse.sessions.turns) == pytest.approx(turns[0], abs=turns[1])


def test_agents_reuse_their_own_and_programs_each_others():
    agents, programs = sample("claude-code", 60)[1], sample("api", 1500)[1]
    assert agents.own_hit_blocks > 0.95 * agents.hit_blocks
    assert programs.own_hit_blocks < 0.4 * programs.hit_blocks


def test_sessions_of_agents_have_the_published_sizes():
    traffic, reuse = sample("claude-code", 200)
    assert 70_000 < np.median(reuse.sessions.peak_tokens) < 180_000  # 137K and 145K
    assert 4 < np.quantile(reuse.runs.gap_s, 0.5) < 30
    growth = np.median(traffic.output_tokens)
    assert growth == pytest.approx(217, rel=0.15)


def test_each_loss_is_seen():
    """Without losses every turn keeps the whole context before it; with each of them some do not."""
    kept = dataclasses.replace(PROFILES["claude-code"], edit_share=0.0, back_share=0.0, restart_share=0.0)
    kept = dataclasses.replace(kept, limit_tokens=Spread(1e9, 1e9, 1e9, 1e9))

    def lost(profile):
        last, blocks = {}, []
        for r in generate(profile, sessions=12, seed=2):
            before = last.get(r.session, r.ids[:0])
            both = min(len(before), len(r.ids))
            blocks.append(len(before) - int((before[:both] == r.ids[:both]).sum()))
            last[r.session] = r.ids
        return np.array(blocks)

    assert lost(kept).max() == 0
    assert set(lost(dataclasses.replace(kept, edit_share=0.3)).tolist()) == {0, 1}
    assert lost(dataclasses.replace(kept, back_share=0.1)).max() > 1
    assert lost(dataclasses.replace(kept, restart_share=0.1)).max() > 100
    short = dataclasses.replace(kept, limit_tokens=Spread(50_000, 50_001, 50_000, 50_000))
    assert lost(short).max() > 100
