"""Nodes that meet, in this process: static directory, token, TLS, strangers, leases, flaps."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import grpc
import pytest
from certificates import certificates
from cluster import Wire, keys_of, remote, store
from cluster_nodes import config_of, found, nodes, run, soon
from ports import free_port
from redis_server import RedisServer, needs_redis
from wire import Refused

from flatcake_proto.v1 import peer_pb2, peer_pb2_grpc, store_pb2, store_pb2_grpc
from flatcake_server.app import Node
from flatcake_server.cluster import cluster as cluster_module
from flatcake_server.cluster.credentials import Secrets
from flatcake_server.cluster.members import Member
from flatcake_server.cluster.peers import Peers
from flatcake_server.rpc_admin import AdminClient
from flatcake_server.tasks import Background
from flatcake_transport.access import CALL_METADATA, call_proof
from flatcake_transport.errors import Unavailable

TOKEN = b"0123456789abcdef-the-cluster-s-token"


def peers_of(me, cluster, secrets, timeout_s=1.0, counts=None):
    """Of no node."""
    unforeseen = Background(Counter() if counts is None else counts).unforeseen
    return Peers(me, cluster, secrets, timeout_s, 1 << 20, held=lambda _: (), now_s=lambda: 0.0, unforeseen=unforeseen)


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


def test_links_take_no_calls_away(tmp_path):
    async def work() -> None:
        async with nodes(tmp_path, 8, rpcs_max=4) as (one, two, *_):
            await asyncio.to_thread(store, two, keys_of(16))
            assert await found(one, keys_of(16)) == [(2, 16)]

    run(work())


def test_ipv6(tmp_path):
    async def work() -> None:
        async with nodes(tmp_path, host="[::1]") as (one, two):
            await asyncio.to_thread(store, two, keys_of(16))
            assert await found(one, keys_of(16)) == [(2, 16)]
            assert one.member().address.startswith("[::1]:")

    run(work())


def test_an_engine_is_told_that_peers_check_memory_and_how_long_they_may_be_silent(tmp_path):
    async def work() -> None:
        async with nodes(tmp_path, 1, peer_timeout=7.5) as (one,):

            def asked() -> tuple[bool, int]:
                with Wire(one.endpoint) as wire:
                    return wire.welcome.memory_checksums, wire.welcome.peer_timeout_ms

            assert await asyncio.to_thread(asked) == (True, 7500)

    run(work())


def test_leases_are_swept_also_after_a_sweep_that_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster_module, "SWEEP_S", 0.005)

    async def work() -> None:
        async with nodes(tmp_path, 1) as (one,):
            sweeps = []

            def sweep(_) -> None:
                sweeps.append(len(sweeps))
                assert len(sweeps) > 1, "the first one fails"

            monkeypatch.setattr(type(one.cluster.remote), "sweep", sweep)
            await soon(lambda: len(sweeps) > 2)

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
            greeting = {"protocol": 2, "cluster": "flatcake", "cluster_fingerprint": me.fingerprint, "node_id": 9}
            reply = await stub.Greet(peer_pb2.GreetRequest(**greeting, incarnation=b"i" * 16, nonce=b"n" * 16))
            as_greeted = {"node_id": 9, "incarnation": b"i" * 16, "asker_nonce": b"n" * 16}
            for nonce, proof in ((reply.nonce, b""), (reply.nonce, reply.proof), (b"never said", reply.proof)):
                with pytest.raises(grpc.RpcError) as refused:
                    await stub.Attach(peer_pb2.AttachRequest(nonce=nonce, proof=proof, **as_greeted)).read()
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
            assert one.node.timings.by_verb["refused"][0] == 3
            assert len(one.node.store.clients) == 0, "nothing is kept of them"

    run(work())


@pytest.mark.parametrize(("text", "mode", "said"), [(b"short", 0o600, "openssl rand"), (TOKEN, 0o644, "chmod 600")])
def test_a_weak_token_is_refused(tmp_path, text, mode, said):
    (tmp_path / "token").write_bytes(text)
    (tmp_path / "token").chmod(mode)
    node = Node(config_of(tmp_path, 1, 0, [1], cluster_token_file=str(tmp_path / "token")))
    with pytest.raises(Unavailable, match=said):
        asyncio.run(node.start())


def test_tls_in_both_directions(tmp_path, monkeypatch):
    files = certificates(tmp_path)

    async def work() -> None:
        async with nodes(tmp_path, **files) as (one, two):
            await asyncio.to_thread(store, two, keys_of(16))
            assert await found(one, keys_of(16)) == [(2, 16)]

            def ask() -> None:
                with pytest.raises(Refused), contextlib.closing(Wire(two.address)):
                    pass
                with (
                    pytest.raises(Unavailable, match="FLATCAKE_TLS_CERT_FILE"),
                    AdminClient(two.address, timeout_s=2) as admin,
                ):
                    admin.status()
                for name, file in files.items():
                    monkeypatch.setenv(f"FLATCAKE_{name.upper()}", file)
                with AdminClient(two.address) as admin:
                    assert admin.nodes()[0]["node"] == 2

            await asyncio.to_thread(ask)

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


def test_a_word_to_attach_that_comes_late_ends_nothing(tmp_path):
    """It names what was held then: what was lent since would be taken back."""

    async def work() -> None:
        async with nodes(tmp_path) as (one, two):
            peers, owner, leases = one.cluster.peers, two.member(), two.node.leases
            stub = peer_pb2_grpc.PeerStub(grpc.aio.insecure_channel(two.address))
            reply, shake = await peers._greet(stub, 5)
            peers.keep([])
            await asyncio.to_thread(store, two, keys_of(16))
            with await asyncio.to_thread(Wire, one.endpoint) as wire:
                await asyncio.to_thread(remote, wire, keys_of(16))
                assert leases.stats().leases == 1
                request = peer_pb2.AttachRequest(
                    nonce=reply.nonce, proof=shake.proof(b"", "asker"), node_id=1, incarnation=shake.asker,
                    asker_nonce=shake.asker_nonce,
                )  # fmt: skip
                with pytest.raises(grpc.RpcError) as refused:
                    await stub.Attach(request).read()
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
                assert leases.stats().leases == 1
                assert (two.cluster.stats().attached, two.cluster.stats().strangers_total) == (1, 0)
                assert peers.linked(owner)

    run(work())


def test_other_clusters_and_formats_are_no_members(tmp_path):
    async def work() -> None:
        async with nodes(tmp_path, 1) as (one,):
            me = Member(9, b"9" * 16, "", "1", one.member().fingerprint)
            secrets = one.cluster.peers._secrets
            other = peers_of(me, "other", secrets)
            with pytest.raises(Unavailable, match="the peer is of cluster 'other'"):
                await other.greet(one.address)
            strange = Member(9, b"9" * 16, "", "1", b"another format..")
            differs = peers_of(strange, "flatcake", secrets)
            assert (await differs.greet(one.address)).node_id == 1
            with pytest.raises(Unavailable, match="does not let us attach"):
                await differs.attach(one.member())
            assert not differs.usable(one.member()), "it is left alone for a moment"

    run(work())


def test_what_fails_behind_a_cluster_s_back_is_counted(tmp_path, monkeypatch, caplog):
    async def work() -> None:
        async with nodes(tmp_path) as (one, two):

            async def fails(_member):
                raise KeyError("the test broke it")

            monkeypatch.setattr(one.cluster.peers, "attach", fails)
            one.cluster.peers._drop(one.cluster.peers._links[2])
            one.cluster._meet()
            await soon(lambda: one.node.reports.stats().counters.unforeseen_total > 0)
            assert "the test broke it" in caplog.text
            assert not two.node.reports.stats().counters.unforeseen_total

    run(work())


class Life:
    """A stream whose end nobody foresaw, when it is let go on."""

    def __init__(self) -> None:
        self.ends = asyncio.Event()

    async def read(self) -> None:
        await self.ends.wait()
        raise KeyError("the test broke it")

    def cancel(self) -> None:
        pass


def test_a_stream_that_ends_in_a_way_nobody_foresaw_ends_its_link(monkeypatch, caplog):
    """It would look linked for ever, and nothing could be renewed through it."""
    life = Life()

    async def enter(*_):
        return peer_pb2.Attached(peer_id=1), life, ()

    async def work() -> None:
        me, owner = Member(1, b"1" * 16, ""), Member(2, b"2" * 16, "127.0.0.1:1")
        counts: Counter[str] = Counter()
        peers = peers_of(me, "c", Secrets(), 30.0, counts)
        monkeypatch.setattr(Peers, "_enter", enter)
        await peers.attach(owner)
        assert peers.linked(owner)
        life.ends.set()
        await soon(lambda: not peers.linked(owner))
        assert "the test broke it" in caplog.text
        assert counts == {"unforeseen": 1}
        life.ends.clear()
        await peers.attach(owner)
        (watcher,) = peers._watchers
        await peers.close()
        assert (watcher.done(), len(peers)) == (True, 0)
        with pytest.raises(Unavailable, match="this node is leaving"):
            await peers.attach(owner)

    run(work())


def test_who_leaves_lets_nobody_attach_any_more(tmp_path):
    """Else its end would wait for streams that began meanwhile."""

    async def work() -> None:
        async with nodes(tmp_path) as (one, two):
            two.cluster.membership.leave()
            one.cluster.peers.keep([])
            with pytest.raises(Unavailable, match="this node is leaving"):
                await one.cluster.peers.attach(two.member())

    run(work())
