"""Replays of any traffic: what is delivered is at most what could be, and the counts add up."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from replays import DictSystem, run_of
from traces import traffics

from flatcake_client.replay.maximum import ideal_blocks, oracle_blocks
from flatcake_client.replay.metrics import covered_s, summarise
from flatcake_client.replay.queues import OneQueue
from flatcake_client.replay.workload import Shaping, dense, shape
from flatcake_client.scheduler import TwoQueues


class Forgetful(DictSystem):
    """Loses what chance says, and brings less than it found."""

    def __init__(self, chances):
        super().__init__()
        self.chances = chances

    def _chance(self):
        with self.lock:
            return self.chances.pop() if self.chances else 1

    def restore(self, asked, found, pages, slots, timeout_s):
        usable = super().restore(asked, found, pages, slots, timeout_s)
        return usable if self._chance() else usable - 1

    def store(self, asked, first_block, pages, slots, timeout_s):
        return super().store(asked, first_block, pages, slots, timeout_s) if self._chance() else 0


@settings(max_examples=40, deadline=None)
@given(traffics(), st.lists(st.integers(0, 1), max_size=20), st.sampled_from(["two", "one", "fifo"]))
def test_delivered_is_at_most_the_maximum_and_counts_add_up(requests, chances, kind):
    workload = shape(requests, Shaping(rate=1e6))
    # In order with one prefetch, as the ablation has it: with two, a later one may hold the pages that an earlier one waits for.
    queues = (
        TwoQueues(2) if kind == "two" else OneQueue(1, in_order=True) if kind == "one" else OneQueue(2, in_order=False)
    )
    run = run_of(workload, Forgetful(list(chances)), queues=queues)
    assert run.run()
    for record in run.records:
        assert 0 <= record.delivered_blocks <= record.stored_blocks <= record.ideal_blocks <= record.blocks
        assert record.delivered_blocks + record.wrong_blocks <= record.found_blocks
        assert record.arrived_s <= record.prefill_began_s <= record.first_token_s
        assert record.offered_blocks == record.blocks - record.delivered_blocks
    summary = summarise(run.records, 16, len(requests))
    assert summary.requests == len(requests)
    assert summary.wrong_blocks == summary.errors == 0
    assert summary.found_blocks == summary.delivered_blocks + summary.short_blocks
    assert summary.delivered_hit <= summary.stored_hit <= summary.ideal_hit <= 1
    if not chances:
        assert summary.delivered_blocks == summary.found_blocks


@given(traffics(), st.integers(0, 30))
def test_no_budget_beats_no_end_and_a_large_one_is_no_end(requests, capacity):
    workload = shape(requests, Shaping())
    chains = [planned.numbers for planned in workload.requests]
    sessions = [planned.asked.session for planned in workload.requests]
    best = ideal_blocks(chains, workload.different_blocks)
    mine = oracle_blocks(chains, sessions, workload.different_blocks, capacity)
    assert all(hit <= most for hit, most in zip(mine, best, strict=True))
    assert all(hit <= capacity for hit in mine)
    assert oracle_blocks(chains, sessions, workload.different_blocks, workload.different_blocks) == best
    seen = set()
    for numbers, most in zip(chains, best, strict=True):
        known = [number in seen for number in numbers.tolist()]
        assert most == (known.index(False) if False in known else len(known))
        seen.update(numbers.tolist())


@given(traffics())
def test_dense_arrivals_keep_turns_in_order(requests):
    times = dense([r.arrival_s for r in requests], [r.session for r in requests], 3.0, seed=1)
    assert all(0 <= time <= 3.0 + 1e-9 for time in times)
    for session in {r.session for r in requests}:
        mine = [time for time, r in zip(times, requests, strict=True) if r.session == session]
        assert mine == sorted(mine)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=8))
def test_the_union_of_intervals_is_the_count_of_covered_steps(drawn):
    covered = np.zeros(30, bool)
    for start, length in drawn:
        covered[start : start + length] = True
    assert covered_s([(start, start + length) for start, length in drawn]) == covered.sum()
