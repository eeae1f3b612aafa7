"""Things that meet across an await: each is right alone, and together they must be too."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from core import ONE, Core, Yield, suspect

from flatcake_server import app, room
from flatcake_server.journal_records import FILES, SEGMENTS, SESSIONS
from flatcake_server.rpc import StoreService, Timings
from flatcake_transport.errors import Overloaded, Unavailable
from flatcake_transport.space import SpaceSpec

TWO = SpaceSpec("two", "u8", 16, (4096,), shards=2)
HEAD = [1] * 20  # its file has room for some single blocks more

PACES = pytest.mark.parametrize("pace", range(5))  # who is faster


def beside(core, *steps):
    """Turns of one block each, in the file of a session that is stored."""
    core.put(ONE, HEAD)
    session = core.store.catalog.find(ONE.fingerprint, "s")
    turns = [core.do(core.begin(ONE, [step])) for step in steps]
    assert all(turn.parts[0].file is session.files[0] for turn in turns)
    return session, turns


def torn_journals(core):
    """Kinds of records, after each write that left files without a session or segments without a file."""
    records = core._records[core.node.disks[1].path / "journal"]
    real, torn = records.write, []

    def write(puts, deletes, **options):
        real(puts, deletes, **options)
        kinds = {key[:1] for key in records.records}
        if (FILES in kinds and SESSIONS not in kinds) or (SEGMENTS in kinds and FILES not in kinds):
            torn.append(sorted(kinds))

    records.write = write
    return torn


def test_a_turn_in_a_file_whose_sync_failed_is_not_committed(core):
    """The kernel may have dropped what it wrote with what the other wrote, and would call the next sync a success."""
    _, (one, two) = beside(core, 2, 3)
    core.fail("write_footer")
    for turn in (one, two):
        with pytest.raises(Unavailable):
            core.do(core.commit(turn))
    assert core.hit(ONE, [3])[0] == 0


@PACES
def test_a_file_sealed_while_its_session_goes_leaves_a_journal_that_can_be_read(core, pace):
    session, (turn,) = beside(core, 2)

    async def dies():
        await core.store.client_gone(core.clients[0])
        await core.node.retirement.drop(session)

    core._turns = pace
    core.run(core.abort(turn, failure="EIO"), dies())
    core.restart()
    assert len(core.store.catalog) == 0


@pytest.mark.parametrize("steps", range(12))
def test_a_file_sealed_while_its_first_turn_commits_leaves_a_journal_that_can_be_read(core, steps):
    """The seal may not name a file whose session is not in the journal yet: a kill here would damage it."""
    one, two = core.do(core.begin(ONE, HEAD)), core.do(core.begin(ONE, [2]))
    torn = torn_journals(core)

    async def fails():
        for _ in range(steps):
            await Yield()
        await core.abort(two, failure="EIO")

    core.run(core.commit(one), fails())
    assert torn == []


def test_a_turn_that_nobody_heard_of_goes_with_its_client_or_alone(core):
    """Its call ended before it had begun, and the client's connection a moment before or after that."""
    service, client_id = StoreService(core.store, core.node.identity, Timings()), core.clients[0]

    async def story(client_goes):
        begun = asyncio.get_running_loop().create_future()
        begun.set_result(await core.begin(ONE, [1]))
        if client_goes:
            await core.store.client_gone(client_id)
        service._give_back(SimpleNamespace(client_id=client_id, shard=0), begun)

    for client_goes in (False, True):
        core.do(story(client_goes))
        assert not core.store.turns
    assert core.node.retirement.counts["unforeseen"] == 0


def test_turns_given_back_in_any_order_leave_no_hole(core):
    session, turns = beside(core, 2, 3)
    for turn in turns:
        core.do(core.abort(turn))
    assert session.files[0].tail == session.files[0].written_bytes


@PACES
@pytest.mark.parametrize("what", ["truncate", "journal"])
def test_a_session_dropped_while_its_trim_fails_frees_all_its_bytes(core, what, pace):
    session, _ = beside(core)
    core.fail(what)
    core.now_s += 700
    core._turns = pace
    core.run(core.store.tick(600.0), core.node.retirement.drop(session))
    core.check()


def test_a_session_quarantined_while_a_turn_on_top_of_it_gets_no_room_is_gone(core, monkeypatch):
    """It holds nothing, so no reclaim would ever find it and its file."""
    session, _ = beside(core)

    async def no_room(_sessions_max):
        await core.store.report_corrupt([suspect(session.segments[0])])
        raise Overloaded("as many sessions as there may be")

    monkeypatch.setattr(core.node.room, "for_session", no_room)
    with pytest.raises(Overloaded):
        core.do(core.begin(ONE, [*HEAD, 2]))
    assert session.gone


