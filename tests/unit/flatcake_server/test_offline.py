"""A path is sound, or the check says what is not; what the files say is enough to make its journal anew."""

from __future__ import annotations

import os
import shutil
import struct
import time
from dataclasses import replace

import pytest
from disk_path import SPEC, DiskPath, flip, raw_file, same_segment, snapshot
from rocksdict import Options, Rdict

from flatcake_server import offline
from flatcake_server.journal import MARK_STEP
from flatcake_server.scan import SessionFileReader
from flatcake_server.session import PathInUse
from flatcake_transport.errors import Corrupt
from flatcake_transport.space import SpaceSpec

SMALL = SpaceSpec(model="other", dtype="uint8", block_tokens=16, plane_bytes=(100,), shards=1)


@pytest.fixture
def root(tmp_path):
    """Three sessions, one of them dropped, one with a hole, one of another space."""
    root = tmp_path / "ssd"
    with DiskPath(root) as path:
        path.turn("a", 5)
        path.turn("b", 1)
        path.turn("a", 2, skip=8192)
        path.turn("gone", 1)
        path.turn("c", 40, spec=SMALL)
        path.trim("b")
        path.drop("gone")
    return root


def journal_of(root):
    return Rdict(str(root / "journal"), Options(raw_mode=True))


def change(root, prefix, number, edit):
    """Change one record behind everybody's back; None from `edit` removes it."""
    database = journal_of(root)
    key = prefix + struct.pack(">Q", number)
    value = edit(database[key])
    if value is None:
        del database[key]
    else:
        database[key] = value
    database.close()


def test_a_sound_path(root):
    steps = []
    report = offline.check(root, progress=lambda done, total: steps.append((done, total)))
    assert report.findings == []
    assert report.notes == []
    assert report.ok
    assert steps == [(n, 4) for n in range(1, 5)]
    counts = report.facts
    assert (counts["spaces"], counts["sessions"], counts["files"], counts["segments"]) == (2, 3, 3, 4)
    assert counts["blocks"] == 5 + 1 + 2 + 40
    assert counts["hole_bytes"] == 8192
    assert counts["checked_bytes"] == 0
    assert counts["disk_bytes"] == sum(p.stat().st_size for p in root.rglob("*.kv"))


def test_with_data(root):
    steps = []
    report = offline.check(root, data=True, progress=lambda done, total: steps.append((done, total)))
    assert report.findings == []
    assert report.counts["checked_bytes"] == report.counts["committed_bytes"] == steps[-1][0] == steps[-1][1]


@pytest.mark.parametrize("data", [False, True])
def test_looking_changes_nothing(root, data):
    before = snapshot(root)
    assert offline.check(root, data=data).ok
    assert snapshot(root) == before


@pytest.mark.parametrize("place", ["first", "last granule", "pad"])
def test_a_flipped_bit_of_data(root, place):
    with DiskPath(root) as path:
        segment = path.image.segments[0]
    # Plane 1 of shard 0 begins after 5 x 3,000 bytes, on the next 4 KiB.
    at = {"first": 0, "last granule": 16384 + 5 * 100_000 - 1, "pad": 5 * 3000}[place]
    flip(raw_file(root, segment.file_id), segment.file_offset + at, 7)
    assert offline.check(root).ok, "nobody looked at the data"
    report = offline.check(root, data=True)
    if place == "pad":
        assert report.ok, "what stands between planes belongs to nobody"
    else:
        assert report.findings == [
            f"segment {segment.generation} of session 'a' in file {segment.file_id:x}: 1 of 6 granules differ from their checksums"
        ]


def test_a_flipped_bit_of_a_footer(root):
    with DiskPath(root) as path:
        segment = path.image.segments[0]
    flip(raw_file(root, segment.file_id), segment.end_offset - 1)
    (finding,) = offline.check(root).findings
    assert "differs from its own checksum" in finding


@pytest.mark.parametrize(("field", "at"), [("first block", 32), ("turn", 40), ("parent key", 48), ("keys", 80)])
def test_journal_and_footer_differ(root, field, at):
    change(root, b"g", 1, lambda value: value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :])
    (finding,) = offline.check(root).findings
    assert finding.endswith(f"differ in {field}")


def test_session_and_footer_differ(root):
    change(root, b"n", 2, lambda value: value[:-1] + b"x")
    (finding,) = offline.check(root).findings
    assert "differ in session" in finding


def test_two_segments_share_bytes(root):
    with DiskPath(root) as path:
        first = path.image.segments[0]
        twin = replace(first, generation=first.generation + 1000, file_offset=first.file_offset + 4096)
        path.journal.commit(path.sessions["a"], path.image.files[first.file_id], [twin], {})
    findings = offline.check(root).findings
    assert f"segments {first.generation} and {twin.generation} share bytes of file {first.file_id:x}" in findings


def test_two_files_share_addresses(root):
    with DiskPath(root) as path:
        one, two, _ = path.image.files.values()
        path.journal.put_file(replace(two, base=one.base + 4096))
    (finding,) = offline.check(root).findings
    assert "share addresses" in finding
    with DiskPath(root) as path:
        path.journal.put_file(replace(two, base=two.base + 1))
    assert any("units of 4096" in finding for finding in offline.check(root).findings)


