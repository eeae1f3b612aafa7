"""Two real nodes: what one has in memory, engines at the other restore over UCX; and when it dies, they miss in time."""

from __future__ import annotations

import contextlib
import signal
import time

import numpy as np
import pytest
from cluster import knows, node, published
from kv import Kv, connect
from redis_server import RedisServer, needs_redis
from ucx_peer import ucx_here

import flatcake_client as fc
from flatcake_client.worth import RemoteRead
from flatcake_transport.address import Medium

pytestmark = needs_redis

SHARED = 48  # blocks
SHARE = 0.03  # of 64 MiB: room for one copy of them


@pytest.fixture
def pair(tmp_path):
    """Nodes 1 and 2 of one cluster, which serve their memory."""
    ucx_here()
    with RedisServer(tmp_path) as redis:
        nodes = [
            node(tmp_path, n, directory="redis", redis_url=redis.url, ucx_listen="127.0.0.1:0", peer_timeout="5s")
            for n in (1, 2)
        ]
        with nodes[0] as one, nodes[1] as two:
            for each in nodes:
                knows(each, 2)
            yield one, two


def put(daemon, kv, tokens, blocks, session="s"):
    """Stored in that node's memory, and known to the other."""
    kv.store(tokens, session=session, share_counts=[2] * blocks)
    published(daemon)


def test_a_prefix_that_another_node_has_in_memory_is_restored_from_there(pair):
    one, two = pair
    with connect(one, timeout_s=5) as here, connect(two) as there:
        kv, far = Kv(here), Kv(there)
        tokens = kv.tokens(1, SHARED)
        put(two, far, tokens, SHARED)
        assert kv.hit(tokens) == SHARED
        stats = here.stats()
        assert stats.movers["remote"].bytes_moved >= SHARED * 3 * 8192
        assert stats.corrupt_segments == 0
        assert stats.staging["remote reads"].windows_out == 0


def test_local_blocks_and_those_of_another_node_are_one_hit(pair):
    one, two = pair
    with connect(one, timeout_s=5) as here, connect(two) as there:
        kv, far = Kv(here), Kv(there)
        tokens = kv.tokens(2, SHARED)
        kv.store(tokens[: 20 * 16], session="agent")  # on SSD
        put(two, far, tokens, SHARED)
        keys = kv.space.keys(tokens)
        with kv.space.lookup(keys) as hit:
            assert hit.blocks == SHARED
            assert [run.segment.node for run in hit.runs] == [1, 2]
        assert kv.hit(tokens) == SHARED


def test_a_node_that_dies_with_a_restore_under_way_costs_its_blocks(pair):
    one, two = pair
    with connect(one, timeout_s=5) as here, connect(two) as there:
        kv, far = Kv(here), Kv(there)
        tokens = kv.tokens(3, SHARED)
        kv.store(tokens[: 8 * 16], session="agent")
        put(two, far, tokens, SHARED)
        keys = kv.space.keys(tokens)
        with kv.space.lookup(keys) as hit:
            assert hit.blocks == SHARED
            two.kill()
            target = [np.zeros((SHARED, kv.plane_bytes), np.uint8) for _ in range(kv.layers)]
            started = time.monotonic()
            with hit.restore(target, np.arange(SHARED)) as restore:
                usable = restore.wait()
            assert time.monotonic() - started < 20
        assert 8 <= usable <= SHARED  # what was in flight may still have come
        for layer, pages in enumerate(target):
            assert np.array_equal(pages[:usable], kv.bytes_of(keys[:usable], layer))
        assert kv.hit(tokens) == 8, "the dead node's blocks are a miss"
        two.start()


def test_a_node_that_is_stopped_is_a_miss_in_time_and_comes_back(pair):
    one, two = pair
    with connect(one, timeout_s=5) as here, connect(two) as there:
        kv, far = Kv(here), Kv(there)
        tokens = kv.tokens(4, SHARED)
        put(two, far, tokens, SHARED)
        assert kv.hit(tokens) == SHARED
        two.signal(signal.SIGSTOP)
        started = time.monotonic()
        assert kv.hit(kv.tokens(4, SHARED)) in (0, SHARED)
        assert kv.hit(kv.tokens(5, 4)) == 0
        assert time.monotonic() - started < 15
        two.signal(signal.SIGCONT)
        knows(one, 2)


