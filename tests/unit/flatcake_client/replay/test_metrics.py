from __future__ import annotations

import pytest

from flatcake_client.replay.metrics import Record, covered_s, quantile, run_document, summarise
from flatcake_client.replay.system import SystemStats


def record(number, **fields):
    made = Record(number, "x", 1, input_tokens=100, blocks=6, done=True, arrived_s=0.0, first_token_s=1.0)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_hits_are_tokens_delivered_of_all_tokens_of_requests_that_were_done():
    records = [
        record(0, found_blocks=5, delivered_blocks=4, stored_blocks=5, ideal_blocks=6, found_ssd_bytes=500),
        record(1, found_blocks=2, delivered_blocks=1, wrong_blocks=1, stored_blocks=2, ideal_blocks=2),
        record(2, done=False, found_blocks=6, delivered_blocks=6),
    ]
    summary = summarise(records, 16, 3)
    assert (summary.requests, summary.requests_planned, summary.input_tokens) == (2, 3, 200)
    assert summary.delivered_hit == pytest.approx(5 * 16 / 200)
    assert summary.stored_hit == pytest.approx(7 * 16 / 200)
    assert summary.ideal_hit == pytest.approx(8 * 16 / 200)
    assert summary.found_blocks == summary.delivered_blocks + summary.short_blocks + summary.wrong_blocks
    assert (summary.short_blocks, summary.short_restores, summary.wrong_blocks) == (1, 1, 1)
    assert summary.ssd_bytes == 400  # of the five found, the four that came


def test_bandwidth_is_over_the_time_in_which_something_was_restored():
    times = [(0.0, 1.0), (0.5, 2.0), (5.0, 6.0)]
    records = [
        record(n, found_blocks=1, delivered_blocks=1, found_ssd_bytes=300, prefetch_began_s=a, prefetch_ended_s=b)
        for n, (a, b) in enumerate(times)
    ]
    summary = summarise(records, 16, 3)
    assert summary.restoring_s == pytest.approx(3.0)
    assert summary.ssd_bytes_per_s == pytest.approx(300)
    assert summary.prefetch_mean_s == pytest.approx((1 + 1.5 + 1) / 3)
    assert summary.prefetch_p99_s == pytest.approx(1.5)


def test_memory_hits_are_no_prefetches():
    one = record(
        0, found_blocks=1, delivered_blocks=1, found_memory_bytes=9, prefetch_began_s=0.0, prefetch_ended_s=0.1
    )
    summary = summarise([one], 16, 1)
    assert (summary.prefetches, summary.memory_bytes, summary.ssd_bytes_per_s) == (0, 9, 0.0)


def test_requests_with_a_hit_have_a_time_of_their_own():
    records = [record(0, delivered_blocks=1, found_blocks=1, first_token_s=0.5), record(1, first_token_s=2.5)]
    summary = summarise(records, 16, 2)
    assert (summary.ttft_mean_s, summary.ttft_hit_mean_s, summary.ttft_hit_p99_s) == (1.5, 0.5, 0.5)


def test_a_run_spans_from_the_first_arrival_to_the_last_token():
    records = [record(0, arrived_s=1.0, first_token_s=2.0), record(1, arrived_s=1.5, first_token_s=5.0)]
    summary = summarise(records, 16, 2)
    assert (summary.span_s, summary.requests_per_s) == (4.0, 0.5)


def test_of_nothing_all_is_zero():
    summary = summarise([], 16, 0)
    assert (summary.requests, summary.delivered_hit, summary.ttft_p99_s, summary.requests_per_s) == (0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("intervals", "length"),
    [([], 0), ([(1, 2)], 1), ([(0, 4), (1, 2)], 4), ([(1, 2), (0, 1)], 2), ([(3, 4), (0, 1)], 2), ([(-2, -1)], 1)],
)
def test_the_union_of_intervals(intervals, length):
    assert covered_s(intervals) == length


def test_quantiles_are_values_that_occurred():
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert quantile(list(range(100)), 0.99) == 98
    assert quantile([7.0], 0.99) == 7.0


def test_amplification_is_unknown_where_nobody_counts():
    summary = summarise([record(0, found_blocks=1, delivered_blocks=1, found_ssd_bytes=100)], 16, 1)
    document = run_document(summary, SystemStats(), load=1, device={"read_bytes": 150}, settings={})
    assert document["read_amplification"] == 1.5
    assert run_document(summary, SystemStats(), load=1, device={}, settings={})["read_amplification"] is None
    assert document["cancelled_restores"] is None
