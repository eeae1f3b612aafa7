"""Anchors: which there are, and which node they lead to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flatcake_server.cluster.anchors import anchor_lengths, anchors_within, choose, probes


def naive(held, total):
    return [n for n in range(held + 1, total + 1) if n % 16 == 0 or n in (1, 2, 4, 8)]


@given(st.integers(0, 300), st.integers(0, 300))
def test_anchors_are_multiples_of_16_and_powers_of_two(held, total):
    assert anchor_lengths(held, total).tolist() == naive(held, total)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_segments_publish_what_lookups_probe(counts):
    """However a chain is cut into segments, exactly its anchors are published."""
    published, first = [], 0
    for blocks in counts:
        published += [first + int(i) + 1 for i in anchors_within(first, blocks)]
        first += blocks
    assert published == naive(0, first)


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(4, 40))
def test_probes_are_bounded_and_have_both_ends(held, more, probes_max):
    every = naive(held, held + more)
    asked = probes(held, held + more, probes_max).tolist()
    assert len(asked) <= probes_max
    assert set(asked) <= set(every)
    if every:
        assert (asked[0], asked[-1]) == (every[0], every[-1])


def test_a_long_chain_is_probed_for_short_prefixes_too():
    asked = probes(0, 200_000)
    assert len(asked) <= 64
    assert {1, 2, 4, 8, 16, 32, 64, 4096, 131072} <= set(asked.tolist())


def test_the_longest_prefix_wins():
    assert choose([{1, 2}, {1, 2}, {2}], 0) == 2
    assert choose([{1}, {1}, {2}, {2}, {2}], 0) == 1, "2 does not hold what comes first"
    assert choose([set(), {3}, {3, 4}], 0) == 3, "an entry may be missing: the owner is asked all the same"
    assert choose([set(), set()], 0) is None
    assert choose([], 0) is None


def test_equal_nodes_share_the_load():
    assert {choose([{1, 5, 9}], asking) for asking in range(12)} == {1, 5, 9}
