"""`flatcake replay` as a user runs it: real daemon, real bytes, in seconds."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command import FLATCAKE, flatcake
from waiting import until

# 60 requests of 10 agents in half a second; 4 KiB of KV a block and plane.
SMALL = (
    *("--profile", "claude-code", "--profile-sessions", "10", "--turns", "6", "--max-tokens", "60000"),
    *("--block-tokens", "512", "--planes", "2", "--kv-bytes-per-token", "16", "--pages-bytes", "16MiB"),
    *("--memory-bytes", "64MiB", "--ssd-bytes", "64MiB", "--dense", "1s", "--prefill-rate", "5000000"),
)


@pytest.fixture
def small(tmp_path):
    return (*SMALL, "--ssd-dir", tmp_path, "--json", tmp_path / "report.json")


def report_of(tmp_path):
    return json.loads((tmp_path / "report.json").read_text())


@pytest.mark.parametrize("ablation", ["", "one-queue", "eviction-layout", "no-merge", "window-of-one", "memory-off"])
def test_everything_that_was_computed_is_delivered(small, tmp_path, ablation):
    more = ("--ablation", ablation) if ablation else ()
    done = flatcake("replay", *small, "--verify-all", *more)
    assert done.returncode == 0, done.stderr
    document = report_of(tmp_path)
    (run,) = document["runs"]
    assert not document["partial"]
    assert run["requests"] == run["requests_planned"] == document["trace"]["requests"] > 40
    assert (run["wrong_blocks"], run["cancelled_restores"], run["errors"], run["short_blocks"]) == (0, 0, 0, 0)
    assert run["stats"]["rejected_blocks"] == run["stats"]["lost_blocks"] == 0
    assert run["delivered_hit"] == run["found_hit"] <= run["stored_hit"] <= document["ideal_hit"] + 1e-9
    assert run["delivered_hit"] > 0.5
    assert run["stored_hit"] - run["delivered_hit"] < 0.2  # what was being stored when another session asked for it
    homes = run["stats"]["more"]["blocks_by_home"]
    assert ("shared" in homes) == (ablation != "memory-off")
    if ablation == "memory-off":
        assert run["memory_bytes"] == 0 < run["ssd_bytes"]
    reads, blocks = run["stats"]["read_commands"], run["ssd_bytes"] // document["budget"]["block_bytes"]
    if ablation == "no-merge":
        assert reads == blocks * document["budget"]["planes"]
    elif ablation != "eviction-layout":
        assert 0 < reads < blocks
    assert "wrong" in done.stdout
    assert not [path for path in tmp_path.iterdir() if path.name != "report.json"]


def test_loads_beside_each_other_and_without_a_store(small, tmp_path):
    (tmp_path / "none").mkdir()
    done = flatcake("replay", *small, "--load", "1,8", "--each-request")
    assert done.returncode == 0, done.stderr
    ours = report_of(tmp_path)
    assert [run["load"] for run in ours["runs"]] == [1, 8]
    assert len(ours["runs"][0]["records"]) == ours["trace"]["requests"]
    none = tmp_path / "none" / "report.json"
    done = flatcake("replay", *small[:-1], none, "--system", "none", "--load", "8")
    assert done.returncode == 0, done.stderr
    assert json.loads(none.read_text())["runs"][0]["delivered_hit"] == 0
    page = tmp_path / "page"
    done = flatcake("replay", "--compare", tmp_path / "report.json", none, "--plot", page)
    assert done.returncode == 0, done.stderr
    assert "none: delivers 0.00%" in done.stdout
    assert (page / "hit-rate.png").read_bytes().startswith(b"\x89PNG")
    text = (page / "index.html").read_text()
    assert not re.search(r'(src|href)="(?!data:)', text)
    assert "flatcake replay --profile claude-code" in text


def test_a_stop_leaves_a_whole_report_of_what_was_done(small, tmp_path):
    slow = [*map(str, small)]
    slow[slow.index("--dense") + 1] = "600s"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FLATCAKE_")}
    running = subprocess.Popen(
        [*FLATCAKE, "replay", *slow, "--load", "100,1,1"],
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    with running:
        # The first load takes six seconds and is reported whole, the second would take ten minutes.
        until((tmp_path / "report.json").exists, timeout_s=60)
        until(lambda: any(tmp_path.glob(".flatcake-replay-*")), timeout_s=30)
        running.send_signal(signal.SIGINT)
        running.send_signal(signal.SIGINT)
        said = running.stderr.read().decode()
        assert running.wait(30) == 130, said
    assert "stopped" in said
    document = report_of(tmp_path)
    assert document["partial"]
    assert not document["runs"][0]["partial"]
    assert document["runs"][0]["requests"] == document["trace"]["requests"]
    for run in document["runs"][1:]:
        assert run["partial"]
        assert run["requests"] < run["requests_planned"]
    assert not list(tmp_path.glob(".flatcake-replay-*"))


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv: a killed replay leaves its daemon behind")
def test_a_killed_replay_takes_its_daemon_along(tmp_path):
    code = f"""
from pathlib import Path
from flatcake_client.replay.node import Node
node = Node(Path({str(tmp_path)!r}), {{"memory-bytes": "1MiB", "ssd-bytes": "16MiB"}})
print(node.pid, flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as replay:
        words = Path(f"/proc/{int(replay.stdout.readline())}/cmdline")
        assert b"serve" in words.read_bytes()
        replay.kill()

    def gone():
        try:
            return not words.read_bytes()  # a process that nobody has waited for has no words
        except OSError:
            return True

    until(gone, 20)


ADAPTER = """
from flatcake_client.replay.system import Found, SystemStats

class Mine:
    name, prefetches_max, settings = "mine", 3, {"how": "badly"}
    def __init__(self, budget): self.held = {}
    def lookup(self, asked):
        n = 0
        while n < len(asked.keys) and asked.keys[n].tobytes() in self.held: n += 1
        return Found(n, {"ssd": n})
    def restore(self, asked, found, pages, slots, timeout_s):
        for key, slot in zip(asked.keys, slots): pages[slot] = self.held[key.tobytes()]
        pages[slots[0], 1, 40] ^= 1
        return found.blocks
    def store(self, asked, first_block, pages, slots, timeout_s):
        for key, slot in zip(asked.keys, slots): self.held[key.tobytes()] = pages[slot].copy()
        return len(asked.keys) - first_block
    def settle(self, timeout_s): pass
    def stats(self): return SystemStats(more={"said": 7})
    def close(self): pass

def open_system(budget): return Mine(budget)
"""


def test_a_system_of_ones_own_is_driven_alike_and_its_lie_is_found(small, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(ADAPTER)
    done = flatcake("replay", *small, "--adapter", file, "--verify-all")
    assert done.returncode == 1, done.stderr
    document = report_of(tmp_path)
    (run,) = document["runs"]
    assert (document["system"], run["stats"]["more"]["said"], run["settings"]["how"]) == ("mine", 7, "badly")
    assert run["wrong_blocks"] > 10
    assert run["requests"] == document["trace"]["requests"]
