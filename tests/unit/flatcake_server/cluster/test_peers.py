"""Nodes that meet, in this process: static directory, token, TLS, strangers, leases, flaps."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from cluster import SPEC, Wire, keys_of, remote, store
from redis_server import RedisServer, free_port, needs_redis
from waiting import pause
from wire import Refused

from flatcake_proto.v1 import peer_pb2, peer_pb2_grpc, store_pb2, store_pb2_grpc
from flatcake_server.app import Node
from flatcake_server.cluster.members import Member
from flatcake_server.cluster.peers import Peers
from flatcake_server.cluster.remote import _checked
from flatcake_server.config import NodeConfig
from flatcake_server.rpc_admin import AdminClient
from flatcake_transport.access import CALL_METADATA, call_proof
from flatcake_transport.address import Address, Medium
from flatcake_transport.errors import Unavailable

TOKEN = b"0123456789abcdef-the-cluster-s-token"


@dataclass
class Running:
    node: Node
    address: str

    @property
    def endpoint(self) -> str:
        return f"unix://{self.node.config.socket}"

    @property
    def cluster(self) -> Any:
        return self.node.cluster

    def member(self) -> Member:
        return self.cluster.membership.me


def config_of(
    root: Path, number: int, port: int, peers: list[int], host: str = "127.0.0.1", **options: Any
) -> NodeConfig:
    folder = root / str(number)
    folder.mkdir(exist_ok=True)
    told: dict[str, Any] = {
        "socket": folder / "s",
        "memory_bytes": 1 << 20,
        "huge_pages": "off",
        "grpc_listen": f"{host}:{port}",
        "http_listen": "off",
        "directory": "static",
        "peers": tuple(f"{host}:{other}" for other in peers),
        "node_ttl": 1.0,
        "peer_timeout": 1.0,
        "node_id": number,
        "drain_timeout": 0.1,
    }
    return NodeConfig(**told | options)


@contextlib.asynccontextmanager
async def nodes(root: Path, count: int = 2, **options: Any) -> AsyncIterator[list[Running]]:
    ports = [free_port() + 7 * n for n in range(count)]
    running: list[Running] = []
    try:
        for number, port in enumerate(ports, 1):
            node = Node(config_of(root, number, port, ports, **options))
            await node.start()
            running.append(Running(node, f"{options.get('host', '127.0.0.1')}:{port}"))
        for each in running:
            await meet(each, count)
        yield running
    finally:
        for each in reversed(running):
            await each.node.stop()


async def soon(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.to_thread(pause, 0.01)


async def meet(running: Running, count: int) -> None:
    cluster = running.cluster
    await soon(lambda: cluster.stats().nodes == count and len(cluster.peers) == count - 1)


async def found(running: Running, keys: bytes, **fields: Any) -> list[tuple[int, int]]:
    def ask() -> list[tuple[int, int]]:
        with Wire(running.endpoint) as wire:
            return remote(wire, keys, **fields)[0]

    return await asyncio.to_thread(ask)


def run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def test_peers_named_in_a_list_find_each_other_s_prefixes(tmp_path):
    async def work() -> None:
        async with nodes(tmp_path, 3) as (one, two, three):
            keys = keys_of(64)
            await asyncio.to_thread(store, two, keys[: 16 * 20])
            await asyncio.to_thread(store, three, keys[: 16 * 41])
            before = one.cluster.peers.calls.copy()
            assert await found(one, keys) == [(3, 41)]
            asked = one.cluster.peers.calls - before
            assert (asked["probe"], asked["find"]) == (2, 1), "all at once, then one"
            assert await found(one, keys_of(64, seed=2)) == []
            stats = one.cluster.stats()
            assert (stats.remote_lookups_total, stats.remote_hits_total, stats.remote_misses_total) == (2, 1, 1)
            assert [(row.node, row.link) for row in stats.members] == [(1, "this node"), (2, "linked"), (3, "linked")]
            with pytest.raises(Unavailable, match="node 2 of cluster flatcake is at"):
                await Node(config_of(tmp_path, 2, free_port(), [int(two.address[-5:])], socket=tmp_path / "t")).start()

    run(work())


@needs_redis
def test_sixteen_nodes_and_sixty_four_clients_at_once(tmp_path):
    """All in this process: a busy one. A hit or a miss in time, most of them hits, and nothing stays behind."""

    async def work(url: str) -> None:
        shared = {"directory": "redis", "redis_url": url, "node_ttl": 3.0, "peer_timeout": 5.0}
        async with nodes(tmp_path, 16, **shared) as running:
            keys = keys_of(40)
            owner = running[11]
            await asyncio.to_thread(store, owner, keys)
            await soon(lambda: owner.cluster.stats().anchors_published and not owner.cluster.stats().anchors_pending)
            answers = await asyncio.gather(*(found(each, keys) for each in running * 4))
            assert sum(answer == [(12, 40)] for answer in answers) >= 60
            assert all(answer in ([], [(12, 40)]) for answer in answers)
            for each in running:
                assert (each.cluster.stats().links, each.cluster.stats().attached) == (15, 15)
            for each in running:
                for client in [c for c in each.node.store.clients._clients.values() if c.name == "wire"]:
                    await each.node.store.client_gone(client.client_id)
            await soon(lambda: not any(each.cluster.stats().loans for each in running))
            await soon(lambda: owner.node.leases.stats().leases == 0)

    with RedisServer(tmp_path / "redis") as server:
        run(work(server.url))


def test_ipv6(tmp_path):
    async def work() -> None:
        async with nodes(tmp_path, host="[::1]") as (one, two):
            await asyncio.to_thread(store, two, keys_of(16))
            assert await found(one, keys_of(16)) == [(2, 16)]
            assert one.member().address.startswith("[::1]:")

    run(work())


def test_memory_that_peers_read_has_checksums(tmp_path):
    async def work() -> None:
        async with nodes(tmp_path, 1) as (one,):

            def asked() -> bool:
                with Wire(one.endpoint) as wire:
                    return bool(wire.welcome.memory_checksums)

            assert await asyncio.to_thread(asked)

    run(work())


def test_without_pin_nothing_is_leased(tmp_path):
    async def work() -> None:
        async with nodes(tmp_path) as (one, two):
            keys = keys_of(16)
            await asyncio.to_thread(store, two, keys)
            assert await found(one, keys, pin=False) == [(2, 16)]
            assert two.node.leases.stats().granted_total == 0
            assert one.cluster.stats().loans == 0

    run(work())


def test_who_does_not_know_the_token_is_a_stranger(tmp_path):
    (tmp_path / "token").write_bytes(TOKEN)
    (tmp_path / "token").chmod(0o600)
    (tmp_path / "other").write_bytes(TOKEN + b"!")
    (tmp_path / "other").chmod(0o600)

    async def work() -> None:
        async with nodes(tmp_path, cluster_token_file=str(tmp_path / "token")) as (one, two):
            await asyncio.to_thread(store, two, keys_of(16))
            assert await found(one, keys_of(16)) == [(2, 16)]
            stub = peer_pb2_grpc.PeerStub(grpc.aio.insecure_channel(two.address))
            me = one.member()
            greeting = {"protocol": 1, "cluster": "flatcake", "cluster_fingerprint": me.fingerprint, "node_id": 9}
            reply = await stub.Greet(peer_pb2.GreetRequest(**greeting, incarnation=b"i" * 16, nonce=b"n" * 16))
            for nonce, proof in ((reply.nonce, b""), (reply.nonce, reply.proof), (b"never said", reply.proof)):
                with pytest.raises(grpc.RpcError) as refused:
                    await stub.Attach(peer_pb2.AttachRequest(nonce=nonce, proof=proof)).read()
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            for verb in ("Probe", "Find", "Prolong", "GiveBack"):
                with pytest.raises(grpc.RpcError) as refused:
                    await getattr(stub, verb)(getattr(peer_pb2, f"{verb}Request")(peer_id=1))
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert two.cluster.stats().strangers_total == 3
            thief = Node(
                config_of(tmp_path, 5, free_port(), [int(two.address[-5:])], cluster_token_file=str(tmp_path / "other"))
            )
            await thief.start()
            assert thief.cluster is not None
            assert thief.cluster.stats().nodes == 1, "nor does it believe us"
            await thief.stop()

    run(work())


def test_clients_over_tcp_show_the_token_and_those_of_the_socket_need_not(tmp_path, monkeypatch):
    (tmp_path / "token").write_bytes(TOKEN)
    (tmp_path / "token").chmod(0o600)

    async def work() -> None:
        async with nodes(tmp_path, 1, cluster_token_file=str(tmp_path / "token")) as (one,):

            def ask() -> None:
                with pytest.raises(Refused) as refused:
                    Wire(one.address)
                assert refused.value.code is grpc.StatusCode.UNAUTHENTICATED
                with pytest.raises(Unavailable, match="FLATCAKE_CLUSTER_TOKEN_FILE"), AdminClient(one.address) as admin:
                    admin.status()
                monkeypatch.setenv("FLATCAKE_CLUSTER_TOKEN_FILE", str(tmp_path / "token"))
                with AdminClient(one.address) as admin:
                    assert admin.nodes()[0]["node"] == 1
                with AdminClient(one.endpoint) as admin:
                    assert admin.status()["cluster"]["state"] == "joined"

            await asyncio.to_thread(ask)
            wrong = ((CALL_METADATA, call_proof(TOKEN + b"!")),)
            stub = store_pb2_grpc.StoreStub(grpc.aio.insecure_channel(one.address))
            with pytest.raises(grpc.RpcError) as refused:
                await stub.Hello(store_pb2.HelloRequest(protocol=1), metadata=wrong)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED

    run(work())


@pytest.mark.parametrize(("text", "mode", "said"), [(b"short", 0o600, "openssl rand"), (TOKEN, 0o644, "chmod 600")])
def test_a_weak_token_is_refused(tmp_path, text, mode, said):
    (tmp_path / "token").write_bytes(text)
    (tmp_path / "token").chmod(mode)
    node = Node(config_of(tmp_path, 1, 0, [1], cluster_token_file=str(tmp_path / "token")))
    with pytest.raises(Unavailable, match=said):
        asyncio.run(node.start())


def certificates(root: Path) -> dict[str, str]:
    """A CA and one certificate for 127.0.0.1 that it signed, as docs/security.md makes them."""
    script = """
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=ca -keyout ca.key -out ca.pem
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=node -keyout node.key -out node.csr
    printf 'subjectAltName=IP:127.0.0.1,DNS:localhost' > san
    openssl x509 -req -in node.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile san -out node.pem
    chmod 600 node.key
    """
    subprocess.run(["sh", "-ec", script], cwd=root, check=True, capture_output=True)
    return {
        "tls_cert_file": str(root / "node.pem"),
        "tls_key_file": str(root / "node.key"),
        "tls_ca_file": str(root / "ca.pem"),
    }


def test_tls_in_both_directions(tmp_path, monkeypatch):
    files = certificates(tmp_path)

    async def work() -> None:
        async with nodes(tmp_path, **files) as (one, two):
            await asyncio.to_thread(store, two, keys_of(16))
            assert await found(one, keys_of(16)) == [(2, 16)]

            def ask() -> None:
                with pytest.raises(Refused), contextlib.closing(Wire(two.address)):
                    pass
                with pytest.raises(Unavailable), AdminClient(two.address, timeout_s=2) as admin:
                    admin.status()
                for name, file in files.items():
                    monkeypatch.setenv(f"FLATCAKE_{name.upper()}", file)
                with AdminClient(two.address) as admin:
                    assert admin.nodes()[0]["node"] == 2

            await asyncio.to_thread(ask)

    run(work())


def test_leases_are_renewed_given_back_and_outlive_a_link_that_broke(tmp_path):
    """The engines that read there do not hear of it: what they read must not change under them before their time is over."""

    async def work() -> None:
        async with nodes(tmp_path, lease_ttl=2.0) as (one, two):
            keys = keys_of(16)
            await asyncio.to_thread(store, two, keys)
            peers, owner = one.cluster.peers, two.member()
            leases = two.node.leases
            reply = await peers.find(owner, SPEC.to_json(), keys, pin=True, timeout_s=5)
            assert not reply.fabric.arena, "served only where ucx_listen says so"
            assert await peers.prolong(2, owner.incarnation, [reply.lease_id, 77], timeout_s=5) == [reply.lease_id]
            await peers.give_back(2, owner.incarnation, [reply.lease_id])
            assert leases.stats().leases == 0
            await peers.find(owner, SPEC.to_json(), keys, pin=True, timeout_s=5)
            assert leases.stats().leases == 1
            with pytest.raises(Unavailable, match="another one now"):
                await peers.prolong(2, b"x" * 16, [1], timeout_s=5)
            reply = await peers.find(owner, SPEC.to_json(), keys, pin=True, timeout_s=5)
            found_s = asyncio.get_running_loop().time()
            clients = len(two.node.store.clients)
            one.cluster.peers.keep([])
            await soon(lambda: len(two.node.store.clients) < clients)
            assert asyncio.get_running_loop().time() > found_s + 1.5 or leases.get(reply.lease_id) is not None
            await soon(lambda: not leases.stats().leases)
            assert (leases.stats().expired_total, leases.stats().orphaned_total) == (2, 0)

    run(work())


def test_a_loan_that_cannot_be_kept_leaves_no_lease(tmp_path):
    async def work() -> None:
        async with nodes(tmp_path) as (one, two):
            keys = keys_of(16)
            await asyncio.to_thread(store, two, keys)
            one.cluster._loans._loans_max = 0
            assert await found(one, keys) == []
            await soon(lambda: two.node.leases.stats().leases == 0)
            assert two.node.leases.stats().released_total == 1
            assert one.node.leases.stats().leases == 0

    run(work())


def test_an_owner_that_is_slow_takes_no_more_than_half_of_a_renewal_s_time(tmp_path):
    """The client gives it a second; a daemon that does not answer in that is left alone by all its lookups."""

    async def work() -> None:
        async with nodes(tmp_path, peer_timeout=30.0) as (one, two):
            keys = keys_of(16)
            await asyncio.to_thread(store, two, keys)
            given: list[float] = []

            async def slow(*_: Any, timeout_s: float) -> list[int]:
                given.append(timeout_s)
                raise Unavailable("no answer in time")

            def ask() -> tuple[list[int], list[int]]:
                with Wire(one.endpoint) as wire:
                    lease_id = remote(wire, keys)[1].lease_id
                    one.cluster.remote.peers = SimpleNamespace(prolong=slow)
                    reply = wire.call("Renew", lease_ids=[lease_id])
                    return list(reply.alive), list(reply.alive_remote)

            alive, elsewhere = await asyncio.to_thread(ask)
            assert (len(alive), elsewhere) == (1, [])
            assert len(given) == 1
            assert 0 < given[0] <= 10, "the wire gives it 20 s"
            one.cluster.remote.peers = one.cluster.peers

    run(work())


def test_a_lookup_that_is_given_up_half_way_leaves_no_lease(tmp_path):
    async def work() -> None:
        async with nodes(tmp_path) as (one, _):
            keys = keys_of(64)
            await asyncio.to_thread(store, one, keys[: 16 * 20])
            asked = asyncio.Event()

            async def never(_: Any) -> list[Any]:
                asked.set()
                await asyncio.Event().wait()
                return []

            one.cluster.remote.directory = SimpleNamespace(probe=never)
            stub = store_pb2_grpc.StoreStub(grpc.aio.insecure_channel(one.endpoint.replace("//", "")))
            me = await stub.Hello(store_pb2.HelloRequest(protocol=1))
            who = {"client_id": me.client_id, "incarnation": me.incarnation, "fingerprint": SPEC.fingerprint}
            call = stub.Lookup(store_pb2.LookupRequest(**who, keys=keys, pin=True, remote=True))
            await asked.wait()
            assert one.node.leases.stats().leases == 1
            call.cancel()
            await soon(lambda: one.node.leases.stats().leases == 0)
            counted = one.cluster.stats()
            assert counted.remote_lookups_total == counted.remote_failures_total == 1, "they add up"

    run(work())


def test_a_peer_that_comes_and_goes_leaves_nothing_behind(tmp_path):
    async def work() -> None:
        async with nodes(tmp_path) as (one, two):
            owner, peers = two.member(), one.cluster.peers
            for _ in range(100):
                peers.keep([])
                await peers.attach(owner)
            await soon(lambda: two.cluster.stats().attached == 1)
            assert len(two.node.store.clients) == 1
            assert len(peers) == 1

    run(work())


def test_other_clusters_and_formats_are_no_members(tmp_path):
    async def work() -> None:
        async with nodes(tmp_path, 1) as (one,):
            me = Member(9, b"9" * 16, "", "1", one.member().fingerprint)
            secrets = one.cluster.peers._secrets
            other = Peers(me, "other", secrets, 1.0, 1 << 20, lost=lambda _: None, now_s=lambda: 0.0)
            with pytest.raises(Unavailable, match="the peer is of cluster 'other'"):
                await other.greet(one.address)
            strange = Member(9, b"9" * 16, "", "1", b"another format..")
            differs = Peers(strange, "flatcake", secrets, 1.0, 1 << 20, lost=lambda _: None, now_s=lambda: 0.0)
            assert (await differs.greet(one.address)).node_id == 1
            with pytest.raises(Unavailable, match="does not let us attach"):
                await differs.attach(one.member())
            assert not differs.usable(one.member()), "it is left alone for a moment"

    run(work())


def a_run(**fields: Any) -> Any:
    told = {"segment": Address.of(Medium.SSD, 3, 4096), "segment_blocks": 8, "first_block": 2, "blocks": 6}
    return store_pb2.Run(**told | fields)


@pytest.mark.parametrize(
    "wrong",
    [
        {"segment": Address.of(Medium.SSD, 4, 0)},
        {"segment": 7 << 60},
        {"blocks": 7},
        {"blocks": 0},
    ],
)
def test_a_reply_that_makes_no_sense_is_a_failure(wrong):
    owner = Member(3, b"3" * 16, "")
    assert _checked(peer_pb2.FindReply(runs=[a_run(), a_run()]), owner, 12, pin=False) == 12
    assert _checked(peer_pb2.FindReply(), owner, 12, pin=True) == 0
    with pytest.raises(Unavailable, match="pinned none"):
        _checked(peer_pb2.FindReply(runs=[a_run()]), owner, 12, pin=True)
    with pytest.raises(Unavailable):
        _checked(peer_pb2.FindReply(runs=[a_run(), a_run(**wrong)]), owner, 12, pin=False)
    with pytest.raises(Unavailable, match="more blocks"):
        _checked(peer_pb2.FindReply(runs=[a_run(), a_run()]), owner, 11, pin=False)
