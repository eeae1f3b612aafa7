"""What a restart knows of when sessions were used."""

from __future__ import annotations

import asyncio

import pytest
from core import ONE, Core, Yield

from flatcake_server.journal_records import SESSIONS
from flatcake_server.uses import TELL_S, tell_uses
from flatcake_transport.errors import Unavailable


@pytest.fixture
def core(tmp_path):
    node = Core(tmp_path, paths=2)
    node.open(ONE)
    for number, name in enumerate(("read", "written", "forgotten")):
        node.now_s += 1
        node.put(ONE, [number, 1, 2], session=name)
    yield node
    node.check(data=True)
    node.close()


def order(core):
    """Of reclaim, the first to go first."""
    sessions = core.store.catalog.sessions
    return [sessions[number].name for number in core.store.catalog.order.sessions()]


def test_what_is_read_often_is_not_the_first_to_go_after_a_restart(core):
    assert order(core) == ["read", "written", "forgotten"]
    core.now_s += TELL_S
    core.hit(ONE, [0, 1, 2])
    core.do(core.store.tick(600))
    assert not core.store.catalog.used
    core.restart()
    assert order(core) == ["written", "forgotten", "read"]


@pytest.mark.parametrize("how", ["hangs", "fails"])
def test_a_path_that_hangs_or_fails_keeps_nothing_from_the_other(core, how):
    """Also from its tails, which are given back in the same walk of the clock."""
    go = asyncio.Event()
    sessions = {s.name: s for s in core.store.catalog.sessions.values()}
    away = sessions["read"].pool
    (well,) = [disk for pool, disk in core.store.disks.items() if pool != away]

    async def run(*_):
        await go.wait()
        raise Unavailable("EIO")

    core.store.disks[away].run = run
    if how == "fails":
        go.set()
    core.now_s += TELL_S
    for number in range(3):
        core.hit(ONE, [number, 1, 2])
    core.now_s += 1000.0
    records, before = core.records(well.pool).records, dict(core.records(well.pool).records)

    async def story() -> None:
        ticks = [asyncio.ensure_future(core.store.tick(600.0)) for _ in range(2)]
        for _ in range(100):
            await Yield()
        assert any(key.startswith(SESSIONS) for key in records if records[key] != before.get(key))
        assert not any(s.tail_bytes for s in sessions.values() if s.pool == well.pool)
        go.set()
        await asyncio.gather(*ticks, return_exceptions=True)

    core.do(story())


def test_it_is_told_once_in_so_long(core):
    core.do(core.store.tick(600))
    core.hit(ONE, [0, 1, 2])
    core.do(core.store.tick(600))
    assert core.store.catalog.used
    core.now_s += TELL_S
    core.do(core.store.tick(600))
    assert not core.store.catalog.used


def test_a_journal_hears_of_no_session_that_it_does_not_know_or_that_is_gone(core):
    before = len(core.records(1).records) + len(core.records(2).records)
    turn = core.do(core.begin(ONE, [7, 8], session="not committed"))
    catalog = core.store.catalog
    gone = catalog.find(ONE.fingerprint, "forgotten")
    core.hit(ONE, [2, 1, 2])
    catalog.used.add(turn.session.session_no)
    core.do(core.store.retirement.drop(gone))
    core.do(tell_uses(catalog, core.store.disks))
    core.do(core.abort(turn))
    assert len(core.records(1).records) + len(core.records(2).records) < before
    core.restart()
    assert sorted(order(core)) == ["read", "written"]


def test_who_has_the_session_s_lock_writes_it_down_itself(core):
    session = core.store.catalog.find(ONE.fingerprint, "read")
    core.hit(ONE, [0, 1, 2])

    async def beside() -> None:
        async with session.lock:
            await tell_uses(core.store.catalog, core.store.disks)

    core.do(beside())


def test_who_came_while_another_s_lock_was_waited_for_is_not_waited_for(core):
    """He may have the lock until somebody gives room who waits for ours."""
    first, second = (core.store.catalog.find(ONE.fingerprint, name) for name in ("read", "forgotten"))
    assert first.pool == second.pool
    core.store.catalog.used = {first.session_no, second.session_no}

    async def beside() -> None:
        await first.lock.acquire()
        before_us = asyncio.ensure_future(first.lock.acquire())
        await Yield()
        telling = asyncio.ensure_future(tell_uses(core.store.catalog, core.store.disks))
        first.lock.release()  # nobody has it for a moment, and somebody is next
        await Yield()
        async with second.lock:
            await before_us
            assert not telling.done()
            first.lock.release()
            await asyncio.wait_for(telling, 2)

    core.do(beside())
