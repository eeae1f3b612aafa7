from __future__ import annotations

import pytest

from flatcake_server.reclaim import ReclaimOrder, reclaim_need


def order_of(*sessions: int, pool: int = 1, size: int = 10) -> ReclaimOrder:
    order = ReclaimOrder()
    for session in sessions:
        order.add(session)
        order.set_bytes(session, pool, size)
    return order


def nobody(_session: int) -> bool:
    return False


def test_least_recently_used_goes_first_and_only_as_many_as_needed() -> None:
    order = order_of(1, 2, 3)
    order.touch([1])
    assert order.victims(1, 10, nobody) == [2]
    assert order.victims(1, 11, nobody) == [2, 3]
    assert order.victims(1, 1000, nobody) == [2, 3, 1]
    assert order.victims(1, 0, nobody) == []
    assert order.victims(7, 10, nobody) == []


def test_a_session_being_read_stays() -> None:
    assert order_of(1, 2, 3).victims(1, 20, {1}.__contains__) == [2, 3]


def test_using_a_fork_uses_its_chain_and_drops_it_from_its_end() -> None:
    order = order_of(1, 2, 3, 4)
    order.touch([1, 2, 3])
    assert order.sessions() == [4, 3, 2, 1]


def test_a_parent_waits_for_its_dependents_and_follows_them_at_once() -> None:
    order = order_of(1, 2, 3)
    order.depend(2, 1)
    assert order.victims(1, 10, nobody) == [2]
    assert order.victims(1, 20, nobody) == [2, 1]
    assert order.victims(1, 1000, {2}.__contains__) == [3]


def test_a_parent_used_later_keeps_its_turn() -> None:
    order = order_of(1, 2, 3)
    order.depend(1, 3)
    assert order.victims(1, 20, nobody) == [1, 2]


def test_a_chain_used_out_of_order_goes_whole_once_its_end_has_gone() -> None:
    order = order_of(1, 2, 3)
    order.depend(1, 2)
    order.depend(3, 1)
    assert order.victims(1, 1000, nobody) == [3, 1, 2]


def test_a_parent_freed_twice_is_dropped_and_counted_once() -> None:
    order = order_of(1, 2, 3, 4)
    for child, parent in ((3, 1), (3, 2), (1, 2)):
        order.depend(child, parent)
    assert order.victims(1, 35, nobody) == [3, 1, 2, 4]


def test_a_dependent_elsewhere_protects_its_parent() -> None:
    order = order_of(1)
    order.add(2)
    order.set_bytes(2, 0, 5)
    order.depend(2, 1)
    assert order.victims(1, 10, nobody) == []
    order.remove(2)
    assert order.victims(1, 10, nobody) == [1]


def test_two_ways_to_one_parent_drop_it_once() -> None:
    order = order_of(1, 2, 3, 4)
    for child, parent in ((2, 1), (3, 1), (3, 2), (4, 1), (4, 3)):
        order.depend(child, parent)
    assert order.victims(1, 1000, nobody) == [4, 3, 2, 1]


def test_a_cycle_is_not_closed() -> None:
    order = order_of(1, 2, 3)
    assert order.depend(2, 1)
    assert order.depend(3, 2)
    assert order.depend(3, 2)
    assert not order.depend(1, 3)
    assert not order.depend(1, 1)
    assert order.stats().dependencies == 2
    order.check()


def test_bytes_that_come_late_keep_a_session_at_its_place() -> None:
    order = order_of(1, 2)
    order.add(3)
    order.touch([1])
    order.set_bytes(1, 5, 1)
    order.set_bytes(2, 5, 1)  # used before 1
    assert order.victims(5, 1, nobody) == [2]
    assert order.bytes_of(5) == 2


def test_bytes_are_counted_by_pool() -> None:
    order = order_of(1, 2)
    order.add_bytes(1, 1, -4)
    order.add_bytes(1, 0, 3)
    assert (order.bytes_of(0), order.bytes_of(1), order.bytes_of(2)) == (3, 16, 0)
    with pytest.raises(ValueError):
        order.add_bytes(1, 0, -4)
    order.remove(1)
    assert (order.bytes_of(0), order.bytes_of(1)) == (0, 10)


@pytest.mark.parametrize(
    ("used", "request_bytes", "need"),
    [(800, 100, 0), (900, 0, 0), (850, 51, 201), (900, 1, 201), (100, 850, 100), (1000, 0, 300), (0, 950, 0)],
)
def test_watermarks(used: int, request_bytes: int, need: int) -> None:
    assert reclaim_need(used, request_bytes, 1000, high=0.9, low=0.7) == need


@pytest.mark.parametrize(("high", "low"), [(0.5, 0.6), (1.1, 0.5), (0.5, -0.1)])
def test_watermarks_out_of_order_are_refused(high: float, low: float) -> None:
    with pytest.raises(ValueError):
        reclaim_need(0, 0, 0, high, low)


def test_negative_sizes_are_refused() -> None:
    with pytest.raises(ValueError):
        reclaim_need(-1, 0, 0, 1, 1)
