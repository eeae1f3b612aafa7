"""Who reads which bucket, and who is dead."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatcake_server.cluster.directory import Holder
from flatcake_server.cluster.members import Member
from flatcake_server.cluster.sweeper import BATCH_MAX, SUSPECTS_MAX, Sweeper

PERIOD_S, GRACE_S, BUCKETS = 100.0, 4.0, 1000


def members(*nodes, tag=b"one-"):
    return [Member(node, tag * 4, "") for node in nodes]


def swept(sweeper, node, seconds, step_s, start_s=0.0):
    read = Counter()
    for step in range(int(seconds / step_s) + 1):
        batch = sweeper.take(start_s + step * step_s, node)
        assert len(batch) <= BATCH_MAX
        read.update(batch)
    return read


@settings(max_examples=40)
@given(nodes=st.sets(st.integers(0, 4095), min_size=1, max_size=9), step_s=st.sampled_from([0.05, 0.5, 3.0]))
def test_all_together_read_each_bucket_once_a_period(nodes, step_s):
    read = Counter()
    for node in nodes:
        sweeper = Sweeper(PERIOD_S, GRACE_S, buckets=BUCKETS)
        sweeper.listed(members(*nodes))
        read.update(swept(sweeper, node, PERIOD_S + 2 * step_s, step_s))
    assert set(read) == set(range(BUCKETS))
    assert sum(read.values()) <= BUCKETS * (1 + 4 * step_s / PERIOD_S) + 2 * len(nodes)


def test_the_rate_of_one_node_is_bounded_and_it_gets_through_all_the_same():
    sweeper = Sweeper(PERIOD_S, GRACE_S, buckets=BUCKETS, rate_max=2.0)
    read = swept(sweeper, 7, BUCKETS / 2 + 2, 0.5)
    assert set(read) == set(range(BUCKETS))
    assert sum(swept(sweeper, 7, 100, 0.5, 502.0).values()) <= 201


def test_members_that_come_and_go_leave_no_bucket_out_for_longer_than_a_period():
    sweepers = {node: Sweeper(PERIOD_S, GRACE_S, buckets=BUCKETS) for node in (1, 2)}
    sweepers[1].listed(members(1, 2, 3))
    swept(sweepers[1], 1, 20, 0.5)
    read = Counter()
    for node, sweeper in sweepers.items():  # 3 went
        sweeper.listed(members(1, 2))
        read.update(swept(sweeper, node, PERIOD_S + 1, 0.5, 20.0))
    assert set(read) == set(range(BUCKETS))


def test_after_a_pause_it_does_not_catch_up_at_once():
    sweeper = Sweeper(PERIOD_S, GRACE_S, buckets=BUCKETS)
    sweeper.take(0.0, 1)
    assert len(sweeper.take(1e6, 1)) == BATCH_MAX
    assert len(sweeper.take(1e6 + 1, 1)) == 10


ALIVE, OLD, AWAY = Holder(1, b"one-"), Holder(1, b"zero"), Holder(2, b"one-")


def test_dead_is_who_was_in_no_list_for_so_long():
    sweeper = Sweeper(PERIOD_S, GRACE_S)
    sweeper.listed(members(1))
    assert sweeper.dead([ALIVE, OLD, AWAY], 10.0) == set()
    assert sweeper.dead([ALIVE, OLD, AWAY], 10.0 + GRACE_S / 2) == set()
    sweeper.listed(members(1, 2))
    sweeper.listed(members(1))
    assert sweeper.dead([ALIVE, OLD, AWAY], 10.0 + GRACE_S) == {OLD}, "the other was there in between"
    assert sweeper.dead([ALIVE, OLD, AWAY], 10.0 + 2 * GRACE_S) == {OLD, AWAY}


def test_suspects_do_not_pile_up():
    sweeper = Sweeper(PERIOD_S, GRACE_S)
    sweeper.dead((Holder(number, b"tag") for number in range(SUSPECTS_MAX + 1)), 0.0)
    assert sweeper.dead([Holder(5, b"tag")], GRACE_S) == set()
    assert sweeper.dead([Holder(5, b"tag")], 2 * GRACE_S) == {Holder(5, b"tag")}


@pytest.mark.parametrize("node", [5, 9])
def test_who_is_not_listed_yet_has_a_share_too(node):
    sweeper = Sweeper(PERIOD_S, GRACE_S, buckets=BUCKETS)
    sweeper.listed(members(1, 9))
    sweeper.take(0.0, node)
    assert sweeper.take(10.0, node)
