"""How space comes back, and what happens where it cannot."""

from __future__ import annotations

import asyncio

import pytest
from core import ONE, Core, suspect

from flatcake_server.records import Suspect
from flatcake_transport.errors import Overloaded, Unavailable

TIMEOUT_S = 10.0


def fill(core, count, first=0, **options):
    for number in range(first, first + count):
        core.put(ONE, [number, 0, 0], session=f"s{number}", **options)


def names(core):
    return [core.store.catalog.sessions[number].name for number in core.store.catalog.order.sessions()]


def test_the_least_recently_used_go(core):
    fill(core, 10)
    assert core.hit(ONE, [0, 0, 0])[0] == 3
    fill(core, 6, first=10)
    assert "s0" in names(core)
    assert "s1" not in names(core)
    assert names(core)[-1] == "s15"
    assert core.node.room.reclaimed[1] > 0


def test_what_is_leased_or_written_stays(core):
    fill(core, 1)
    _, lease = core.hit(ONE, [0, 0, 0], pin=True)
    turn = core.do(core.begin(ONE, [100], session="writes"))
    fill(core, 30, first=1)
    assert core.hit(ONE, [0, 0, 0])[0] == 3
    core.do(core.commit(turn))
    core.store.release(core.clients[0], [lease])
    fill(core, 30, first=40)
    assert core.hit(ONE, [0, 0, 0])[0] == 0


def test_a_parent_goes_after_its_forks(core):
    core.put(ONE, [1, 2], session="parent")
    core.put(ONE, [1, 2, 3], session="child")
    fill(core, 30, first=10)
    assert ("parent" in names(core)) >= ("child" in names(core))
    with pytest.raises(ValueError):
        core.node.catalog.order.dependents(999)


def test_what_would_not_fit_drops_nothing(core):
    fill(core, 10)
    before = names(core)
    with pytest.raises(Overloaded, match="of its quota"):
        core.do(core.begin(ONE, [9] * 100, session="large"))
    assert names(core) == before


def test_a_session_dropped_under_a_lease_keeps_its_memory_until_the_lease_ends(core):
    core.put(ONE, [1, 2], share_counts=[2, 2])
    _, lease = core.hit(ONE, [1, 2], pin=True)
    segment = next(iter(core.store.catalog.segments))
    core.do(core.store.report_corrupt([suspect(segment)]))
    assert core.hit(ONE, [1, 2])[0] == 0
    assert core.node.retirement.limbo_bytes == segment.total_bytes
    assert core.node.memory.used_bytes > 0
    core.check()
    core.store.release(core.clients[0], [lease])
    core.do(core.store.tick(600.0))
    assert core.node.memory.used_bytes == core.node.retirement.limbo_bytes == 0


def test_quarantine_while_a_turn_goes_on_top(core):
    core.put(ONE, [1, 2], share_counts=[2, 2])
    turn = core.do(core.begin(ONE, [1, 2, 3]))
    segment = next(iter(core.store.catalog.segments))
    core.do(core.store.report_corrupt([suspect(segment), Suspect(0x1234000, 1), suspect(segment)]))
    assert core.store.counts["corrupt_segments"] == 1
    core.do(core.commit(turn))
    core.check_rest()
    assert core.hit(ONE, [1, 2, 3])[0] == 0
    core.put(ONE, [1, 2, 3])
    assert core.hit(ONE, [1, 2, 3])[0] == 3


def test_a_report_of_what_stood_there_before_drops_nothing(core):
    core.put(ONE, [1, 2], share_counts=[2, 2])
    old = next(iter(core.store.catalog.segments))
    core.do(core.store.report_corrupt([suspect(old)]))
    core.do(core.store.tick(600.0))
    core.put(ONE, [1, 2], share_counts=[2, 2])
    new = next(iter(core.store.catalog.segments))
    assert new.address == old.address, "the same keys at the same place"
    core.do(core.store.report_corrupt([suspect(old)]))
    assert core.hit(ONE, [1, 2])[0] == 2
    assert core.store.counts["corrupt_segments"] == 1


