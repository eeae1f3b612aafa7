"""`flatcake check` on the directory of a daemon that is not running: finds what is wrong, changes nothing, and mends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command import flatcake
from kv import Kv, connect


@pytest.fixture
def stored(daemon):
    """A directory with two sessions, its daemon stopped; and what they hold."""
    client = connect(daemon)
    kv = Kv(client)
    contexts = {name: kv.tokens(seed, blocks) for seed, (name, blocks) in enumerate({"a": 6, "b": 9}.items())}
    for name, tokens in contexts.items():
        kv.store(tokens, session=name)
    client.close()
    daemon.stop()
    return daemon, contexts


def check(path: Path, *arguments: str) -> tuple[int, dict]:
    run = flatcake("check", "--ssd-paths", path, "--json", *arguments)
    return run.returncode, json.loads(run.stdout)


def content(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def test_a_sound_directory_passes_and_is_left_as_it_was(stored):
    path = stored[0].ssd_paths[0]
    before = content(path)
    for arguments in ((), ("--data",)):
        code, document = check(path, *arguments)
        assert (code, document["ok"]) == (0, True)
        (report,) = document["paths"]
        assert (report["path"], report["sessions"], report["blocks"], report["findings"]) == (str(path), 2, 15, [])
    assert report["checked_bytes"] == report["committed_bytes"] > 0
    assert content(path) == before


def test_a_running_daemon_keeps_it_out_and_is_named(daemon):
    run = flatcake("check", "--ssd-paths", daemon.ssd_paths[0])
    assert (run.returncode, run.stderr.count("\n")) == (3, 1)
    assert str(daemon.process.pid) in run.stderr
    assert flatcake("check", "--ssd-paths", daemon.ssd_paths[0], "--rebuild").returncode == 3


def test_a_flipped_bit_is_found_by_data_only(stored):
    path = stored[0].ssd_paths[0]
    file = max((path / "sessions").rglob("*.kv"), key=lambda one: one.stat().st_size)
    with file.open("r+b") as opened:
        opened.seek(5000)
        byte = opened.read(1)
        opened.seek(5000)
        opened.write(bytes([byte[0] ^ 4]))
    assert check(path)[0] == 0
    code, document = check(path, "--data")
    assert (code, document["ok"]) == (1, False)
    assert len(document["paths"][0]["findings"]) == 1
    run = flatcake("check", "--ssd-paths", path, "--data")
    assert run.returncode == 1
    assert "checksum" in run.stderr


def test_a_lost_journal_is_found_and_rebuilt_from_the_files(stored):
    daemon, contexts = stored
    path = daemon.ssd_paths[0]
    shutil.rmtree(path / "journal")
    code, document = check(path)
    assert code == 1
    assert "--rebuild" in document["paths"][0]["findings"][0]
    code, document = check(path, "--rebuild")
    assert (code, document["ok"]) == (0, True)
    assert document["paths"][0]["rebuilt"]["blocks"] == 15
    daemon.start()
    client = connect(daemon)
    kv = Kv(client)
    assert {name: kv.hit(tokens) for name, tokens in contexts.items()} == {"a": 6, "b": 9}
    client.close()


def test_a_wrong_directory_is_refused_in_one_line(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        run = flatcake("check", "--ssd-paths", path)
        assert (run.returncode, run.stderr.count("\n"), run.stdout) == (2, 1, "")
