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
from flatcake_server.cluster import cluster as cluster_module
from flatcake_server.cluster.members import Member
from flatcake_server.cluster.remote import _checked
from flatcake_transport.address import Address, Medium
from flatcake_transport.errors import Unavailable


def test_leases_are_renewed_and_given_back(tmp_path):
    async def work() -> None:
        async with nodes(tmp_path) as (one, two):
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

    run(work())


def test_after_a_broken_link_an_owner_holds_what_is_read_and_nothing_else(tmp_path):
    """The engines that read there do not hear of it: what they read must not change under them."""

    async def work() -> None:
        async with nodes(tmp_path) as (one, two):
            keys = keys_of(16)
            await asyncio.to_thread(store, two, keys)
            peers, owner, leases = one.cluster.peers, two.member(), two.node.leases
            with await asyncio.to_thread(Wire, one.endpoint) as wire:
                read, ended = [(await asyncio.to_thread(remote, wire, keys))[1] for _ in range(2)]
                lost = await peers.find(owner, SPEC.to_json(), keys, pin=True, timeout_s=5)  # as if no reply had come
                assert leases.stats().leases == 3
                until_s = asyncio.get_running_loop().time() + 1e6
                peers.keep([])
                peers._pauses[2] = owner, until_s, 1.0  # and it cannot be made again
                await asyncio.to_thread(wire.call, "Release", lease_ids=[ended.lease_id])
                await soon(lambda: two.cluster.stats().attached == 0)
                two.cluster.service.sweep()
                assert leases.stats().leases == 3, "an engine may read what was lent"
                del peers._pauses[2]
                await peers.attach(owner)
                assert leases.held_by(leases.get(read.nodes[0].lease_id).client_id) == [read.nodes[0].lease_id]
                assert leases.get(lost.lease_id) is None
                renewed = await asyncio.to_thread(wire.call, "Renew", lease_ids=[read.lease_id])
                assert list(renewed.alive_remote) == [read.lease_id], "and reads on"
                await asyncio.to_thread(wire.call, "Release", lease_ids=[read.lease_id])
                await soon(lambda: not leases.stats().leases)
            assert leases.stats().expired_total == 0

    run(work())


def test_a_lease_that_ends_while_its_owner_is_attached_to_is_given_back(tmp_path):
    """It was named as held a moment before."""

    async def work() -> None:
        async with nodes(tmp_path) as (one, two):
            keys = keys_of(16)
            await asyncio.to_thread(store, two, keys)
            peers, owner, loans = one.cluster.peers, two.member(), one.cluster._loans
            with await asyncio.to_thread(Wire, one.endpoint) as wire:
                _, reply = await asyncio.to_thread(remote, wire, keys)
                held = peers._held

                def named(member: Member) -> list[int]:
                    ids = list(held(member))
                    loans.end([reply.lease_id])
                    return ids

                peers._held = named
                peers.keep([])
                await peers.attach(owner)
                assert two.node.leases.stats().leases == 0

    run(work())


def test_what_comes_by_a_link_that_ended_is_not_taken_in(tmp_path):
    """The owner may have ended that lease: it was not named when we attached again."""

    async def work() -> None:
        async with nodes(tmp_path) as (one, two):
            keys = keys_of(16)
            await asyncio.to_thread(store, two, keys)
            peers, owner = one.cluster.peers, two.member()
            link = await peers._link(owner)

            async def late(request: Any, **options: Any) -> Any:
                reply = await link.stub.Find(request, **options)
                peers.keep([])
                await peers.attach(owner)
                return reply

            request = peer_pb2.FindRequest(peer_id=link.peer_id, space=SPEC.to_json(), keys=keys, pin=True)
            with pytest.raises(Unavailable, match="ended"):
                await peers._ask(link, "find", late, request, 5)
            assert two.node.leases.stats().leases == 0
            assert peers.usable(owner)

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


@pytest.mark.parametrize("error", [Unavailable("no answer in time"), KeyError("a reason nobody foresaw")], ids=type)
def test_an_owner_that_is_slow_takes_no_more_than_half_of_a_renewal_s_time(tmp_path, error):
    """The client gives it a second; a daemon that does not answer in that is left alone by all its lookups."""

    async def work() -> None:
        async with nodes(tmp_path, peer_timeout=30.0) as (one, two):
            keys = keys_of(16)
            await asyncio.to_thread(store, two, keys)
            given: list[float] = []

            async def slow(*_: Any, timeout_s: float) -> list[int]:
                given.append(timeout_s)
                raise error

            def ask() -> tuple[list[int], list[int]]:
                with Wire(one.endpoint) as wire:
                    lease_id = remote(wire, keys)[1].lease_id
                    one.cluster.remote.peers = SimpleNamespace(prolong=slow, usable=lambda _: False)
                    reply = wire.call("Renew", lease_ids=[lease_id])
                    return list(reply.alive), list(reply.alive_remote)

            alive, elsewhere = await asyncio.to_thread(ask)
            assert (len(alive), elsewhere) == (1, [])
            assert one.node.retirement.counts["unforeseen"] == isinstance(error, KeyError)
            assert len(given) == 1
            assert 0 < given[0] < 11, "of the 20 s that the wire gives, and some"
            one.cluster.remote.peers = one.cluster.peers

    run(work())


def test_leases_are_renewed_also_where_the_link_ended(tmp_path, monkeypatch):
    """In a large cluster nobody makes one again before it is needed."""

    async def work() -> None:
        loop = asyncio.get_running_loop()
        async with nodes(tmp_path) as (one, two):
            keys = keys_of(16)
            await asyncio.to_thread(store, two, keys)
            monkeypatch.setattr(cluster_module, "EAGER_LINKS_MAX", 0)

            def ask() -> list[int]:
                with Wire(one.endpoint) as wire:
                    lease_id = remote(wire, keys)[1].lease_id
                    loop.call_soon_threadsafe(one.cluster.peers.keep, ())
                    return list(wire.call("Renew", lease_ids=[lease_id]).alive_remote)

            assert len(await asyncio.to_thread(ask)) == 1

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
