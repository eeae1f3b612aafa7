"""`flatcake analyze` and `flatcake tune` as a user runs them, on traffic of their own generator."""

from __future__ import annotations

import json

import pytest
from command import flatcake

from flatcake_server.config import load_config
from flatcake_transport.trace import read_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """A small trace, generated and saved by the command itself."""
    file = tmp_path_factory.mktemp("traffic") / "agents.jsonl.gz"
    run = flatcake("analyze", "--profile", "claude-code", "--sessions", 6, "--seed", 4, "--save-trace", file, "--json")
    assert (run.returncode, run.stderr) == (0, "")
    return file, json.loads(run.stdout)


def test_a_saved_trace_says_the_same_as_its_profile(trace):
    file, document = trace
    again = json.loads(flatcake("analyze", file, "--json").stdout)
    assert again["trace"].pop("name") == "agents.jsonl.gz"
    assert document["trace"].pop("name") == "profile claude-code"
    assert again == document
    assert document["trace"]["requests"] == sum(1 for _ in read_trace(file))
    assert document["hits"]["max_share_blocks"] > 0.9


def test_tables_and_advice_are_for_people(trace, tmp_path):
    run = flatcake(
        "analyze", trace[0], "--model", "llama-3.1-70b", "--memory-bytes", "8GiB", "--plot", tmp_path / "plots"
    )
    assert (run.returncode, run.stderr) == (0, "")
    for word in ("used once", "hit rate against cache size", "1/256", "plan per session", "327,680 bytes each"):
        assert word in run.stdout, word
    assert {path.name for path in (tmp_path / "plots").iterdir()} >= {"index.html", "hit-rate.png", "working-set.png"}


def test_tune_prints_a_configuration_that_loads(trace, tmp_path):
    run = flatcake("tune", trace[0], "--bytes-per-token", "128KiB", "--memory-bytes-max", "32GiB", "--plot", tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.count("chosen") >= 4
    snippet = tmp_path / "flatcake.toml"
    snippet.write_text(run.stdout[run.stdout.index("# for flatcake.toml") :])
    config = load_config(snippet)
    assert config.memory_bytes <= 32 << 30
    assert (tmp_path / "index.html").exists()
    found = json.loads(flatcake("tune", trace[0], "--memory-bytes-max", "32GiB", "--json").stdout)
    assert found["toml"] in run.stdout
    assert {option: getattr(config, option) for option in found["curves"]} == {
        option: found[option] for option in found["curves"]
    }


def test_a_file_that_is_no_trace_and_one_that_is_not_there(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("hello\n")
    run = flatcake("analyze", file)
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert f"{file}:1: no trace" in run.stderr
    run = flatcake("tune", tmp_path / "missing")
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert "missing does not exist: give a trace, or --profile NAME" in run.stderr
