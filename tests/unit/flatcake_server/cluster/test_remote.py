"""Lookups that go on at another node, in this process: the leases they have there, and owners that are slow or talk nonsense."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from cluster import SPEC, Wire, keys_of, remote, store
from cluster_nodes import found, nodes, run, soon

from flatcake_proto.v1 import peer_pb2, store_pb2, store_pb2_grpc
from flatcake_server.cluster.members import Member
from flatcake_server.cluster.remote import _checked
from flatcake_transport.address import Address, Medium
from flatcake_transport.errors import Unavailable


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
            assert 0 < given[0] < 11, "of the 20 s that the wire gives, and some"
            one.cluster.remote.peers = one.cluster.peers

    run(work())


def test_one_slow_peer_costs_its_own_answer_only(tmp_path):
    """A static directory asks all at once; beats may come in time where answers do not."""

    async def work() -> None:
        async with nodes(tmp_path, 3) as (one, two, three):
            keys = keys_of(16)
            await asyncio.to_thread(store, three, keys)
            ask = one.cluster.peers.probe

            async def slow(member: Member, *arguments: Any) -> bytes:
                if member.node_id == two.member().node_id:
                    await asyncio.Event().wait()
                return bytes(await ask(member, *arguments))

            one.cluster.peers.probe = slow
            assert await found(one, keys) == [(3, 16)]

    run(work())


def test_a_caller_in_a_hurry_keeps_no_other_from_asking(tmp_path):
    async def work() -> None:
        async with nodes(tmp_path) as (one, two):
            keys, remote_of_one = keys_of(16), one.cluster.remote
            await asyncio.to_thread(store, two, keys)
            link = one.cluster.peers._links[two.member().node_id]
            stub, nothing = link.stub, grpc.aio.Metadata()

            async def late(*_: Any, **__: Any) -> None:
                raise grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, nothing, nothing)

            link.stub = SimpleNamespace(Find=late)
            for timeout_s, usable in ((0.01, True), (1.0, False)):
                with pytest.raises(Unavailable):
                    await one.cluster.peers.find(two.member(), b"", keys, pin=False, timeout_s=timeout_s)
                assert one.cluster.peers.usable(two.member()) == usable
            link.stub = stub
            await soon(lambda: one.cluster.peers.usable(two.member()))

            async def never(*_: Any, **__: Any) -> list[Any]:
                await asyncio.Event().wait()
                return []

            remote_of_one.directory = SimpleNamespace(probe=never)
            array = np.frombuffer(keys, np.uint8).reshape(-1, 16)
            await remote_of_one.extend(store_pb2.LookupReply(), 1, SPEC, array, 0, pin=False, time_s=0.02)
            remote_of_one.directory = one.cluster.directory
            assert await found(one, keys) == [(2, 16)]

    run(work())


def test_a_lookup_that_is_given_up_half_way_leaves_no_lease(tmp_path):
    async def work() -> None:
        async with nodes(tmp_path) as (one, _):
            keys = keys_of(64)
            await asyncio.to_thread(store, one, keys[: 16 * 20])
            asked = asyncio.Event()

            async def never(_: Any, **__: Any) -> list[Any]:
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
