"""The directory in a real redis-server, and in a Redis Cluster of six."""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from redis_server import RedisCluster, RedisServer, needs_redis

from flatcake_server.cluster.directory import Holder
from flatcake_server.cluster.members import Member, Verdict
from flatcake_server.cluster.publisher import Batch
from flatcake_server.cluster.redis_directory import RedisDirectory
from flatcake_transport.errors import Unavailable

pytestmark = needs_redis

ME = Member(3, b"a" * 16, "10.0.0.3:7450", "1", b"f" * 16)
OTHER = replace(ME, incarnation=b"b" * 16)
BUCKETS = 64  # so that many anchors share one
SEVEN = replace(ME, node_id=7, incarnation=b"7" * 16)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


def run(url: str, work: Callable[[RedisDirectory], Awaitable[None]], timeout_s: float = 20.0) -> None:
    """With a cluster name of its own, so that tests share one server."""

    async def all_of_it() -> None:
        directory = RedisDirectory(url, secrets.token_hex(4), timeout_s=timeout_s, buckets=BUCKETS)
        try:
            await work(directory)
        finally:
            await directory.close()

    asyncio.run(all_of_it())


async def membership(directory):
    beat = await directory.beat(ME, 10, b"", members=True)
    assert (beat.verdict, beat.members) == (Verdict.FRESH, (ME,))
    assert (await directory.beat(ME, 10, b"", members=False)).members is None, "unchanged"
    beat = await directory.beat(SEVEN, 10, b"", members=False)
    assert set(beat.members) == {ME, SEVEN}
    beat = await directory.beat(OTHER, 10, b"", members=False)
    assert (beat.verdict, beat.holder) == (Verdict.TAKEN, ME)
    assert (await directory.beat(OTHER, 10, b"c" * 16, members=False)).verdict is Verdict.TAKEN
    assert (await directory.beat(OTHER, 10, ME.incarnation, members=False)).verdict is Verdict.FRESH
    assert (await directory.beat(ME, 10, b"", members=False)).verdict is Verdict.TAKEN, "the old one is told"
    await directory.leave(ME)
    assert (await directory.beat(OTHER, 10, b"", members=True)).verdict is Verdict.RENEWED, "not its own to give back"
    await directory.leave(OTHER)
    assert (await directory.beat(SEVEN, 10, b"", members=True)).members == (SEVEN,)


async def anchors(directory):
    keys = [bytes([n]) * 16 for n in range(100)]
    assert await directory.probe(keys) == [[]] * 100
    await directory.tell(ME, Batch(tuple(keys), ()))
    await directory.tell(SEVEN, Batch(tuple(keys[:50]), ()))
    await directory.tell(ME, Batch((), tuple(keys[40:60])))
    me, seven = Holder(3, b"aaaa"), Holder(7, b"7777")
    found = await directory.probe(keys)
    assert [set(holders) for holders in found] == ([{me, seven}] * 40 + [{seven}] * 10 + [set()] * 10 + [{me}] * 40)
    reborn = replace(ME, incarnation=b"new" * 5 + b"!")
    await directory.tell(reborn, Batch(tuple(keys[:1]), ()))
    assert set((await directory.probe(keys[:1]))[0]) == {me, Holder(3, b"newn"), seven}
    assert await directory.sweep(range(BUCKETS), lambda holders: {me} & set(holders)) == 80
    found = await directory.probe(keys)
    assert set(found[0]) == {Holder(3, b"newn"), seven}
    assert found[1:] == [[seven]] * 49 + [[]] * 50, "nothing of the dead, and all of the others"
    assert await directory.sweep(range(BUCKETS), lambda _: set()) == 0
    await directory.tell(ME, Batch(tuple(keys[60:]), ()))


def test_membership(server):
    run(server.url, membership)


def test_anchors(server):
    run(server.url, anchors)


def test_who_lapses_is_off_the_list_that_the_others_are_sent(server):
    async def work(directory):
        await directory.beat(SEVEN, 60, b"", members=False)
        assert set((await directory.beat(ME, 60, b"", members=False)).members) == {ME, SEVEN}
        await directory.beat(SEVEN, 1, b"", members=False)
        deadline_s = time.monotonic() + 10
        while (beat := await directory.beat(ME, 10, b"", members=False)).members is None:
            assert time.monotonic() < deadline_s
        assert (beat.verdict, beat.members) == (Verdict.RENEWED, (ME,))
        assert (await directory.beat(ME, 10, b"", members=False)).members is None
        assert (await directory.beat(SEVEN, 10, b"", members=False)).verdict is Verdict.FRESH

    run(server.url, work)


def test_after_its_data_was_lost_nobody_keeps_the_old_list(server):
    """As many come again as there were: who counts from nothing would come to what all know already."""
    name = secrets.token_hex(4)
    again = [replace(ME, node_id=number, incarnation=bytes([number]) * 16) for number in (1, 2, 3)]
    reborn = replace(again[0], incarnation=b"reborn, reborn!!")

    async def work(_):
        nodes = [RedisDirectory(server.url, name, timeout_s=20.0, buckets=BUCKETS) for _ in range(4)]
        for me, node in [*zip(again, nodes, strict=False)] * 2:
            await node.beat(me, 10, b"", members=False)
        server.command("FLUSHALL")
        order = [(reborn, nodes[3]), (again[1], nodes[1]), (again[2], nodes[2])]
        beats = [await node.beat(me, 10, b"", members=False) for me, node in order]
        assert [beat.verdict for beat in beats] == [Verdict.FRESH] * 3
        assert set(beats[2].members) == {reborn, *again[1:]}, "it is sent what it believes to know"
        for me, node in order:
            await node.beat(me, 10, b"", members=False)
        assert (await nodes[2].beat(again[2], 10, b"", members=False)).members is None
        for node in nodes:
            await node.close()

    run(server.url, work)


