"""The cluster's demo on a tiny model: the whole story with real processes, and what its verdict is worth."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace

import pytest
import torch
from redis_server import needs_redis
from ucx_peer import ucx_here

from flatcake_client.engines import demo_cluster, demo_processes
from flatcake_client.engines.demo_cluster import ClusterScale, main, run_cluster_demo
from flatcake_client.engines.demo_cluster_report import ClusterOutcome, MovingRecord
from flatcake_client.engines.demo_engine import DemoEngine
from flatcake_client.engines.demo_processes import DemoFailed
from flatcake_client.engines.models import ModelShape
from flatcake_transport.errors import Unavailable

TINY = ClusterScale(
    shape=asdict(ModelShape()),
    dtype="float32",
    system_tokens=256,
    task_tokens=128,
    step_tokens=260,
    message_tokens=260,
    reply_tokens=4,
    agent_context_tokens=1000,
    memory_bytes=32 << 20,
    ssd_bytes=256 << 20,
)


class EngineHere:
    """An engine in this process, since importing torch three times takes longer than all the rest."""

    def __init__(self, directory, endpoint, setup):
        self._make = lambda: DemoEngine(
            endpoint, ModelShape(**setup["shape"]), getattr(torch, setup["dtype"]), setup["block_tokens"], 10.0
        )

    def start(self):
        self._engine = None

    def wait_ready(self):
        self._engine = self._make()

    def ask(self, request):
        return json.loads(json.dumps(self._engine.answer(json.loads(json.dumps(request)))))

    def kill(self):
        if self._engine is not None:
            self._engine._client.close()


@needs_redis
def test_a_session_moves(tmp_path):
    ucx_here()
    said = []
    outcome = run_cluster_demo(TINY, tmp_path, said.append, EngineHere)
    assert outcome.tokens_identical
    assert outcome.law_holds
    assert outcome.from_others
    assert outcome.recomputed_tokens == 0
    assert list(tmp_path.iterdir()) == []
    records = {(record.scene, record.name): record for record in outcome.records}
    assert records["moves to node 2", "agent"].blocks(1, "memory") == TINY.system_tokens // TINY.block_tokens
    stayed = records["stays at node 2", "agent"]
    assert (stayed.recomputed_tokens, stayed.dead_tokens) == (0, 0)
    assert stayed.blocks(2, "memory")
    assert stayed.blocks(2, "ssd")
    assert records["node 1 is killed", "agent"].dead_tokens >= TINY.step_tokens - TINY.block_tokens
    assert not records["node 1 is killed", "agent"].blocks(1, "memory")
    assert any("kill -9 of node 1" in text for text in said)


RECORD = MovingRecord(
    scene="moves to node 2",
    name="agent",
    node=2,
    identical=True,
    prompt_tokens=500,
    computed_tokens=180,
    known_tokens=400,
    living_tokens=320,
    restored={"tokens": 320, "blocks_by_place": {"memory@1": 10, "ssd@1": 6, "ssd@2": 4}},
    stored=[],
    ttft_s=0.01,
    ttft_uncached_s=0.1,
)
FINE = ClusterOutcome([RECORD], {"kv_bytes_per_token": 16384}, law_holds=True, seconds=9.0)
SHORT = replace(RECORD, restored={"tokens": 256, "blocks_by_place": {"memory@1": 16}})
ALONE = replace(RECORD, restored={"tokens": 320, "blocks_by_place": {"ssd@2": 20}})
OUTCOMES = {
    "fine": (FINE, 0, "80 tokens that the dead node alone had"),
    "a reply differs": (replace(FINE, records=[replace(RECORD, identical=False)]), 1, "DIFFER.*: agent at node 2"),
    "living": (replace(FINE, records=[SHORT]), 1, "64 tokens were computed again though a living node had them"),
    "no other node": (replace(FINE, records=[ALONE]), 1, "20 from local ssd"),
    "the law is broken": (replace(FINE, law_holds=False), 1, "BROKEN"),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_the_exit_code_is_the_verdict(name, monkeypatch, capsys):
    outcome, code, said = OUTCOMES[name]
    monkeypatch.setattr(demo_cluster, "run_cluster_demo", lambda *_: outcome)
    assert main([]) == code
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(said, text)
    assert main(["--json"]) == code
    told = json.loads(capsys.readouterr().out)
    assert told["tokens_identical"] is (name != "a reply differs")
    if name == "fine":
        assert told["blocks_by_place"] == {"local ssd": 4, "memory of node 1": 10, "ssd of node 1": 6}
        assert (told["new_tokens"], told["dead_nodes_tokens"], told["recomputed_tokens"]) == (100, 80, 0)


def test_a_demo_that_cannot_run_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_cluster, "describe_ucx", lambda: None)
    monkeypatch.setattr(demo_processes.shutil, "which", lambda _: None)
    with pytest.raises(DemoFailed, match="apt-get install redis-server"):
        run_cluster_demo(TINY, tmp_path, print)

    def none_here():
        raise Unavailable("no libucp")

    monkeypatch.setattr(demo_cluster, "describe_ucx", none_here)
    with pytest.raises(DemoFailed, match="through UCX: no libucp"):
        run_cluster_demo(TINY, tmp_path, print)
    assert list(tmp_path.iterdir()) == []
