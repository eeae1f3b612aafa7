"""Two real nodes: what one has on SSD, engines at the other restore: read there, fetched over UCX, within bounds and in time."""

from __future__ import annotations

import signal
import threading
import time

import numpy as np
import pytest
from cluster import cluster_of, knows, node, published
from kv import Kv, connect
from redis_server import RedisServer, needs_redis
from ucx_peer import ucx_here
from waiting import until

import flatcake_client as fc
from flatcake_transport.address import Medium

pytestmark = needs_redis

BLOCKS = 48
MIB = 1 << 20


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    ucx_here()
    root = tmp_path_factory.mktemp("nodes")
    with RedisServer(root) as redis:
        told = {"directory": "redis", "redis_url": redis.url, "ucx_listen": "127.0.0.1:0", "peer_timeout": "5s"}
        made = [node(root, n, ucx_bounce_bytes=16 * MIB, **told) for n in (1, 2)]
        with made[0] as one, made[1] as two:
            yield one, two


@pytest.fixture
def pair(nodes):
    """Nodes 1 and 2 of one cluster; 4 slots of bounce buffer each. The tests share them, each with tokens of its own."""
    for each in nodes:
        knows(each, 2)
    yield nodes
    nodes[1].until(lambda status: status["cluster"]["staged"] == 0)
    for each in nodes:
        each.check()


def put(daemon, kv, tokens, session):
    """Stored on that node's SSD, and known to the other."""
    kv.store(tokens, session=session)
    published(daemon)


def restored(kv, keys, hit, *, timeout_s: float = 20.0) -> int:
    """Blocks in place, each compared."""
    target = [np.zeros((hit.blocks, kv.plane_bytes), np.uint8) for _ in range(kv.layers)]
    with hit.restore(target, np.arange(hit.blocks), timeout_s=timeout_s) as restore:
        usable = restore.wait()
    for layer, pages in enumerate(target):
        assert np.array_equal(pages[:usable], kv.bytes_of(keys[:usable], layer))
    return int(usable)


def test_a_prefix_that_another_node_has_on_ssd_is_restored_from_there(pair):
    one, two = pair
    with connect(one, timeout_s=5) as here, connect(two) as there:
        kv, far = Kv(here), Kv(there)
        tokens = kv.tokens(1, BLOCKS)
        put(two, far, tokens, "s1")
        keys = kv.space.keys(tokens)
        with kv.space.lookup(keys) as hit:
            assert [(run.segment.node, run.segment.medium) for run in hit.runs] == [(2, Medium.SSD)]
            assert hit.bytes_by_medium == {"memory": 0, "ssd": BLOCKS * 3 * 8192}
        assert kv.hit(tokens) == BLOCKS
        stats = here.stats()
        assert stats.movers["served"].bytes_moved >= BLOCKS * 3 * 8192
        assert stats.movers["served"].failures == 0
        assert stats.staging["served reads"].windows_out == 0
        counts = cluster_of(two)["files_served"]
        assert counts["staged"] == stats.movers["served"].commands
        assert counts["staged_bytes"] == stats.movers["served"].bytes_moved


def test_local_runs_and_memory_and_ssd_of_another_node_are_one_hit(pair):
    one, two = pair
    with connect(one, timeout_s=5) as here, connect(two) as there:
        kv, far = Kv(here), Kv(there)
        tokens = kv.tokens(2, BLOCKS)
        kv.store(tokens[: 10 * 16], session="s2")
        far.store(tokens[: 30 * 16], session="s2", share_counts=[2] * 30)
        put(two, far, tokens, "s2")
        keys = kv.space.keys(tokens)
        with kv.space.lookup(keys) as hit:
            places = [(run.segment.node, run.segment.medium) for run in hit.runs]
            assert places == [(1, Medium.SSD), (2, Medium.MEMORY), (2, Medium.SSD)]
        assert kv.hit(tokens) == BLOCKS
        stats = here.stats()
        assert stats.movers["remote"].bytes_moved
        assert stats.movers["served"].bytes_moved


def test_ranges_of_many_turns_go_together(pair):
    one, two = pair
    with connect(one, timeout_s=5) as here, connect(two) as there:
        kv, far = Kv(here), Kv(there)
        tokens = kv.tokens(3, BLOCKS)
        for turn in range(1, 13):
            far.store(tokens[: turn * 4 * 16], session="s3")
        published(two)
        assert kv.hit(tokens) == BLOCKS
        mover = here.stats().movers["served"]
        assert mover.commands < mover.moves


