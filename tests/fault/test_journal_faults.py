"""RocksDB damaged on the disk, a log cut anywhere, a second process, a writer killed without warning."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conformance.journals import BOOT, SPACE, file_of, segment_of, session_of
from disk_path import DiskPath, flip, same_segment
from journal_places import RocksPlace, copied_alive
from rocksdict import Options, Rdict

from flatcake_server import offline
from flatcake_server.journal import Journal
from flatcake_transport.errors import Corrupt, FlatCakeError, Unavailable


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A path whose journal has tables and a log; with what is in it."""
    root = tmp_path_factory.mktemp("made") / "ssd"
    with DiskPath(root) as path:
        for turn in range(12):
            path.turn(f"s{turn % 3}", 1)
    database = Rdict(str(root / "journal"), Options(raw_mode=True))
    database.flush()
    database.close()
    with DiskPath(root) as path:
        for turn in range(6):
            path.turn(f"s{turn % 3}", 1)
        segments = path.segments
        killed = copied_alive(root, root.with_name("killed"))
    return killed, segments


def copied(made, tmp_path):
    shutil.copytree(made[0], tmp_path / "ssd")
    return tmp_path / "ssd", made[1]


def files_of(root: Path, suffix: str) -> list[Path]:
    return sorted(path for path in (root / "journal").iterdir() if path.name.endswith(suffix) and path.stat().st_size)


def prefix_of(found, segments):
    """How many of the segments, oldest first, are there; each as it was committed, none beyond the first missing."""
    assert len(found) <= len(segments)
    assert all(same_segment(one, two) for one, two in zip(found, segments, strict=False))
    return len(found)


@pytest.mark.parametrize("seed", range(12))
def test_a_flipped_bit_anywhere(made, tmp_path, seed):
    """The segments come back, or the oldest of them, or the journal says it is damaged. Never others."""
    root, segments = copied(made, tmp_path)
    rng = np.random.default_rng(seed)
    targets = files_of(root, ".sst") + files_of(root, ".log") + [next((root / "journal").glob("MANIFEST*"))]
    target = targets[seed % len(targets)]
    flip(target, int(rng.integers(target.stat().st_size)), int(rng.integers(8)))
    said = ""
    try:
        with DiskPath(root) as path:
            prefix_of(path.image.segments, segments)
    except Corrupt as error:
        said = str(error)
    assert "flatcake check --rebuild" in said or offline.check(root).ok
    offline.rebuild(root)
    assert offline.check(root, data=True).findings == []
    with DiskPath(root) as path:
        assert {s.keys.tobytes() for s in path.image.segments} == {s.keys.tobytes() for s in segments}


def test_a_damaged_table_is_not_taken_for_its_end(made, tmp_path):
    """RocksDB's own iterator ends there without a word."""
    root, segments = copied(made, tmp_path)
    needle = segments[3].keys.tobytes()
    tables = [path for path in files_of(root, ".sst") if needle in path.read_bytes()]
    assert tables
    for table in tables:  # one that was merged into another may be there still
        flip(table, table.read_bytes().index(needle))
    with pytest.raises(Corrupt, match=r"checksum mismatch.*--rebuild"):
        DiskPath(root)
    (finding,) = offline.check(root).findings
    assert "checksum mismatch" in finding


def test_a_log_cut_anywhere_forgets_the_newest(made, tmp_path):
    root, segments = copied(made, tmp_path)
    log = files_of(root, ".log")[-1]
    data, counts = log.read_bytes(), []
    for keep in np.linspace(len(data), 0, 9).astype(int).tolist():
        log.write_bytes(data[:keep])
        shutil.rmtree(root.with_name("cut"), ignore_errors=True)
        shutil.copytree(root, root.with_name("cut"))
        with DiskPath(root.with_name("cut")) as path:
            counts.append(prefix_of(path.image.segments, segments))
            assert path.image.next_generation > segments[-1].generation, "what is forgotten is not used again"
            assert path.image.next_file_id > max(path.files.list())
    assert counts[0] == 18
    assert counts[-1] == 12
    assert counts == sorted(counts, reverse=True)


