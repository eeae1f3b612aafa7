"""What SGLang's storage must do beyond the suite of all connectors: layouts, ranks, pools, its own injector of failures."""

from __future__ import annotations

from functools import partial
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conformance.connectors import Engine, Shape, kv_of
from engines.sglang.harness import StorageHarness, config_of
from engines.sglang.pools import MHA_LAYOUTS, MLA_LAYOUTS, get, mha_pool, mla_pool, put
from sglang.srt.environ import envs
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageExtraInfo,
    HiCacheStorageFailureInjector,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)

import flatcake_client as fc
from flatcake_client.engines import sglang
from flatcake_client.engines.sglang import FlatCakeStorage
from flatcake_client.engines.sglang_pages import host_planes, page_slots

SHAPE = Shape(block_tokens=4)


@pytest.fixture
def engine_of(daemon):
    engines = []

    def make(**options):
        engines.append(Engine(StorageHarness(daemon.endpoint, SHAPE, **options)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.harness.close()


@pytest.mark.parametrize(
    ("pool", "layout"), [(mha_pool, name) for name in MHA_LAYOUTS] + [(mla_pool, name) for name in MLA_LAYOUTS]
)
def test_planes_are_the_pages_of_the_pool_in_every_layout(pool, layout):
    """Together they have every byte of the pool exactly once, and those of a page only."""
    host = pool(layout, 3, 4, torch.bfloat16, 6)
    for page in range(6):
        for layer in range(3):
            put(host, page, layer, np.full(host.size_per_token * 4 // 3, page + 1, np.uint8))
    planes = host_planes(host)
    assert sum(plane.nbytes for plane in planes) == host.kv_buffer.nbytes
    for page in range(6):
        assert all((plane[page] == page + 1).all() for plane in planes)
        for plane in planes:
            plane[page] = 100
    assert (host.kv_buffer.view(torch.uint8) == 100).all()


@pytest.mark.parametrize("layout", MHA_LAYOUTS)
def test_more_pages_than_a_batch(engine_of, daemon, layout):
    """300 pages are three batches of up to 128; with prefix keys they are one session."""
    engine = engine_of(layout=layout)
    tokens = engine.tokens(1, 300)
    assert engine.store(tokens)
    assert daemon.status()["sessions"] == 1
    assert engine.lookup(tokens) == 300
    assert engine.load(tokens) == 300
    assert engine_of(layout=layout).load(tokens) == 300
    other = "page_first" if layout == "layer_first" else "layer_first"
    assert engine_of(layout=other).lookup(tokens) == 0


def test_without_prefix_keys_it_says_what_to_set(engine_of, daemon, caplog):
    engine = engine_of(prefix=False)
    tokens = engine.tokens(1, 200)
    assert engine.store(tokens)
    assert engine.load(tokens) == 200
    assert [record.levelname for record in caplog.records if "hicache_storage_pass_prefix_keys" in record.message] == ["WARNING"]  # fmt: skip
    assert daemon.status()["sessions"] == 2


def test_pages_after_a_prefix_that_is_gone_are_stored_and_found(engine_of):
    """Of the chain before only the names are known: the batch is a chain of its own."""
    engine = engine_of()
    harness = engine.harness
    tokens = engine.tokens(1, 6)
    hashes, kv = harness.hashes(tokens), kv_of(harness, tokens)
    pages = harness.take(4)
    for layer in range(harness.layers):
        for page, data in zip(pages, kv[layer][2:], strict=True):
            put(harness.pool, page, layer, data)
    info = HiCacheStorageExtraInfo(prefix_keys=hashes[:2])
    assert harness.storage.batch_set_v1(hashes[2:], harness.rows(pages), info) == [True] * 4
    assert harness.storage.batch_exists(hashes[2:], info) == 4
    harness.pool.kv_buffer.zero_()
    assert harness.storage.batch_get_v1(hashes[2:], harness.rows(pages), info) == [True] * 4
    for layer in range(harness.layers):
        for page, data in zip(pages, kv[layer][2:], strict=True):
            assert np.array_equal(get(harness.pool, page, layer), data)
    assert engine.lookup(tokens) == 0


def test_ranks_store_and_find_together(engine_of):
    """Two ranks, each with its own heads: nothing shows before both have stored, then both find all."""
    ranks = [engine_of(tp_rank=rank, tp_size=2) for rank in range(2)]
    tokens = ranks[0].tokens(1, 300)
    results = {}

    def store(rank):
        shift = np.uint8(rank)
        kv = [rows + shift for rows in kv_of(ranks[rank].harness, tokens)]
        results[rank] = ranks[rank].harness.store(tokens, kv)

    short = tokens[: 5 * SHAPE.block_tokens + 1]
    assert ranks[0].store(short)
    assert ranks[0].lookup(short) == 0
    assert ranks[1].store(short)
    assert [rank.lookup(short) for rank in ranks] == [5, 5]
    tokens = ranks[0].tokens(2, 300)
    threads = [Thread(target=store, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: True, 1: True}
    for rank, engine in enumerate(ranks):
        assert engine.lookup(tokens) == 300
        blocks, kv = engine.harness.load(tokens)
        assert blocks == 300
        for got, stored in zip(kv, kv_of(engine.harness, tokens), strict=True):
            assert np.array_equal(got, stored + np.uint8(rank))


def test_of_ranks_that_hold_the_same_one_writes_and_all_read(engine_of, daemon):
    ranks = [engine_of(pool=mla_pool, is_mla_model=True, tp_rank=rank, tp_size=2) for rank in range(2)]
    tokens = ranks[0].tokens(1, 5)
    assert ranks[1].store(tokens), "what another rank stores is no failure"
    assert ranks[1].lookup(tokens) == 0
    assert ranks[0].store(tokens)
    assert [rank.load(tokens) for rank in ranks] == [5, 5]
    assert daemon.status()["counters"]["turns_begun_total"] == 1


@pytest.mark.parametrize("different", [{"pp_size": 2, "pp_rank": 1}, {"attn_cp_size": 2}, {"tp_size": 2}], ids=str)
def test_other_ranks_are_other_spaces(engine_of, different):
    engine = engine_of()
    tokens = engine.tokens(1, 5)
    assert engine.store(tokens)
    assert engine_of(**different).lookup(tokens) == 0


def transfer(name, keys, harness, pages, policy=PoolHitPolicy.ALL_PAGES):
    return PoolTransfer(name=name, keys=keys, host_indices=harness.rows(pages), hit_policy=policy)


def test_fp8_formats_are_other_spaces_though_pools_keep_both_as_bytes(engine_of, monkeypatch):
    names = []
    for kv_cache_dtype in ("fp8_e4m3", "fp8_e5m2", "auto"):
        monkeypatch.setattr(
            sglang, "get_server_args", lambda named=kv_cache_dtype: SimpleNamespace(kv_cache_dtype=named)
        )
        names.append(engine_of().harness.storage._stores["kv"].space.spec.fingerprint)
    assert len(set(names)) == 3


def test_how_pages_lie_on_the_device_is_in_the_space(engine_of):
    """A host pool is given them as they are."""
    names = [
        engine_of(pool=partial(mha_pool, on_device=layout)).harness.storage._stores["kv"].space.spec.fingerprint
        for layout in (KVBufferLayout.NHD, KVBufferLayout.HND, KVBufferLayout.NHD)
    ]
    assert names[0] == names[2] != names[1]


def test_borders_are_looked_for_no_longer_than_a_second(monkeypatch):
    now_s, asked = [0.0], []
    monkeypatch.setattr(sglang, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def count(_prefix, keys):
        asked.append(keys)
        now_s[0] += 0.3  # a slow daemon
        return 0

    keys = [str(number) for number in range(100)]
    assert not sglang.borders(SimpleNamespace(count=count), keys, 1, set(range(1, 101)))
    assert len(asked) == 4


def test_pools_each_by_its_policy(engine_of):
    """An indexer has every page, a sliding window only those before its borders; the hit is what all can restore."""
    engine = engine_of()
    harness, storage = engine.harness, engine.harness.storage
    for name in (PoolName.INDEXER, PoolName.SWA):
        storage.register_mem_host_pool_v2(mha_pool("page_first", 2, SHAPE.block_tokens, torch.float16, 100), name)
    tokens = engine.tokens(1, 10)
    hashes = harness.hashes(tokens)
    asked = [
        PoolTransfer(name=PoolName.INDEXER),
        PoolTransfer(name=PoolName.SWA, keys=hashes[-2:], hit_policy=PoolHitPolicy.TRAILING_PAGES),
    ]
    assert storage.batch_exists_v2(hashes, asked).kv_hit_pages == 0
    assert engine.store(tokens)
    assert storage.batch_exists_v2(hashes).kv_hit_pages == 10
    assert storage.batch_exists_v2(hashes, asked).kv_hit_pages == 0
    pages = np.arange(10)
    indexer, window = storage.registered_pools[PoolName.INDEXER], storage.registered_pools[PoolName.SWA]
    indexer.kv_buffer.fill_(3)
    window.kv_buffer.fill_(4)
    stored = storage.batch_set_v2([transfer(PoolName.INDEXER, hashes[:9], harness, pages[:9])])
    assert stored == {PoolName.INDEXER: [True] * 9}
    result = storage.batch_exists_v2(hashes, asked[:1])
    assert (result.kv_hit_pages, result.extra_pool_hit_pages, result.restorable_prefix_pages) == (
        9, {"kv": 10, "indexer": 9}, list(range(1, 10)),
    )  # fmt: skip
    for end in (4, 7):
        window_keys = transfer(PoolName.SWA, hashes[end - 2 : end], harness, pages[:2], PoolHitPolicy.TRAILING_PAGES)
        assert storage.batch_set_v2([window_keys]) == {PoolName.SWA: [True, True]}
    result = storage.batch_exists_v2(hashes, asked)
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (7, [4, 7])
    indexer.kv_buffer.zero_()
    window.kv_buffer.zero_()
    got = storage.batch_get_v2([
        transfer(PoolName.INDEXER, hashes, harness, pages),
        transfer(PoolName.SWA, hashes[5:7], harness, pages[:2], PoolHitPolicy.TRAILING_PAGES),
    ])  # fmt: skip
    assert got == {PoolName.INDEXER: [True] * 9 + [False], PoolName.SWA: [True, True]}
    assert (indexer.kv_buffer[:, : 9 * SHAPE.block_tokens] == 3).all()
    assert (window.kv_buffer[:, : 2 * SHAPE.block_tokens] == 4).all()


def test_under_sglangs_own_delays_and_failures(engine_of):
    """Whatever its injector drops or delays: what is loaded is right, and every page has an answer."""
    with envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY.override(0.01), envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(0.3):  # fmt: skip
        engines = [engine_of() for _ in range(2)]
    assert all(isinstance(engine.harness.storage, HiCacheStorageFailureInjector) for engine in engines)
    came, failures = [], []

    def converse(engine, seed):
        try:
            context = engine.tokens(0, 3)
            for turn in range(12):
                context = engine.tokens(100 * seed + turn, 12, after=context)
                engine.store(context)
                assert engine.lookup(context) <= len(context)
                came.append(engine.load(context))
        except BaseException as error:
            failures.append(error)
            raise

    threads = [Thread(target=converse, args=(engines[n % 2], n + 1)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert any(came)
    assert not all(came)


def test_settings_that_make_no_sense_end_the_attach(daemon):
    config = config_of(daemon.endpoint)
    config.extra_config["endpont"] = "x"
    with pytest.raises(ValueError, match=r"endpont.*known: endpoint"):
        FlatCakeStorage(config, {})
    config = config_of(daemon.endpoint)
    del config.extra_config["interface_v1"]
    with pytest.raises(ValueError, match="interface_v1"):
        FlatCakeStorage(config, {})


def test_a_pool_without_memory_of_its_own_ends_the_attach(engine_of):
    storage = engine_of().harness.storage

    class Anchor:
        size, page_size, layout, dtype = 8, 4, "layer_first", torch.int8

        def get_page_buffer_meta(self, indices):
            return None

    with pytest.raises(ValueError, match="Anchor has no memory"):
        storage.register_mem_host_pool_v2(Anchor(), "anchor")


@pytest.mark.parametrize("rows", [[0, 1, 2], [1, 2, 3, 4]], ids=str)
def test_rows_that_are_no_pages_are_a_miss(engine_of, rows):
    with pytest.raises(ValueError):
        page_slots(torch.tensor(rows), 4, 1)
    storage = engine_of().harness.storage
    assert storage.batch_get_v1(["ab"], torch.tensor(rows), None) == [False]
    assert storage.batch_set_v1(["ab"], torch.tensor(rows), None) == [False]
    assert storage.stats().calls_failed == 2


def test_counts_and_metrics(engine_of):
    engine = engine_of(enable_storage_metrics=True)
    tokens = engine.tokens(1, 5)
    assert engine.store(tokens)
    assert engine.lookup(tokens) == 5
    assert engine.load(tokens) == 5
    stats = engine.harness.storage.stats()
    assert (stats.pages_given, stats.pages_stored, stats.pages_wanted, stats.pages_loaded) == (5, 5, 5, 5)
    assert (stats.pages_asked, stats.pages_found, stats.calls_failed) == (5, 5, 0)
    metrics = engine.harness.storage.get_stats()
    assert (metrics.prefetch_pgs, metrics.backup_pgs) == ([5], [5])
    assert engine.harness.storage.get_stats().prefetch_pgs == []


def test_a_store_without_room_is_refused_and_a_lookup_without_a_lease_failed(engine_of, monkeypatch):
    engine = engine_of()
    tokens = engine.tokens(1, 5)
    assert engine.store(tokens)
    for owner, verb in ((fc.Space, "begin_turn"), (fc.Space, "lookup")):
        monkeypatch.setattr(owner, verb, lambda *_, **__: (_ for _ in ()).throw(fc.Overloaded("full")))
    assert not engine.store(engine.tokens(2, 5))
    assert engine.load(tokens) == 0
    stats = engine.harness.storage.stats()
    assert (stats.stores_refused, stats.calls_failed) == (1, 1)
