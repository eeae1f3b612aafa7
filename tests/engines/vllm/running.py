"""A vLLM engine for tests: made with or without FlatCake, asked for greedy tokens, stepped by hand."""

from __future__ import annotations

import gc
import time
from collections import Counter
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from vllm import LLM, SamplingParams

from flatcake_client.engines.models import ModelShape, make_model

BLOCK = 32
SHAPE = ModelShape(layers=3)


def write_model(folder: Path, *, seed: int = 0) -> Path:
    make_model(SHAPE, seed=seed, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def prompt(seed: int, tokens: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, SHAPE.vocab_size, tokens).tolist()


class Witness:
    """Greedy tokens of the model, computed by transformers without any cache of ours."""

    def __init__(self, *, seed: int = 0) -> None:
        self._model = make_model(SHAPE, seed=seed)
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def __call__(self, ids: list[int], tokens: int = 8) -> list[int]:
        key = (tuple(ids), tokens)
        if key not in self._known:
            reply = self._model.generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False)
            self._known[key] = reply[0, len(ids) :].tolist()
        return self._known[key]


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
                "kv_connector_extra_config": {"endpoint": endpoint} | (extra or {}),
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
        self.llm = LLM(str(model), kv_transfer_config=transfer, **(defaults | options))
        self._counted: Counter[str] = Counter()
        self.core: Any = getattr(self.llm.llm_engine.engine_core, "engine_core", None)

    def ask(self, *prompts: list[int], tokens: int = 8, **params: Any) -> list[list[int]]:
        """Greedy tokens of requests that run together, and everything stored when this returns."""
        return self.ask_raw(*({"prompt_token_ids": ids} for ids in prompts), tokens=tokens, **params)

    def ask_raw(self, *requests: dict[str, Any], tokens: int = 8, **params: Any) -> list[list[int]]:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True, **params)
        outputs = self.llm.generate(list(requests), sampling, use_tqdm=False)
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
            assert self.worker._crew.settle(timeout_s)

    def forget(self) -> None:
        """vLLM's own prefix cache is empty after this."""
        assert self.llm.reset_prefix_cache()

    def counts(self) -> Counter[str]:
        """What both sides counted since the last call."""
        totals = self.scheduler.tally.totals + self.worker.tally.totals
        fresh, self._counted = totals - self._counted, totals
        return fresh

    def close(self) -> None:
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        del self.llm, self.core
        cleanup_dist_env_and_memory()
        gc.collect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
