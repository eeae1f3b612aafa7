"""Many daemons of one cluster, started at once, and as many clients as come: six and twenty-four; sixteen and sixty-four in a soak."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

from cluster import Wire, keys_of, knows, node, published, remote, store
from hypothesis import settings
from redis_server import RedisServer, needs_redis
from waiting import until

pytestmark = needs_redis
NODES = 16 if settings().max_examples > 1000 else 6
CLIENTS = 4 * NODES
BLOCKS = 48


def test_all_nodes_link_and_every_client_finds_what_any_node_holds(tmp_path):
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(RedisServer(tmp_path / "redis"))
        options = {"directory": "redis", "redis_url": redis.url, "node_ttl": "30s", "peer_timeout": "10s"}
        nodes = [node(tmp_path, n, **options) for n in range(1, NODES + 1)]
        for each in nodes:
            stack.callback(each.__exit__)
        pool = stack.enter_context(ThreadPoolExecutor(CLIENTS))
        list(pool.map(lambda each: each.start(), nodes))
        for each in nodes:
            knows(each, NODES)
        for number, each in enumerate(nodes, 1):
            store(each, keys_of(BLOCKS, seed=100 + number), session=f"of {number}")
        for each in nodes:
            published(each)

        def ask(number: int) -> None:
            """From one node what another one holds; the same again until it is there: its link may be on its way."""
            here, there = number % NODES, (number + 1 + number // NODES) % NODES
            keys = keys_of(BLOCKS, seed=101 + there)
            with Wire(nodes[here].endpoint) as wire, wire.handover():
                until(lambda: remote(wire, keys)[0] == [(there + 1, BLOCKS)], 60)

        list(pool.map(ask, range(CLIENTS)))
        for each in nodes:  # given back with their clients, at both ends
            each.until(
                lambda status: (status["leases"], status["clients"] - status["cluster"]["attached"]) == (0, 0), 60
            )
            each.check()
            assert not each.status()["counters"]["unforeseen_total"]
