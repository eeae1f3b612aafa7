from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatcake_server.placement import Hints, Policy, Reason
from flatcake_server.turns import plan_parts
from flatcake_transport.address import Medium

POLICY = Policy(agent_context_tokens=1000, short_reply_tokens=100)


def cuts(missing: list[bool], hints: Hints) -> list[tuple[int, int, str]]:
    return [(p.first_block, p.blocks, str(p.reason)) for p in plan_parts(np.array(missing), hints, POLICY)]


def test_a_shared_head_and_its_tail_are_two_segments():
    hints = Hints(1, 500, None, [3, 3, 1, 1])
    assert cuts([True] * 4, hints) == [(0, 2, Reason.SHARED), (2, 2, Reason.FIRST_TURN)]


def test_only_what_is_missing_is_stored_and_holes_are_segments_of_their_own():
    hints = Hints(2, 5000)
    assert cuts([True, False, False, True, True], hints) == [(0, 1, Reason.LONG_CONTEXT), (3, 2, Reason.LONG_CONTEXT)]


def test_a_share_count_reaches_into_a_later_run():
    hints = Hints(2, 500, 10, [2, 2, 2, 1])
    assert cuts([False, False, True, True], hints) == [(2, 1, Reason.SHARED), (3, 1, Reason.SHORT_REPLY)]


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 3), st.data())
def test_parts_cover_exactly_what_is_missing(missing, turn, data):
    counts = data.draw(st.none() | st.lists(st.integers(0, 3), min_size=len(missing), max_size=len(missing)))
    plans = plan_parts(np.array(missing), Hints(turn, 50, 5, counts), POLICY)
    covered = [block for plan in plans for block in range(plan.first_block, plan.first_block + plan.blocks)]
    assert covered == [block for block, is_missing in enumerate(missing) if is_missing]
    assert all(plan.blocks > 0 for plan in plans)
    assert all((plan.medium is Medium.MEMORY) == (plan.reason in ("shared", "short-reply")) for plan in plans)


def test_nothing_missing_is_no_parts():
    assert plan_parts(np.array([False, False]), Hints(1, 1), POLICY) == []


def test_hints_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="turns count from 1"):
        plan_parts(np.array([True]), Hints(0, 1), POLICY)
