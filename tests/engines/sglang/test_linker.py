"""What SGLang's linker must do beyond the suite of all connectors: sessions, batches of loads, layers in order, quiescence."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conformance.connectors import Engine, Shape, kv_of
from engines.sglang.linker_harness import LinkerHarness
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from waiting import until

import flatcake_client as fc
from flatcake_client.engines.sglang_linker import LAYERED_MAX, FlatCakeLinker, pool_group_of

SHAPE = Shape(block_tokens=4)


@pytest.fixture
def engine(daemon):
    engine = Engine(LinkerHarness(daemon.endpoint, SHAPE))
    yield engine
    engine.harness.close()


def sessions_of(daemon):
    with daemon.admin() as admin:
        return {session["name"] for session in admin.sessions()}


def test_offloads_of_a_session_are_in_its_file_turn_after_turn(engine, daemon):
    """SGLang tells of each node only its own pages; the lookup before told the order of all."""
    harness = engine.harness
    first = engine.tokens(1, 4)
    longer = engine.tokens(2, 3, after=first)
    assert harness.store(first, kv_of(harness, first), session="agent-7")
    harness.lookup(longer)
    hashes = harness.hashes(longer)
    pages = harness.take(3)
    for buffers, rows in zip(harness.buffers, kv_of(harness, longer), strict=True):
        for buffer, part in zip(buffers, np.split(rows[4:], len(buffers), axis=1), strict=True):
            harness.pages_of(buffer)[pages] = part
    assert harness.linker.offload(
        [PoolTransfer(PoolName.KV, keys=hashes[4:], device_indices=harness.rows(pages))], "agent-7"
    )
    until(lambda: harness.linker.num_completed_offloads() == 1)
    assert harness.linker.pop_completed_offload()
    assert engine.load(longer) == 7
    assert sessions_of(daemon) == {"agent-7"}
    assert daemon.status()["counters"]["duplicate_blocks_total"] == 0


@pytest.mark.parametrize("requests", [1, LAYERED_MAX, 2 * LAYERED_MAX + 1])
def test_a_batch_of_loads(engine, requests):
    """More requests than restores that go layer by layer: all land, each in its own pages."""
    harness, linker = engine.harness, engine.harness.linker
    contexts = [engine.tokens(seed, 3) for seed in range(requests)]
    for context in contexts:
        assert engine.store(context)
    pages = harness.random.permutation(np.arange(1, 64))[: 3 * requests].reshape(requests, 3)
    for number, context in enumerate(contexts):
        keys = harness.hashes(context)
        assert linker.lookup(f"q{number}", [PoolTransfer(PoolName.KV, keys=keys)]) == [1, 2, 3]
        assert linker.load(f"q{number}", [PoolTransfer(PoolName.KV, keys=keys, device_indices=harness.rows(pages[number]))])  # fmt: skip
    assert not linker.load("q0", [PoolTransfer(PoolName.KV, keys=keys, device_indices=harness.rows(pages[0]))])
    index = linker.start_layer_wise_loading()
    assert linker.start_layer_wise_loading() == -1
    linker.layer_done_counter.set_consumer(index)
    for layer in range(SHAPE.layers):
        linker.layer_done_counter.wait_until(layer)
        for number, context in enumerate(contexts):  # what prefill may read when this layer was announced
            got = np.concatenate([harness.pages_of(b)[pages[number]] for b in harness.buffers[layer]], axis=1)
            assert np.array_equal(got, kv_of(harness, context)[layer])
    assert linker.finish_layer_wise_loading(index)


def test_a_lookup_keeps_its_pages_until_they_are_loaded(engine, daemon):
    """A failed load aborts a request, so what was found must not be reclaimed meanwhile."""
    harness = engine.harness
    tokens = engine.tokens(1, 3)
    assert engine.store(tokens)
    pages, _, count = harness.queue(tokens)
    assert count == 3
    assert daemon.status()["leases"] == 1
    with daemon.admin() as admin:
        admin.drop(sorted(sessions_of(daemon)))
    index = harness.linker.start_layer_wise_loading()
    assert harness.linker.finish_layer_wise_loading(index)
    for buffers, rows in zip(harness.buffers, kv_of(harness, tokens), strict=True):
        assert np.array_equal(np.concatenate([harness.pages_of(b)[pages] for b in buffers], axis=1), rows)
    daemon.until(lambda status: not status["leases"])


def test_what_was_pinned_and_never_loaded_is_let_go(engine, daemon):
    harness = engine.harness
    tokens = engine.tokens(1, 3)
    assert engine.store(tokens)
    transfer = [PoolTransfer(PoolName.KV, keys=harness.hashes(tokens))]
    for _ in range(3):
        harness.linker.lookup("same", transfer)
    daemon.until(lambda status: status["leases"] == 1)
    harness.linker.reset()
    daemon.until(lambda status: status["leases"] == 0)


def test_a_load_that_fails_is_reported_and_the_next_works(engine, monkeypatch):
    tokens = engine.tokens(1, 3)
    assert engine.store(tokens)
    with monkeypatch.context() as patch:
        patch.setattr(fc.Restore, "wait_layer", lambda *_: (_ for _ in ()).throw(fc.Unavailable("x")))
        assert engine.load(tokens) == 0
    assert engine.load(tokens) == 3
    stats = engine.harness.linker.stats()
    assert (stats.loads, stats.loads_failed, stats.offloads, stats.offloads_failed) == (2, 1, 1, 0)


def test_results_of_offloads_come_in_order(engine, monkeypatch):
    harness, linker = engine.harness, engine.harness.linker
    real, calls = fc.Turn.commit, []

    def second_fails(turn, *args):
        calls.append(turn)
        if len(calls) == 2:
            raise fc.Unavailable("x")
        return real(turn, *args)

    monkeypatch.setattr(fc.Turn, "commit", second_fails)
    for seed in range(3):
        keys = harness.hashes(engine.tokens(seed, 2))
        assert linker.offload([PoolTransfer(PoolName.KV, keys=keys, device_indices=harness.rows(harness.take(2)))])
    until(lambda: linker.num_completed_offloads() == 3)
    assert [linker.pop_completed_offload() for _ in range(3)] == [True, False, True]
    assert not linker.offload([PoolTransfer(PoolName.KV, keys=[], device_indices=torch.zeros(0, dtype=torch.int64))])


def test_an_offload_that_is_dropped_has_a_result_in_its_place(engine, monkeypatch):
    """Ranks' results are reduced one by one: on a rank with one less they would be of other pages than on the others."""
    harness, linker = engine.harness, engine.harness.linker
    real, calls = linker._offloads.submit, []

    def second_is_dropped(work):
        calls.append(work)
        return len(calls) != 2 and real(work)

    monkeypatch.setattr(linker._offloads, "submit", second_is_dropped)
    for seed in range(3):
        keys = harness.hashes(engine.tokens(seed, 2))
        assert linker.offload([PoolTransfer(PoolName.KV, keys=keys, device_indices=harness.rows(harness.take(2)))])
    until(lambda: linker.num_completed_offloads() == 3)
    assert [linker.pop_completed_offload() for _ in range(3)] == [True, False, True]
    assert linker.stats().offloads_dropped == 1


