"""A path that hangs: what begins on it, and what does not."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest
from core import Core, Yield

from flatcake_server import disk as disk_module
from flatcake_server.catalog import MEMORY_POOL
from flatcake_server.disk import Disk
from flatcake_server.handover import Handover
from flatcake_server.session import DiskFull
from flatcake_transport.errors import Overloaded, Unavailable
from flatcake_transport.handoff import Request, Status, Verb
from flatcake_transport.space import SpaceSpec

ONE = SpaceSpec("one", "u8", 16, (4096,))


def test_a_path_that_is_memory_is_served_and_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(disk_module, "is_memory", lambda path: path == tmp_path)
    disk = Disk(tmp_path, 1, 1 << 20, 8)
    disk.open()
    disk.close()
    assert f"{tmp_path} is memory" in caplog.text


def test_a_path_that_hangs_takes_nothing_new_and_then_goes_on(tmp_path, monkeypatch):
    disk, hang = Disk(tmp_path, 1, 1 << 20, 8), threading.Event()

    async def story() -> None:
        assert disk.waited_s == 0
        reading = asyncio.ensure_future(disk.read(hang.wait))
        disk.admit()
        monkeypatch.setattr(disk_module, "STUCK_S", 0.0)
        disk.admit()  # a long read says nothing of the disk
        working = asyncio.ensure_future(disk.run(hang.wait))
        while not disk.waited_s:
            await asyncio.wait({working}, timeout=0.001)
        with pytest.raises(Overloaded, match="has not ended its oldest operation"):
            disk.admit()
        hang.set()
        await asyncio.gather(reading, working)
        assert disk.waited_s == 0
        disk.admit()

    asyncio.run(story())
    disk.close()


def test_a_path_that_hangs_takes_none_of_the_others_along(tmp_path, monkeypatch):
    """It has most room, since nothing is stored on it."""
    core = Core(tmp_path, paths=2, open_turns_max=4)
    core.open(ONE)
    slow = core.store.disks[1]
    monkeypatch.setattr(type(slow), "waited_s", property(lambda disk: 5.0 if disk is slow else 0.0))
    for number in range(12):
        core.put(ONE, [number, 0], session=f"s{number}")
    assert {session.pool for session in core.store.catalog.sessions.values()} == {2}
    monkeypatch.setattr(type(slow), "waited_s", property(lambda disk: 60.0 if disk is not slow else 0.0))
    with pytest.raises(Overloaded, match="has not ended"):
        core.put(ONE, [0, 0, 1], session="s0")
    assert not core.store.turns
    core.put(ONE, [99], session="new")
    assert core.store.catalog.find(ONE.fingerprint, "new").pool == 1
    core.check(data=True)
    core.check_rest()
    core.close()


@pytest.mark.parametrize("full", [{"sessions_max": 12}, {"index_blocks_max": 24}], ids=["sessions", "index"])
def test_a_full_table_drops_nothing_of_a_path_that_hangs(tmp_path, monkeypatch, full):
    """It has most; whoever begins a turn on another path would wait for its journal."""
    core = Core(tmp_path, paths=2, **full)
    core.open(ONE)
    slow, slow_s = core.store.disks[1], 0.0
    monkeypatch.setattr(type(slow), "waited_s", property(lambda disk: slow_s if disk is slow else 0.0))
    core.store.disks[2].quota_bytes -= 16 << 12  # so that more lies on the first
    for number in range(12):
        core.put(ONE, [number, 0], session=f"s{number}")
    before = [session.pool for session in core.store.catalog.sessions.values()]
    assert before.count(1) > before.count(2) > 1
    slow_s = 5.0
    core.put(ONE, [99, 0], session="new")
    after = [session.pool for session in core.store.catalog.sessions.values()]
    assert after.count(1) == before.count(1)
    assert core.node.room.reclaimed.keys() == {2}
    assert core.hit(ONE, [99, 0])[0] == 2
    core.close()


@pytest.mark.parametrize("full", [{"sessions_max": 11}, {"index_blocks_max": 18}], ids=["sessions", "index"])
def test_a_full_table_drops_nothing_in_memory_whose_files_are_on_a_path_that_hangs(tmp_path, monkeypatch, full):
    """Most is in memory, and all that is there would have to wait; the other path can spare some."""
    core, slow = Core(tmp_path, paths=2, **full), 1
    core.open(ONE)
    monkeypatch.setattr(Disk, "waited_s", property(lambda disk: 5.0 if disk.pool == slow else 0.0))
    for number in range(3):
        core.put(ONE, [number], session=f"s{number}")
    slow = 2
    for number in range(3, 10):
        core.put(ONE, [number], session=f"s{number}")
        core.put(ONE, [number, 9], session=f"s{number}", context_tokens=1, previous_reply_tokens=1)
    core.put(ONE, [10], session="s10")
    pools = core.store.catalog.order.sessions_in
    assert [pools(pool) for pool in range(3)] == [7, 8, 3]
    slow = 1
    core.put(ONE, [99], session="new")
    assert [pools(pool) for pool in range(2)] == [7, 8]
    assert core.node.room.reclaimed.keys() == {2}
    assert core.hit(ONE, [99])[0] == 1
    core.close()


def test_a_reader_has_the_files_of_the_paths_that_do_not_hang(tmp_path, monkeypatch):
    core = Core(tmp_path, paths=2)
    core.open(ONE)
    core.put(ONE, [1, 2], session="s")
    core.put(ONE, [1, 2, 3], session="t")
    slow = core.store.disks[core.store.catalog.find(ONE.fingerprint, "s").pool]
    (there,) = core.store.catalog.find(ONE.fingerprint, "t").files
    _, lease = core.hit(ONE, [1, 2, 3], pin=True)
    turn = core.do(core.begin(ONE, [1, 2, 4], session="s"))
    assert set(core.store.files_of_lease(core.clients[0], lease).values()) == {*core.store.disks.values()}
    handover = Handover(core.store, core.node.arena, core.node.config.handover_path, 0o600, 1)
    monkeypatch.setattr(type(slow), "waited_s", property(lambda disk: 60.0 if disk is slow else 0.0))
    reply, fds = core.do(handover._answer(core.clients[0], Request(Verb.LEASE, lease, 0)))
    assert (reply.status, reply.file_ids, reply.more, len(fds)) == (Status.OK, (there.file_id,), False, 1)
    assert core.store.counts["files_unopened"] == 0, "it may be well"
    reply, none = core.do(handover._answer(core.clients[0], Request(Verb.TURN, turn.turn_id, 0)))
    assert (reply.status, none) == (Status.FAILED, [])
    os.close(*fds)
    core.do(core.abort(turn))
    core.close()


def test_a_client_that_goes_leaves_no_turn_behind_one_whose_path_hangs(tmp_path, monkeypatch):
    core, hang = Core(tmp_path), asyncio.Event()
    core.open(ONE)
    turns = [core.do(core.begin(ONE, [number], session=f"s{number}")) for number in range(2)]
    real = type(core.store.reserver).give_back

    async def give_back(self, parts):
        if parts == turns[0].parts:
            await hang.wait()
        await real(self, parts)

    monkeypatch.setattr(type(core.store.reserver), "give_back", give_back)

    async def story():
        going = asyncio.ensure_future(core.store.client_gone(core.clients[0]))
        for _ in range(100):
            await Yield()
        assert not going.done()
        assert [session.name for session in core.store.catalog.sessions.values()] == ["s0"]
        assert (len(core.store.turns), core.store._reserved_blocks) == (0, 0)
        hang.set()
        await going

    core.do(story())
    core.check()
    core.check_rest()
    core.close()


def test_a_daemon_that_can_open_no_more_is_no_full_disk(tmp_path, caplog):
    """An operator who is told to make room would look in vain."""
    core = Core(tmp_path)
    core.open(ONE)
    core.faults["short"], core.faults["create"] = 1, 2  # also without headroom
    with pytest.raises(Overloaded):
        core.put(ONE, [1])
    assert not core.node.disks[1].full
    assert caplog.text.count("takes no file") == 1
    core.close()


def test_a_disk_that_others_fill_takes_none_of_the_others_along(tmp_path, monkeypatch):
    """By its quota it has most room, since nothing is stored on it. It is tried again once in a while."""
    core, tries = Core(tmp_path, paths=2), []
    core.open(ONE)
    full = core.node.disks[1]
    full.files.create = lambda *_: tries.append(core.now_s) or refuse()
    core.store.reserver._wall_s = lambda: 1e9 - core.now_s  # somebody sets it back

    def refuse():
        raise DiskFull("others are there")

    for number in range(8):
        core.put(ONE, [number, 0], session=f"s{number}")
        assert core.store.catalog.find(ONE.fingerprint, f"s{number}").pool == 2
        core.now_s += 10
    assert full.full
    assert sorted({int(at_s - tries[0]) for at_s in tries}) == [0, 60]
    core.check(data=True)
    core.check_rest()
    core.close()


@pytest.mark.parametrize("error", [Overloaded("too large"), Unavailable("EIO")], ids=["too large", "dead"])
def test_a_path_that_takes_no_file_leaves_it_to_the_next(tmp_path, error):
    """For whatever reason. Where none takes it, the session stays where it was: nothing of it is lost with a path."""
    core = Core(tmp_path, paths=3)
    core.open(ONE)
    core.put(ONE, [1], session="s", turn=2, context_tokens=1, previous_reply_tokens=1)
    session = core.store.catalog.find(ONE.fingerprint, "s")
    assert (session.pool, session.files) == (MEMORY_POOL, [])

    def refuse(*_):
        raise error

    core.node.disks[1].files.create = refuse
    core.put(ONE, [2], session="t")
    assert core.store.catalog.find(ONE.fingerprint, "t").pool == 2
    for disk in core.node.disks.values():
        disk.files.create = refuse
    with pytest.raises(type(error)):
        core.put(ONE, [1, 2], session="s")
    assert session.pool == MEMORY_POOL
    for pool in core.node.disks:
        core.do(core.lose(pool))
    assert core.hit(ONE, [1])[0] == 1
    core.check()
    core.close()


def test_a_disk_that_others_fill_is_said_and_not_at_each_turn(tmp_path, caplog):
    core = Core(tmp_path)
    core.open(ONE)
    disk = core.node.disks[1]
    core.faults["full"] = 1
    for later_s, lines in ((0, 1), (1, 1), (60, 2)):
        core.now_s += later_s
        core.faults["create"] = 2  # also without headroom
        with pytest.raises(Overloaded):
            core.put(ONE, [1])
        assert disk.full
        assert caplog.text.count("takes no file") == lines
    core.put(ONE, [1])
    assert not disk.full
    core.check()
    core.close()
