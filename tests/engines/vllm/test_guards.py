"""A bug in any call of the connector is a miss and a count: vLLM answers right and goes on. Loads and stores beside the steps."""

from __future__ import annotations

import pytest
from daemon import Daemon
from engines.vllm.running import BLOCK, Engine, prompt

from flatcake_client.background import Lookups
from flatcake_client.engines import vllm_worker
from flatcake_client.engines.vllm_scheduler import SchedulerSide
from flatcake_client.engines.vllm_worker import WorkerSide
from flatcake_client.paged_kv import PagedKv

SCHEDULER = [
    (SchedulerSide, name)
    for name in ("_of", "_ask", "matched", "allocated", "sources", "store_prefill", "pause", "_store_turn", "holds_blocks")
]  # fmt: skip
WORKER = [
    (WorkerSide, name)
    for name in ("_begin_load", "_submit", "wait_layer", "layer_computed", "computed", "_give_up", "_keys")
]
OTHERS = [(Lookups, "discard"), (Lookups, "take"), (vllm_worker, "Fence"), (PagedKv, "load"), (PagedKv, "store")]


@pytest.fixture(scope="module", params=["between", "beside"])
def engine(model, tmp_path_factory, request):
    """Loads and stores between the steps, as by default; and beside their computation."""
    extra = {"layerwise": True, "store_at": "prefill"} if request.param == "beside" else {}
    with Daemon(tmp_path_factory.mktemp("node"), ssd_paths="") as node:
        with Engine(model, node.endpoint, extra=extra, num_gpu_blocks_override=48, max_model_len=1024) as running:
            running.beside = bool(extra)
            yield running
        node.until(lambda status: not status["leases"] and not status["open_turns"])
        node.check()


@pytest.mark.parametrize(
    ("owner", "verb"), [*SCHEDULER, *WORKER, *OTHERS], ids=lambda value: getattr(value, "__name__", value)
)
def test_a_bug_is_a_miss(engine, expected, monkeypatch, owner, verb):
    stored = prompt(300, 5 * BLOCK + 7)
    assert engine.ask(stored) == [expected(stored)]
    engine.forget()
    called = []

    def fails(*_: object, **__: object) -> None:
        called.append(1)
        raise RuntimeError("a bug")

    monkeypatch.setattr(owner, verb, fails)
    prompts = [stored + prompt(310 + number, BLOCK * number + 5) for number in range(3)]
    assert engine.ask(*prompts) == [expected(ids) for ids in prompts]
    monkeypatch.undo()
    if called:
        assert engine.counts()["errors"] > 0
    engine.worker.computed()
    engine.forget()
    engine.counts()
    assert engine.ask(stored) == [expected(stored)]
    assert engine.counts()["load_failed_blocks"] == 0
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "vLLM has all its blocks again"
    assert not engine.scheduler._known
