"""Pages by their hashes, without SGLang: what its storage and its linker share, over a real daemon."""

from __future__ import annotations

from threading import Thread

import numpy as np
import pytest
from kv import connect

import flatcake_client as fc
from flatcake_client.engines import sglang_pages
from flatcake_client.engines.sglang_pages import PageStore, page_slots
from flatcake_client.engines.weights import Weights

PAGES = 12
KEYS = [f"{page:064x}" for page in range(PAGES)]
SLOTS = np.arange(PAGES)


def stores_of(daemon, shards=1):
    """A rank each: its own client, its own bytes."""
    for shard in range(shards):
        client = connect(daemon)
        planes = [np.random.default_rng(10 * shard + n).integers(0, 256, (PAGES, 4096), np.uint8) for n in range(2)]
        yield PageStore(
            client, planes, model="m", dtype="uint8", page_tokens=4, layout="test", shards=shards, shard=shard,
            weights=Weights("files-1", lambda: "engine-1", "flush it"),
        )  # fmt: skip


def check(store, keys, slots):
    """They come back as they were stored."""
    stored = [plane[slots].copy() for plane in store.planes]
    for plane in store.planes:
        plane[slots] = 7
    assert store.load((), keys, slots) == len(keys)
    for plane, expected in zip(store.planes, stored, strict=True):
        assert np.array_equal(plane[slots], expected)


def test_batches_are_one_session_and_each_is_found_by_itself(daemon):
    (store,) = stores_of(daemon)
    for start in range(0, PAGES, 4):
        part = slice(start, start + 4)
        store.store(KEYS[:start], KEYS[part], SLOTS[part])
    assert daemon.status()["sessions"] == 1
    assert store.count(KEYS[:4], KEYS[4:]) == 8
    assert store.count((), KEYS[4:]) == 8
    assert store.count((), [*KEYS[:3], "ff", *KEYS[3:]]) == 3
    check(store, KEYS[4:9], SLOTS[4:9])
    store.space.client.close()


def test_pages_of_other_weights_are_not_found_and_not_overwritten(daemon):
    """The same hashes: SGLang makes them of tokens alone."""
    (store,) = stores_of(daemon)
    weights = store._weights
    store.store((), KEYS[:4], SLOTS[:4])
    weights.changed()
    for verb in (lambda: store.count((), KEYS[:4]), lambda: store.load((), KEYS[:4], SLOTS[:4]), lambda: store.store((), KEYS[:4], SLOTS[:4])):  # fmt: skip
        with pytest.raises(fc.Unavailable, match="flush it"):
            verb()
    weights.flushed()
    assert store.count((), KEYS[:4]) == 0
    store.store((), KEYS[:4], SLOTS[4:8])
    store.store(KEYS[:4], KEYS[4:6], SLOTS[8:10])
    check(store, KEYS[:4], SLOTS[4:8])
    assert store.count((), KEYS[:6]) == 6
    weights.changed("files-1")
    weights.flushed()
    assert store.count((), KEYS[:6]) == 4
    check(store, KEYS[:4], SLOTS[:4])
    store.space.client.close()


def test_what_does_not_continue_is_a_chain_of_its_own(daemon):
    (store,) = stores_of(daemon)
    store.store(KEYS[:4], KEYS[4:], SLOTS[4:])
    assert store.count((), KEYS) == 0
    assert store.count(KEYS[:4], KEYS[4:]) == 8
    check(store, KEYS[4:], SLOTS[4:])
    store.space.client.close()


def test_ranks_wait_for_each_other_and_no_longer_than_they_may(daemon, monkeypatch):
    ranks = list(stores_of(daemon, shards=2))
    monkeypatch.setattr(sglang_pages, "VISIBLE_TIMEOUT_S", 0.1)
    ranks[0].store((), KEYS[:4], SLOTS[:4])
    with pytest.raises(fc.Unavailable, match="other ranks"):
        ranks[0].store(KEYS[:4], KEYS[4:8], SLOTS[4:8])
    ranks[1].store((), KEYS[:4], SLOTS[:4])
    monkeypatch.undo()
    failures = []

    def store_rest(rank):
        try:
            for start in range(4, PAGES, 2):
                rank.store(KEYS[:start], KEYS[start : start + 2], SLOTS[start : start + 2])
        except BaseException as error:
            failures.append(error)
            raise

    threads = [Thread(target=store_rest, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for rank in ranks:
        check(rank, KEYS, SLOTS)
        rank.space.client.close()
    assert daemon.status()["sessions"] == 1


def test_commits_that_are_never_seen_are_forgotten(daemon, monkeypatch):
    monkeypatch.setattr(sglang_pages, "UNSEEN_MAX", 3)
    rank, other = stores_of(daemon, shards=2)
    for page in range(6):
        rank.store((), KEYS[page : page + 1], SLOTS[page : page + 1])
    assert len(rank._unseen) == 3
    rank.space.client.close()
    other.space.client.close()


@pytest.mark.parametrize(("rows", "pages"), [([0, 1, 2], 1), ([1, 2, 3, 4], 1), ([], 1)], ids=str)
def test_rows_that_are_no_pages(rows, pages):
    with pytest.raises(ValueError):
        page_slots(np.array(rows), 4, pages)


def test_rows_of_pages():
    assert page_slots(np.array([8, 9, 10, 11, 0, 1, 2, 3]), 4, 2).tolist() == [2, 0]
