"""A path that fails while something is under way, or while it is taken out of the tables."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest
from core import ONE, Core

from flatcake_server import catalog, retire
from flatcake_server.catalog import UNLOADED_AT_ONCE
from flatcake_server.law import check_state
from flatcake_transport.errors import Unavailable


@contextlib.contextmanager
def unloaded_after(go: asyncio.Event, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A path that is lost has one segment taken out of the tables, and the others then."""
    with monkeypatch.context() as patch:
        patch.setattr(catalog, "UNLOADED_AT_ONCE", 1)
        patch.setattr(retire.Pace, "rest", lambda _: go.wait())
        yield


def test_a_path_that_fails_is_emptied_a_few_segments_at_a_time(core, monkeypatch):
    """All at once they held the loop for seconds, at 10 million blocks."""
    for number in range(10):
        core.put(ONE, [number], session=f"s{number}")
        core.put(ONE, [number, 9], session=f"s{number}", context_tokens=1, previous_reply_tokens=1)
    index, calls = core.store.catalog.index, []
    stored, remove = len(index), index.remove
    monkeypatch.setattr(index, "remove", lambda *arguments: calls.append(remove(*arguments)))
    _, lease = core.hit(ONE, [9, 9], pin=True)

    async def story() -> None:
        await core.lose(1)
        assert [core.hit(ONE, [number, 9])[0] for number in range(10)] == [0] * 10
        assert core.store.catalog.find(ONE.fingerprint, "s1") is None
        assert not calls

    core.do(story())
    assert (sum(calls), max(calls), len(core.store.catalog)) == (stored, UNLOADED_AT_ONCE, 0)
    assert stored > UNLOADED_AT_ONCE
    assert len(core.node.retirement.limbo) == 1, "leased memory waits"
    core.check()
    core.store.release(core.clients[0], [lease])
    core.do(core.store.tick(600.0))
    assert core.node.memory.used_bytes == 0


def test_a_lost_path_is_emptied_whatever_goes_wrong_on_the_way(core, monkeypatch, caplog):
    for number in range(10):
        core.put(ONE, [number], session=f"s{number}")
        core.put(ONE, [number, 9], session=f"s{number}", context_tokens=1, previous_reply_tokens=1)
    index, calls = core.store.catalog.index, []
    remove = index.remove

    def fails_once(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise RuntimeError("the test broke it")
        return remove(*arguments)

    monkeypatch.setattr(index, "remove", fails_once)
    monkeypatch.setattr(retire, "UNLOAD_AGAIN_S", 0.0)
    core.do(core.lose(1))
    assert len(core.store.catalog) == len(index) == core.node.memory.used_bytes == 0
    assert core.node.retirement.counts["unforeseen"] == 1
    assert "lost is taken out of the tables later" in caplog.text
    assert not core.store.catalog._lost_pools


def test_what_a_path_lost_is_stored_again_before_it_is_emptied(tmp_path, monkeypatch):
    core, go = Core(tmp_path, paths=2), asyncio.Event()
    core.open(ONE)
    for number in range(6):
        core.put(ONE, [number, 0], session=f"s{number}")
    lost = [s for s in core.store.catalog.sessions.values() if s.pool == 1]
    names = [int(session.name[1:]) for session in lost]
    assert 0 < len(names) < 6

    def state() -> list[str]:
        return check_state(core.store, core.node.memory, core.node.ssd_range)

    async def story() -> None:
        await core.lose(1)
        try:
            assert state() == []
            for number in names:
                assert core.hit(ONE, [number, 0])[0] == 0
                await core.commit(await core.begin(ONE, [number, 0, 1], session=f"s{number}"))
            assert not any(session.gone for session in lost[1:])
            assert [core.hit(ONE, [number, 0, 1])[0] for number in names] == [3] * len(names)
            assert state() == []
        finally:
            go.set()

    with unloaded_after(go, monkeypatch):
        core.do(story())
    assert all(session.gone for session in lost)
    assert [core.hit(ONE, [number, 0])[0] for number in range(6)] == [2] * 6
    core.check(data=True)
    core.check_rest()
    core.close()


@pytest.mark.parametrize("work", ["make_file", "cut_files"])
def test_a_path_is_lost_while_a_file_of_it_is_made_or_cut(core, work):
    """Every byte of the address range has one owner all the same, until the next start."""
    core.put(ONE, [1] * 20)
    disk = core.node.disks[1]
    real = disk.run

    async def run(asked, *arguments):
        result = await real(asked, *arguments)
        if asked == getattr(disk, work):
            await core.lose(1)
            await asyncio.gather(*core.node.retirement.unloading)
        return result

    disk.run = run
    core.now_s += 700
    if work == "make_file":
        with pytest.raises(Unavailable, match="out of service"):
            core.put(ONE, [2], session="new")
    else:
        core.do(core.store.tick(600.0))
    assert disk.failure
    assert not core.store.catalog.sessions
    core.check()


def test_a_trim_fails_when_its_path_is_lost_already(core):
    core.put(ONE, [1] * 20)
    disk = core.node.disks[1]

    async def run(*_):
        await core.lose(1)
        await asyncio.gather(*core.node.retirement.unloading)
        raise Unavailable("EIO")

    disk.run = run
    core.now_s += 700
    core.do(core.store.tick(600.0))
    core.check()


def test_a_commit_whose_path_is_lost_before_it_is_visible_is_none(core):
    disk = core.node.disks[1]
    real = disk.run

    async def run(work, *arguments):
        result = await real(work, *arguments)
        if work == disk.journal.commit:
            await core.lose(1)
        return result

    turn = core.do(core.begin(ONE, [1]))
    disk.run = run
    with pytest.raises(Unavailable, match="lost with its SSD path"):
        core.do(core.commit(turn))
    assert core.hit(ONE, [1])[0] == 0


@pytest.mark.parametrize("full", [{"sessions_max": 8}, {"index_blocks_max": 16}], ids=["sessions", "index"])
def test_a_full_table_has_room_where_a_path_was_lost(tmp_path, monkeypatch, full):
    """Nothing of a path that is well goes for what is on its way out."""
    core, go = Core(tmp_path, paths=2, **full), asyncio.Event()
    core.open(ONE)
    core.store.disks[1].quota_bytes -= 16 << 12  # so that more lies on the other
    for number in range(8):
        core.put(ONE, [number, 0], session=f"s{number}")
    well = [session for session in core.store.catalog.sessions.values() if session.pool == 2]
    assert 4 < len(well) < 8

    async def story() -> None:
        await core.lose(1)
        try:
            await core.commit(await core.begin(ONE, [99, 0], session="new"))
            assert not any(session.gone for session in well)
        finally:
            go.set()

    with unloaded_after(go, monkeypatch):
        core.do(story())
    core.check()
    core.close()


def test_the_end_does_not_wait_for_a_lost_path_to_be_emptied(tmp_path, monkeypatch):
    core = Core(tmp_path)
    core.open(ONE)
    core.put(ONE, [1], session="s")

    async def story() -> None:
        monkeypatch.setattr(retire.Pace, "rest", lambda _: asyncio.Event().wait())
        await core.lose(1)
        (emptying,) = core.node.retirement.unloading
        await core.node.retirement.drain()
        await asyncio.wait({emptying})
        assert emptying.cancelled()

    core.do(story())
    core.close()
