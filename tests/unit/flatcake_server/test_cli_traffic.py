"""What `flatcake analyze` and `flatcake tune` refuse, and that they refuse it before any work."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from flatcake_server import cli


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a trace, or --profile NAME"),
        (["x.jsonl", "--profile", "chat"], "one of the two"),
        (["--profile", "nobody"], "--profile nobody is unknown: choose claude-code, chat, api"),
        (["--profile", "chat", "--model", "gpt"], "--model gpt is unknown"),
        (["--profile", "chat", "--bytes-per-token", "many"], "--bytes-per-token: 'many' is no size"),
        (["--profile", "chat", "--bytes-per-token", "0"], "--bytes-per-token is above 0"),
        (["--profile", "chat", "--spread", "soon"], "--spread: 'soon' is no duration"),
        (["nothing.jsonl"], "nothing.jsonl does not exist: give a trace, or --profile NAME"),
        (["--profile", "chat", "--save-trace", "/"], "--save-trace / is a directory: give a file"),
    ],
)
@pytest.mark.parametrize("command", ["analyze", "tune"])
def test_mistakes_are_one_line(command, arguments, message, capsys):
    assert cli._exit_code([command, *arguments]) == 2
    out, error = capsys.readouterr()
    assert message in error
    assert error.count("\n") == 1
    assert out == ""


@pytest.mark.parametrize("command", ["analyze", "tune"])
def test_missing_matplotlib_is_said_before_the_trace_is_read(command, capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli._exit_code([command, str(tmp_path / "missing"), "--plot", str(tmp_path)]) == 2
    assert "pip install 'flatcake[plots]'" in capsys.readouterr().err


def test_every_model_that_is_offered_is_known(capsys):
    assert cli._exit_code(["analyze", "--help"]) == 0
    text = capsys.readouterr().out
    for name in ("llama-3.1-8b", "llama-3.1-70b", "deepseek-v3-mla", "claude-code", "chat", "api"):
        assert name in text.replace("\n", " "), name


def test_every_option_of_the_guide_is_one(capsys):
    guide = (Path(__file__).parents[3] / "docs/traffic.md").read_text(encoding="utf-8")
    for command in ("analyze", "tune"):
        assert cli._exit_code([command, "--help"]) == 0
    help_text = capsys.readouterr().out
    assert set(re.findall(r"--[a-z]+(?:-[a-z]+)*", guide)) <= set(re.findall(r"--[a-z]+(?:-[a-z]+)*", help_text))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full: a full disk was not tried")
def test_a_full_disk_is_named(capsys):
    command = ["analyze", "--profile", "chat", "--sessions", "3", "--save-trace", "/dev/full"]
    assert cli._exit_code(command) == 3
    assert capsys.readouterr().err == "flatcake: /dev/full: No space left on device\n"
