"""The remote connector inside a real LMCache engine: stored, restarted, retrieved, bytes equal; and all that every connector must do."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conformance.connectors import Kv, Shape, check_connector
from engine import DIM, HEADS, InProcess
from lmcache.v1.memory_management import BytesBufferMemoryObj
from waiting import until

import flatcake_client as fc
from flatcake_client.engines import lmcache
from flatcake_client.engines.lmcache import settings_of

CHUNK = 16


@pytest.fixture
def engines(daemon):
    """Makes engines, and closes them."""
    made = []

    def make(**options):
        made.append(InProcess(daemon.endpoint, **options))
        return made[-1]

    make.made = made
    yield make
    for engine in made:
        engine.close()


def tokens_of(seed, chunks, after=None, tail=4):
    fresh = np.random.default_rng(seed).integers(0, 30_000, chunks * CHUNK + tail, dtype=np.int64)
    return fresh if after is None else np.concatenate([after, fresh])


def store(engine, tokens, seed):
    kv, before = engine.kv(len(tokens), seed), engine.answered()
    engine.store(tokens, kv)
    until(lambda: engine.answered() > before)
    return kv


def assert_retrieved(engine, tokens, kv, chunks):
    """So many chunks come back, byte by byte, and nothing behind them."""
    pages, end = engine.kv(len(tokens)), chunks * CHUNK
    assert engine.lookup(tokens) == end
    assert engine.retrieve(tokens, pages) == end
    assert torch.equal(pages[:, :, :end], kv[:, :, :end])
    assert not pages[:, :, end:].any()


def taken_bytes(engine):
    return engine.engine.storage_manager.allocator_backend.memory_allocator.pin_allocator.total_allocated_size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("adapter", ["FlatCakeConnectorAdapter", "FlatCakeConnector"])
def test_what_was_stored_comes_back_after_lmcache_and_the_daemon_restarted(daemon, engines, dtype, adapter):
    tokens = tokens_of(1, 6)
    engine = engines(dtype=dtype, adapter=adapter)
    kv = store(engine, tokens, 1)
    assert_retrieved(engine, tokens, kv, 6)
    engines.made.pop().close()
    daemon.restart()
    engine = engines(dtype=dtype, adapter=adapter)
    assert_retrieved(engine, tokens, kv, 6)
    stats = engine.connector.stats()
    assert (stats.chunks_loaded, stats.bytes_loaded) == (6, 6 * engine.connector.full_chunk_size_bytes)


def test_turns_of_a_conversation_lie_in_one_session(daemon, engines):
    engine = engines()
    context = tokens_of(2, 10, tail=0)
    kv = engine.kv(len(context), 2)
    for chunks in (4, 7, 10):
        tokens, before = context[: chunks * CHUNK], engine.answered()
        engine.lookup(tokens)
        engine.store(tokens, kv[:, :, : len(tokens)])
        until(lambda before=before: engine.answered() > before)
    assert_retrieved(engine, context, kv, 10)
    assert [session["blocks"] for session in daemon.admin().sessions()] == [10]


def test_a_daemon_that_is_dead_or_stopped_is_a_miss_in_time_and_comes_back(daemon, engines):
    engine, tokens = engines(), tokens_of(3, 4)
    kv = store(engine, tokens, 3)
    hasty = engines(settings={"timeout_s": 1.0, "load_timeout_s": 3.0, "store_timeout_s": 3.0})
    until(lambda: hasty.lookup(tokens) == 4 * CHUNK)
    daemon.signal(signal.SIGSTOP)
    try:
        started_s = time.monotonic()
        assert hasty.lookup(tokens) == 0
        assert hasty.retrieve(tokens, hasty.kv(len(tokens))) == 0
        store(hasty, tokens_of(4, 2), 4)
        assert time.monotonic() - started_s < 8
    finally:
        daemon.signal(signal.SIGCONT)
    until(lambda: hasty.lookup(tokens) == 4 * CHUNK)
    daemon.kill()
    assert engine.lookup(tokens) == 0
    assert engine.retrieve(tokens, engine.kv(len(tokens))) == 0
    daemon.start()
    until(lambda: engine.lookup(tokens) == 4 * CHUNK)
    assert_retrieved(engine, tokens, kv, 4)


def test_an_engine_starts_without_a_daemon(daemon, engines):
    daemon.kill()
    engine, tokens = engines(), tokens_of(5, 2)
    assert engine.lookup(tokens) == 0
    daemon.start()
    until(lambda: engine.connector._store.ping(engine.connector._kind))
    assert_retrieved(engine, tokens, store(engine, tokens, 5), 2)


def test_partial_and_compressed_chunks_are_declined_and_counted(engines):
    engine, tokens = engines(save_unfull_chunk=True), tokens_of(6, 2, tail=5)
    kv = store(engine, tokens, 6)
    until(lambda: engine.connector.stats().chunks_stored == 2)
    assert engine.connector.stats().chunks_declined == 1
    assert_retrieved(engine, tokens, kv, 2)


def test_what_a_serde_compressed_is_declined(engines):
    engine, tokens = engines(), tokens_of(12, 1, tail=0)
    [key] = keys_of(engine, tokens)
    each = BytesBufferMemoryObj(b"compressed")
    asyncio.run_coroutine_threadsafe(engine.connector.put(key, each), engine.backend.loop).result(30)
    assert engine.connector.stats().chunks_declined == 1
    assert engine.lookup(tokens) == 0


def test_no_memory_object_is_kept_or_given_back_twice(engines, caplog):
    engine, tokens = engines(), tokens_of(7, 6)
    taken = taken_bytes(engine)
    kv = store(engine, tokens, 7)
    until(lambda: taken_bytes(engine) == taken)
    assert_retrieved(engine, tokens, kv, 6)
    until(lambda: taken_bytes(engine) == taken)
    abort(engine, tokens)
    until(lambda: taken_bytes(engine) == taken)
    assert_retrieved(engine, tokens, kv, 6)
    assert "Double free" not in caplog.text


class Allocations:
    """What the connector takes from LMCache's pool, kept: a leak would be mended by the garbage collector otherwise."""

    def __init__(self, engine):
        self.taken, self._memory = [], engine.connector._memory
        engine.connector._memory = self

    def allocate(self, *args, **kwargs):
        self.taken.append(self._memory.allocate(*args, **kwargs))
        return self.taken[-1]

    def counts(self):
        return [each.get_ref_count() for each in self.taken]


