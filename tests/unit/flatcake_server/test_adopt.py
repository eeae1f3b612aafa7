"""What a start makes of a journal and a disk: decided by a pure plan, carried out once or twice with the same end."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from core import BOOT_ID, Core, DictRecords, Yield
from faults import files_of

from flatcake_server import adopt as adopt_module
from flatcake_server.adopt import Taken, adopt, plan_adoption
from flatcake_server.catalog import Catalog
from flatcake_server.disk import Disk
from flatcake_server.journal import Journal
from flatcake_server.journal_records import read_image, read_vouched
from flatcake_server.records import FileId
from flatcake_server.session import SessionFiles
from flatcake_transport.errors import Corrupt, Unavailable
from flatcake_transport.space import SpaceSpec

ONE = SpaceSpec("one", "u8", 16, (4096, 5000))


@pytest.fixture
def core(tmp_path):
    node = Core(tmp_path)
    node.open(ONE)
    node.put(ONE, [1, 2, 3])
    node.put(ONE, [1, 2, 3, 4, 5])
    node.put(ONE, [9], session="other")
    yield node
    node.check(data=True)
    node.check_rest()
    node.close()


def restarted(core):
    """Blocks of both sessions after a start, and after a second one: the same."""
    seen = []
    for _ in range(2):
        core.restart()
        core.open(ONE)
        core.check(data=True)
        seen.append((core.hit(ONE, [1, 2, 3, 4, 5])[0], core.hit(ONE, [9])[0], core.node.disks[1].used_bytes))
    assert seen[0] == seen[1]
    return seen[0][:2]


def test_all_that_was_committed(core):
    core.do(core.begin(ONE, [1, 2, 3, 4, 5, 6]))
    core.do(core.begin(ONE, [20], session="never committed"))
    files = len(files_of(core.node.disks[1].path))
    assert restarted(core) == (5, 1)
    assert len(files_of(core.node.disks[1].path)) < files
    session = core.store.catalog.find(ONE.fingerprint, "s")
    assert session.turns == 2
    assert all(file.sealed and file.size_bytes == file.written_bytes for file in session.files)
    journaled = read_image(core.records(1), 0, BOOT_ID).files
    assert all(journaled[file.file_id] == file.record(session.session_no) for file in session.files)


def test_memory_is_gone_and_what_continues_it_waits(core):
    core.put(ONE, [30, 31], session="m", share_counts=[2, 1])
    assert restarted(core) == (5, 1)
    assert core.hit(ONE, [30, 31])[0] == 0
    core.put(ONE, [30], session="m", share_counts=[2])
    assert core.hit(ONE, [30, 31])[0] == 2


def test_a_file_that_is_shorter_keeps_what_it_reaches_over(core):
    session = core.store.catalog.find(ONE.fingerprint, "s")
    path = core.node.disks[1].files.path_of(session.segments[-1].file_id)
    os.truncate(path, session.segments[-1].end_offset - 4096)
    assert restarted(core) == (3, 1)


def test_a_file_that_is_gone_takes_its_session(core):
    session = core.store.catalog.find(ONE.fingerprint, "other")
    core.node.disks[1].files.path_of(session.files[0].file_id).unlink()
    assert restarted(core) == (5, 0)
    assert core.store.catalog.find(ONE.fingerprint, "other") is None


def test_strange_files(core):
    """Ours by name but in no journal: deleted. Of other names: not ours."""
    root = core.node.disks[1].path / "sessions"
    (root / "ab" / "cd").mkdir(parents=True)
    (root / "ab" / "cd" / "0000000000abcdef.kv").write_bytes(b"x")
    (root / "ab" / "cd" / "notes.txt").write_bytes(b"x")
    assert restarted(core) == (5, 1)
    assert not (root / "ab" / "cd" / "0000000000abcdef.kv").exists()
    assert (root / "ab" / "cd" / "notes.txt").exists()


def test_numbers_are_not_used_again(core):
    before = {file.file_id for session in core.store.catalog.sessions.values() for file in session.files}
    sessions = set(core.store.catalog.sessions)
    core.restart()
    core.open(ONE)
    core.put(ONE, [40], session="new")
    new = core.store.catalog.find(ONE.fingerprint, "new")
    assert new.session_no > max(sessions)
    assert new.files[0].file_id > max(before)


def test_a_files_range_that_is_taken_moves(core):
    """Two journals that gave out the same range: the second one's file gets another, and keeps it."""
    session = core.store.catalog.find(ONE.fingerprint, "other")
    other = core.store.catalog.find(ONE.fingerprint, "s")
    record = session.files[0].record(session.session_no)
    core.node.disks[1].journal.put_file(replace(record, base=other.files[0].base))
    assert restarted(core) == (5, 1)


