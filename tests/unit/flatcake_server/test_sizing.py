from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatcake_server.sizing import SizingPolicy, file_bytes
from flatcake_transport.layout import ALIGN_BYTES, align_up

MIB = 1 << 20
POLICY = SizingPolicy(headroom_share=0.25, growth_share=0.5, file_bytes_max=1024 * MIB)


def test_the_first_file_takes_its_turn_and_some_headroom() -> None:
    assert file_bytes(8 * MIB, 0, 0, POLICY) == 10 * MIB


def test_a_further_file_doubles_the_last() -> None:
    assert file_bytes(MIB, 100 * MIB, 10 * MIB, POLICY) == 20 * MIB


def test_but_is_at_most_a_share_of_what_the_session_holds() -> None:
    assert file_bytes(MIB, 100 * MIB, 90 * MIB, POLICY) == 50 * MIB


def test_a_turn_always_fits_its_file() -> None:
    assert file_bytes(70 * MIB, 100 * MIB, 90 * MIB, POLICY) == 70 * MIB
    assert file_bytes(2000 * MIB, 0, 0, POLICY) == 2000 * MIB
    assert file_bytes(1, 0, 0, POLICY) == ALIGN_BYTES


def test_headroom_and_doubling_end_at_the_longest_file() -> None:
    assert file_bytes(1000 * MIB, 0, 0, POLICY) == 1024 * MIB
    assert file_bytes(MIB, 9000 * MIB, 1000 * MIB, POLICY) == 1024 * MIB


@given(st.integers(1, 1 << 45), st.integers(0, 1 << 45), st.integers(0, 1 << 45))
def test_never_more_than_its_share_beyond_need(need: int, written: int, previous: int) -> None:
    size = file_bytes(need, written, previous, SizingPolicy())
    assert size % ALIGN_BYTES == 0
    assert size >= need
    beyond = need * 0.2 if previous == 0 else written * 0.35
    assert size <= align_up(need) or size <= beyond + need * (previous == 0) + ALIGN_BYTES
    assert size <= max(align_up(need), SizingPolicy().file_bytes_max)


def test_a_session_of_many_short_turns_stays_within_a_quarter_and_in_few_files() -> None:
    policy, written, tail, files = SizingPolicy(), 0, 0, [0]
    reserved_area = written_area = 0
    for _ in range(400):
        if tail + MIB > files[-1]:
            written += tail
            files.append(file_bytes(MIB if written else 32 * MIB, written, files[-1], policy))
            tail = 0 if written else 31 * MIB
        tail += MIB
        reserved_area += written + files[-1]
        written_area += written + tail
    assert reserved_area / written_area <= 1.25
    assert len(files) - 1 <= 12


@pytest.mark.parametrize("sizes", [(0, 0, 0), (1, -1, 0), (1, 0, -1)])
def test_sizes_that_cannot_be_are_a_bug_of_the_caller(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError):
        file_bytes(*sizes, POLICY)


@pytest.mark.parametrize("shares", [(-0.1, 0.5, 1), (0.1, -0.5, 1), (0.1, 0.5, 0)])
def test_a_policy_that_cannot_be_is_refused(shares: tuple[float, float, int]) -> None:
    with pytest.raises(ValueError):
        SizingPolicy(*shares)
