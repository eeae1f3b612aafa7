"""Weights that vLLM changes while it runs: KV of others is never found, by this engine or any other, whatever it was told to reset."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
from daemon import Daemon
from engines.vllm.running import Engine, Witness, prompt, write_model

from flatcake_client.engines import vllm_weights
from flatcake_client.engines.vllm_weights import CHANGES, WORKER


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("other"), seed=1), Witness(seed=1)


def reload(engine: Engine, model: Path) -> None:
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})


def ask(engine: Engine, ids: list[int]) -> tuple[list[int], bool, int]:
    """Its reply, without vLLM's own cache; whether it was loaded, and how often stored."""
    engine.forget()
    engine.counts()
    reply = engine.ask(ids)[0]
    counts = engine.counts()
    return reply, counts["loads"] > 0 and not counts["load_failed_blocks"], counts["stores"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("extra", [{}, {"layerwise": True, "store_at": "prefill"}], ids=["between", "beside"])
def test_weights_that_are_reloaded(model, expected, other, tmp_path, extra):
    ids, (other_model, other_expected) = prompt(600, 200), other
    assert expected(ids) != other_expected(ids)
    with Daemon(tmp_path, ssd_paths="") as node:
        with Engine(model, node.endpoint, extra=extra) as engine:
            assert ask(engine, ids)[0] == expected(ids)
            assert ask(engine, ids)[:2] == (expected(ids), True)
            reload(engine, other_model)
            for each in (ids, ids, prompt(601, 150)):  # the first before the scheduler has heard
                assert ask(engine, each) == (other_expected(each), False, 0), (
                    "nothing is known of a cache that was not reset"
                )
            assert engine.counts()["errors"] == 0
            assert engine.llm.reset_prefix_cache(reset_connector=True)
            reply, loaded, stores = ask(engine, ids)
            assert (reply, loaded, stores > 0) == (other_expected(ids), False, True)
            assert ask(engine, ids)[:2] == (other_expected(ids), True), "of its own"
            # As a pause does it: the reset comes first.
            assert engine.llm.reset_prefix_cache(reset_connector=True)
            reload(engine, model)
            reply, loaded, stores = ask(engine, ids)
            assert (reply, loaded, stores > 0) == (expected(ids), False, True)
            assert ask(engine, ids)[:2] == (expected(ids), True)
        for path, witness in ((other_model, other_expected), (model, expected)):
            with Engine(path, node.endpoint, extra=extra) as engine:
                found = ask(engine, ids)
                assert found[:2] == (witness(ids), path == model), (
                    "what an engine stored before it changed, and nothing after"
                )
        node.check()


def test_the_ways_by_which_weights_change_are_this_vllms():
    """One that is not there is left out with a warning."""
    path = Path(importlib.util.find_spec(WORKER.partition(":")[0]).origin)
    worker = next(each for each in ast.parse(path.read_text()).body if getattr(each, "name", "") == "Worker")
    methods = {each.name for each in worker.body if isinstance(each, ast.FunctionDef)}
    assert set(CHANGES) <= methods
    changing = {name for name in methods if name.endswith(("_weights", "_weight_update"))}
    assert changing == {*CHANGES, "finish_weight_update", "_start_weight_update"}, "a way that is new?"


def test_a_vllm_without_such_a_worker_is_told_what_to_do(monkeypatch, caplog):
    monkeypatch.setattr(vllm_weights, "WORKER", "vllm.v1.worker.gpu_worker:Other")
    vllm_weights.watch_weights()
    assert caplog.text.count("pause and reset before weights change") == len(CHANGES)
