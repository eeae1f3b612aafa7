"""What happens to other nodes' blocks while they are read: reclaimed, restarted elsewhere, cut off. Right bytes, or a miss in time.

After each the law holds on every node, and nothing is leased any more.
"""

from __future__ import annotations

import contextlib
import time
from functools import partial

import numpy as np
import pytest
from cluster import knows, node, published
from kv import Kv, connect
from networks import families, ip, need_namespaces, quoted, room
from redis_server import RedisServer, needs_redis
from ucx_peer import PEER_TIMEOUT_S, Peer, ucx_here
from waiting import until

from flatcake_transport.errors import Unavailable
from flatcake_transport.mover import MemorySpan, Move
from flatcake_transport.movers.ucx import UcxMover

pytestmark = needs_redis

BLOCKS = 48
MIB = 1 << 20


def restored(kv, hit, keys, in_time_s=20.0):
    """How many blocks come back; all of them are compared."""
    target = [np.zeros((hit.blocks, kv.plane_bytes), np.uint8) for _ in range(kv.layers)]
    began_s = time.monotonic()
    with hit.restore(target, np.arange(hit.blocks)) as restore:
        usable = restore.wait()
    assert time.monotonic() - began_s < in_time_s
    for layer, pages in enumerate(target):
        assert np.array_equal(pages[:usable], kv.bytes_of(keys[:usable], layer))
    return usable


def settled(*nodes):
    for each in nodes:
        each.until(lambda status: status["leases"] == 0)
        each.check()


@pytest.fixture
def pair(request, tmp_path):
    """Nodes 1 and 2, which verify as the test says; the memory of each holds a few contexts."""
    ucx_here()
    with RedisServer(tmp_path) as redis:
        told = {"directory": "redis", "redis_url": redis.url, "ucx_listen": "127.0.0.1:0", "memory_bytes": 8 * MIB}
        one, two = (
            node(tmp_path, n, verify=verify, peer_timeout="5s", **told) for n, verify in enumerate(request.param, 1)
        )
        with one, two:
            for each in (one, two):
                knows(each, 2)
            yield one, two


@pytest.mark.parametrize("pair", [("all", "off")], indirect=True, ids=["checks what has no checksums"])
def test_what_a_peer_has_leased_is_not_reclaimed_under_it(pair):
    one, two = pair
    with connect(one, timeout_s=5) as here, connect(two) as there:
        kv, far = Kv(here), Kv(there)
        tokens = kv.tokens(1, BLOCKS)
        far.store(tokens, session="leased", share_counts=[2] * BLOCKS)
        published(two)
        keys = kv.space.keys(tokens)
        with kv.space.lookup(keys) as hit:
            assert hit.blocks == BLOCKS
            for seed in range(10, 30):  # 1.2 MiB each into 8: all that nobody reads goes, again and again
                far.store(far.tokens(seed, BLOCKS), session=f"s{seed}", share_counts=[2] * BLOCKS)
            assert restored(kv, hit, keys) == BLOCKS
        settled(one, two)
        for seed in range(30, 50):
            far.store(far.tokens(seed, BLOCKS), session=f"s{seed}", share_counts=[2] * BLOCKS)
        assert kv.hit(tokens) == 0, "given back, it is the oldest, and goes"
        # The directory may still name it: that is a stale entry, and a miss.
        assert here.stats().corrupt_segments == 0
    settled(one, two)


@pytest.mark.parametrize("pair", [("off", "remote")], indirect=True, ids=["checks nothing"])
def test_a_node_that_restarts_on_another_port_during_a_read(pair):
    one, two = pair
    with connect(one, timeout_s=5) as here, connect(two) as there:
        kv, far = Kv(here), Kv(there)
        tokens = kv.tokens(2, BLOCKS)
        far.store(tokens[: 20 * 16], session="s")  # on SSD
        far.store(tokens, session="s", share_counts=[2] * BLOCKS)
        published(two)
        keys = kv.space.keys(tokens)
        with kv.space.lookup(keys) as hit:
            assert hit.blocks == BLOCKS
            two.restart()
            assert restored(kv, hit, keys) <= BLOCKS
        knows(one, 2)
        published(two)
        until(lambda: kv.hit(tokens), 20)  # a reader that lost its peer is left alone for a moment
        assert kv.hit(tokens) == 20, "its SSD is there again, its memory is not"
    settled(one, two)


