from __future__ import annotations

import json

import pytest

from flatcake_client.replay import report
from flatcake_client.replay.__main__ import run, write_whole

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


def test_json_without_a_file_is_all_that_is_printed(capsys, tmp_path):
    small = [*SMALL, "--system", "none", "--kv-bytes-per-token", "1", "--planes", "1", "--dense", "0.2s"]
    assert (
        run([*small, "--prefill-rate", "10000000", "--pages-bytes", "16MiB", "--ssd-dir", str(tmp_path), "--json"]) == 0
    )
    document = json.loads(capsys.readouterr().out)
    assert document["runs"][0]["requests"] == document["trace"]["requests"] == 20


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