def test_quarantine_is_for_good(core):
    core.put(ONE, [1, 2])
    core.put(ONE, [1, 2, 3])
    segment = core.store.catalog.find(ONE.fingerprint, "s").segments[0]
    core.do(core.store.report_corrupt([suspect(segment)]))
    assert core.hit(ONE, [1, 2, 3])[0] == 0
    core.restart()
    core.open(ONE)
    assert core.hit(ONE, [1, 2, 3])[0] == 0
    core.put(ONE, [1, 2, 3])
    assert core.hit(ONE, [1, 2, 3])[0] == 3


def test_an_idle_session_gives_back_its_tail(core):
    core.put(ONE, [1] * 20)
    session = core.store.catalog.find(ONE.fingerprint, "s")
    before = session.file_bytes
    assert before > session.files[0].tail
    core.now_s += 700
    core.do(core.store.tick(600.0))
    assert session.file_bytes == session.files[0].tail < before
    core.check()


@pytest.mark.parametrize("what", ["truncate", "journal"])
def test_a_tail_that_cannot_be_given_back_stays_the_sessions(core, what):
    core.put(ONE, [1] * 20)
    session = core.store.catalog.find(ONE.fingerprint, "s")
    before = session.file_bytes
    core.fail(what)
    core.now_s += 700
    core.do(core.store.tick(600.0))
    assert session.file_bytes == before
    core.check()


@pytest.mark.parametrize("failure", ["", "EIO"])
def test_a_turn_that_is_given_up_leaves_no_space_in_a_file_that_is_not_the_last(core, failure):
    """Whether its file was sealed, or another turn had gone on in a further one by then."""
    core.put(ONE, [1])
    given_up = core.do(core.begin(ONE, [1, 2, 3]))
    if not failure:
        core.put(ONE, [1, 4, 5, 6])
    core.do(core.abort(given_up, failure=failure))
    core.put(ONE, [1, 7, 8, 9])
    core.put(ONE, [1, 7, 8, 9, 10, 11, 12, 13])
    session = core.store.catalog.find(ONE.fingerprint, "s")
    assert len(session.files) > 2
    assert [file.size_bytes - file.tail for file in session.files[:-1]] == [0] * (len(session.files) - 1)


def tails(core):
    """By session: bytes that are pre-allocated and not taken."""
    return {session.name: session.tail_bytes >> 12 for session in core.store.catalog.sessions.values()}


def test_tails_go_before_sessions_the_oldest_first(core):
    """What is being read or written keeps its tail: it goes on soon."""
    for number in range(5):
        core.put(ONE, [number] * 8, session=f"s{number}")
    assert tails(core) == {"s0": 2, "s1": 2, "s2": 2, "s3": 2, "s4": 2}
    core.hit(ONE, [1] * 8, pin=True)
    core.hit(ONE, [0] * 8)
    core.put(ONE, [5] * 4, session="s5")  # 61 pages of 64: above the high watermark, and 4 above the low one
    assert tails(core) == {"s0": 2, "s1": 2, "s2": 0, "s3": 0, "s4": 2, "s5": 1}
    assert core.node.room.reclaimed[1] == 0
    core.put(ONE, [6] * 12, session="s6")
    assert "s2" not in tails(core), "tails alone do not make this room"
    assert tails(core)["s1"] == 2
    assert core.hit(ONE, [1] * 8)[0] == 8


def test_a_session_in_use_keeps_its_tail(core):
    """Its next turn would be a further file. How long is idle depends on how old the session is that would go."""
    for number in range(4):
        core.put(ONE, [number] * 8, session=f"s{number}")
    for _ in range(100):
        core.hit(ONE, [3] * 8)
    for number in (2, 1):
        core.hit(ONE, [number] * 8)
    core.put(ONE, [5] * 10, session="s5")
    core.put(ONE, [6] * 3, session="s6")
    assert tails(core) == {"s0": 0, "s1": 2, "s2": 2, "s3": 2, "s5": 3, "s6": 0}