def test_sessions_of_one_number_on_two_paths(tmp_path, monkeypatch):
    """A rebuilt journal counts from 1 again: the second path's session gets another number, for good."""
    synced, fdatasync = set(), os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.add(os.fstat(fd).st_ino) or fdatasync(fd))
    core = Core(tmp_path, paths=2)
    core.open(ONE)
    core.put(ONE, [1], session="a")
    core.put(ONE, [2], session="b")
    one, other = (core.node.disks[pool] for pool in (1, 2))
    (a,) = [s for s in core.store.catalog.sessions.values() if s.pool == 1]
    (b,) = [s for s in core.store.catalog.sessions.values() if s.pool == 2]
    b_segment = b.segments[0]
    record, file = replace(b.record(), session_no=a.session_no), replace(b.files[0].record(a.session_no))
    other.journal.commit(record, file, [replace(b_segment, session_no=a.session_no)], {}, synced=False)
    other.journal.drop(b.session_no, [], [])
    for _ in range(2):
        core.restart()
        core.open(ONE)
        assert [core.hit(ONE, [n])[0] for n in (1, 2)] == [1, 1]
        assert len(core.store.catalog) == 2
        core.check(data=True)
        vouched = {FileId(file_id) for _, (file_id, _, _) in read_vouched(core.records(2))}
        assert {core.node.disks[2].files.path_of(file_id).stat().st_ino for file_id in vouched} <= synced, "a power cut"
    assert one.path != other.path
    core.close()


def test_one_name_on_two_paths(tmp_path):
    """A path was away while its session went on elsewhere: both are there, the newer goes by the name."""
    core = Core(tmp_path, paths=2)
    core.open(ONE)
    core.put(ONE, [1, 2], session="s")
    session = core.store.catalog.find(ONE.fingerprint, "s")
    core.do(core.lose(session.pool))
    core.now_s += 1
    core.put(ONE, [1, 2, 3], session="s")
    core.restart()
    core.open(ONE)
    assert core.hit(ONE, [1, 2, 3])[0] == 3
    core.check(data=True)
    newer = core.store.catalog.find(ONE.fingerprint, "s")
    assert newer.blocks == 3
    core.do(core.node.retirement.drop(newer))
    assert core.store.catalog.find(ONE.fingerprint, "s").blocks == 2
    core.check(data=True)
    core.do(core.node.retirement.drop(core.store.catalog.find(ONE.fingerprint, "s")))
    assert core.store.catalog.find(ONE.fingerprint, "s") is None
    core.check()
    core.close()


def test_a_path_with_the_file_numbers_of_another_is_refused(tmp_path):
    """Descriptors go by file number: two files of one number would be one file to a reader."""
    core = Core(tmp_path, paths=2)
    core.open(ONE)
    core.put(ONE, [1], session="a")
    (file,) = files_of(core.node.disks[1].path)
    twin = core.node.disks[2].path / file.relative_to(core.node.disks[1].path)
    twin.parent.mkdir(parents=True)
    twin.write_bytes(file.read_bytes())
    core.restart()
    core.open(ONE)
    assert "numbers of another path" in core.node.disks[2].failure
    assert "or they counted from the same number" in core.node.disks[2].failure
    assert core.hit(ONE, [1])[0] == 1
    assert twin.exists()
    core.check()
    core.close()


def test_a_fresh_journal_over_files_is_refused(core):
    core.crash()
    disk = core.node.disks[1]
    disk.open = lambda: None
    disk._files = SessionFiles(disk.path)
    image = type("Image", (), {"fresh": True, "files": {}})()
    with pytest.raises(Corrupt, match="check --rebuild"):
        core.loop.run_until_complete(
            adopt(disk, image, core.node.ssd_range, 0, Taken(core.node.numbers.next_session_no))
        )
    disk.close()
    core.start()


def test_orphans_that_cannot_be_deleted_are_counted(core, monkeypatch):
    core.do(core.begin(ONE, [20], session="never committed"))

    def stuck(self, file_id):
        raise Unavailable("the test broke it")

    with monkeypatch.context() as patch:
        patch.setattr(SessionFiles, "delete", stuck)
        core.restart()
    disk = core.node.disks[1]
    disk.files.delete = SessionFiles.delete.__get__(disk.files)
    assert disk.releasing_bytes > 0
    core.check()
    core.do(core.store.tick(600.0))
    assert disk.releasing_bytes == 0
    assert restarted(core) == (5, 1)


def test_tails_that_cannot_be_cut_stay_counted(core, monkeypatch):
    core.do(core.begin(ONE, [1, 2, 3, 4, 5, 6]))

    def stuck(self, file_id, size_bytes):
        raise Unavailable("the test broke it")

    with monkeypatch.context() as patch:
        patch.setattr(SessionFiles, "truncate", stuck)
        core.restart()
    core.check(data=False)
    assert restarted(core) == (5, 1)