def test_sixteen_readers_share_the_slots(pair):
    """Four slots, sixteen readers of several stagings each: they wait for each other, and all have all."""
    one, two = pair
    with connect(one, timeout_s=5) as here, connect(two) as there:
        kv, far = Kv(here, plane_bytes=64 << 10), Kv(there, plane_bytes=64 << 10)
        chains = [kv.tokens(100 + n, BLOCKS) for n in range(4)]
        for n, tokens in enumerate(chains):
            put(two, far, tokens, session=f"agent {n}")
        usable: list[int] = []

        def read(n: int) -> None:
            usable.append(kv.hit(chains[n % 4], timeout_s=60.0))

        readers = [threading.Thread(target=read, args=(n,)) for n in range(16)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        assert usable == [BLOCKS] * 16


def test_a_node_that_dies_with_a_restore_under_way_costs_its_blocks(pair):
    one, two = pair
    with connect(one, timeout_s=5) as here, connect(two) as there:
        kv, far = Kv(here), Kv(there)
        tokens = kv.tokens(4, BLOCKS)
        kv.store(tokens[: 8 * 16], session="s4")
        put(two, far, tokens, "s4")
        keys = kv.space.keys(tokens)
        with kv.space.lookup(keys) as hit:
            assert hit.blocks == BLOCKS
            two.kill()
            started = time.monotonic()
            assert 8 <= restored(kv, keys, hit) <= BLOCKS
            assert time.monotonic() - started < 20
        assert kv.hit(tokens) == 8
        two.start()
        knows(one, 2)
        published(two)
        until(lambda: kv.hit(tokens) == BLOCKS)


def test_a_node_that_is_stopped_is_a_miss_in_time(pair):
    one, two = pair
    with connect(one, timeout_s=5) as here, connect(two) as there:
        kv, far = Kv(here), Kv(there)
        tokens = kv.tokens(5, BLOCKS)
        put(two, far, tokens, "s5")
        keys = kv.space.keys(tokens)
        with kv.space.lookup(keys) as hit:
            two.signal(signal.SIGSTOP)
            started = time.monotonic()
            assert restored(kv, keys, hit) in (0, BLOCKS)
            assert time.monotonic() - started < 15
        two.signal(signal.SIGCONT)
        until(lambda: kv.hit(tokens) == BLOCKS)


def test_what_is_read_is_not_dropped_and_what_was_read_is(pair):
    one, two = pair
    with connect(one, timeout_s=5) as here, connect(two) as there, two.admin() as admin:
        kv, far = Kv(here), Kv(there)
        tokens = kv.tokens(6, BLOCKS)
        put(two, far, tokens, "held")
        keys = kv.space.keys(tokens)
        with kv.space.lookup(keys) as hit:
            assert admin.drop(["held"])["busy"] == ["held"]
            assert restored(kv, keys, hit) == BLOCKS
        until(lambda: admin.drop(["held"])["dropped"] == ["held"])
        assert kv.hit(tokens) == 0


def test_a_file_that_is_gone_there_costs_its_blocks_only_and_is_no_surprise(pair):
    """Who asks for ranges of it is refused these, goes on asking for others, and the owner has foreseen it."""
    one, two = pair
    with connect(one, timeout_s=5) as here, connect(two) as there:
        kv, far = Kv(here), Kv(there)
        lost, kept = kv.tokens(10, BLOCKS), kv.tokens(11, BLOCKS)
        put(two, far, lost, "lost")
        put(two, far, kept, "kept")
        failures = cluster_of(two)["files_served"]["staging_failures"]
        with kv.space.lookup(kv.space.keys(lost)) as hit:
            next((two.root / "ssd" / "sessions").rglob(f"{hit.runs[0].file_id:016x}.kv")).unlink()
            assert restored(kv, kv.space.keys(lost), hit) == 0
        assert kv.hit(kept) == BLOCKS
        assert cluster_of(two)["files_served"]["staging_failures"] > failures
        assert "Traceback" not in two.log.read_text()
        with two.admin() as admin:
            until(lambda: admin.drop(["lost"])["dropped"] == ["lost"])


def test_damaged_bytes_of_another_node_are_a_miss_that_it_is_told_of(pair):
    one, two = pair
    with connect(one, timeout_s=5) as here, connect(two) as there:
        kv, far = Kv(here), Kv(there)
        tokens = kv.tokens(8, BLOCKS)
        put(two, far, tokens, "s8")
        keys = kv.space.keys(tokens)
        with kv.space.lookup(keys) as hit:
            file_id = hit.runs[0].file_id
        file = next((two.root / "ssd" / "sessions").rglob(f"{file_id:016x}.kv"))
        with kv.space.lookup(keys) as hit, file.open("r+b") as damaged:
            damaged.seek(hit.runs[0].file_offset + 5)
            byte = damaged.read(1)[0]
            damaged.seek(hit.runs[0].file_offset + 5)
            damaged.write(bytes([byte ^ 0xFF]))
            damaged.flush()
            target = [np.zeros((BLOCKS, kv.plane_bytes), np.uint8) for _ in range(kv.layers)]
            with hit.restore(target, np.arange(BLOCKS)) as restore:
                with pytest.raises(fc.Corrupt):
                    restore.wait_layer(2)
                assert restore.wait() == 0
        until(lambda: two.status()["counters"]["corrupt_segments_total"] == 1)
        cluster = cluster_of(two)
        assert (cluster["doubts_total"], cluster["doubts_refuted_total"]) == (1, 0)
        assert kv.hit(tokens) == 0


def test_what_only_the_reader_saw_damaged_stays(pair):
    one, two = pair
    with connect(one, timeout_s=5) as here, connect(two) as there:
        kv, far = Kv(here), Kv(there)
        tokens = kv.tokens(9, BLOCKS)
        put(two, far, tokens, "s9")
        before = two.status()["counters"]["corrupt_segments_total"]
        with kv.space.lookup(kv.space.keys(tokens)) as hit:
            hit.remote[-1].report_corrupt(hit.runs[:1])
            until(lambda: cluster_of(two)["doubts_refuted_total"] == 1)
        assert two.status()["counters"]["corrupt_segments_total"] == before
        assert kv.hit(tokens) == BLOCKS
