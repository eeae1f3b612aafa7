from __future__ import annotations

import numpy as np
import pytest

from flatcake_server.index import LOAD_MAX, PREFIX_KEYS, SUBS, BlockIndex
from flatcake_server.records import KeyArray
from flatcake_transport.address import MISSING, AddressArray
from flatcake_transport.errors import Overloaded


def some_keys(count: int, seed: int = 1) -> KeyArray:
    keys: KeyArray = np.random.default_rng(seed).integers(0, 256, (count, 16), np.uint8)
    return keys


def addresses_from(first: int, count: int) -> AddressArray:
    return np.arange(first, first + count, dtype=np.uint64)


def test_an_empty_index_misses_and_takes_empty_batches() -> None:
    index = BlockIndex(1000)
    assert index.lookup(some_keys(3)).tolist() == [MISSING] * 3
    none = some_keys(0)
    assert len(index.lookup(none)) == len(index.prefix(none)) == len(index.insert(none, addresses_from(0, 0))) == 0
    assert index.remove(none, addresses_from(0, 0)) == 0
    assert [len(part) for part in index.arrays()] == [0, 0]
    index.check()


def test_memory_address_zero_is_an_address() -> None:
    index = BlockIndex(1000)
    key = np.zeros((1, 16), np.uint8)
    index.insert(key, addresses_from(0, 1))
    assert index.lookup(key).tolist() == [0]


def test_first_address_of_a_key_stays_across_and_within_batches() -> None:
    index = BlockIndex(1000)
    keys = some_keys(2)
    assert index.insert(keys[[0, 1, 0]], addresses_from(5, 3)).tolist() == [True, True, False]
    assert index.insert(keys, addresses_from(50, 2)).tolist() == [False, False]
    assert index.lookup(keys).tolist() == [5, 6]


def test_remove_needs_the_address_that_is_stored() -> None:
    index = BlockIndex(1000)
    keys = some_keys(3)
    index.insert(keys, addresses_from(5, 3))
    assert index.remove(keys[[0, 0, 1]], np.array([5, 5, 99], np.uint64)) == 1
    assert index.lookup(keys).tolist() == [MISSING, 6, 7]


def test_prefix_ends_at_the_first_gap_however_long_the_chain() -> None:
    index = BlockIndex(4 * PREFIX_KEYS)
    keys = some_keys(2 * PREFIX_KEYS + 10)
    index.insert(keys, addresses_from(0, len(keys)))
    assert np.array_equal(index.prefix(keys), addresses_from(0, len(keys)))
    gap = PREFIX_KEYS + 3
    index.remove(keys[gap : gap + 1], addresses_from(gap, 1))
    assert np.array_equal(index.prefix(keys), addresses_from(0, gap))
    index.remove(keys[:1], addresses_from(0, 1))
    assert len(index.prefix(keys)) == 0


def test_a_hundred_thousand_blocks_cost_fifty_bytes_each_at_most_and_the_memory_goes_back() -> None:
    index = BlockIndex(1_000_000)
    keys = some_keys(200_000)
    for first in range(0, len(keys), 4000):
        assert index.insert(keys[first : first + 4000], addresses_from(first, 4000)).all()
        if first >= 100_000:
            assert index.stats().bytes_per_block <= 50
    index.check()
    full_bytes = index.stats().bytes
    assert index.remove(keys[40_000:], addresses_from(40_000, 160_000)) == 160_000
    index.check()
    assert index.stats().bytes < full_bytes / 3
    assert np.array_equal(index.lookup(keys[:40_000]), addresses_from(0, 40_000))
    assert (index.lookup(keys[40_000:]) == np.uint64(MISSING)).all()


def test_years_of_coming_and_going_leave_no_tombstones_to_walk() -> None:
    index = BlockIndex(100_000)
    keys = some_keys(280_000)
    for first in range(0, len(keys), 10_000):  # 50,000 live at a time
        index.insert(keys[first : first + 10_000], addresses_from(first, 10_000))
        old = first - 40_000
        if old >= 0:
            assert index.remove(keys[old : old + 10_000], addresses_from(old, 10_000)) == 10_000
    index.check()
    assert len(index) == 40_000
    assert index._capacity.sum() < 2 * len(index)
    assert index._taken.sum() < LOAD_MAX * index._capacity.sum()


