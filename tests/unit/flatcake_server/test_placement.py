from __future__ import annotations

import pytest

from flatcake_server.placement import Hints, Placed, Policy, Reason, place
from flatcake_transport.address import Medium

POLICY = Policy(agent_context_tokens=1000, short_reply_tokens=100)


@pytest.mark.parametrize(
    ("hints", "medium", "reason"),
    [
        (Hints(1, 10, 10), Medium.SSD, Reason.FIRST_TURN),
        (Hints(1, 5000, 500), Medium.SSD, Reason.FIRST_TURN),
        (Hints(2, 1001, 10), Medium.SSD, Reason.LONG_CONTEXT),
        (Hints(2, 1001, None), Medium.SSD, Reason.LONG_CONTEXT),
        (Hints(2, 1000, None), Medium.SSD, Reason.REPLY_UNKNOWN),
        (Hints(2, 1000, 101), Medium.SSD, Reason.LONG_REPLY),
        (Hints(2, 1000, 100), Medium.MEMORY, Reason.SHORT_REPLY),
        (Hints(2, 0, 0), Medium.MEMORY, Reason.SHORT_REPLY),
    ],
)
def test_the_first_row_of_the_table_that_matches_wins(hints: Hints, medium: Medium, reason: Reason) -> None:
    assert place(hints, POLICY, 3) == [Placed(0, 3, medium, reason)]


@pytest.mark.parametrize(
    ("share_counts", "head"),
    [([2, 2, 1, 1], 2), ([2, 3, 4, 5], 4), ([1, 2, 2, 2], 0), ([2, 1, 2, 1], 1), ([0, 0, 0, 0], 0), ([], 0)],
)
def test_a_shared_head_lives_in_memory_and_the_rest_by_the_table(share_counts: list[int], head: int) -> None:
    placed = place(Hints(1, 5000, None, share_counts), POLICY, 4)
    expected = [Placed(0, head, Medium.MEMORY, Reason.SHARED), Placed(head, 4 - head, Medium.SSD, Reason.FIRST_TURN)]
    assert placed == [part for part in expected if part.blocks]


@pytest.mark.parametrize(
    ("hints", "blocks"),
    [(Hints(1, 0), 0), (Hints(0, 0), 1), (Hints(1, -1), 1), (Hints(1, 0, -1), 1), (Hints(1, 0, None, [1, 2]), 3)],
)
def test_hints_that_cannot_be_are_a_bug_of_the_caller(hints: Hints, blocks: int) -> None:
    with pytest.raises(ValueError):
        place(hints, POLICY, blocks)


@pytest.mark.parametrize("thresholds", [(-1, 0), (0, -1)])
def test_negative_thresholds_are_refused(thresholds: tuple[int, int]) -> None:
    with pytest.raises(ValueError):
        Policy(*thresholds)


def test_reasons_read_as_they_are_counted() -> None:
    assert [str(reason) for reason in Reason] == [
        "copied",
        "shared",
        "first-turn",
        "long-context",
        "reply-unknown",
        "long-reply",
        "short-reply",
        "memory-full",
    ]