def test_what_did_not_come_is_given_back(engines, monkeypatch):
    engine, tokens = engines(), tokens_of(13, 4, tail=0)
    store(engine, tokens, 13)
    allocations = Allocations(engine)
    for usable, error in ((1, None), (0, fc.Unavailable("x")), (0, RuntimeError("x"))):
        allocations.taken.clear()

        def wait(_self, usable=usable, error=error):
            if error is not None:
                raise error
            return usable

        with monkeypatch.context() as patch:
            patch.setattr(fc.Restore, "wait", wait)
            got = asyncio.run_coroutine_threadsafe(
                engine.connector.batched_get(keys_of(engine, tokens)), engine.backend.loop
            ).result(30)
        assert [each is not None for each in got] == [at < usable for at in range(4)]
        assert allocations.counts() == [1] * usable + [0] * (4 - usable)
        for each in allocations.taken[:usable]:
            each.ref_count_down()


def test_what_nobody_waits_for_any_more_is_given_back(engines, monkeypatch):
    engine, tokens = engines(), tokens_of(14, 3, tail=0)
    store(engine, tokens, 14)
    allocations, real, cancelled = Allocations(engine), fc.Restore.wait, []

    def wait(self):
        until(lambda: bool(cancelled))
        return real(self)

    monkeypatch.setattr(fc.Restore, "wait", wait)
    get = asyncio.run_coroutine_threadsafe(engine.connector.batched_get(keys_of(engine, tokens)), engine.backend.loop)
    until(lambda: allocations.counts() == [1, 1, 1])
    cancelled.append(get.cancel())
    until(lambda: allocations.counts() == [0, 0, 0])


