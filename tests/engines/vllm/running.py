"""A vLLM engine for tests: made with or without FlatCake, asked for greedy tokens, stepped by hand."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from vllm import LLM, SamplingParams

from flatcake_client import Space
from flatcake_client.engines.models import ModelShape, make_model
from flatcake_client.paged_kv import Loaded, PagedKv
from flatcake_transport.errors import Unavailable

BLOCK = 32
SHAPE = ModelShape(layers=3)


def write_model(folder: Path, *, seed: int = 0, shape: ModelShape = SHAPE) -> Path:
    make_model(shape, seed=seed, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def prompt(seed: int, tokens: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, SHAPE.vocab_size, tokens).tolist()


class Witness:
    """Greedy tokens of the model, computed by transformers without any cache of ours."""

    def __init__(self, *, seed: int = 0, shape: ModelShape = SHAPE) -> None:
        self.model = make_model(shape, seed=seed)
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def __call__(self, ids: list[int], tokens: int = 8) -> list[int]:
        key = (tuple(ids), tokens)
        if key not in self._known:
            reply = self.model.generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False)
            self._known[key] = reply[0, len(ids) :].tolist()
        return self._known[key]


class Held:
    """A call that waits until it is let go."""

    def __init__(self, monkeypatch: Any, owner: Any, verb: str) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        real = getattr(owner, verb)

        def held(*rest: Any, **more: Any) -> Any:
            self.reached.set()
            assert self.open.wait(30)
            return real(*rest, **more)

        monkeypatch.setattr(owner, verb, held)


class Engine:
    """`extra` is kv_connector_extra_config; `endpoint` None: no connector."""

    def __init__(
        self, model: Path, endpoint: str | None, *, extra: dict[str, Any] | None = None, **options: Any
    ) -> None:
        from vllm.distributed.kv_transfer import has_kv_transfer_group

        assert not has_kv_transfer_group(), "vLLM has one connector a process: close the other engine first"
        transfer = None
        if endpoint is not None:
            transfer = {
                "kv_connector": "FlatCakeConnector",
                "kv_role": "kv_both",
                "kv_connector_module_path": "flatcake_client.engines.vllm",
                "kv_load_failure_policy": "recompute",
                # A lookup that is late on a busy machine would be a miss, and hits are counted.
                "kv_connector_extra_config": {"endpoint": endpoint, "lookup_timeout_s": 5.0} | (extra or {}),
            }
        defaults: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "block_size": BLOCK,
            "dtype": "bfloat16",
            "max_model_len": 4096,
            "num_gpu_blocks_override": 512,
            "disable_log_stats": True,
        }
        try:
            self.llm = LLM(str(model), kv_transfer_config=transfer, **(defaults | options))
        except BaseException:
            self._clean()  # of what a start that failed left behind
            raise
        self._counted: Counter[str] = Counter()
        self.core: Any = getattr(self.llm.llm_engine.engine_core, "engine_core", None)

    def ask(self, *prompts: list[int], tokens: int = 8, **params: Any) -> list[list[int]]:
        """Greedy tokens of requests that run together, and everything stored when this returns."""
        return self.ask_raw(*({"prompt_token_ids": ids} for ids in prompts), tokens=tokens, **params)

    def ask_raw(self, *requests: dict[str, Any], tokens: int = 8, lora: Any = None, **params: Any) -> list[list[int]]:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True, **params)
        outputs = self.llm.generate(list(requests), sampling, use_tqdm=False, lora_request=lora)
        self.drain()
        return [list(output.outputs[0].token_ids) for output in outputs]

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler.connector._scheduler

    @property
    def worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker

    def drain(self, timeout_s: float = 20.0) -> None:
        """Step until no request is left, finished ones that are being stored included."""
        if self.core is None:
            return
        deadline_s = time.monotonic() + timeout_s
        while self.core.scheduler.has_requests():
            assert time.monotonic() < deadline_s, "requests are left"
            self.core.step_fn()
        if self.core.scheduler.connector is not None:
            self._settle(timeout_s)

    def _settle(self, timeout_s: float) -> None:
        assert self.worker._crew.settle(timeout_s)

    def forget(self) -> None:
        """vLLM's own prefix cache is empty after this."""
        assert self.llm.reset_prefix_cache()

    def counts(self) -> Counter[str]:
        """What both sides counted since the last call."""
        totals = self.scheduler.tally.totals + self._moved()
        fresh, self._counted = totals - self._counted, totals
        return fresh

    def _moved(self) -> Counter[str]:
        return self.worker.tally.totals

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm, self.core
        self._clean()

    @staticmethod
    def _clean() -> None:
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()
        gc.collect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Ranks(Engine):
    """Whose workers are processes of their own, one a rank. `call` runs a function of this module in each."""

    def __init__(self, *rest: Any, **more: Any) -> None:
        super().__init__(*rest, **more)
        self.call(make_stage_buffer)

    def call(self, act: Callable[..., Any], *rest: Any) -> list[Any]:
        return self.llm.collective_rpc(act, args=rest)

    def counts_of_ranks(self) -> list[Counter[str]]:
        return self.call(moved_in_rank)

    def _settle(self, timeout_s: float) -> None:
        assert all(self.call(settle_rank, timeout_s))

    def _moved(self) -> Counter[str]:
        return sum(self.counts_of_ranks(), Counter())


def side_of_rank() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker


def make_stage_buffer(worker: Any) -> None:
    """What the second stage receives into. vLLM makes it when it warms up, and on a CPU it does not do that with `enforce_eager`."""
    from vllm.distributed import get_pp_group

    runner = worker.model_runner
    if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def moved_in_rank(_worker: Any) -> Counter[str]:
    return Counter(side_of_rank().tally.totals)


def settle_rank(_worker: Any, timeout_s: float) -> bool:
    return side_of_rank()._crew.settle(timeout_s)


def shard_of_rank(_worker: Any) -> tuple[int, str]:
    """And the fingerprint of its space."""
    space = side_of_rank()._space
    return space.shard, space.spec.fingerprint.hex()


def spoil_loads(worker: Any, rank: int, usable: int, told: bool) -> None:
    """From now on that rank brings other bytes behind `usable` blocks, and says so if `told`."""
    load = PagedKv.load

    def cut(kv: PagedKv, keys: Any, first_block: int, slots: Any, *rest: Any) -> Loaded:
        loaded = load(kv, keys, first_block, slots, *rest)
        for pages in kv.pages:
            pages[slots[max(0, usable - first_block) :]] = 0
        return Loaded(min(loaded.blocks, usable)) if told else loaded

    if worker.rank == rank:
        PagedKv.load = cut
        side_of_rank().unspoil = lambda: setattr(PagedKv, "load", load)


def fail_stores(worker: Any, rank: int) -> None:
    """From now on that rank stores nothing."""
    begin = Space.begin_turn

    def fails(*_: Any, **__: Any) -> None:
        raise Unavailable("told to fail")

    if worker.rank == rank:
        Space.begin_turn = fails
        side_of_rank().unspoil = lambda: setattr(Space, "begin_turn", begin)


def unspoil(_worker: Any) -> None:
    side = side_of_rank()
    getattr(side, "unspoil", lambda: None)()
