"""Fetch or recompute: against all cuts tried one by one, and what a bandwidth forgets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flatcake_client as fc
from flatcake_client.records import Run
from flatcake_client.worth import FORGET_S, SAMPLE_BYTES_MIN, Bandwidths, RemoteRead, worth_fetching
from flatcake_transport.address import Address, Medium

NEAR = 1
PLACES = [(node, medium) for node in (NEAR, 2, 3) for medium in (Medium.MEMORY, Medium.SSD)]
MIB = 1 << 20


def run_of(place, blocks):
    return Run(Address.of(place[1], place[0], 0), blocks, 0, blocks, 0, int(place[1] is Medium.SSD), 0)


def kept(runs, rates, block_bytes=8, block_tokens=4, speed=2.0):
    return worth_fetching(
        runs, NEAR, block_bytes=block_bytes, block_tokens=block_tokens, prefill_tokens_per_s=speed, bandwidth=rates.get
    )


runs_lists = st.lists(
    st.tuples(st.sampled_from(PLACES), st.integers(1, 4)).map(lambda drawn: run_of(*drawn)), max_size=6
)
rates_dicts = st.dictionaries(st.sampled_from(PLACES), st.sampled_from([1.0, 2.0, 4.0, 8.0, 64.0]))


@given(runs_lists, rates_dicts, st.sampled_from([0.5, 1.0, 2.0, 4.0]))
def test_no_other_cut_takes_less_time(runs, rates, speed):
    def total_s(cut):
        fetched = sum(
            run.blocks * 8 / rates[place]
            for run in runs[:cut]
            if (place := (run.segment.node, run.segment.medium)) in rates and place[0] != NEAR
        )
        return fetched + sum(run.blocks for run in runs[cut:]) * 4 / speed

    best = min(total_s(cut) for cut in range(len(runs) + 1))
    chosen = kept(runs, rates, speed=speed)
    assert total_s(chosen) == best
    assert all(total_s(cut) > best for cut in range(chosen + 1, len(runs) + 1)), "the longest of equals"
    assert all(run.segment.node != NEAR for run in runs[chosen : chosen + 1])


def test_a_slow_node_is_cut_and_a_fast_or_unknown_one_is_not():
    here, far, farther = run_of((1, Medium.SSD), 9), run_of((2, Medium.MEMORY), 3), run_of((2, Medium.SSD), 3)
    # A block of 8 bytes and 4 tokens takes 2 s to compute.
    assert kept([here, far, farther], {}) == 3
    assert kept([here, far, farther], {(2, Medium.SSD): 3.9}) == 2
    assert kept([here, far, farther], {(2, Medium.SSD): 4.0}) == 3
    assert kept([here, far, farther], {(2, Medium.MEMORY): 1.0, (2, Medium.SSD): 1e9}) == 1
    assert kept([here, far], {(1, Medium.SSD): 0.001, (2, Medium.MEMORY): 1.0}) == 1


def test_an_average_that_forgets():
    place, known = (2, Medium.MEMORY), Bandwidths()
    known.add(RemoteRead(place, SAMPLE_BYTES_MIN - 1, 0.001), 0.0)
    known.add(RemoteRead(place, MIB, 0.0), 0.0)
    assert known.of(place, 0.0) is None, "too little to measure"
    known.add(RemoteRead(place, 10 * MIB, 1.0), 0.0)
    known.add(RemoteRead(place, 10 * MIB, 2.0), 1.0)
    assert known.of(place, 1.0) == pytest.approx(MIB / 0.13)
    assert known.of((2, Medium.SSD), 1.0) is None
    assert known.of(place, 1.0 + FORGET_S) is None
    known.add(RemoteRead(place, 40 * MIB, 1.0), 2 + FORGET_S)
    assert known.of(place, 2 + FORGET_S) == 40 * MIB, "nothing is left of what was forgotten"


def test_what_came_while_something_else_was_waited_for_does_not_hide_a_slow_link():
    """One link brings two media, and the restore stands waiting for the first: the second seems a hundred times as fast."""
    place, known = (2, Medium.MEMORY), Bandwidths()
    known.add(RemoteRead(place, 2 * MIB, 0.005), 0.0)
    known.add(RemoteRead(place, 2 * MIB, 0.5), 1.0)
    assert known.of(place, 1.0) < 4 * 4 * MIB


def test_a_speed_makes_sense():
    with pytest.raises(ValueError, match="prefill_tokens_per_s is 0"):
        fc.connect("unix:///nowhere", prefill_tokens_per_s=0)
