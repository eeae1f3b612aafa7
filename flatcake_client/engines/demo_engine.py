"""The demo's engine: a process with a model, asked one JSON line at a time, that can be killed at any moment.

    {"do": "generate", "prompt": [...], "count": 16, "hints": {...}}   ->   tokens, what was restored and stored, times, the verdict
    {"do": "zeroed", "prompt": [...], "count": 16}                     ->   tokens from KV of the right size that is all zeros
    {"do": "measure", "prompt": [...], "first_block": 12, "times": 5}  ->   seconds and commands of restores alone

Every answer is judged here by one forward over prompt and reply that no cache has touched: a reply is what the model says without
FlatCake exactly if each of its tokens is the best one there, given those before it. That forward's time is what a request
costs without the cache. Standard output carries answers only; the log goes to standard error.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np
import torch

import flatcake_client as fc
from flatcake_client.engines.models import ModelShape, make_model
from flatcake_client.engines.transformers import RequestHints, TransformersEngine

Answer = dict[str, Any]

TIMEOUT_S: Final = 10.0  # a daemon that is late on a busy machine is no miss


class DemoEngine:
    """One model on one daemon."""

    def __init__(
        self, endpoint: str, shape: ModelShape, dtype: torch.dtype, block_tokens: int, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._model = make_model(shape, dtype=dtype)
        self._client = fc.connect(endpoint, timeout_s, name="demo-engine")
        self._engine = TransformersEngine(self._model, self._client, block_tokens=block_tokens)
        # Libraries choose their kernels at the first call: no request of the demo should pay for that.
        self._engine.generate([1] * 100, 2, cached=False)

    def answer(self, request: Answer) -> Answer:
        """Raises: ValueError: not a request."""
        verbs = {"generate": self._generate, "zeroed": self._zeroed, "measure": self._measure, "stats": self._stats}
        if request.get("do") not in verbs:
            raise ValueError(f"{request.get('do')!r} is none of {', '.join(verbs)}")
        return verbs[request["do"]](request)

    def _generate(self, request: Answer) -> Answer:
        prompt = request["prompt"]
        reply = self._engine.generate(prompt, request["count"], RequestHints(**request.get("hints", {})))
        best, uncached_s = self._without_cache(prompt, reply.tokens)
        block_bytes = self._engine.space.spec.block_bytes
        return {
            "tokens": reply.tokens,
            "identical": best == reply.tokens,
            "prompt_tokens": reply.prompt_tokens,
            "computed_tokens": reply.computed_tokens,
            "restored": asdict(reply.restored),
            "stored": [
                {
                    "medium": part.medium,
                    "reason": part.reason,
                    "first_block": part.first_block,
                    "blocks": part.blocks,
                    "bytes": part.blocks * block_bytes,
                }
                for part in reply.stored
            ],
            "ttft_s": reply.ttft_s,
            "ttft_uncached_s": uncached_s,
        }

    @torch.no_grad()
    def _without_cache(self, prompt: Sequence[int], reply: Sequence[int]) -> tuple[list[int], float]:
        """The best token at each place of the reply, and the seconds of the forward over all."""
        started_s = time.perf_counter()
        ids = torch.tensor([[*prompt, *reply[:-1]]])
        logits = self._model(input_ids=ids, use_cache=True, logits_to_keep=len(reply)).logits[0]
        best: list[int] = logits.argmax(-1).tolist()
        return best, time.perf_counter() - started_s

    def _zeroed(self, request: Answer) -> Answer:
        cache, restored = self._engine.restore(request["prompt"])
        for layer in cache.layers:
            layer.keys.zero_()
            layer.values.zero_()
        greedy = self._engine.decode(request["prompt"][restored.tokens :], cache)
        return {"tokens": [next(greedy) for _ in range(request["count"])], "restored_tokens": restored.tokens}

    def _measure(self, request: Answer) -> Answer:
        """Restores into slots that were touched before, as an engine's paged KV is: the store's part alone."""
        space = self._engine.space
        keys = space.keys(request["prompt"])
        first = request["first_block"]
        target = [np.zeros((len(keys), plane_bytes), np.uint8) for plane_bytes in space.spec.plane_bytes]
        seconds, commands, moved = [], 0, {}
        for _ in range(request["times"]):
            with space.lookup(keys) as hit:
                started_s = time.perf_counter()
                restore = hit.restore(target, np.arange(hit.blocks), first_block=min(first, hit.blocks))
                usable = restore.wait()
                seconds.append(time.perf_counter() - started_s)
                commands, moved = restore.stats.read_commands, restore.stats.bytes_by_medium
        return {"seconds": seconds, "commands": commands, "bytes_by_medium": moved, "blocks": usable}

    def _stats(self, _: Answer) -> Answer:
        stats = self._client.stats()
        files = stats.movers.get("files")
        return {
            "engine": asdict(self._engine.stats()),
            "greetings": stats.greetings,
            "read_path": files.path if files else "",
            "kv_bytes_per_token": self._engine.space.spec.block_bytes // self._engine.space.spec.block_tokens,
            "parameters": sum(parameter.numel() for parameter in self._model.parameters()),
        }


def main() -> None:
    """`demo_engine ENDPOINT SETUP`: JSON of `shape`, `dtype`, `block_tokens`, and `timeout_s` if one likes. Ends with its standard input."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s: %(message)s")
    endpoint, setup = sys.argv[1], json.loads(sys.argv[2])
    shape, dtype = ModelShape(**setup["shape"]), getattr(torch, setup["dtype"])
    engine = DemoEngine(endpoint, shape, dtype, setup["block_tokens"], setup.get("timeout_s", TIMEOUT_S))
    print("{}", flush=True)  # noqa: T201  ready
    for line in sys.stdin:
        print(json.dumps(engine.answer(json.loads(line))), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
