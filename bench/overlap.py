"""Time to the first token with restore beside prefill, layer by layer, and with prefill after the whole restore.

    in a row   lookup, restore of every layer, then the forward over the new tokens
    beside     the same, but a layer is computed as soon as it has landed, and a long prompt is stored meanwhile
    restore    the restore alone                  compute    the forward alone, after a cache that is in place

Beside is at best the longer of restore and compute; `overlapped` is how much of the shorter was hidden. The model's weights are
made up and its stored context is noise: bytes and work are those of a real one. Both ways must give the same tokens. All four take
turns; bests are compared.

On a CPU the copies of a restore and the forward share the cores, so less is hidden than on a GPU, where the disk and the copy
engine work while the device computes. Run: python bench/overlap.py [--dir DIR]
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from _support import GIB, Node, Report, arguments, disk_directory, say, take_turns, timed_s
from transformers import DynamicCache

import flatcake_client as fc
from flatcake_client.engines.models import ModelShape, make_model
from flatcake_client.engines.transformers import RequestHints, TransformersEngine

SHAPE = ModelShape(
    layers=16, hidden=768, intermediate=1024, heads=8, kv_heads=4, head_dim=128, digit_base=8, context_tokens=1 << 17
)
HINTS = RequestHints(session="bench")
BLOCK_TOKENS = 64


class Engines:
    """One model and one client, behind a connector that overlaps and one that does not."""

    def __init__(self, client: fc.Client, context_tokens: int, new_tokens: int) -> None:
        self._model = make_model(SHAPE, dtype=torch.float32)
        make = {"block_tokens": BLOCK_TOKENS, "name": "overlap", "weights": "bench"}
        self.beside = TransformersEngine(self._model, client, **make)  # type: ignore[arg-type]
        self.in_a_row = TransformersEngine(self._model, client, overlap=False, **make)  # type: ignore[arg-type]
        rng = np.random.default_rng(0)
        self._context = rng.integers(0, SHAPE.vocab_size, context_tokens).tolist()
        self._new_tokens, self._rng = new_tokens, rng
        self.tokens: dict[str, list[int]] = {}
        self.waited_s: list[float] = []
        self.size_bytes = context_tokens // BLOCK_TOKENS * self.beside.space.spec.block_bytes

    def store(self) -> None:
        """A context's KV, without computing it: noise of the size it has."""
        cache: Any = DynamicCache(config=self._model.config)
        generator = torch.Generator().manual_seed(0)
        for layer in range(SHAPE.layers):
            size = (1, SHAPE.kv_heads, len(self._context), SHAPE.head_dim)
            cache.update(torch.randn(size, generator=generator), torch.randn(size, generator=generator), layer)
        assert self.beside.store(self._context, cache, HINTS), "nothing was stored"

    def prompt(self, number: int) -> list[int]:
        new = np.random.default_rng(1000 + number).integers(0, SHAPE.vocab_size, self._new_tokens).tolist()
        return [*self._context, *new]

    def first_s(self, engine: TransformersEngine, number: int) -> float:
        """Seconds to the first token of a prompt whose context is stored."""
        reply = engine.generate(self.prompt(number), 1, replace(HINTS, session=f"s{number}"))
        assert reply.restored.tokens == len(self._context), f"{reply.restored.tokens} tokens were restored"
        assert self.tokens.setdefault(str(number), reply.tokens) == reply.tokens, "other tokens"
        if engine is self.beside:
            self.waited_s.append(reply.restored.waited_s)
        return reply.ttft_s

    def restore_s(self, _: int) -> float:
        return timed_s(lambda: self.in_a_row.restore([*self._context, 0], HINTS))

    def compute_s(self, number: int) -> float:
        cache, _ = self.in_a_row.restore([*self._context, 0], HINTS)
        return timed_s(lambda: next(self.in_a_row.decode(self.prompt(number)[len(self._context) :], cache)))


def main() -> None:
    args = arguments(
        __doc__,
        context_tokens=(16384, "stored tokens"),
        new_tokens=(
            BLOCK_TOKENS,
            f"tokens to compute after them, at most {BLOCK_TOKENS}: what fills no block is not restored",
        ),
        rounds=(5, "times that all take turns"),
    )
    report = Report("restore beside prefill")
    context_tokens = args.context_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    size_bytes = context_tokens * SHAPE.kv_bytes_per_token * 2
    with disk_directory(args.dir, 2 * size_bytes) as directory:
        options = {"ssd_bytes": 4 * size_bytes + GIB, "memory_bytes": 64 << 20}
        with Node(directory, **options) as node, fc.connect(node.endpoint) as client:
            engines = Engines(client, context_tokens, args.new_tokens)
            say(f"storing {engines.size_bytes / 1e9:.2f} GB of KV: {context_tokens} tokens, {SHAPE.layers} layers")
            engines.store()
            runs = [
                lambda n: engines.first_s(engines.in_a_row, n),
                lambda n: engines.first_s(engines.beside, n),
                engines.restore_s,
                engines.compute_s,
            ]
            for run in runs:
                run(0)  # touches landings and staging
            row_s, beside_s, restore_s, compute_s = take_turns(args.rounds, *runs)
    best = [min(times) for times in (row_s, beside_s, restore_s, compute_s)]
    names = ("in a row", "beside", "restore alone", "compute alone")
    for name, times in zip(names, (row_s, beside_s, restore_s, compute_s), strict=True):
        report.more[name] = {"best_s": round(min(times), 3), "median_s": round(statistics.median(times), 3)}
    report.more["waited_s_median"] = round(statistics.median(engines.waited_s), 3)
    report.add("first token, beside / in a row", best[1] / best[0], None, detail=f"{best[1]:.2f} s of {best[0]:.2f} s")
    report.add("overlapped: of the shorter of restore and compute", (best[0] - best[1]) / min(best[2:]), None)
    report.show(as_json=args.json)


if __name__ == "__main__":
    main()