def test_a_store_that_nobody_waits_for_reads_only_memory_it_holds(engines, monkeypatch):
    """LMCache gives the object up with the cancelled call; its bytes must not be another chunk's by the time they are read."""
    engine, tokens = engines(), tokens_of(8, 1, tail=0)
    seen = []
    real = type(engine.connector._store).store

    def slow(self, *args, **kwargs):
        until(lambda: bool(seen))
        seen.append(each.get_ref_count())
        return real(self, *args, **kwargs)

    monkeypatch.setattr(type(engine.connector._store), "store", slow)
    each = engine.connector._memory.allocate(
        engine.connector.meta_shapes, engine.connector.meta_dtypes, engine.connector.meta_fmt
    )
    [key] = keys_of(engine, tokens)
    put = asyncio.run_coroutine_threadsafe(engine.backend.connection.put(key, each), engine.backend.loop)
    until(lambda: each.get_ref_count() == 2)
    put.cancel()
    until(lambda: each.get_ref_count() == 1)
    seen.append("cancelled")
    until(lambda: len(seen) == 2 and each.get_ref_count() == 0)
    assert seen[1] == 1


@pytest.mark.parametrize(
    "options", [{"settings": {"treads": 2}}, {"settings": {"store_timeout_s": "inf"}}, {"use_layerwise": True}]
)
def test_what_cannot_be_is_declined_at_the_start(engines, options):
    assert engines(**options).backend.connection is None, "LMCache says why, and goes on without"


@pytest.mark.parametrize(
    ("algorithm", "vllm", "warns"),
    [("builtin", True, True), ("sha256_cbor", False, True), ("sha256_cbor", True, False)],
)
def test_names_that_can_be_made_on_purpose_are_warned_of(engines, monkeypatch, algorithm, vllm, warns):
    lines = []
    monkeypatch.setattr(lmcache, "find_spec", lambda _: vllm or None)
    monkeypatch.setattr(lmcache.log, "warning", lambda line, *_: lines.append(line))
    engines(pre_caching_hash_algorithm=algorithm)
    assert any("a prompt can be made" in line for line in lines) == warns


def test_settings_are_found_by_the_name_of_the_plugin():
    extra = {"remote_storage_plugin.flatcake.two.endpoint": "x", "remote_storage_plugin.flatcake.endpoint": "y", "a": 1}
    assert settings_of(extra, "flatcake.two") == {"endpoint": "x"}
    with pytest.raises(ValueError, match=r"treads.*load_threads"):
        settings_of({"remote_storage_plugin.flatcake.treads": 1}, "flatcake")


def abort(engine, tokens):
    """LMCache stops waiting: its future is cancelled while our thread loads."""
    asyncio.run_coroutine_threadsafe(
        engine.connector.batched_get(keys_of(engine, tokens)), engine.backend.loop
    ).cancel()


def keys_of(engine, tokens):
    return [key for _, _, key in engine.engine.token_database.process_tokens(torch.from_numpy(tokens))]


