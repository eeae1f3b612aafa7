from __future__ import annotations

import numpy as np
from replays import talk, workload_of

from flatcake_client.replay.maximum import Seen, ideal_blocks, oracle_blocks


def chains(*lists):
    return [np.array(numbers, np.int64) for numbers in lists]


def test_seen_counts_prefixes_only():
    seen = Seen(5)
    seen.add(np.array([0, 1, 3]))
    assert seen.prefix(np.array([0, 1, 2, 3])) == 2
    seen.drop(np.array([1]))
    assert seen.prefix(np.array([0, 1])) == 1
    assert seen.prefix(np.array([], np.int64)) == 0


def test_the_ideal_is_what_came_before():
    assert ideal_blocks(chains([0, 1], [0, 1, 2], [3], [0, 1, 2]), 4) == [0, 2, 0, 3]


def test_the_oracle_drops_who_comes_back_last():
    # a b a b: two sessions of two blocks, room for one of them and a half. The one dropped is the one used later.
    asked = chains([0, 1], [2, 3], [0, 1], [0, 1], [2, 3])
    assert oracle_blocks(asked, ["a", "b", "a", "a", "b"], 4, 4) == [0, 0, 2, 2, 2]
    assert oracle_blocks(asked, ["a", "b", "a", "a", "b"], 4, 2) == [0, 0, 0, 2, 0]
    assert oracle_blocks(asked, ["a", "b", "a", "a", "b"], 4, 0) == [0] * 5


def test_of_two_the_oracle_drops_the_later_one():
    asked = chains([0, 1], [2, 3], [4, 5], [0, 1], [2, 3])
    assert oracle_blocks(asked, ["a", "b", "c", "a", "b"], 6, 4) == [0, 0, 0, 2, 0]
    asked = chains([0, 1], [2, 3], [4, 5], [2, 3], [0, 1])
    assert oracle_blocks(asked, ["a", "b", "c", "b", "a"], 6, 4) == [0, 0, 0, 2, 0]


def test_the_oracle_never_drops_what_the_request_hits():
    asked = chains([0, 1], [0, 1, 2], [0, 1, 2, 3])
    assert oracle_blocks(asked, ["a"] * 3, 4, 3) == [0, 2, 3]


def test_a_shared_head_stays_while_others_use_it():
    workload = workload_of(talk("x", 1, 10, shared=range(3)), talk("y", 1, 20, at_s=1, shared=range(3)))
    numbers = [planned.numbers for planned in workload.requests]
    assert oracle_blocks(numbers, ["x", "y"], workload.different_blocks, 100) == [0, 3]


def test_what_is_still_there_behind_a_hole_needs_no_room_again():
    # d's coming drops a, the head of b's chain. When b comes back only that head is missing: d makes room, c stays.
    asked = chains([0, 1], [0, 1, 2, 3], [4, 5], [6, 7], [4, 5], [0, 1, 2, 3], [4, 5])
    assert oracle_blocks(asked, list("abcdcbc"), 8, 6) == [0, 2, 0, 0, 2, 0, 2]
