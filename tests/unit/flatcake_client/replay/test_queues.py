from __future__ import annotations

import pytest

from flatcake_client.replay.queues import OneQueue


def test_prefetches_start_in_order_of_arrival_however_large():
    queues = OneQueue(2, in_order=False)
    for name, size in (("large", 9), ("small", 1), ("third", 5)):
        queues.arrive(name, 0.0, size)
    assert queues.start_prefetches(0.0) == ["large", "small"]
    assert queues.start_prefetches(0.0) == []
    queues.prefetched("small")
    assert queues.start_prefetches(0.0) == ["third"]
    assert queues.take_ready() == "small"  # the large one is still being read
    assert queues.take_ready() is None


def test_in_order_nobody_passes():
    queues = OneQueue(1, in_order=True)
    queues.arrive("on ssd", 0.0, 5)
    queues.arrive("in memory", 1.0, 0)
    assert queues.take_ready() is None
    assert queues.start_prefetches(1.0) == ["on ssd"]
    queues.prefetched("on ssd")
    assert [queues.take_ready(), queues.take_ready(), queues.take_ready()] == ["on ssd", "in memory", None]


def test_counts_add_up_and_cancelled_ones_hold_up_nobody():
    queues = OneQueue(1, in_order=True)
    for n in range(4):
        queues.arrive(n, 0.0, int(n != 3))
    assert queues.start_prefetches(0.0) == [0]
    queues.cancel(0)
    queues.cancel(1)
    queues.cancel(9)
    queues.prefetched(0)
    assert queues.start_prefetches(0.0) == [2]
    queues.prefetched(2)
    assert [queues.take_ready(), queues.take_ready(), queues.take_ready()] == [2, 3, None]
    stats = queues.stats()
    assert (stats.arrived_total, stats.taken_total, stats.cancelled_total) == (4, 2, 2)
    assert (stats.ready, stats.preparing, stats.prefetching) == (0, 0, 0)


def test_one_that_ends_leaves_the_disk_to_the_next():
    queues = OneQueue(1, in_order=True)
    for n in range(3):
        queues.arrive(n, 0.0, 1)
    queues.prefetched(0, ending=True)
    assert queues.start_prefetches(0.0) == [0]
    queues.prefetched(0, ending=True)
    assert queues.start_prefetches(0.0) == [1]
    queues.prefetched(1, ending=True)
    assert queues.start_prefetches(0.0) == []
    assert queues.stats().prefetching == 2
    assert queues.take_ready() is None
    queues.prefetched(0)
    assert queues.start_prefetches(0.0) == [2]
    queues.prefetched(1)
    queues.prefetched(1)
    assert [queues.take_ready(), queues.take_ready(), queues.take_ready()] == [0, 1, None]


def test_what_makes_no_sense():
    with pytest.raises(ValueError, match="1 or more"):
        OneQueue(0, in_order=True)
    queues = OneQueue(1, in_order=True)
    queues.arrive("a", 0.0, 0)
    with pytest.raises(ValueError, match="here already"):
        queues.arrive("a", 0.0, 0)