def test_beyond_the_bound_nothing_of_a_batch_is_added() -> None:
    index = BlockIndex(100)
    keys = some_keys(101)
    index.insert(keys[:60], addresses_from(0, 60))
    with pytest.raises(Overloaded):
        index.insert(keys[50:], addresses_from(50, 51))
    assert len(index) == 60
    assert index.insert(keys[:100], addresses_from(0, 100)).sum() == 40
    with pytest.raises(Overloaded):
        index.insert(keys[100:], addresses_from(0, 1))
    assert not index.insert(keys[:100], addresses_from(0, 100)).any()  # what is there needs no room
    index.check()


def test_copies_within_a_batch_count_once_against_the_bound() -> None:
    index = BlockIndex(100)
    keys = some_keys(90)
    batch = np.concatenate([keys, keys[::-1], keys])
    assert index.insert(batch, addresses_from(0, 270)).tolist() == [True] * 90 + [False] * 180
    index.check()


def test_many_copies_of_few_keys_keep_the_order_of_the_batch() -> None:
    index = BlockIndex(1000)
    keys = some_keys(50)
    order = np.random.default_rng(4).integers(0, 50, 5000)
    index.insert(keys[order], addresses_from(0, 5000))
    first = [int(np.flatnonzero(order == key)[0]) for key in range(50)]
    assert index.lookup(keys).tolist() == first


def test_keys_aimed_at_one_sub_table_are_refused_once_it_is_full() -> None:
    index = BlockIndex(100_000)
    keys = some_keys(SUBS * 2000)
    words = np.ascontiguousarray(keys).view(np.uint64).reshape(-1, 2)
    aimed = keys[index._hash(words) >> np.uint64(56) == 9][:1900]
    with pytest.raises(Overloaded):
        index.insert(aimed, addresses_from(0, len(aimed)))
    assert len(index) == 0
    assert index.insert(aimed[:400], addresses_from(0, 400)).all()
    index.check()


def test_the_seed_moves_keys_but_no_answer() -> None:
    keys = some_keys(1000)
    one, other = BlockIndex(2000, seed=1), BlockIndex(2000, seed=2)
    words = np.ascontiguousarray(keys).view(np.uint64).reshape(-1, 2)
    assert (one._hash(words) != other._hash(words)).all()
    for index in (one, other):
        index.insert(keys, addresses_from(0, 1000))
        assert np.array_equal(index.lookup(keys), addresses_from(0, 1000))


def test_hashes_spread_keys_that_differ_little() -> None:
    keys = np.zeros((100_000, 16), np.uint8)
    keys[:, :4] = np.arange(100_000, dtype=np.uint32).view(np.uint8).reshape(-1, 4)
    for arranged in (keys, keys[:, ::-1], np.roll(keys, 8, axis=1)):
        words = np.ascontiguousarray(arranged).view(np.uint64).reshape(-1, 2)
        counts = np.bincount((BlockIndex(1)._hash(words) >> np.uint64(56)).astype(np.int64), minlength=SUBS)
        assert counts.max() < 1.3 * len(keys) / SUBS


@pytest.mark.parametrize(
    "keys",
    [np.zeros((2, 15), np.uint8), np.zeros((2, 16), np.int8), np.zeros(16, np.uint8), np.zeros((2, 16), np.uint64)],
)
def test_keys_of_another_shape_are_a_bug_of_the_caller(keys: KeyArray) -> None:
    index = BlockIndex(10)
    with pytest.raises(ValueError):
        index.lookup(keys)


@pytest.mark.parametrize(
    "addresses",
    [addresses_from(0, 3), np.zeros(2, np.int64), np.array([0, 2 << 60], np.uint64), np.array([MISSING, 0], np.uint64)],
)
def test_addresses_that_cannot_be_are_refused(addresses: AddressArray) -> None:
    index = BlockIndex(10)
    for verb in (index.insert, index.remove):
        with pytest.raises(ValueError):
            verb(some_keys(2), addresses)
    assert len(index) == 0


@pytest.mark.parametrize("blocks_max", [0, -1, 1 << 40])
def test_a_bound_that_cannot_be_is_refused(blocks_max: int) -> None:
    with pytest.raises(ValueError):
        BlockIndex(blocks_max)


def test_keys_may_be_a_view_with_strides() -> None:
    index = BlockIndex(100)
    keys = some_keys(20)
    index.insert(keys[::2], addresses_from(0, 10))
    assert index.lookup(keys[::-2]).tolist() == [MISSING] * 10
    assert index.lookup(keys[18::-2]).tolist() == list(range(9, -1, -1))
