"""Engines of their own: restarts, loads and stores inside the step, processes, little memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from daemon import Daemon
from engines.vllm.running import BLOCK, Engine, Held, prompt
from vllm import SamplingParams

from flatcake_client import Hit


@pytest.mark.parametrize("extra", [{"layerwise": True}, {"store_at": "prefill"}], ids=["layerwise", "prefill"])
def test_beside_the_computation(model, expected, tmp_path, extra):
    """Loaded and stored layer by layer, inside vLLM's steps. A node of memory only."""
    with Daemon(tmp_path, ssd_paths="") as node, Engine(model, node.endpoint, extra=extra) as engine:
        ids = prompt(10, 100)
        for turn in range(3):
            reply = engine.ask(ids, tokens=20)[0]
            assert reply == expected(ids, 20)
            engine.forget()
            ids = ids + reply + prompt(100 + turn, 60)
        counts = engine.counts()
        assert counts["stores"] == (3 if "layerwise" in extra else 4)
        assert (counts["loads"], counts["load_failed_blocks"]) == (2, 0)
        prompts = [ids + prompt(110 + number, 90) for number in range(4)]
        for _ in range(2):
            assert engine.ask(*prompts, tokens=4) == [expected(each, 4) for each in prompts]
            engine.forget()
        # Inside the step, a prefix that four have is loaded once: vLLM's own cache has it from then on.
        assert engine.counts()["loads"] >= (5 if "layerwise" in extra else 8)
        node.check()


def test_across_restarts_of_engine_and_daemon(model, expected, tmp_path):
    ids = prompt(11, 300)
    with Daemon(tmp_path) as node:
        for restart in range(3):
            with Engine(model, node.endpoint) as engine:
                assert engine.ask(ids) == [expected(ids)]
                assert engine.counts()["loads"] == min(1, restart)
                if restart == 1:
                    node.kill()
                    node.start()
                    engine.forget()
                    assert engine.ask(ids) == [expected(ids)]
                    assert engine.counts()["hit_tokens"] > 0
        node.check()


PROCESSES = """
import sys
import time
from pathlib import Path
from engines.vllm.running import Engine, prompt, Witness
def main():
    model, endpoint = sys.argv[1:]
    engine = Engine(Path(model), endpoint)
    ids, expected = prompt(12, 300), Witness()
    import time
    for number in range(2):
        assert engine.ask(ids) == [expected(ids)]
        time.sleep(2)  # the engine's own process stores
        assert engine.llm.reset_prefix_cache()
    metrics = {metric.name: getattr(metric, "value", None) for metric in engine.llm.get_metrics()}
    print({name: value for name, value in metrics.items() if "flatcake" in name})
    engine.llm.llm_engine.engine_core.shutdown()
if __name__ == "__main__":
    main()
"""


@pytest.mark.timeout(300)
def test_in_processes_of_its_own(model, tmp_path):
    with Daemon(tmp_path) as node:
        script = tmp_path / "processes.py"
        script.write_text(
            PROCESSES.replace("Engine(Path(model), endpoint)", "Engine(Path(model), endpoint, disable_log_stats=False)")
        )
        environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(
            [sys.executable, str(script), str(model), node.endpoint],
            env=environment, capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        assert "'vllm:flatcake_loads': 1" in done.stdout, done.stdout
        node.check()


def test_preempted_requests(model, expected, tmp_path):
    """Room for three of five requests: vLLM preempts, and loads again what it had."""
    prompts = [prompt(20 + number, 150 + 10 * number) for number in range(5)]
    with (
        Daemon(tmp_path) as node,
        Engine(model, node.endpoint, num_gpu_blocks_override=20, max_model_len=256) as engine,
    ):
        preempted = []
        preempt = engine.core.scheduler._preempt_request
        engine.core.scheduler._preempt_request = lambda *rest, **more: (preempted.append(1), preempt(*rest, **more))
        for _ in range(2):
            assert engine.ask(*prompts, tokens=40) == [expected(ids, 40) for ids in prompts]
            engine.forget()
        assert preempted
        assert engine.counts()["loads"] >= 5
        node.check()


@pytest.mark.parametrize("moment", ["preempted", "loading", "ended"])
def test_a_request_that_was_stored_preempted_and_loaded_again(model, expected, tmp_path, monkeypatch, moment):
    """Its prompt is stored beside its prefill. vLLM hears of each request once, or it stops: of the load, or of the store."""
    ids = prompt(320, 6 * BLOCK + 9)
    extra = {"store_at": "prefill"}
    with Daemon(tmp_path, ssd_paths="") as node, Engine(model, node.endpoint, extra=extra) as engine:
        sampling = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True)
        vllm = engine.llm.llm_engine
        vllm.add_request("one", {"prompt_token_ids": ids}, sampling)
        deadline_s = time.monotonic() + 20
        while not engine.worker.tally.totals["stores"]:
            assert time.monotonic() < deadline_s
            vllm.step()
        call = Held(monkeypatch, Hit, "restore")
        assert engine.core.scheduler.reset_prefix_cache(reset_running_requests=True)
        if moment == "preempted":
            vllm.abort_request(["one"])
        while moment != "preempted" and not call.reached.is_set():
            assert time.monotonic() < deadline_s
            vllm.step()
        if moment == "loading":
            vllm.abort_request(["one"])
        for _ in range(3):
            vllm.step()
        call.open.set()
        replies = []
        while engine.core.scheduler.has_requests():
            assert time.monotonic() < deadline_s, "vLLM waits for a report that does not come"
            replies += [output for output in vllm.step() if output.finished]
        if moment == "ended":
            assert [list(output.outputs[0].token_ids) for output in replies] == [expected(ids, 12)]
        monkeypatch.undo()
        engine.drain()
        assert not engine.scheduler._owed
        assert not engine.worker._owed
        pool = engine.core.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert engine.ask(ids) == [expected(ids)]


@pytest.mark.timeout(300)
def test_eight_agents_through_ssd(model, expected, tmp_path):
    """Growing contexts, of which vLLM's cache holds one and the arena none: all that was computed comes back from SSD."""
    with Daemon(tmp_path, memory_bytes=1 << 20, short_reply_tokens=0) as node, Engine(
        model, node.endpoint, num_gpu_blocks_override=48, max_model_len=1024
    ) as engine:  # fmt: skip
        contexts = [prompt(30 + agent, 150 + 7 * agent) for agent in range(8)]
        found = possible = 0
        for turn in range(3):
            for agent, ids in enumerate(contexts):
                engine.counts()
                reply = engine.ask(ids, tokens=20, extra_args={"kv_transfer_params": {"session_id": f"agent-{agent}"}})[
                    0
                ]
                assert reply == expected(ids, 20), (turn, agent)
                counts = engine.counts()
                if turn:
                    found += counts["loaded_ssd_bytes"]
                    possible += (len(ids) - 41) // BLOCK * engine.scheduler._space.spec.block_bytes
                contexts[agent] = ids + reply + prompt(300 + 10 * turn + agent, 40)
            engine.forget()
        assert found >= 0.9 * possible
        with node.admin() as admin:
            names = {session["name"] for session in admin.sessions()}
        assert names >= {f"agent-{agent}" for agent in range(8)}
        node.check()
