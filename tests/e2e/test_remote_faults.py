"""What happens to other nodes' blocks while they are read: reclaimed, restarted elsewhere, cut off. Right bytes, or a miss in time.

After each the law holds on every node, and nothing is leased any more.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from cluster import knows, node, published
from kv import Kv, connect
from redis_server import RedisServer, needs_redis
from ucx_peer import PEER_TIMEOUT_S, Peer, ucx_here
from waiting import until

from flatcake_transport.errors import Unavailable
from flatcake_transport.mover import MemorySpan, Move
from flatcake_transport.movers.ucx import UcxMover

pytestmark = needs_redis

BLOCKS = 48
MIB = 1 << 20
CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x00020000
MS_PRIVATE_ALL = 1 << 18 | 1 << 14  # MS_PRIVATE, MS_REC
MNT_DETACH = 2


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
        one, two = (node(tmp_path, n, verify=verify, **told) for n, verify in enumerate(request.param, 1))
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


NET = os.getpid() % 250  # two runs on one machine must not take each other's addresses
ADDRESSES = {
    "IPv4": (f"10.231.{NET}.1", f"10.231.{NET}.2", 24),
    "IPv6": (f"fd23:{NET:x}::1", f"fd23:{NET:x}::2", 64),
}


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


def clear_leftovers():
    """A run that was killed leaves its device, and with it a route to addresses that another run may take."""
    for device in os.listdir("/sys/class/net"):  # noqa: PTH208
        owner = device.removeprefix("fcn")
        if owner != device and not Path(f"/proc/{owner}").exists():
            subprocess.run(["ip", "netns", "del", f"fc{owner}"], check=False, capture_output=True)
            subprocess.run(["ip", "link", "del", device], check=False, capture_output=True)


@pytest.fixture(params=ADDRESSES)
def cable(request, tmp_path):
    """A veth pair into a network namespace; the addresses of both ends, and a file that moves a process there."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2: partitions were tested by stopped processes only")
    clear_leftovers()
    here, there, bits = ADDRESSES[request.param]
    name, near, away = f"fc{os.getpid()}", f"fcn{os.getpid()}", f"fca{os.getpid()}"
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    try:
        ip("link", "add", near, "type", "veth", "peer", "name", away, "netns", name)
        dad = ["nodad"] if request.param == "IPv6" else []
        ip("addr", "add", f"{here}/{bits}", "dev", near, *dad)
        ip("-n", name, "addr", "add", f"{there}/{bits}", "dev", away, *dad)
        for words in (
            ["link", "set", near, "up"],
            ["-n", name, "link", "set", away, "up"],
            ["-n", name, "link", "set", "lo", "up"],
        ):
            ip(*words)
        wrapper = tmp_path / "enter.py"
        wrapper.write_text(
            "import ctypes, os\n"
            "libc = ctypes.CDLL(None)\n"
            f"fd = os.open('/run/netns/{name}', os.O_RDONLY)\n"
            f"assert libc.setns(fd, {CLONE_NEWNET}) == 0\n"
            "os.close(fd)\n"
            # UCX looks for network devices in /sys: it must be the one of the namespace.
            f"assert libc.unshare({CLONE_NEWNS}) == 0\n"
            f"assert libc.mount(b'none', b'/', None, {MS_PRIVATE_ALL}, None) == 0\n"
            f"libc.umount2(b'/sys', {MNT_DETACH})\n"
            "assert libc.mount(b'sysfs', b'/sys', b'sysfs', 0, None) == 0\n"
        )
        yield near, here, there, wrapper
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)
        subprocess.run(["ip", "link", "del", near], check=False, capture_output=True)


@pytest.mark.parametrize("cable", ["IPv6"], indirect=True)
def test_a_cable_that_is_pulled_during_a_read_and_put_back(tmp_path, cable):
    ucx_here()
    near, here_address, there_address, wrapper = cable
    (token := tmp_path / "token").write_text("0123456789abcdef" * 4)
    token.chmod(0o600)
    quoted = [f"[{address}]" if ":" in address else address for address in (here_address, there_address)]
    with RedisServer(tmp_path / "redis", bind=f"127.0.0.1 {here_address}", **{"protected-mode": "no"}) as redis:
        told = {
            "directory": "redis",
            "redis_url": f"redis://{quoted[0]}:{redis.port}",
            "cluster_token_file": token,
            "lease_ttl": "600s",  # what was given back while the cable was out must not have to lapse
        }
        one = node(tmp_path, 1, grpc_listen=f"{quoted[0]}:0", ucx_listen=f"{quoted[0]}:0", **told)
        two = node(tmp_path, 2, grpc_listen=f"{quoted[1]}:0", ucx_listen=f"{quoted[1]}:0", wrapper=wrapper, **told)
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
                    ip("link", "set", near, "down")
                    assert restored(kv, hit, keys) >= 8
                began_s = time.monotonic()
                assert kv.hit(tokens) == 8
                assert time.monotonic() - began_s < 10, "a miss in time"
                ip("link", "set", near, "up")
                if ":" in here_address:  # the kernel forgets a device's IPv6 addresses when it goes down
                    ip("addr", "replace", f"{here_address}/64", "dev", near, "nodad")
                for each in (one, two):
                    each.until(lambda status: status["cluster"]["state"] == "joined", 20)
                    knows(each, 2)
                until(lambda: kv.hit(tokens) == BLOCKS, 20)  # a peer that failed a moment ago is left alone for another
            settled(one, two)


@pytest.mark.parametrize("cable", ["IPv4"], indirect=True)
def test_a_network_that_comes_after_the_first_read_is_read_from(cable):
    """UCX reads the routes of the machine once a process: that of an engine that lives for weeks would never reach that node."""
    ucx_here()
    near, here, there, _ = cable
    bits = 64 if ":" in here else 24
    mover = UcxMover(peer_timeout_s=PEER_TIMEOUT_S)
    target = np.zeros(4096, np.uint8)

    def read(peer):
        target[:] = 0
        with contextlib.suppress(Unavailable):
            mover.submit([Move(peer.memory.span(0, 4096), MemorySpan(target))]).wait(30)
        return np.array_equal(target, peer.content)

    with Peer(4096, {"TLS": "tcp", "NET_DEVICES": near}) as first:
        assert read(first)
    name, away = near.replace("fcn", "fc"), near.replace("fcn", "fca")
    here, there = (address.replace("10.231", "10.230").replace("fd23", "fd24") for address in (here, there))
    for where, device, address in (([], near, here), (["-n", name], away, there)):
        ip(*where, "addr", "flush", "dev", device, "scope", "global")
        ip(*where, "addr", "add", f"{address}/{bits}", "dev", device, *["nodad"] * (bits == 64))
    with Peer(4096, {"TLS": "tcp", "NET_DEVICES": away}, ["ip", "netns", "exec", name]) as second:
        until(partial(read, second), 20)
    mover.close()
