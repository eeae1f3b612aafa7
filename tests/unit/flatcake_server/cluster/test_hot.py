"""What is read at other nodes so often that it is worth a copy: by example, and beside a naive count."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatcake_server.cluster.hot import FORGET_S, TELLS, HotPrefixes

ROOM = 1 << 20


def chain(seed, blocks=64):
    return np.random.default_rng(seed).integers(0, 256, (blocks, 16), np.uint8)


SHARED = chain(0)


def forked(seed, at):
    """A chain that shares its first `at` blocks with all others."""
    return np.concatenate([SHARED[:at], chain(seed)[at:]])


def found(hot, keys, lengths=(16, 32, 48, 64), held=0, *, shards=1, room_blocks=ROOM, now_s=0.0):
    return hot.found(keys, held, lengths, shards=shards, room_blocks=room_blocks, now_s=now_s)


def test_the_longest_prefix_found_so_often_is_told_and_not_what_differs():
    hot = HotPrefixes(3)
    assert [found(hot, forked(seed, 40)) for seed in (1, 2, 3)] == [0, 0, 32]
    assert found(hot, forked(4, 16)) == 16
    assert found(HotPrefixes(1), SHARED) == 64


def test_who_is_told_may_not_do_it_so_some_more_are_told_and_then_it_counts_anew():
    hot = HotPrefixes(2)
    told = [found(hot, SHARED) for _ in range(3 + 2 * TELLS)]
    assert told == [0, *[64] * TELLS, 0, *[64] * TELLS, 0]


def test_each_shard_of_a_request_is_told():
    hot = HotPrefixes(2)
    told = [found(hot, SHARED, shards=4) for _ in range(7 + 4 * TELLS)]
    assert told == [*[0] * 7, *[64] * (4 * TELLS)]


def test_what_has_no_room_is_not_told_but_the_part_of_it_that_has():
    hot = HotPrefixes(1)
    assert found(hot, SHARED, (48, 64), held=40, room_blocks=7) == 0
    assert found(hot, SHARED, (48, 64), held=40, room_blocks=23) == 48
    assert found(hot, SHARED, (48, 64), held=40, room_blocks=24) == 64


def test_what_nobody_reads_is_forgotten():
    hot = HotPrefixes(2, prefixes_max=8)
    found(hot, SHARED)
    assert found(hot, SHARED, now_s=FORGET_S + 1) == 0
    for seed in range(3, 9):
        found(hot, chain(seed))
    assert len(hot) == 8
    assert found(hot, SHARED, now_s=FORGET_S + 1) == 0, "the table is bounded"


def test_it_must_be_read_before():
    with pytest.raises(ValueError, match="1 hit or more"):
        HotPrefixes(0)


@given(
    after=st.integers(1, 4),
    forks=st.lists(st.tuples(st.integers(0, 2), st.sampled_from([16, 32, 48, 64]), st.integers(0, 70)), max_size=40),
)
def test_beside_a_naive_count(after, forks):
    """Nothing is told that was found less often, or has no room; and what was is told, until it has been told often."""
    hot, counts, told = HotPrefixes(after), Counter(), 0
    for seed, at, room in forks:
        keys = forked(seed + 1, at)
        counts.update(keys[length - 1].tobytes() for length in (16, 32, 48, 64))
        best = found(hot, keys, room_blocks=room)
        often = [n for n in (16, 32, 48, 64) if counts[keys[n - 1].tobytes()] >= after and n <= room]
        assert best == max(often, default=0) or told >= TELLS
        assert best in (0, *often)
        told += bool(best)