def test_files_and_journal_differ(root):
    with DiskPath(root) as path:
        one, two, three = path.image.files.values()
        path.files.create(0x999, 8192)
    os.truncate(raw_file(root, one.file_id), one.written_bytes)
    raw_file(root, two.file_id).unlink()
    os.truncate(raw_file(root, three.file_id), three.size_bytes + 4096)
    report = offline.check(root)
    assert report.findings == [
        f"file {one.file_id:x} has {one.written_bytes} bytes, the journal says {one.size_bytes}",
        f"file {two.file_id:x} is in the journal and not on the disk",
    ]
    assert report.notes == [
        f"file {three.file_id:x} is 4096 bytes longer than the journal says",
        "file 999 is on the disk and not in the journal: nothing in it is committed",
    ]


def test_a_file_cut_into_its_data(root):
    with DiskPath(root) as path:
        file = path.image.files[path.image.segments[0].file_id]
    os.truncate(raw_file(root, file.file_id), 100_000)
    findings = offline.check(root, data=True).findings
    assert len(findings) == 3, "too short, and both segments have no footer"


def test_what_is_no_path_is_refused(tmp_path, root):
    (tmp_path / "empty").mkdir()
    for work in (offline.check, offline.rebuild):
        with pytest.raises(ValueError, match="no directory"):
            work(tmp_path / "nowhere")
        with pytest.raises(ValueError, match="no SSD path"):
            work(tmp_path / "empty")
        assert list((tmp_path / "empty").iterdir()) == []


def test_a_daemon_keeps_both_out(root):
    with DiskPath(root):
        for work in (offline.check, offline.rebuild):
            with pytest.raises(PathInUse, match=f"process {os.getpid()}"):
                work(root)
    assert offline.check(root).ok


def test_no_journal(root):
    shutil.rmtree(root / "journal")
    (finding,) = offline.check(root).findings
    assert "3 session files and no journal" in finding
    for path in root.rglob("*.kv"):
        path.unlink()
    assert offline.check(root).ok


@pytest.mark.parametrize("victim", ["CURRENT", "MANIFEST", "sst"])
def test_a_broken_journal(root, victim):
    journal_of(root).close()
    for path in (root / "journal").iterdir():
        if victim in path.name:
            path.unlink()
    (finding,) = offline.check(root).findings
    assert "--rebuild" in finding


@pytest.mark.parametrize("loss", ["journal", "manifest", "nothing"])
def test_rebuild(root, loss):
    with DiskPath(root) as path:
        before = path.image
    if loss == "journal":
        shutil.rmtree(root / "journal")
    elif loss == "manifest":
        next((root / "journal").glob("MANIFEST*")).write_bytes(b"rubbish")
        assert not offline.check(root).ok
    files = {p: p.read_bytes() for p in root.rglob("*.kv")}
    steps = []
    result = offline.rebuild(root, progress=lambda done, total: steps.append((done, total)))
    assert (result["sessions"], result["files"], result["segments"], result["blocks"]) == (3, 3, 4, 48)
    assert result["corrupt_segments"] == result["unchecked_segments"] == result["strange_segments"] == 0
    assert steps[-1][0] == steps[-1][1] == sum(len(data) for data in files.values())
    assert {p: p.read_bytes() for p in root.rglob("*.kv")} == files, "files are not touched"
    report = offline.check(root, data=True)
    assert report.findings == []
    with DiskPath(root) as path:
        after = path.image
    assert after.spaces == before.spaces
    assert {s.name: (s.turns, s.fingerprint) for s in after.sessions.values()} == {
        s.name: (s.turns, s.fingerprint) for s in before.sessions.values()
    }
    assert all(file.sealed for file in after.files.values())
    assert set(after.files) == set(before.files)
    for one, two in zip(after.segments, before.segments, strict=True):
        same = replace(one, address=two.address, session_no=two.session_no, reason=two.reason)
        assert same_segment(same, two)
        assert after.sessions[one.session_no].name == before.sessions[two.session_no].name
    for name in ("next_session_no", "next_file_id", "next_generation"):
        assert getattr(after, name) >= getattr(before, name), "ids go on"
        assert (getattr(after, name) > 1 << 50) == (loss != "nothing"), "from the marks where they can be read"


def test_what_a_rebuild_read_is_on_the_disk_before_it_says_so(root, monkeypatch):
    """It may have read what is in memory only: nothing was synced before."""
    with DiskPath(root) as path:
        files = {raw_file(root, file_id).stat().st_ino for file_id in path.image.files}
    synced, fdatasync = set(), os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.add(os.fstat(fd).st_ino) or fdatasync(fd))
    assert offline.rebuild(root)["files"] == len(files & synced) == len(files)


def test_rebuild_finds_what_the_journal_never_heard_of(root):
    """Killed between footer and journal: the segment is whole, so it is taken over."""
    with DiskPath(root) as path:
        path.turn("a", 3, commit=False)
        path.turn("new", 2, commit=False)
    assert offline.rebuild(root)["segments"] == 6
    assert offline.check(root, data=True).ok