class Harness:
    """Pages are `kv`, (2, layers, tokens, heads x dim); a block of a layer is K, then V, of a chunk's tokens."""

    def __init__(self, endpoint: str, shape: Shape) -> None:
        self.block_tokens = shape.block_tokens
        self.plane_bytes = [2 * shape.block_tokens * HEADS * DIM * 2] * shape.layers
        self.dtype = getattr(torch, shape.dtype)
        self.storing = threading.Lock()
        self.lmcache = InProcess(
            endpoint,
            model=shape.model,
            layers=shape.layers,
            chunk_tokens=shape.block_tokens,
            dtype=self.dtype,
            settings={"timeout_s": 3.0, "load_timeout_s": 5.0, "store_timeout_s": 5.0},  # all less than DEADLINE_S
        )

    def store(self, tokens: np.ndarray, kv: Kv) -> bool:
        pages = self.lmcache.kv(len(tokens))
        blocks = len(kv[0])
        for layer, rows in enumerate(kv):
            values = torch.from_numpy(rows.copy()).view(self.dtype).view(blocks, 2, self.block_tokens, -1)
            pages[:, layer, : blocks * self.block_tokens] = values.permute(1, 0, 2, 3).flatten(1, 2)
        with self.storing:  # LMCache tells nobody of a store's end; what is counted meanwhile is this one's
            before = self.lmcache.connector.stats()
            answered = self.lmcache.answered()
            self.lmcache.store(tokens[: blocks * self.block_tokens], pages)
            until(lambda: self.lmcache.answered() > answered)
            return self.lmcache.connector.stats().chunks_store_failed == before.chunks_store_failed

    def lookup(self, tokens: np.ndarray) -> int:
        return self.lmcache.lookup(tokens) // self.block_tokens

    def load(self, tokens: np.ndarray) -> tuple[int, Kv]:
        pages = torch.ones_like(self.lmcache.kv(len(tokens)))
        blocks = self.lmcache.retrieve(tokens, pages) // self.block_tokens
        kv = []
        for layer in range(len(self.plane_bytes)):
            values = pages[:, layer, : blocks * self.block_tokens].unflatten(1, (-1, self.block_tokens))
            rows = (
                values.permute(1, 0, 2, 3).contiguous().view(torch.uint8).numpy() if blocks else np.zeros(0, np.uint8)
            )
            kv.append(rows.reshape(blocks, self.plane_bytes[layer]))
        return blocks, kv

    def abort(self, tokens: np.ndarray) -> Callable[[], bytes]:
        pages = self.lmcache.kv(len(tokens))
        abort(self.lmcache, tokens)
        return lambda: pages.view(torch.uint8).numpy().tobytes()

    def close(self) -> None:
        self.lmcache.close()


@pytest.mark.timeout(300)
def test_all_that_every_connector_must_do(tmp_path: Path) -> None:
    check_connector(Harness, tmp_path)


def test_ping_tells_lmcache_whether_the_daemon_answers(daemon, engines):
    engine = engines()
    ping = lambda: asyncio.run_coroutine_threadsafe(engine.backend.connection.ping(), engine.backend.loop).result(30)  # noqa: E731
    assert ping() == 0
    daemon.kill()
    assert ping() != 0
    daemon.start()
    until(lambda: ping() == 0)


def test_a_full_pool_brings_fewer_chunks_and_no_error(engines):
    engine, tokens = engines(), tokens_of(9, 4)
    taken = taken_bytes(engine)
    kv = store(engine, tokens, 9)
    until(lambda: taken_bytes(engine) == taken)
    hog = []
    memory = engine.connector._memory
    while (
        each := memory.allocate(engine.connector.meta_shapes, engine.connector.meta_dtypes, busy_loop=False)
    ) is not None:
        hog.append(each)
    hog.pop().ref_count_down()
    assert engine.retrieve(tokens, engine.kv(len(tokens))) <= CHUNK
    for each in hog:
        each.ref_count_down()
    assert_retrieved(engine, tokens, kv, 4)


def test_errors_of_the_store_never_reach_lmcache(engines, monkeypatch):
    engine, tokens = engines(), tokens_of(10, 3)
    store(engine, tokens, 10)
    for owner, verb in ((fc.Space, "lookup"), (fc.Hit, "restore"), (fc.Space, "begin_turn")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, verb, lambda *_, **__: 1 / 0)
            assert engine.retrieve(tokens, engine.kv(len(tokens))) == 0 or verb == "begin_turn"
            store(engine, tokens_of(11, 1), 11)
    assert engine.lookup(tokens) == 3 * CHUNK
