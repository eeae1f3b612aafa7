"""The law finds what is wrong: each thing that must be equal is made unequal once."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest
from core import Core, Yield
from faults import files_of, flip

from flatcake_server import pace
from flatcake_server.law import LAST_SESSIONS, _Look, check_data, check_files, check_living, check_state
from flatcake_server.records import FileId
from flatcake_transport.errors import Unavailable
from flatcake_transport.space import SpaceSpec

ONE = SpaceSpec("one", "u8", 16, (4096, 5000))


@pytest.fixture
def core(tmp_path):
    """A session on SSD with two segments, a shared head in memory, and a turn under way in both."""
    node = Core(tmp_path)
    node.open(ONE)
    node.put(ONE, [1, 2, 3, 4], share_counts=[2, 2, 1, 1])
    node.put(ONE, [1, 2, 3, 4, 5])
    assert node.do(node.begin(ONE, [1, 2, 3, 4, 5, 6])) is not None
    assert node.do(node.begin(ONE, [7, 8], session="m", share_counts=[2, 2])) is not None
    node.check(data=True)
    yield node
    node.close()


def session(core):
    return core.store.catalog.find(ONE.fingerprint, "s")


def segment(core, number=0):
    return session(core).segments[number]


def state(core):
    return check_state(core.store, core.node.memory, core.node.ssd_range)


def test_it_holds_at_every_step_of_everything(core):
    """Turns of two media begun, committed and aborted side by side, with sessions dropped for their sake: looked at after
    every step that the loop makes."""
    looks = []

    async def look():
        while len(looks) < 400:
            await Yield()
            looks.append(state(core))

    async def turns(number):
        path = [number, 2, 3, 4]
        turn = await core.begin(ONE, path, session=f"t{number}", share_counts=[2, 2, 1, 1])
        await (core.abort(turn) if number % 3 == 0 else core.commit(turn))
        turn = await core.begin(ONE, [*path, 5], session=f"t{number}", turn=9, previous_reply_tokens=10)
        await core.commit(turn)
        await core.node.retirement.drop(core.store.catalog.find(ONE.fingerprint, f"t{number}"))

    core.do(core.store.tick(0.0))
    results = core.run(look(), *(turns(number) for number in range(20, 29)))
    assert results == [None] * 10
    assert sum(map(len, looks)) == 0
    assert core.node.retirement.counts["trimmed"] > 0


def reserve_memory(core):
    core.node.memory.allocate(4096)


def lose_memory(core):
    part = next(part for turn in core.store.turns.values() for part in turn.parts if part.file is None)
    part.open = False


def overlap(core):
    part = next(part for turn in core.store.turns.values() for part in turn.parts if part.file is None)
    part.address = next(s.address for s in core.store.catalog.segments if not s.file_id)


def take_range(core):
    core.node.ssd_range.allocate(4096)


def miscount_files(core):
    core.node.disks[1].files_bytes += 1


def exceed_quota(core):
    core.node.disks[1].quota_bytes = 4096


def forget_name(core):
    del core.store.catalog._by_name[ONE.fingerprint, "s"]


def misplace_segment(core):
    session(core).segments[0] = replace(segment(core), file_offset=segment(core).file_offset + 4096)


def overlap_segments(core):
    session(core).segments[1] = replace(segment(core), generation=segment(core, 1).generation)


def miscount_committed(core):
    session(core).files[0].committed_bytes += 4096


def miscount_reserved(core):
    session(core).files[-1].reserved_bytes += 4096


def disorder_ends(core):
    session(core).files[0].tail = 0


def lose_segment(core):
    session(core).segments.pop()


def miscount_tails(core):
    core.store.catalog.order.set_bytes(session(core).session_no, -1, 1 << 30)


def add_key(core):
    core.store.catalog.index.insert(np.full((1, 16), 7, np.uint8), core.store.catalog.present(segment(core).keys[:1]))


def wrong_pins(core):
    core.store.leases._pins[77] = 1


def wrong_order(core):
    core.store.catalog.order.add_bytes(session(core).session_no, 1, 4096)
    core.store.catalog.order._pools[1].total_bytes += 1


BREAKS = [
    reserve_memory, lose_memory, overlap, take_range, miscount_files, exceed_quota, forget_name, misplace_segment,
    overlap_segments, miscount_committed, miscount_reserved, disorder_ends, lose_segment, miscount_tails, add_key, wrong_pins, wrong_order,
]  # fmt: skip


@pytest.mark.parametrize("breaks", BREAKS, ids=lambda breaks: breaks.__name__)
def test_state(core, breaks):
    assert state(core) == core.do(living(core)) == []
    breaks(core)
    assert state(core) != []
    assert sorted(core.do(living(core))) == sorted(state(core))


def living(core):
    return check_living(core.store, core.node.memory, core.node.ssd_range)


@pytest.mark.parametrize("seed", range(2))
def test_it_holds_beside_everything(core, monkeypatch, seed):
    """The check is cut at every step it can be, and the store changes at each: nothing is found that is not there."""
    monkeypatch.setattr(pace, "SLICE_S", 0.0)
    monkeypatch.setattr(pace, "REST_S", 0.0)
    under_way = 0

    async def turns(number):
        nonlocal under_way
        under_way += 1
        try:
            for again in range(6):
                path = [number, again, 3, 4]
                turn = await core.begin(ONE, path, session=f"t{number}", share_counts=[2, 2, 1, 1])
                await (core.abort(turn) if again % 3 == 0 else core.commit(turn))
                await core.commit(await core.begin(ONE, [*path, 5], session=f"t{number}", turn=9))
                if number % 2:
                    await core.node.retirement.drop(core.store.catalog.find(ONE.fingerprint, f"t{number}"))
                await core.node.retirement.trim_idle(core.now_s + 1)
        finally:
            under_way -= 1

    async def checks():
        looks = 0
        while under_way or not looks:
            assert await living(core) == []
            assert await check_files(core.store) == []
            looks += 1
        return looks

    core._turns = seed
    results = core.run(checks(), *(turns(number) for number in range(20, 26)))
    assert results[1:] == [None] * 6
    assert results[0] >= 1
    assert core.store.catalog._watchers == []


def test_what_a_lost_path_held_is_stored_again_while_it_looks(tmp_path):
    """The index no longer names the lost blocks then: what was counted of them before is counted anew."""
    core = Core(tmp_path, paths=2)
    core.open(ONE)
    for number in range(6):
        core.put(ONE, [number, 0], session=f"s{number}")
    lost = [s for s in core.store.catalog.sessions.values() if s.pool == 1]
    assert len(lost) > LAST_SESSIONS
    assert lost[-1].name != "s5", "something is left to look at when all of them are counted"
    counted = {(session.session_no, segment.generation) for session in lost for segment in session.segments}
    real, go = core.node.retirement._unload, asyncio.Event()

    async def unload_later(disk):
        await go.wait()
        await real(disk)

    async def story():
        await core.lose(1)
        try:
            look = _Look(core.store, core.node.memory, core.node.ssd_range)
            steps = look.steps()
            while not counted <= look._own.keys():
                next(steps)
            for session in lost:
                await core.commit(await core.begin(ONE, [int(session.name[1:]), 0, 1], session=session.name))
            assert list(steps)
            return look.findings
        finally:
            go.set()

    core.node.retirement._unload = unload_later
    assert core.do(story()) == []
    core.close()


def test_others_have_their_turn_while_it_looks(core, monkeypatch):
    """At each session, segment and some rows of the index. By the clock of this process: on a busy machine too."""
    for number in range(20, 50):
        core.put(ONE, [number, 1], session=f"t{number}")
    monkeypatch.setattr(pace, "SLICE_S", 0.0)
    monkeypatch.setattr(pace, "REST_S", 0.0)
    gaps, over = [0.0], False

    async def others():
        while not over:
            since_s = time.process_time()
            await Yield()
            gaps.append(time.process_time() - since_s)

    async def look():
        nonlocal over
        assert await living(core) == []
        over = True

    core.run(others(), look())
    assert len(gaps) > 30, "a step a session, at least"
    assert max(gaps) < 0.05, "one step of it took as long as the whole should"


def test_files(core):
    (path,) = files_of(core.node.disks[1].path)[:1]
    path.write_bytes(path.read_bytes()[:-4096])
    assert len(core.do(check_files(core.store))) == 1
    path.unlink()
    assert "has None bytes on disk" in core.do(check_files(core.store))[0]


def test_stray_files(core):
    core.node.disks[1].files.create(FileId(0xABC), 4096)
    assert core.do(check_files(core.store)) == [f"{core.node.disks[1].path}: 1 files on disk belong to no session"]


def test_a_disk_that_cannot_be_listed(core):
    core.fail("list")
    assert "cannot be listed" in core.do(check_files(core.store))[0]


def test_what_changes_during_the_look_is_left_out(core):
    """A session comes and one goes between the list and the comparison."""
    disk, real = core.node.disks[1], core.node.disks[1].files.list
    core.put(ONE, [50], session="goes")

    def slow():
        listed = real()
        session = core.store.catalog.find(ONE.fingerprint, "goes")
        disk.files.delete(session.files[0].file_id)
        disk.releasing[session.files[0].base] = 0
        session.files.clear()
        return listed

    disk.files.list = slow
    assert core.do(check_files(core.store)) == []


def test_a_file_that_is_being_cut_is_not_damaged(tmp_path):
    """Its new length is known before the disk has it, behind a write of the journal: however long that takes."""
    core, go = Core(tmp_path), asyncio.Event()
    core.open(ONE)
    core.put(ONE, [1] * 20)
    disk = core.node.disks[1]
    real = disk.run

    async def slow(work, *arguments):
        if work == disk.cut_files:
            await go.wait()
        return await real(work, *arguments)

    async def story() -> None:
        disk.run = slow
        core.now_s += 700
        trimming = asyncio.ensure_future(core.store.tick(600.0))
        for _ in range(50):
            await Yield()
        assert disk.releasing
        for _ in range(3):
            assert await check_files(core.store) == []
        go.set()
        await trimming
        assert await check_files(core.store) == []

    core.do(story())
    assert core.node.retirement.counts["trimmed"] == 1
    core.close()


def data(core):
    steps = []
    found = core.do(check_data(core.store, core.node.arena, lambda done, total: steps.append((done, total))))
    assert steps[-1][0] == steps[-1][1] > 0
    return found


@pytest.mark.parametrize("where", [0, 5000, -1])
def test_data_on_ssd(core, where):
    path = core.node.disks[1].files.path_of(segment(core).file_id)
    flip(path, segment(core).file_offset + where if where >= 0 else segment(core).end_offset - 1)
    found = data(core)
    assert len(found) == 1
    assert "session s: segment ssd@0" in found[0]


@pytest.mark.parametrize("what", ["data", "footer"])
def test_data_in_memory(core, what):
    shared = next(s for s in core.store.catalog.segments if not s.file_id)
    at = shared.address.offset + (0 if what == "data" else shared.total_bytes - 1)
    core.node.arena.write(at, bytes([core.node.arena.read(at, 1)[0] ^ 1]))
    assert len(data(core)) == 1


def test_a_footer_of_another_segment(core):
    session(core).segments[0] = replace(segment(core), turn=9)
    core.store.catalog.segments._segments[core.store.catalog.segments._bases.index(int(segment(core).address))] = (
        segment(core)
    )
    assert "its footer is of another segment" in data(core)[0]


def test_data_of_a_file_that_is_gone(core):
    core.node.disks[1].files.path_of(segment(core).file_id).unlink()
    assert "cannot be read" in data(core)[0]


def test_a_session_stays_while_it_is_read(core):
    held = []
    real = core.node.disks[1].run

    async def watched(work, *arguments):
        held.append(session(core).holds)
        return await real(work, *arguments)

    before = session(core).holds
    core.node.disks[1].read = watched
    assert data(core) == []
    assert max(held) == before + 1
    assert session(core).holds == before


def test_a_dead_path_is_passed_over(core):
    core.do(core.lose(1))
    with pytest.raises(Unavailable):
        core.do(core.node.disks[1].run(list))
    assert core.do(check_files(core.store)) == data(core) == state(core) == []
    core.node.ssd_range.allocate(4096)
    assert any("taken, but not as they are owned" in finding for finding in state(core)), "of nobody's path"
