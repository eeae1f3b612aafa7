"""The demo on a tiny model: the whole story with real processes, and that it can fail."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from command import FLATCAKE
from daemon import Daemon

from flatcake_client.engines import demo
from flatcake_client.engines.demo import Scale, main, run_demo
from flatcake_client.engines.demo_engine import DemoEngine
from flatcake_client.engines.demo_processes import DaemonProcess, DemoFailed, EngineProcess
from flatcake_client.engines.demo_report import Figures, Outcome, Record, document, show
from flatcake_client.engines.landing import Landing
from flatcake_client.engines.models import ModelShape
from flatcake_client.raw_reads import raw_read_rates

TINY = Scale(
    shape=asdict(ModelShape()),
    block_tokens=16,
    system_tokens=64,
    agents=2,
    task_tokens=96,
    step_tokens=40,
    chats=2,
    message_tokens=40,
    one_shot_tokens=20,
    one_shots_a_scene=2,
    agent_context_tokens=200,
    memory_bytes=16 << 20,
    ssd_bytes=128 << 20,
)


def test_the_story_is_told_and_every_token_is_identical(tmp_path):
    said = []
    outcome = run_demo(TINY, tmp_path, said.append)
    assert outcome.tokens_identical
    assert outcome.zeroed_differ
    assert outcome.law_holds
    assert outcome.proved
    assert list(tmp_path.iterdir()) == []

    def of(scene, kind):
        return [record for record in outcome.records if (record.scene, record.kind) == (scene, kind)]

    for record in of("a new engine", "agents"):
        assert record.restored["bytes_by_medium"]["memory"]
        assert record.restored["bytes_by_medium"]["ssd"]
        assert record.computed_tokens <= TINY.step_tokens + 2 * TINY.block_tokens
    assert [record.restored["tokens"] for record in of("no daemon", "one-shots")] == [0]
    # Memory died with the daemon: the first computes the system prompt, and stores it for the next.
    assert [record.restored["tokens"] for record in of("a new daemon", "one-shots")] == [0, 64]
    for record in of("a new daemon", "agents"):
        assert record.computed_tokens <= TINY.step_tokens + 2 * TINY.block_tokens
    said_of = json.loads(json.dumps(document(outcome, asdict(TINY))))
    assert said_of["tokens_identical"] is True
    homes = {(place["kind"], place["medium"], place["reason"]) for place in said_of["placement"]}
    assert homes == {
        ("system prompt", "memory", "shared"),
        ("agents", "ssd", "first-turn"),
        ("agents", "ssd", "long-context"),
        ("chats", "ssd", "first-turn"),
        ("chats", "memory", "short-reply"),
        ("one-shots", "ssd", "first-turn"),
    }
    assert said_of["restored_tokens"] + said_of["computed_tokens"] == said_of["prompt_tokens"]
    assert any("kill -9 of the engine" in text for text in said)


def test_the_demos_engine_says_when_tokens_differ(tmp_path, monkeypatch):
    """A restore that brings zeros must not pass: what `identical` is worth."""
    with Daemon(tmp_path) as daemon:
        engine = DemoEngine(daemon.endpoint, ModelShape(), torch.bfloat16, 16)
        request = {"do": "generate", "prompt": list(range(200)), "count": 8}
        first = engine.answer(request)
        assert first["identical"]
        assert engine.answer(request)["restored"]["tokens"] == 192
        real = Landing.keys_values

        def zeroed(landing, *which):
            keys, values = real(landing, *which)
            return keys, values * 0

        monkeypatch.setattr(Landing, "keys_values", zeroed)
        answer = engine.answer(request)
        assert answer["restored"]["tokens"] == 192
        assert not answer["identical"]
        monkeypatch.undo()
        assert engine.answer({"do": "zeroed", "prompt": request["prompt"], "count": 8})["tokens"] != first["tokens"]
        with pytest.raises(ValueError, match="'sing' is none of generate"):
            engine.answer({"do": "sing"})
        engine._client.close()


def record_of(**changes):
    restored = {
        "tokens": 64,
        "bytes_by_medium": {"memory": 1 << 20, "ssd": 0},
        "read_commands": 1,
        "bytes_read": 0,
        "restore_s": 1,
    }
    values = {
        "scene": "a first day",
        "kind": "agents",
        "name": "agent-0",
        "identical": True,
        "prompt_tokens": 100,
        "computed_tokens": 36,
        "restored": restored,
        "stored": [],
        "ttft_s": 0.01,
        "ttft_uncached_s": 0.1,
    }
    return Record(**(values | changes))


def outcome_of(*records, **changes):
    values = {
        "records": list(records) or [record_of()],
        "zeroed_differ": True,
        "figures": Figures(1 << 20, 3, 1e9, 2e9, "1024 KiB x 4", 5e9),
        "engine": {"kv_bytes_per_token": 1, "parameters": 1, "read_path": "posix"},
        "law_holds": True,
        "seconds": 1.0,
    }
    return Outcome(**(values | changes))


NOTHING_RESTORED = {"tokens": 0, "bytes_by_medium": {}, "read_commands": 0, "bytes_read": 0, "restore_s": 0}
OUTCOMES = {
    "fine": (outcome_of(), 0),
    "a reply differs": (outcome_of(record_of(), record_of(identical=False, name="agent-7")), 1),
    "zeroed KV makes no difference": (outcome_of(zeroed_differ=False), 1),
    "the cache had no part": (outcome_of(record_of(restored=NOTHING_RESTORED)), 1),
    "the law is broken": (outcome_of(law_holds=False), 1),
}


@pytest.mark.parametrize("name", OUTCOMES)
@pytest.mark.parametrize("json_wanted", [False, True])
def test_the_exit_code_is_the_verdict(name, json_wanted, monkeypatch, capsys):
    outcome, code = OUTCOMES[name]
    monkeypatch.setattr(demo, "run_demo", lambda *_: outcome)
    assert main(["--json"] if json_wanted else []) == code
    out = capsys.readouterr().out
    if json_wanted:
        assert json.loads(out)["tokens_identical"] is (name != "a reply differs")
    elif name == "a reply differs":
        assert "DIFFER from a run without the cache: agent-7" in out
    elif name == "fine":
        assert "All tokens of 1 requests are identical" in out
        assert "0.50 of raw O_DIRECT preadv" in out


def test_tables_fit_80_columns(capsys):
    from rich.console import Console

    part = {"medium": "memory", "reason": "long-context", "first_block": 0, "blocks": 99, "bytes": 1 << 30}
    big = record_of(prompt_tokens=123456, stored=[part], ttft_s=12.0, ttft_uncached_s=99.0)
    show(outcome_of(big), Console(width=80))
    assert "123,456" in capsys.readouterr().out


def test_a_demo_that_cannot_run_says_why(tmp_path, monkeypatch, capsys):
    def fails(*_):
        raise DemoFailed("no room")

    monkeypatch.setattr(demo, "run_demo", fails)
    assert main([]) == 3
    assert "no room" in capsys.readouterr().err
    engine = EngineProcess(tmp_path, "unix:///nowhere", {"shape": {}, "dtype": "nonsense", "block_tokens": 16})
    engine.start()
    with pytest.raises(DemoFailed, match=r"(?s)engine: .*no attribute 'nonsense'"):
        engine.wait_ready()
    engine.kill()
    daemon = DaemonProcess(tmp_path, "--memory-bytes", "nonsense")
    daemon.start()
    with pytest.raises(DemoFailed, match=r"(?s)daemon: it ended.*memory_bytes"):
        daemon.wait_ready()
    daemon.kill()


def test_raw_reads_read_the_whole_file(tmp_path, monkeypatch):
    seen = []
    real = os.preadv

    def counted(fd, buffers, offset):
        seen.append(real(fd, buffers, offset))
        return seen[-1]

    monkeypatch.setattr(os, "preadv", counted)
    rates = dict(raw_read_rates(tmp_path, 5 << 20, 1))
    assert len(rates) == 12
    assert all(rate > 0 for rate in rates.values())
    assert sum(seen) == 12 * (5 << 20)
    assert list(tmp_path.iterdir()) == []


def test_a_demo_that_is_told_to_stop_leaves_nothing_behind(tmp_path):
    child = subprocess.Popen(
        [*FLATCAKE, "demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    pids = []
    try:
        children = Path(f"/proc/{child.pid}/task/{child.pid}/children")
        while len(pids := children.read_text().split()) < 2:
            assert child.poll() is None
        child.send_signal(signal.SIGTERM)
        _, errors = child.communicate(timeout=30)
        assert child.returncode == 130
        assert errors == b""
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        assert list(tmp_path.iterdir()) == []
    finally:
        child.kill()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