def test_a_path_that_fails_half_way_into_the_start_keeps_its_range(tmp_path, monkeypatch):
    core = Core(tmp_path, paths=3)
    core.open(ONE)
    core.put(ONE, [1], session="a")
    core.put(ONE, [2], session="b")

    def fails(self, *files):
        raise Unavailable("the test broke it")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "put_file", fails)
        core.restart()
    assert sum(bool(disk.failure) for disk in core.node.disks.values()) == 2, "nothing is to be changed on the third"
    assert core.node.ssd_range.used_bytes
    core.check()
    core.close()


def test_the_plan_of_nothing():
    image = type("Image", (), {"files": {}, "sessions": {}, "segments": [], "spaces": {}})()
    plan = plan_adoption(image, {7: 4096})
    assert plan.orphans == [7]
    assert not plan.sessions


def test_an_index_made_smaller_keeps_what_was_used_last(tmp_path, caplog):
    """A fork's parent goes after it, though its last commit is older."""
    core = Core(tmp_path)
    core.open(ONE)
    core.put(ONE, [1, 2], session="parent")
    for number in range(3, 9):
        core.now_s += 1
        core.put(ONE, [number] * 3, session=f"s{number}")
    core.now_s += 1
    core.put(ONE, [1, 2, 3], session="child")
    core.config = core.config.model_copy(update={"index_blocks_max": 9})
    core.restart()
    core.do(core.node._fit_bounds())
    assert "21 blocks were stored, index_blocks_max is 9: dropped 15, of 5 sessions" in caplog.text
    core.open(ONE)
    assert core.hit(ONE, [1, 2, 3])[0] == 3
    assert [core.hit(ONE, [number] * 3)[0] for number in range(3, 9)] == [0, 0, 0, 0, 0, 3]
    core.put(ONE, [9] * 3, session="s9")
    assert len(core.store.catalog.index) <= 9
    core.check()
    core.close()


@pytest.mark.parametrize("where", ["journal", "files"])
def test_a_path_that_hangs_while_it_is_adopted_is_left_out(tmp_path, monkeypatch, where):
    core, answers, asked = Core(tmp_path, paths=2), threading.Event(), set()
    core.open(ONE)
    core.put(ONE, [1], session="a")
    core.put(ONE, [2], session="b")
    lost = core.store.catalog.find(ONE.fingerprint, "a").pool
    hanging, path = core.records(lost), core.node.disks[lost].path
    owner, name = (DictRecords, "scan") if where == "journal" else (SessionFiles, "list")
    real, waited_s = getattr(owner, name), Disk.waited_s.fget

    def hangs(each, *arguments):
        if each is hanging or getattr(each, "root", None) == path:
            asked.add(lost)
            answers.wait(20)
        return real(each, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, hangs)
        patch.setattr(adopt_module, "OPEN_S", 0.01)
        patch.setattr(Disk, "waited_s", property(lambda disk: waited_s(disk) if disk.pool in asked else 0.0))
        try:
            core.restart()
        finally:
            answers.set()
    assert "has not answered" in core.node.disks[lost].failure
    core.open(ONE)
    assert [core.hit(ONE, [number])[0] for number in (1, 2)] == [0, 1]
    core.check()
    core.close()


def test_a_journal_may_be_long_where_it_is_read(monkeypatch):
    """The whole of it has no deadline, each record has."""
    monkeypatch.setattr(adopt_module, "OPEN_S", 5.0)
    monkeypatch.setattr(adopt_module, "LOOK_S", 0.0)
    monkeypatch.setattr(adopt_module, "time", SimpleNamespace(monotonic=itertools.count().__next__))  # a second a look
    disk, reads = SimpleNamespace(path="ssd", waited_s=1e9), itertools.count(1)

    async def reading():
        for _ in range(100):
            await Yield()
        return "read"

    assert asyncio.run(adopt_module._answered(disk, reading(), reads.__next__)) == "read"
    assert next(reads) > 10
    with pytest.raises(Unavailable, match="has not answered"):
        asyncio.run(adopt_module._answered(disk, asyncio.Event().wait(), lambda: 7))


def test_a_signal_is_heard_while_a_large_node_is_adopted(core, monkeypatch):
    """What takes as long as the node is large leaves the loop alone."""
    loop, threads = threading.get_ident(), set()

    def watched(work):
        def run(*arguments):
            threads.add(threading.get_ident())
            return work(*arguments)

        return run

    for owner, name in (
        (Journal, "load"), (SessionFiles, "list"), (adopt_module, "plan_adoption"), (adopt_module, "_sessions"),
        (Catalog, "load"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
    core.restart()
    core.open(ONE)
    assert threads
    assert loop not in threads