@pytest.fixture(params=families(231))
def cable(request, tmp_path, monkeypatch):
    """A veth pair into a network namespace, and the addresses of both ends."""
    need_namespaces(monkeypatch)
    family = families(231)[request.param]
    with room(tmp_path) as away:
        family.add(1, away.near)
        family.add(2, away.away, *away.where)
        yield away, family


@pytest.mark.parametrize("cable", ["IPv6"], indirect=True)
def test_a_cable_that_is_pulled_during_a_read_and_put_back(tmp_path, cable):
    ucx_here()
    away, family = cable
    (token := tmp_path / "token").write_text("0123456789abcdef" * 4)
    token.chmod(0o600)
    here_address, there_address = (quoted(family.address(number)) for number in (1, 2))
    with RedisServer(tmp_path / "redis", bind=f"127.0.0.1 {family.address(1)}", **{"protected-mode": "no"}) as redis:
        told = {
            "directory": "redis",
            "redis_url": f"redis://{here_address}:{redis.port}",
            "cluster_token_file": token,
            "lease_ttl": "600s",  # what was given back while the cable was out must not have to lapse
        }
        one = node(tmp_path, 1, grpc_listen=f"{here_address}:0", ucx_listen=f"{here_address}:0", **told)
        two = node(
            tmp_path, 2, grpc_listen=f"{there_address}:0", ucx_listen=f"{there_address}:0", wrapper=away.wrapper, **told
        )
        with one, two:
            for each in (one, two):
                knows(each, 2)
            with connect(one, timeout_s=5) as here, connect(two) as there:
                kv, far = Kv(here), Kv(there)
                tokens = kv.tokens(3, BLOCKS)
                kv.store(tokens[: 8 * 16], session="mine")
                far.store(tokens, session="s", share_counts=[2] * BLOCKS)
                published(two)
                until(lambda: kv.hit(tokens) == BLOCKS, 20)  # the first lookup may find its peer not linked yet: a miss
                keys = kv.space.keys(tokens)
                with kv.space.lookup(keys) as hit:
                    assert hit.blocks == BLOCKS
                    ip("link", "set", away.near, "down")
                    assert restored(kv, hit, keys) == 8
                began_s = time.monotonic()
                assert kv.hit(tokens) == 8
                assert time.monotonic() - began_s < 10, "a miss in time"
                ip("link", "set", away.near, "up")
                if family.bits == 64:  # the kernel forgets a device's IPv6 addresses when it goes down
                    family.add(1, away.near)
                for each in (one, two):
                    each.until(lambda status: status["cluster"]["state"] == "joined", 20)
                    knows(each, 2)
                until(lambda: kv.hit(tokens) == BLOCKS, 20)  # a peer that failed a moment ago is left alone for another
            settled(one, two)


@pytest.mark.parametrize("cable", ["IPv4"], indirect=True)
def test_a_network_that_comes_after_the_first_read_is_read_from(cable):
    """UCX reads the routes of the machine once a process: that of an engine that lives for weeks would never reach that node."""
    ucx_here()
    away, _ = cable
    mover = UcxMover(peer_timeout_s=PEER_TIMEOUT_S)
    target = np.zeros(4096, np.uint8)

    def read(peer):
        target[:] = 0
        with contextlib.suppress(Unavailable):
            mover.submit([Move(peer.memory.span(0, 4096), MemorySpan(target))]).wait(30)
        return np.array_equal(target, peer.content)

    with Peer(4096, {"TLS": "tcp", "NET_DEVICES": away.near}) as first:
        assert read(first)
    other = families(230)["IPv4"]
    for number, device, where in ((1, away.near, ()), (2, away.away, away.where)):
        ip(*where, "addr", "flush", "dev", device, "scope", "global")
        other.add(number, device, *where)
    with Peer(4096, {"TLS": "tcp", "NET_DEVICES": away.away}, ["ip", "netns", "exec", away.name]) as second:
        until(partial(read, second), 20)
    mover.close()