def test_a_version_that_begins_again_is_none_that_was(server):
    """It begins with the time: what was counted before is behind it."""

    async def work(directory):
        await directory.beat(ME, 10, b"", members=False)
        assert abs(int(directory._version) / 1000 - time.time()) < 60

    run(server.url, work)


def test_ids_expire_by_the_directory_s_clock_and_anchors_do_not(server):
    async def work(directory):
        await directory.beat(ME, 0.1, b"", members=True)
        await directory.tell(ME, Batch((b"k" * 16,), ()))
        deadline_s = time.monotonic() + 10
        while (await directory.beat(OTHER, 0.1, b"", members=True)).verdict is Verdict.TAKEN:
            assert time.monotonic() < deadline_s
        assert await directory.probe([b"k" * 16]) == [[Holder(3, b"aaaa")]]

    run(server.url, work)


def test_anchors_of_one_bucket_are_told_apart(server):
    """Also those that differ in one bit of what is kept of them, at either end of a bucket."""

    async def work(directory):
        same, first, last = bytes(4), b"\0" * 5, b"\xff" * 5
        keys = [same + middle + b"rest..." for middle in (first, first[:4] + b"\1", last[:4] + b"\xfe", last)]
        assert len({directory.place(key).bucket for key in keys}) == 1
        far = replace(ME, node_id=4095, incarnation=b"\xff" * 16)
        for number, key in enumerate(keys):
            await directory.tell(replace(ME, node_id=number), Batch((key,), ()))
            await directory.tell(far, Batch((key,), ()))
        found = await directory.probe(keys)
        assert [set(each) for each in found] == [
            {Holder(number, b"aaaa"), Holder(4095, b"\xff" * 4)} for number in range(4)
        ]

    run(server.url, work)


def test_keys_fall_into_all_buckets():
    directory = RedisDirectory("redis://nowhere", "c", timeout_s=1.0, buckets=7)
    assert {directory.place(bytes([byte]) * 16).bucket for byte in range(256)} == {f"fc:c:b:{n}" for n in range(7)}


def test_a_lost_directory_says_fresh_and_one_that_kept_its_data_does_not(tmp_path):
    with RedisServer(tmp_path) as server:

        async def work(directory):
            await directory.beat(ME, 60, b"", members=True)
            await directory.tell(ME, Batch((b"k" * 16,), ()))
            server.restart(keep=True)
            assert await directory.probe([b"k" * 16]) == [[Holder(3, b"aaaa")]], "on a connection that was closed"
            assert (await directory.beat(ME, 60, b"", members=True)).verdict is Verdict.RENEWED
            server.restart(keep=False)
            assert await directory.probe([b"k" * 16]) == [[]]
            assert (await directory.beat(ME, 60, b"", members=True)).verdict is Verdict.FRESH

        run(server.url, work)


def test_gone_or_hanging_is_unavailable_within_the_deadline(tmp_path):
    with RedisServer(tmp_path) as server:

        async def work(directory):
            await directory.beat(ME, 60, b"", members=True)
            server.signal(signal.SIGSTOP)
            directory._timeout_s = 0.3
            for ask in (lambda: directory.beat(ME, 60, b"", members=True), lambda: directory.probe([b"k" * 16] * 50)):
                asked_s = time.monotonic()
                with pytest.raises(Unavailable, match="does not answer"):
                    await ask()
                assert time.monotonic() - asked_s < 2.0
            server.signal(signal.SIGCONT)
            directory._timeout_s = 20.0
            assert (await directory.beat(ME, 60, b"", members=True)).verdict is Verdict.RENEWED
            server.stop()
            with pytest.raises(Unavailable):
                await directory.probe([b"k" * 16])
            server.start()
            await directory.probe([b"k" * 16])

        run(server.url, work)


def test_nobody_at_the_url():
    async def work(directory):
        with pytest.raises(Unavailable):
            await directory.beat(ME, 60, b"", members=True)

    run("redis://127.0.0.1:1,redis://127.0.0.1:2", work)


def test_a_redis_cluster_of_six(tmp_path):
    """Membership on one slot, anchors over all; a primary that dies costs its share until its replica takes over."""
    with RedisCluster(tmp_path) as cluster:

        async def work(directory):
            await membership(directory)
            await anchors(directory)
            await asyncio.to_thread(cluster.replicated)
            directory._timeout_s = 2.0
            cluster.servers[0].signal(signal.SIGKILL)
            keys = [bytes([n]) * 16 for n in range(60, 100)]
            deadline_s = time.monotonic() + 60
            while True:
                try:
                    found = await directory.probe(keys)
                    await directory.beat(ME, 10, b"", members=True)
                    break
                except Unavailable:
                    assert time.monotonic() < deadline_s
            assert found == [[Holder(3, b"aaaa")]] * 40, "replicas had them"

        run(cluster.url, work)
