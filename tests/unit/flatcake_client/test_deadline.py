from __future__ import annotations

import math

import pytest

from flatcake_client.deadline import TIMEOUT_S_MAX, checked_timeout, deadline


@pytest.mark.parametrize("timeout_s", [math.inf, math.nan, TIMEOUT_S_MAX * 1.01])
def test_a_time_without_an_end_is_refused_by_calls_and_as_a_setting(timeout_s):
    with pytest.raises(ValueError, match="a timeout is"):
        deadline(0.0, timeout_s)
    with pytest.raises(ValueError, match=r"store_timeout_s is .*: expected seconds, more than 0"):
        checked_timeout("store_timeout_s", timeout_s)


def test_no_time_is_for_a_call_and_not_a_setting():
    assert deadline(5.0, 0.0) == 5.0
    assert checked_timeout("store_timeout_s", TIMEOUT_S_MAX) == TIMEOUT_S_MAX
    for none_s in (0, -1.0):
        with pytest.raises(ValueError, match="store_timeout_s is"):
            checked_timeout("store_timeout_s", none_s)