def test_damaged_bytes_of_another_node_are_a_miss(pair):
    one, two = pair
    with connect(one, timeout_s=5) as here, connect(two) as there:
        kv, far = Kv(here), Kv(there)
        tokens = kv.tokens(6, SHARED)
        put(two, far, tokens, SHARED)
        keys = kv.space.keys(tokens)
        with far.space.lookup(keys) as mine:  # a damaged byte in the owner's arena
            arena = mine.arena(5.0)
            run = mine.runs[0]
            arena[run.segment.offset + 5] ^= 0xFF
        with kv.space.lookup(keys) as hit:
            target = [np.zeros((SHARED, kv.plane_bytes), np.uint8) for _ in range(kv.layers)]
            with hit.restore(target, np.arange(SHARED)) as restore:
                with pytest.raises(fc.Corrupt):
                    restore.wait_layer(2)
                assert restore.wait() == 0
        assert here.stats().corrupt_segments == 1


def test_what_takes_longer_to_fetch_than_to_compute_is_left_out(pair):
    one, two = pair
    with connect(one, timeout_s=5, prefill_tokens_per_s=1000.0) as here, connect(two) as there:
        kv, far = Kv(here), Kv(there)
        tokens = kv.tokens(7, SHARED)
        kv.store(tokens[: 8 * 16], session="agent")
        put(two, far, tokens, SHARED)
        assert kv.hit(tokens) == SHARED
        measured = here.bandwidths.of((2, Medium.MEMORY), time.monotonic())
        assert measured is None or measured > 1e6
        # 40 blocks of 24 KiB and 16 tokens take 0.64 s to compute.
        here.bandwidths.add(RemoteRead((2, Medium.MEMORY), 1 << 20, 1e6), time.monotonic())
        for _ in range(40):
            here.bandwidths.add(RemoteRead((2, Medium.MEMORY), 1 << 20, 1e6), time.monotonic())
        assert kv.hit(tokens) == 8
        assert here.stats().declined_blocks == SHARED - 8
    two.until(lambda status: status["leases"] == 0)


def test_a_prefix_that_is_read_elsewhere_again_and_again_is_copied_once_and_local_then(tmp_path):
    """And what was read once is not, nor what finds no room in the share of copies."""
    ucx_here()
    with RedisServer(tmp_path / "redis") as redis, contextlib.ExitStack() as stack:
        told = {"directory": "redis", "redis_url": redis.url, "ucx_listen": "127.0.0.1:0", "peer_timeout": "5s"}
        one, two = (
            stack.enter_context(node(tmp_path, n, copy_after_hits=2, copy_memory_share=SHARE, **told)) for n in (1, 2)
        )
        for each in (one, two):
            knows(each, 2)
        here, there = (stack.enter_context(connect(each, timeout_s=5)) for each in (one, two))
        kv, far = Kv(here), Kv(there)
        prompt, other = kv.tokens(1, SHARED), kv.tokens(9, SHARED)
        agents = [kv.tokens(seed, 20, after=prompt) for seed in (2, 3, 4)]
        for number, tokens in enumerate((prompt, *agents, other)):
            shared = [2] * min(SHARED, len(tokens) // kv.block_tokens) + [1] * (len(tokens) // kv.block_tokens - SHARED)
            far.store(tokens, session=f"agent{number}", share_counts=shared)
        published(two)
        for tokens in agents:
            assert kv.hit(tokens) == SHARED + 20
        assert here.stats().copied_blocks == SHARED
        status = one.status()
        assert status["counters"]["stored_blocks_total"] == {"memory/copied": SHARED}
        mine, theirs = status["cluster"]["members"]
        assert SHARED * kv.layers * kv.plane_bytes <= mine["copied_bytes"] <= SHARE * (64 << 20)
        assert theirs["found_blocks"] == 2 * (SHARED + 20) + 20, "the third one found the prompt here"
        moved = here.stats().movers["remote"].bytes_moved
        assert kv.hit(prompt) == SHARED, "its bytes are compared"
        assert here.stats().movers["remote"].bytes_moved == moved
        for _ in range(4):
            assert kv.hit(other) == SHARED
        assert here.stats().copied_blocks == SHARED + 32, "as much of it as there is room for"
        assert mine["copied_bytes"] < one.status()["cluster"]["copied_bytes"] <= SHARE * (64 << 20)
        one.check()
