"""The simulated node against what the daemon's rules say of small traces."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import request, traffics

from flatcake_server.placement import Policy
from flatcake_server.traffic.simulate import Node, Rates, share_counts, simulate
from flatcake_server.traffic.spans import gather

MIB = 1 << 20
TOKEN_BYTES = 65_536  # a block of 16 tokens is 1 MiB
AMPLE = Node(1 << 40, 1 << 40, Policy(1 << 30, 1 << 30), TOKEN_BYTES)


def run(requests, node, rates=None):
    traffic = gather(requests)
    return simulate(traffic, share_counts(traffic), node, rates or Rates())


def turns(session, lengths, *, start=0, base=0, output_tokens=8):
    return [
        request(start + n, session, range(base, base + length), turn=n + 1, output_tokens=output_tokens)
        for n, length in enumerate(lengths)
    ]


@given(traffics())
def test_with_room_for_all_every_block_known_is_a_hit(requests):
    seen, hits, asked = set(), 0, 0
    for one in requests:
        hits += len(seen & set(one.ids.tolist()))
        asked += len(one.ids)
        seen |= set(one.ids.tolist())
    outcome = run(requests, AMPLE)
    assert outcome.hit_share == outcome.hit_share_max == pytest.approx(hits / asked)
    assert outcome.recompute_s == 0
    assert outcome.refused_blocks == 0
    assert outcome.reclaimed == {"memory": 0, "ssd": 0}


@given(traffics(), st.integers(1, 8), st.integers(1, 8), st.integers(0, 80), st.integers(0, 8))
def test_quotas_hold_and_hits_are_what_is_known(requests, memory, ssd, context, reply):
    node = Node(memory * MIB, ssd * 2 * MIB, Policy(context, reply), TOKEN_BYTES)
    outcome = run(requests, node)
    assert outcome.memory_peak_bytes <= node.memory_bytes
    assert outcome.ssd_peak_bytes <= node.ssd_bytes
    assert 0 <= outcome.memory_hit_share <= outcome.hit_share <= outcome.hit_share_max


def test_shares_count_sessions():
    traffic = gather([*turns("x", [2, 3]), request(9, "y", [0, 1, 7])])
    first = dict(
        zip(np.concatenate(([0], np.cumsum(traffic.span_blocks)[:-1])).tolist(), share_counts(traffic), strict=True)
    )
    assert first == {0: 2, 2: 1, 3: 1}


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (Policy(1 << 30, 8), "short-reply"),
        (Policy(1 << 30, 7), "long-reply"),
        (Policy(47, 8), "long-context"),
    ],
)
def test_homes_are_those_of_the_table(policy, reason):
    outcome = run(turns("x", [2, 3]), dataclasses.replace(AMPLE, policy=policy))
    assert set(outcome.placed_bytes) == {"first-turn", reason}
    assert outcome.placed_bytes["first-turn"] > outcome.placed_bytes[reason] >= MIB


def test_shared_heads_go_to_memory_and_outlive_their_first_user():
    requests = [request(0, "x", [0, 1, 2]), request(1, "y", [0, 1, 3])]
    outcome = run(requests, AMPLE)
    assert set(outcome.placed_bytes) == {"shared", "first-turn"}
    assert outcome.memory_hit_share == pytest.approx(2 / 6)


def test_costs_are_bytes_over_rates():
    rates = Rates(memory_bytes_per_s=4 * MIB, ssd_bytes_per_s=2 * MIB, prefill_tokens_per_s=32)
    outcome = run(turns("x", [2, 3, 3]), AMPLE, rates)
    # The second request restores 2 blocks from SSD; the third those and one from memory.
    assert outcome.restore_s == pytest.approx((4 * MIB / (2 * MIB) + MIB / (4 * MIB)) / 3)
    nothing = dataclasses.replace(AMPLE, ssd_bytes=MIB, policy=Policy(0, 0))
    outcome = run(turns("x", [2, 2]), nothing, rates)
    assert outcome.refused_blocks == 4
    assert outcome.recompute_s == pytest.approx(2 * 16 / 32 / 2)
    assert outcome.cost_s == outcome.recompute_s + outcome.restore_s


def test_the_disk_gives_up_the_session_used_least_recently():
    requests = [*turns("x", [4]), *turns("y", [4], start=1, base=10), *turns("x", [4], start=2)]
    requests += [*turns("z", [4], start=3, base=20), *turns("x", [4], start=4), *turns("y", [4], start=5, base=10)]
    outcome = run(requests, dataclasses.replace(AMPLE, ssd_bytes=11 * MIB))
    # Room for two: z drops y, and y, come back, drops z. x is always there.
    assert outcome.reclaimed == {"memory": 0, "ssd": 2}
    assert outcome.hit_share == pytest.approx(8 / 24)
    assert outcome.hit_share_max == pytest.approx(12 / 24)


def test_a_full_arena_sends_turns_to_ssd_and_makes_room_behind_them():
    long = turns("x", [2, 6, 10, 14])
    outcome = run(long, dataclasses.replace(AMPLE, memory_bytes=9 * MIB))
    assert outcome.placed_bytes["memory-full"] > 0
    assert outcome.hit_share == outcome.hit_share_max
    other = [
        request(10 + n, f"s{n}", range(100 * n, 100 * n + k), turn=t) for n in range(1, 6) for t, k in ((1, 1), (2, 4))
    ]
    outcome = run([*long, *other], dataclasses.replace(AMPLE, memory_bytes=9 * MIB))
    assert outcome.reclaimed["memory"] > 0


def test_idle_sessions_give_back_the_tails_of_their_files():
    sessions = [r for n in range(4) for r in turns(f"s{n}", [10], start=1000 * n, base=100 * n)]
    trimmed = run(sessions, dataclasses.replace(AMPLE, session_trim_after_s=10.0))
    kept = run(sessions, dataclasses.replace(AMPLE, session_trim_after_s=1e9))
    assert trimmed.ssd_peak_bytes < kept.ssd_peak_bytes
