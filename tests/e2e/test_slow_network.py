"""Three daemons and a Redis on a network of namespaces, one of them behind a slow link (tc htb), and an engine at another one."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from cluster import knows, node, published
from kv import Kv, connect
from networks import RUN, families, ip, need_namespaces, needed, quoted, room, slow
from redis_server import RedisServer, needs_redis
from ucx_peer import ucx_here

from flatcake_transport.address import Medium

pytestmark = needs_redis

BLOCKS = 64  # 1.5 MiB: enough to measure a bandwidth by
LINK_MBIT = 20
LINK_BYTES_PER_S = LINK_MBIT * 1e6 / 8  # half a second for them
PREFILL_TOKENS_PER_S = 100_000.0  # a hundredth of one


@pytest.fixture(params=families(232))
def lan(request, tmp_path, monkeypatch):
    """A bridge with the address 1, and two rooms on it, 2 and 3; what 2 sends goes slowly."""
    need_namespaces(monkeypatch, "tc")
    family, bridge = families(232)[request.param], f"fcn{RUN}"
    with contextlib.ExitStack() as stack:
        with needed("bridge"):
            ip("link", "add", bridge, "type", "bridge")
        stack.callback(ip, "link", "del", bridge)
        ip("link", "set", bridge, "up")
        rooms = [stack.enter_context(room(tmp_path, f"x{number}")) for number in (2, 3)]
        family.add(1, bridge)
        for number, each in enumerate(rooms, 2):
            ip("link", "set", each.near, "master", bridge)
            family.add(number, each.away, *each.where)
        with needed("tc htb"):
            slow(rooms[0].away, f"{LINK_MBIT}mbit", *rooms[0].where)
        yield family, rooms


@pytest.fixture
def three(lan, tmp_path):
    ucx_here()
    family, rooms = lan
    (token := tmp_path / "token").write_text("0123456789abcdef" * 4)
    token.chmod(0o600)
    addresses = [quoted(family.address(number)) for number in (1, 2, 3)]
    with contextlib.ExitStack() as stack:
        bind = {"bind": f"127.0.0.1 {family.address(1)}", "protected-mode": "no"}
        redis = stack.enter_context(RedisServer(tmp_path / "redis", **bind))
        told = {
            "directory": "redis",
            "redis_url": f"redis://{addresses[0]}:{redis.port}",
            "cluster_token_file": token,
            "node_ttl": "20s",  # a beat may stand behind megabytes
            "peer_timeout": "10s",
        }
        nodes = [
            node(tmp_path, number, grpc_listen=f"{address}:0", ucx_listen=f"{address}:0", wrapper=wrapper, **told)
            for number, (address, wrapper) in enumerate(
                zip(addresses, (None, *(each.wrapper for each in rooms)), strict=True), 1
            )
        ]
        for each in nodes:
            stack.callback(each.__exit__)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda each: each.start(), nodes))
        for each in nodes:
            knows(each, 3)
        yield nodes
        for each in nodes:
            each.until(lambda status: status["leases"] == 0)
            each.check()


def test_a_slow_link_brings_the_same_bytes_and_is_then_left_for_computing(three):
    """And a node behind a fast one is read all the same."""
    with contextlib.ExitStack() as stack:
        here = stack.enter_context(connect(three[0], prefill_tokens_per_s=PREFILL_TOKENS_PER_S))
        kv, behind, beside = Kv(here), *(Kv(stack.enter_context(connect(each))) for each in three[1:])
        on_ssd, in_memory = kv.tokens(1, BLOCKS), kv.tokens(2, BLOCKS)
        behind.store(on_ssd, session="ssd")
        behind.store(in_memory, session="memory", share_counts=[2] * BLOCKS)
        both = {behind: kv.tokens(3, 2 * BLOCKS), beside: kv.tokens(4, 2 * BLOCKS)}
        for at, tokens in both.items():
            at.store(tokens[: BLOCKS * 16], session="both")
            at.store(tokens, session="both", share_counts=[2] * 2 * BLOCKS)
        for each in three[1:]:
            published(each)
        for tokens, medium in ((on_ssd, Medium.SSD), (in_memory, Medium.MEMORY)):
            assert kv.hit(tokens) == BLOCKS, "nobody knows yet how slow it is; each byte is compared"
            measured = here.bandwidths.of((2, medium), time.monotonic())
            assert measured is not None
            assert measured < 10 * LINK_BYTES_PER_S, "much came before anybody waited for it, at most"
        assert kv.hit(both[behind]) == 0, "sooner computed than fetched"
        assert here.stats().declined_blocks == 2 * BLOCKS
        assert kv.hit(both[beside]) == 2 * BLOCKS