def test_no_session_goes_for_headroom(core):
    for number in range(3):
        core.put(ONE, [number] * 12, session=f"s{number}")
    core.do(core.node.retirement.trim_idle(core.now_s + 1))
    core.put(ONE, [9] * 18, session="new")  # 19 pages beside 39 pass the watermark with their headroom only
    assert tails(core) == {"s0": 0, "s1": 0, "s2": 0, "new": 0}
    assert core.node.room.reclaimed[1] == 0
    core.put(ONE, [8] * 4, session="more")
    assert core.node.room.reclaimed[1] == 1


def test_tails_of_many_are_one_write_of_the_journal(core):
    for number in range(6):
        core.put(ONE, [number] * 5, session=f"s{number}")
    writes, records = [], core.records(1)
    real = records.write

    def write(puts, deletes, **options):
        writes.append(len(puts))
        real(puts, deletes, **options)

    records.write = write
    core.do(core.node.retirement.trim_idle(core.now_s + 1))
    assert writes == [6]
    assert set(tails(core).values()) == {0}


def test_where_tails_cannot_be_cut_sessions_go(core):
    for number in range(3):
        core.put(ONE, [number] * 12, session=f"s{number}")
    core.faults["truncate"] = 3
    core.put(ONE, [9] * 12, session="new")
    assert core.node.retirement.counts["untrimmed"] == 3, "each is tried once"
    assert core.node.room.reclaimed[1] == 1
    core.check()
    core.put(ONE, [2] * 14, session="s2")
    assert core.hit(ONE, [2] * 14)[0] == 14, "its tail is still for the session to write in"
    core.restart()
    core.open(ONE)
    assert core.hit(ONE, [2] * 14)[0] == 14
    assert set(tails(core).values()) == {0}


def test_a_file_that_cannot_be_deleted_is_tried_again(core, caplog):
    fill(core, 1)
    core.faults["delete"] = 3
    core.do(core.node.retirement.drop(core.store.catalog.find(ONE.fingerprint, "s0")))
    disk = core.node.disks[1]
    assert core.hit(ONE, [0, 0, 0])[0] == 0
    assert (disk.used_bytes, len(disk.condemned)) == (disk.releasing_bytes, 1)
    core.check()
    for _ in range(2):
        core.do(core.store.tick(600.0))
        assert disk.used_bytes
    core.do(core.store.tick(600.0))
    assert disk.used_bytes == 0
    assert caplog.text.count("cannot be deleted") == 1, "not once a second"


def test_a_session_that_was_forgotten_is_freed_twice_by_nobody(core):
    fill(core, 2)
    session = core.store.catalog.find(ONE.fingerprint, "s0")
    core.run(*(core.node.retirement.settle(session) for _ in range(2)))
    assert core.hit(ONE, [0, 0, 0])[0] == 3


@pytest.mark.parametrize("when", ["commit", "drop", "discard"])
def test_a_journal_that_fails_ends_its_path_only(tmp_path, when):
    core = Core(tmp_path, paths=2)
    core.open(ONE)
    fill(core, 4)
    session = core.store.catalog.find(ONE.fingerprint, "s1")
    segment = session.segments[0]
    turn = core.do(core.begin(ONE, [1, 0, 0, 5], session="s1"))
    core.fail("journal")
    if when == "commit":
        with pytest.raises(Unavailable):
            core.do(core.commit(turn))
    else:
        core.do(core.abort(turn))
        core.do(
            core.store.report_corrupt([suspect(segment)]) if when == "discard" else core.node.retirement.drop(session)
        )
    disk = core.node.disks[session.pool]
    assert "journal cannot be written" in disk.failure
    core.check()
    core.check_rest()
    for number in range(4):
        expected = 0 if core.node.disks[1 + number % 2] is disk else 3
        assert core.hit(ONE, [number, 0, 0])[0] == expected
    fill(core, 4)
    assert all(core.hit(ONE, [number, 0, 0])[0] == 3 for number in range(4))
    core.check()
    core.close()


