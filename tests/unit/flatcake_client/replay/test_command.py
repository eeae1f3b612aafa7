from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from flatcake_client.replay import report
from flatcake_client.replay.__main__ import run, write_whole
from flatcake_client.replay.options import PEERS, SYSTEMS
from flatcake_client.replay.systems import ABLATIONS
from flatcake_transport import page

SMALL = ("--profile", "chat", "--limit", "20")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing.jsonl",), "nothing.jsonl does not exist"),
        ((*SMALL, "--system", "redis"), "choose flatcake, none, mooncake, lmcache"),
        ((*SMALL, "--ssd-bytes", "64KiB"), "cannot hold one request"),
        ((*SMALL, "--ssd-bytes", "900TB"), "free"),
        ((*SMALL, "--ssd-dir", "/nothing/here"), "is no directory"),
        ((*SMALL, "--planes", "3"), "do not divide"),
        ((*SMALL, "--pages-bytes", "64KiB"), "--pages-bytes"),
        ((*SMALL, "--json", "/nothing/here/report.json"), "directory does not exist"),
        ((*SMALL, "--json", "/"), "--json / is a directory: give a file"),
        ((*SMALL, "--from", "9000h"), "widen --from"),
        (("--compare", __file__), "is no JSON"),
    ],
)
def test_what_cannot_be_is_one_line(capsys, arguments, message):
    assert run(list(arguments)) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1


def test_a_peer_without_its_environment_says_how_to_make_it(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bench" / "peers").mkdir(parents=True)
    for name in ("mooncake", "lmcache"):
        (tmp_path / "bench" / "peers" / f"{name}.py").write_text("")
    monkeypatch.setattr("flatcake_client.replay.__main__.__file__", str(tmp_path / "a" / "b" / "c.py"))
    for name in ("mooncake", "lmcache"):
        assert run([*SMALL, "--system", name]) == 2
        assert f".venv-{name}: make it with `make peers`" in capsys.readouterr().err


@pytest.fixture
def quick(tmp_path):
    """20 requests without a store, in a moment."""
    small = [*SMALL, "--system", "none", "--kv-bytes-per-token", "1", "--planes", "1", "--dense", "0.2s"]
    return [*small, "--prefill-rate", "10000000", "--pages-bytes", "16MiB", "--ssd-dir", str(tmp_path)]


def test_json_without_a_file_is_all_that_is_printed(capsys, quick):
    assert run([*quick, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["runs"][0]["requests"] == document["trace"]["requests"] == 20


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_full_disk_takes_only_what_was_to_be_on_it(capsys, quick, tmp_path, monkeypatch, option):
    file = str(tmp_path / "report")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", file)

    monkeypatch.setattr("flatcake_client.replay.__main__.write_whole", full)
    monkeypatch.setattr("flatcake_client.replay.__main__.write_page", full)
    assert run([*quick, "--load", "1,2", option, file]) == 3
    out, error = capsys.readouterr()
    assert f"flatcake replay: {file}: No space left on device" in error
    assert "What was replayed" in out
    assert "delivers 0.00% to 0.00%" in out  # of both loads


def test_pages_that_do_not_fit_into_memory_are_said(capsys, quick, monkeypatch):
    def none(_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("flatcake_client.replay.sweep.aligned_buffer", none)
    assert run(quick) == 2
    assert "--pages-bytes 16777216: Cannot allocate memory; give less" in capsys.readouterr().err


def test_another_json_is_no_report(tmp_path):
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"format": "other/1"}))
    with pytest.raises(ValueError, match="is no report of flatcake replay"):
        report.read_documents([file])


def test_a_report_is_written_whole(tmp_path):
    file = tmp_path / "report.json"
    write_whole(file, "one")
    write_whole(file, "two")
    assert file.read_text() == "two"
    assert list(tmp_path.iterdir()) == [file]


def test_a_report_that_cannot_be_written_leaves_nothing_and_is_named(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken") as found:
        write_whole(tmp_path / "taken", "one")
    assert found.value.filename == str(tmp_path / "taken")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_page_that_cannot_be_written_names_its_folder(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="page") as found:
        page.write_page(tmp_path / "page", "", "", {}, [])
    assert found.value.filename == str(tmp_path / "page")


def test_every_system_and_ablation_has_a_colour_of_its_own():
    assert len(set(page.COLOURS)) >= len(SYSTEMS) + len(PEERS) + len(ABLATIONS)
