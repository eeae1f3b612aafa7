from __future__ import annotations

import itertools

import numpy as np
import pytest
from replays import talk, workload_of
from traces import request

from flatcake_client.replay.workload import Shaping, block_keys, dense, shape


def test_blocks_are_grouped_and_what_is_behind_the_last_whole_one_has_no_key():
    workload = workload_of([request(0, "x", range(7)), request(1, "y", [0, 1, 2, 3, 9, 9 + 1])], block_tokens=32)
    first, second = workload.requests
    assert (first.blocks, second.blocks) == (3, 3)  # 7 blocks of 16 tokens are 3 of 32, and a half
    assert np.array_equal(first.asked.keys[:2], second.asked.keys[:2])
    assert not np.array_equal(first.asked.keys[2], second.asked.keys[2])
    assert first.asked.share_counts.tolist() == [2, 2, 1]
    assert workload.stored_blocks == 4


def test_a_group_is_named_by_all_of_its_blocks():
    workload = workload_of([request(0, "x", [0, 1]), request(1, "y", [0, 2])], block_tokens=32)
    first, second = (planned.asked.keys for planned in workload.requests)
    assert len(first) == len(second) == 1
    assert not np.array_equal(first, second)


def test_a_partial_last_block_has_no_key():
    ids = np.arange(3)
    partial = request(0, "x", ids)
    partial = type(partial)(0.0, "x", 1, 40, 8, 16, ids)  # 40 tokens: two blocks and a half
    assert shape([partial], Shaping()).requests[0].blocks == 2


def test_turns_count_within_the_replay_and_know_the_reply_before():
    requests = [request(t, "x", range(t + 1), turn=t + 5, output_tokens=100 + t) for t in range(3)]
    asked = [planned.asked for planned in shape(requests, Shaping()).requests]
    assert [each.turn for each in asked] == [1, 2, 3]
    assert [each.previous_reply_tokens for each in asked] == [None, 100, 101]
    assert [each.number for each in asked] == [0, 1, 2]


@pytest.mark.parametrize(
    ("shaping", "expected"),
    [
        ({"limit": 3}, ["x", "y", "x"]),
        ({"sessions": 1}, ["x"] * 4),
        ({"turns": 1}, ["x", "y"]),
        ({"max_tokens": 16 * 4}, ["x", "y", "x", "y"]),  # the third turn of each is longer: the session ends there
        ({"from_s": 0.0018}, ["x", "y"] * 2),
        ({"window_s": 0.001}, ["x", "y", "x"]),
    ],
)
def test_what_is_chosen(shaping, expected):
    workload = workload_of(talk("x", 4, 0), talk("y", 4, 100, at_s=0.0005), **shaping)
    assert [planned.asked.session for planned in workload.requests] == expected


def test_a_rate_shrinks_the_time_and_the_first_request_comes_at_once():
    workload = workload_of(talk("x", 3, 0, at_s=10.0, gap_s=1.0), rate=2.0)
    assert [planned.arrival_s for planned in workload.requests] == [0.0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("shaping", "message"), [({"from_s": 99.0}, "no request of the trace is left"), ({"block_tokens": 24}, "multiple")]
)
def test_what_cannot_be_shaped_is_said(shaping, message):
    with pytest.raises(ValueError, match=message):
        workload_of(talk("x", 2, 0), **shaping)


def test_dense_keeps_the_order_of_turns_takes_its_time_and_mixes_sessions():
    sessions = ["x"] * 20 + ["y"] * 20
    sparse = [float(t) for t in range(20)] + [1000.0 + t for t in range(20)]
    times = dense(sparse, sessions, 5.0, seed=3)
    assert min(times) == 0.0
    assert max(times) == pytest.approx(5.0)
    for session in "xy":
        mine = [time for time, name in zip(times, sessions, strict=True) if name == session]
        assert mine == sorted(mine)
    order = [session for _, session in sorted(zip(times, sessions, strict=True))]
    assert sum(a != b for a, b in itertools.pairwise(order)) > 5
    assert times == dense(sparse, sessions, 5.0, seed=3)
    assert times != dense(sparse, sessions, 5.0, seed=4)


def test_keys_of_different_blocks_differ():
    keys = block_keys(np.arange(100_000))
    assert keys.shape == (100_000, 16)
    assert len(np.unique(keys, axis=0)) == 100_000
    assert keys.any(axis=1).all()