def test_a_flip_in_the_log_ends_it_there(tmp_path):
    """Also where later records are sound: a state with a hole in it is none that ever was."""
    place = RocksPlace(tmp_path / "place")
    journal = place.open(BOOT)
    journal.load()
    file = file_of(1, 1)
    segments = [segment_of(n, file, blocks=50, offset=4096 * n) for n in range(1, 201)]
    for segment in segments:  # 200 KB: seven of the log's blocks of 32 KiB, each read by itself
        journal.commit(session_of(1), file, [segment], {SPACE.fingerprint: SPACE})
    killed = place.kill()
    journal.close()
    log = max(killed.path.glob("*.log"), key=lambda path: path.stat().st_size)
    flip(log, log.read_bytes().index(segments[19].keys.tobytes()))
    journal = killed.open(BOOT)
    assert [segment.generation for segment in journal.load(5).segments] == list(range(1, 20))
    journal.close()


@pytest.mark.parametrize("victims", [("CURRENT",), ("CURRENT", ".log"), ("MANIFEST",), (".sst",)], ids=" ".join)
def test_a_lost_part_is_no_new_journal(made, tmp_path, victims):
    """Without CURRENT and a log, RocksDB by itself would begin an empty database."""
    root, segments = copied(made, tmp_path)
    for path in (root / "journal").iterdir():
        if any(victim in path.name for victim in victims):
            path.unlink()
    with pytest.raises(Corrupt, match="flatcake check --rebuild"):
        DiskPath(root)
    assert offline.rebuild(root)["segments"] == len(segments)
    assert offline.check(root, data=True).findings == []


def test_a_journal_that_was_never_finished(tmp_path):
    """Killed while it was made for the first time: what is beside its place is nobody's."""
    (tmp_path / "journal.new").mkdir()
    (tmp_path / "journal.new/MANIFEST-000001").write_bytes(b"half")
    (tmp_path / "journal").mkdir()
    journal = Journal(tmp_path / "journal")
    assert journal.load().fresh
    journal.close()
    journal = Journal(tmp_path / "journal")
    assert not journal.load().fresh
    journal.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal"]


def test_a_journal_in_use(tmp_path):
    journal = Journal(tmp_path / "journal")
    with pytest.raises(Unavailable, match="lock"):
        Journal(tmp_path / "journal")
    code = (
        "import sys; from pathlib import Path; from flatcake_server.journal import Journal; Journal(Path(sys.argv[1]))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "journal")], capture_output=True, text=True, check=False
    )
    assert "Unavailable: the journal" in other.stderr
    journal.close()


def test_after_closing_nothing_is_written(tmp_path):
    journal = Journal(tmp_path / "journal")
    journal.load()
    journal.close()
    with pytest.raises(Unavailable):
        journal.put_meta({"a": b"b"})


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(FlatCakeError):
        Journal(tmp_path / "file" / "journal")


WRITER = """
import sys
sys.path[:0] = [sys.argv[2]]
from pathlib import Path
from disk_path import DiskPath
path = DiskPath(Path(sys.argv[1]))
n = 0
while True:
    print(path.turn(f"s{n}", 1).generation, flush=True)
    if n >= 3:
        path.drop(f"s{n - 3}")
    n += 1
"""


def test_a_writer_killed_at_no_chosen_moment(tmp_path):
    root = tmp_path / "ssd"
    tests = str(Path(__file__).parents[1])
    for stop_after in (5, 17, 40):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(root), tests], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        answered = [int(writer.stdout.readline()) for _ in range(stop_after)]
        os.kill(writer.pid, signal.SIGKILL)
        answered += map(int, writer.stdout.read().split())  # what it could still say
        writer.wait(10)
        writer.stdout.close()
        assert offline.check(root, data=True).findings == []
        with DiskPath(root) as path:
            found = {s.generation for s in path.image.segments}
            assert set(answered[-3:]) <= found, "an answered commit is forgotten"
            # Of this life's, the newest three, one whose drop and one whose commit were under way.
            assert len(found & set(range(answered[0], answered[-1] + 2))) <= 5
            for name in list(path.sessions):
                path.drop(name)