def test_a_session_that_is_forked_while_others_are_dropped_stays(core):
    core.put(ONE, [1], session="first")
    core.put(ONE, [2], session="parent")
    turn = core.do(core.begin(ONE, [2, 3], session="child"))
    first, parent = (core.store.catalog.find(ONE.fingerprint, name) for name in ("first", "parent"))
    drop = core.node.retirement.drop

    async def drop_slowly(session):
        await drop(session)
        if session is first:
            await core.commit(turn)

    core.node.retirement.drop = drop_slowly
    core.do(core.node.room._drop_all(1, [first.session_no, parent.session_no]))
    assert core.hit(ONE, [1])[0] == 0
    assert core.hit(ONE, [2, 3])[0] == 2


@pytest.mark.parametrize("medium", ["memory", "ssd"])
def test_keys_that_the_index_refuses_leave_nothing(core, monkeypatch, medium):
    """Keys made to meet in one sub-table. The bytes were freed and yet served, and committed in the journal."""
    hints = {"context_tokens": 1, "previous_reply_tokens": 1} if medium == "memory" else {}
    core.put(ONE, [1])
    turn = core.do(core.begin(ONE, [1, 2], **hints))
    assert (turn.parts[0].file is None) == (medium == "memory")
    with monkeypatch.context() as patch:

        def full(*_arguments):
            raise Overloaded("the sub-table is full: keys are skewed")

        patch.setattr(core.store.catalog.index, "insert", full)
        with pytest.raises(Unavailable, match="no room for keys like these"):
            core.do(core.commit(turn))
    core.check()
    core.check_rest()
    core.restart()
    core.open(ONE)
    assert core.hit(ONE, [1, 2])[0] == 1


@PACES
def test_a_session_dropped_while_a_segment_is_quarantined_leaves_a_journal_that_can_be_read(core, pace):
    session, (turn,) = beside(core, 2)
    core.do(core.commit(turn))
    torn = torn_journals(core)
    core._turns = pace
    core.run(core.store.report_corrupt([suspect(session.segments[0])]), core.node.retirement.drop(session))
    assert torn == []


def test_a_tick_that_fails_is_not_the_last(core, monkeypatch):
    """Leases end by it."""
    monkeypatch.setattr(app, "TICK_S", 0.001)
    ticks = []

    async def fails(_trim_after_s):
        ticks.append(len(ticks))
        raise KeyError("a bug")

    async def watch():
        core.store.tick = fails
        ticker = asyncio.ensure_future(core.node._tick())
        while len(ticks) < 3 and not ticker.done():
            await asyncio.wait({ticker}, timeout=0.001)
        ticker.cancel()

    core.loop.run_until_complete(watch())
    assert len(ticks) >= 3
    assert core.node.retirement.counts["unforeseen"] >= 2


@PACES
def test_tails_are_taken_from_all_sides_at_once(core, pace):
    """By the clock, for room, from a session that is dropped meanwhile and from one that goes on: nobody waits for ever."""
    for number in range(5):
        core.put(ONE, [number] * 8, session=f"s{number}")
    sessions = [core.store.catalog.find(ONE.fingerprint, f"s{number}") for number in range(5)]
    core.now_s += 700
    core._turns = pace
    retirement = core.node.retirement
    core.run(
        core.store.tick(600.0),
        retirement.drop(sessions[3]),
        core.begin(ONE, [2] * 9, session="s2"),
        core.begin(ONE, [9] * 12, session="large"),
        retirement.trim_idle(core.now_s + 1),
        core.begin(ONE, [4] * 9, session="s4"),
        core.begin(ONE, [8] * 12, session="large too"),
    )
    core.check()
    for turn in list(core.store.turns.values()):
        core.do(core.commit(turn))
    assert [core.hit(ONE, [number] * 9)[0] for number in (2, 4)] == [9, 9]


def test_who_trims_by_the_clock_waits_for_no_writer(core, monkeypatch):
    """The writer waits for a session to go whose lock the other would keep until the writer is done."""
    monkeypatch.setattr(room, "TRIMS_MAX", 0)
    for number in range(4):
        core.put(ONE, [number] * 8, session=f"s{number}")

    async def both():
        large, idle = core.begin(ONE, [3] * 36, session="s3"), core.node.retirement.trim_idle(core.now_s + 1)
        async with asyncio.timeout(30):
            return (await asyncio.gather(large, idle))[0]

    core.do(core.abort(core.do(both())))
    assert core.node.room.reclaimed[1] >= 2


@PACES
def test_ranks_join_while_a_place_in_the_tables_is_made(tmp_path, pace):
    """Or each would wait in a turn of its own for the other, and neither would ever be visible."""
    core = Core(tmp_path, sessions_max=3)
    core.open(ONE)
    core.open(TWO)
    for number in range(3):
        core.put(ONE, [number], session=f"s{number}")
    core._turns = pace
    turns = core.run(*(core.begin(TWO, [1, 2], shard=shard, client=shard) for shard in range(2)))
    assert turns[0] is turns[1]
    for shard in range(2):
        core.do(core.commit(turns[shard], shard=shard, client=shard))
    assert core.hit(TWO, [1, 2])[0] == 2
    core.check(data=True)
    core.check_rest()
    core.close()