@pytest.mark.parametrize("journal", ["whole", "damaged", "lost"])
def test_what_has_no_checksums_is_taken_over_by_the_old_journals_word(root, journal):
    """Stored under verify=off. One that the journal never heard of, or that may not have been on the disk, is left out."""
    with DiskPath(root) as path:
        path.turn("vouched", 3, algorithm=0)
        path.turn("unsynced", 1, algorithm=0, synced=False)
        path.turn("uncommitted", 2, algorithm=0, commit=False)
    if journal == "lost":
        shutil.rmtree(root / "journal")
    elif journal == "damaged":
        change(root, b"n", 1, lambda value: value[:3])
    result = offline.rebuild(root)
    assert result["unchecked_segments"] == (3 if journal == "lost" else 2)
    assert result["segments"] == (4 if journal == "lost" else 5)
    assert offline.check(root, data=True).ok


def test_rebuild_leaves_out_what_is_not_proven(root):
    with DiskPath(root) as path:
        damaged = path.image.segments[0]
        path.turn("unchecked", 2, algorithm=0, commit=False)
        path.files.create(0x999, 8192)
    flip(raw_file(root, damaged.file_id), damaged.file_offset)
    result = offline.rebuild(root)
    assert (result["segments"], result["corrupt_segments"], result["unchecked_segments"], result["empty_files"]) == (
        3,
        1,
        1,
        2,
    )
    report = offline.check(root, data=True)
    assert report.ok
    with DiskPath(root) as path:
        assert damaged.generation not in {s.generation for s in path.image.segments}


def test_rebuild_passes_over_copies_and_stale_footers(root):
    """A footer counts where it was written and nowhere else, and a file of two sessions is nobody's twice."""
    with DiskPath(root) as path:
        file_id = path.image.segments[0].file_id
    copy = raw_file(root, 0x777)
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(raw_file(root, file_id), copy)
    data = raw_file(root, file_id).read_bytes()
    with raw_file(root, file_id).open("ab") as file:
        file.write(data)  # all its segments once more, at other offsets
    result = offline.rebuild(root)
    assert (result["files"], result["segments"], result["empty_files"]) == (3, 4, 1)
    assert offline.check(root, data=True).ok


def test_a_footer_counts_only_where_it_was_written(root):
    """Bytes that moved to another file or another place in it are not that segment, sound as they are."""
    with DiskPath(root) as path:
        moved, shifted = (path.image.files[path.sessions_file(name)] for name in ("b", "c"))
    raw_file(root, 0x777).parent.mkdir(parents=True, exist_ok=True)
    raw_file(root, moved.file_id).rename(raw_file(root, 0x777))
    data = raw_file(root, shifted.file_id).read_bytes()
    raw_file(root, shifted.file_id).write_bytes(bytes(4096) + data)
    result = offline.rebuild(root)
    assert (result["files"], result["segments"], result["empty_files"]) == (1, 2, 2)
    assert result["corrupt_segments"] == result["strange_segments"] == 0, "they were not even considered"


def test_a_file_in_the_place_of_another(root):
    with DiskPath(root) as path:
        one, two = (path.sessions_file(name) for name in ("a", "b"))
        segment = next(s for s in path.segments if s.file_id == two)
    # The footer of b's only segment, where a's first one would have it if it had as many blocks.
    data = raw_file(root, two).read_bytes()
    shutil.copy(raw_file(root, two), raw_file(root, one))
    assert len(data) == segment.end_offset
    with SessionFileReader(raw_file(root, one), one) as reader, pytest.raises(Corrupt, match=f"is of file {two:x}"):
        reader.footer_at(segment.end_offset - 4096)


def test_rebuild_keeps_what_the_node_said(root):
    with DiskPath(root) as path:
        path.journal.put_meta({"node": b"7"})
    offline.rebuild(root)
    with DiskPath(root) as path:
        assert path.image.meta == {"node": b"7"}
    assert (root / "journal.old").is_dir()
    offline.rebuild(root)
    shutil.rmtree(root / "journal")
    offline.rebuild(root)
    with DiskPath(root) as path:
        assert path.image.meta == {"node": b"7"}, "an interrupted rebuild left journal.old"


def test_without_marks_ids_come_from_the_clock(root):
    """As a daemon counts files: a path rebuilt now and one begun in a year never have the same."""
    shutil.rmtree(root / "journal")
    before = time.time_ns() // 1000
    offline.rebuild(root)
    after = time.time_ns() // 1000 + 2 * MARK_STEP
    with DiskPath(root) as path:
        ids = (path.image.next_session_no, path.image.next_file_id, path.image.next_generation)
    assert before <= min(ids) <= max(ids) <= after


def test_an_interrupted_rebuild_is_not_a_new_path(root):
    (root / "journal").rename(root / "journal.old")
    with pytest.raises(Corrupt, match="interrupted"):
        DiskPath(root)
    assert "no journal" in offline.check(root).findings[0]
    offline.rebuild(root)
    assert offline.check(root, data=True).ok
    with DiskPath(root) as path:
        assert SPEC.fingerprint in path.image.spaces