def test_a_shared_head_that_gets_no_room_leaves_no_empty_session(core):
    """No memory, and the disk is full of what is in use."""
    begins = [core.begin(ONE, [number] * 8, session=f"w{number}", share_counts=[2] * 8) for number in range(20)]
    turns = [turn for turn in core.run(*begins) if not isinstance(turn, Overloaded)]
    assert 2 < len(turns) < 20
    for turn in turns:
        core.do(core.abort(turn))
    assert len(core.store.catalog) == 0


def test_memory_alone_makes_one_piece_out_of_many(tmp_path):
    """Small sessions everywhere, half of them in use: a large one takes what can be had together."""
    core = Core(tmp_path, paths=0, memory_bytes=64 << 12, memory_high_watermark=1.0, memory_low_watermark=0.9)
    core.open(ONE)
    for number in range(32):
        core.put(ONE, [number], session=f"s{number}")
    assert core.node.memory.free_bytes == 0
    core.put(ONE, [100] * 20, session="large")
    assert core.hit(ONE, [100] * 20)[0] == 20
    assert core.hit(ONE, [31])[0] == 1
    with pytest.raises(Overloaded):
        core.do(core.begin(ONE, [101] * 64, session="too large"))
    assert core.hit(ONE, [100] * 20)[0] == 20
    core.check()
    core.close()


def test_a_full_memory_costs_a_session_what_it_has_there_and_nothing_on_ssd(core):
    """A chat's first turn is on SSD, its short replies in memory: memory pressure takes the replies only."""
    core.put(ONE, [1, 1], session="chat")
    core.put(ONE, [1, 1, 2, 3], session="chat", previous_reply_tokens=1)
    assert core.hit(ONE, [1, 1, 2, 3])[0] == 4
    for number in range(2, 10):
        core.put(ONE, [number, 0], session=f"c{number}")
        core.put(ONE, [number, 0, 0, 0], session=f"c{number}", previous_reply_tokens=1)
    assert core.node.room.reclaimed[0] > 0, "the arena never filled"
    assert core.hit(ONE, [1, 1, 2, 3])[0] == 2
    core.put(ONE, [1, 1, 2, 3], session="chat", previous_reply_tokens=1)
    assert core.hit(ONE, [1, 1, 2, 3])[0] == 4, "what is missing is stored anew"


def test_memory_is_made_free_beside_a_path_that_hangs(core):
    """What a session has there may be all it still has, and its file is to be deleted then."""
    core.put(ONE, [1, 1], session="chat")
    core.put(ONE, [1, 1, 2, 3], session="chat", previous_reply_tokens=1)
    session, disk = core.store.catalog.find(ONE.fingerprint, "chat"), core.node.disks[1]
    core.do(core.store.report_corrupt([suspect(segment) for segment in session.segments if segment.file_id]))
    real, answers = disk.run, asyncio.Event()

    async def run(work, *arguments):
        await answers.wait()
        return await real(work, *arguments)

    async def story():
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await core.node.room.in_memory(15 << 12)
            assert core.node.memory.used_bytes == 0
        finally:
            answers.set()

    disk.run = run
    core.do(story())
    assert session.gone
    assert disk.used_bytes == 0


def test_memory_that_cannot_go_is_not_looked_through_again_and_again(core, monkeypatch):
    """Prompts that SSD sessions depend on fill the arena: one search a second, not one a turn."""
    for number in range(1, 4):
        core.put(ONE, [number, number, number, 0], session=f"s{number}", share_counts=[2, 2, 2, 1])
    searches = []
    order = core.node.catalog.order
    real = type(order).victims

    def victims(self, pool, need, busy):
        searches.append(pool)
        return real(self, pool, need, busy)

    monkeypatch.setattr(type(order), "victims", victims)
    for number in range(4, 10):
        core.put(ONE, [number, number, 0], session=f"s{number}", share_counts=[2, 2, 1])
    assert searches.count(0) == 1
    core.do(core.store.tick(600.0))
    core.put(ONE, [10, 10, 0], session="s10", share_counts=[2, 2, 1])
    assert searches.count(0) == 2
