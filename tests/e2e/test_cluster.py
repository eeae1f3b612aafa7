"""Three daemons and a real redis-server on loopback: joined, found, killed, restarted, refused."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from cluster import Wire, cluster_of, keys_of, knows, node, published, remote, store
from command import flatcake
from redis_server import RedisServer, needs_redis
from waiting import until

pytestmark = needs_redis


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(scope="module")
def trio(tmp_path_factory, server):
    root = tmp_path_factory.mktemp("nodes")
    nodes = [node(root, n, directory="redis", redis_url=server.url, lease_ttl="8s") for n in (1, 2, 3)]
    with contextlib.ExitStack() as stack:
        for each in nodes:
            stack.callback(each.__exit__)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda each: each.start(), nodes))
        yield nodes


@pytest.fixture
def three(trio):
    """Nodes 1 to 3, linked to each other; the law holds on each at the end."""
    for each in trio:
        if each.process.poll() is not None:
            each.start()
    for each in trio:
        knows(each, 3)
    yield trio
    for each in trio:
        if each.process.poll() is None:
            each.signal(signal.SIGCONT)
            each.check()


def test_a_prefix_is_found_at_the_node_that_holds_most_in_two_round_trips(three):
    one, two, other = three
    keys = keys_of(100, seed=11)
    store(one, keys[: 16 * 20])
    store(two, keys[: 16 * 64])
    store(other, keys[: 16 * 90])
    for each in three:
        published(each)
    with Wire(one.endpoint) as wire, wire.handover():
        before = cluster_of(one)
        found, reply = remote(wire, keys)
        after = cluster_of(one)
        assert found == [(1, 20), (3, 70)]
        assert after["directory_calls_total"]["probe"] - before["directory_calls_total"]["probe"] == 1
        assert sum(after["peer_calls_total"].values()) - sum(before["peer_calls_total"].values()) == 1
        (owner,) = reply.nodes
        assert (owner.node_id, owner.incarnation.hex()) == (3, other.status()["incarnation"])
        assert owner.lease_id
        assert 0 < owner.lease_spent_ms < owner.lease_ttl_ms
        assert owner.verify
        assert reply.lease_id
        assert remote(wire, keys[: 16 * 20])[0] == [(1, 20)], "what is here is not asked for elsewhere"
        assert not wire.lookup(keys).nodes, "nor for a client that cannot read it"
        # The owner's lease hangs on ours.
        assert other.status()["leases"] == 1
        renewed = wire.call("Renew", lease_ids=[reply.lease_id])
        assert (list(renewed.alive), list(renewed.alive_remote)) == ([reply.lease_id], [reply.lease_id])
        wire.call("Release", lease_ids=[reply.lease_id])
        other.until(lambda status: status["leases"] == 0)
        # So it does when the client is gone without a word.
        remote(wire, keys)
        other.until(lambda status: status["leases"] == 1)
    other.until(lambda status: status["leases"] == 0)
    assert cluster_of(other)["peer_lookups_total"] == 2
    assert other.status()["counters"]["lookups_total"] == 0, "a peer's lookups are not an engine's"
    rows = json.loads(flatcake("nodes", "--endpoint", one.endpoint, "--json").stdout)
    assert [(row["node"], row["state"], row["link"]) for row in rows] == [
        (1, "joined", "this node"),
        (2, "joined", "linked"),
        (3, "joined", "linked"),
    ]


def test_a_killed_node_is_a_miss_in_time_and_back_on_another_port_a_hit(three):
    one, two, _ = three
    keys = keys_of(64, seed=12)
    store(two, keys)
    published(two)
    with Wire(one.endpoint) as wire, wire.handover():
        assert remote(wire, keys)[0] == [(2, 64)]
        two.signal(signal.SIGSTOP)
        asked_s = time.monotonic()
        assert remote(wire, keys)[0] == []
        assert time.monotonic() - asked_s < 6.0
        asked_s = time.monotonic()
        assert remote(wire, keys)[0] == [], "it is not waited for again"
        assert time.monotonic() - asked_s < 1.8
        two.signal(signal.SIGCONT)
        until(lambda: remote(wire, keys)[0] == [(2, 64)], 20)
        two.kill()
        asked_s = time.monotonic()
        found, reply = remote(wire, keys)
        assert (found, list(reply.nodes)) == ([], [])
        assert time.monotonic() - asked_s < 1.8
        two.start()  # on another port: 0 takes any
        until(lambda: remote(wire, keys)[0] == [(2, 64)], 20)
        assert cluster_of(one)["loans"] >= 1


def test_a_lease_ends_with_its_owner_and_lapses_when_its_reader_is_gone(three):
    one, two, other = three
    keys = keys_of(32, seed=13)
    store(two, keys)
    published(two)
    with Wire(one.endpoint) as wire, wire.handover():
        _, reply = remote(wire, keys)
        two.kill()
        renewed = wire.call("Renew", lease_ids=[reply.lease_id])
        assert (list(renewed.alive), list(renewed.alive_remote)) == ([reply.lease_id], [])
        two.start()
        until(lambda: remote(wire, keys)[0] == [(2, 32)], 20)
        one.kill()
    two.until(lambda status: status["leases"] == 0)
    with Wire(other.endpoint) as wire, wire.handover():
        until(lambda: remote(wire, keys)[0] == [(2, 32)], 20)


def test_a_node_that_comes_back_empty_is_not_believed_in(tmp_path, three):
    one, two, _ = three
    keys = keys_of(64, seed=14)
    store(two, keys)
    published(two)
    two.kill()
    two.options["ssd_paths"] = tmp_path / "new"
    two.start()
    knows(one, 3)
    one.until(lambda status: status["cluster"]["links"] == 2)
    with Wire(one.endpoint) as wire, wire.handover():
        assert remote(wire, keys)[0] == []


def test_what_was_dropped_is_withdrawn_and_a_stale_entry_is_a_miss(three, server):
    one, two, _ = three
    keys = keys_of(64, seed=15)
    store(two, keys)
    published(two)
    server.signal(signal.SIGSTOP)  # the withdrawal does not come through
    with two.admin() as admin:
        assert admin.drop(["s"])["dropped"] == ["s"]
    two.until(lambda status: status["cluster"]["anchors_pending"] > 0)
    server.signal(signal.SIGCONT)
    with Wire(one.endpoint) as wire, wire.handover():
        assert remote(wire, keys)[0] == []
        two.until(lambda status: status["cluster"]["anchors_published"] == 0 == status["cluster"]["anchors_pending"])
        one.until(
            lambda status: not status["cluster"]["directory_failures_total"] or status["cluster"]["state"] == "joined"
        )
        until(lambda: remote(wire, keys)[0] == [])


def test_a_number_that_is_taken_is_refused_clearly(tmp_path, server, three):
    told = {"directory": "redis", "redis_url": server.url}
    late, *both = twins = [node(tmp_path, n, node_id=n_id, **told) for n, n_id in ((7, 2), (8, 9), (9, 9))]

    def start(twin):
        with contextlib.suppress(AssertionError):  # it may have served its own socket for a moment
            twin.start()

    with contextlib.ExitStack() as stack:
        for twin in twins:
            stack.callback(twin.__exit__)
        with ThreadPoolExecutor() as pool:
            list(pool.map(start, twins))
        assert late.wait(20)
        until(lambda: sum(twin.wait(0) for twin in both) == 1, 20)  # of two that start at once one has it
        refused = next(twin for twin in both if twin.wait(0))
        for twin, number in ((late, 2), (refused, 9)):
            assert twin.process.returncode == 3
            said = rf"node {number} of cluster flatcake is at 127\.0\.0\.1:\d+ already.*--node-id"
            assert re.search(said, twin.log_tail())
        for twin in (three[1], *(twin for twin in both if twin is not refused)):
            twin.until(lambda status: status["cluster"]["state"] == "joined")
            twin.check()
        twin.stop()  # it says so: the next test need not wait for its number to lapse


def test_sixty_four_clients_that_come_at_once_are_answered(three):
    """(Sixteen nodes at once: tests/unit/flatcake_server/cluster/test_peers.py, in one process.)"""
    keys = keys_of(64, seed=18)
    store(three[1], keys)
    published(three[1])

    def ask(number):
        with Wire(three[number % 3].endpoint) as wire, wire.handover():
            return remote(wire, keys)[0]

    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(ask, range(64)))
    assert all(answer in ([], [(2, 64)]) for answer in answers), "a hit or a miss"
    assert answers.count([(2, 64)]) >= 60
    for each in three:  # given back: they would lapse after 8 s
        each.until(lambda status: (status["leases"], status["clients"] - status["cluster"]["attached"]) == (0, 0), 6)


def test_the_directory_goes_and_comes_back_without_its_data(three, server):
    one, two, _ = three
    keys = keys_of(64, seed=16)
    store(two, keys)
    published(two)
    with Wire(one.endpoint) as wire, wire.handover():
        server.keep = False
        server.stop()
        one.until(lambda status: status["cluster"]["state"] == "cut off")
        asked_s = time.monotonic()
        for _ in range(20):
            assert remote(wire, keys)[0] == []
        assert time.monotonic() - asked_s < 2.0, "misses at once"
        store(one, keys_of(20, seed=1), session="local")  # local service goes on
        assert sum(run.blocks for run in wire.lookup(keys_of(20, seed=1)).runs) == 20
        assert flatcake("nodes", "--endpoint", one.endpoint).returncode == 1
        server.start()
        for each in (one, two):
            each.until(lambda status: status["cluster"]["state"] == "joined", 20)
            published(each)
        until(lambda: remote(wire, keys)[0] == [(2, 64)], 20)


def test_a_node_that_died_a_moment_ago_does_not_hide_the_next_best(three):
    one, two, other = three
    keys = keys_of(64, seed=17)
    store(two, keys)
    store(other, keys[: 16 * 40])
    for each in (two, other):
        published(each)
    with Wire(one.endpoint) as wire, wire.handover():
        assert remote(wire, keys)[0] == [(2, 64)]
        two.kill()  # the directory still has it, for a while
        assert remote(wire, keys)[0] == [(3, 40)]