def test_a_device_that_fails_costs_a_load_and_an_offload_and_no_more(engine, monkeypatch):
    """Events of the device are made on SGLang's scheduler thread: what they raise must not get there, nor leave a layer unanswered."""
    harness, linker = engine.harness, engine.harness.linker
    tokens = engine.tokens(1, 3)
    assert engine.store(tokens)
    with monkeypatch.context() as patch:
        patch.setattr(linker, "_ready", lambda: (_ for _ in ()).throw(RuntimeError("device")))
        _, _, count = harness.queue(tokens)
        assert count == 3
        index = linker.start_layer_wise_loading()
        linker.layer_done_counter.set_consumer(index)
        for layer in range(SHAPE.layers):
            linker.layer_done_counter.wait_until(layer)
        assert not linker.finish_layer_wise_loading(index)
        keys = harness.hashes(engine.tokens(2, 2))
        assert linker.offload([PoolTransfer(PoolName.KV, keys=keys, device_indices=harness.rows(harness.take(2)))])
        assert linker.num_completed_offloads() == 1
        assert not linker.pop_completed_offload()
    assert engine.load(tokens) == 3
    assert engine.store(engine.tokens(2, 2))
    stats = linker.stats()
    assert (stats.loads_failed, stats.offloads_failed, stats.offloads_dropped) == (1, 1, 1)


def test_pages_that_do_not_lie_on_their_borders_are_refused(engine):
    linker = engine.harness.linker
    rows = torch.arange(1, 1 + SHAPE.block_tokens)
    assert linker.offload([PoolTransfer(PoolName.KV, keys=["ab"], device_indices=rows)])
    until(lambda: linker.num_completed_offloads() == 1)
    assert not linker.pop_completed_offload()


def test_how_pages_lie_on_the_device_is_in_the_space(engine):
    assert " kv nhd " in engine.harness.linker._pools[PoolName.KV].store.space.spec.layout


def test_settings_that_make_no_sense_end_the_start(daemon):
    with pytest.raises(ValueError, match="no setting endpont"):
        FlatCakeLinker(SimpleNamespace(), SimpleNamespace(), components=set(), extra_config={"endpont": "x"})
    with pytest.raises(ValueError, match="mla-dedup"):
        FlatCakeLinker(SimpleNamespace(enable_linker_mla_dedup=True), SimpleNamespace(), components=set())


def test_a_draft_model_beside_a_plain_pool_is_declined():
    pool = MHATokenToKVPool(16, 4, torch.bfloat16, 2, 16, 2, "cpu", False)
    params = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool), page_size=4, mtp_draft_device_pools=(pool,)
    )  # fmt: skip
    with pytest.raises(ValueError, match="speculative"):
        pool_group_of(params, {ComponentType.FULL})
