"""The transformers engine as a harness. Engines with environments of their own have theirs in tests/engines/."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conformance.connectors import Kv, Shape, check_connector

import flatcake_client as fc

torch = pytest.importorskip("torch", reason="the transformers engine was not tested")
pytest.importorskip("transformers", reason="the transformers engine was not tested")

from transformers import DynamicCache  # noqa: E402

from flatcake_client.engines.models import ModelShape, make_model  # noqa: E402
from flatcake_client.engines.transformers import TransformersEngine  # noqa: E402

TIMEOUT_S = 5.0


class TransformersHarness:
    """Its pages are a `DynamicCache`: a block is K, then V, each (kv_heads, block_tokens, head_dim)."""

    def __init__(self, endpoint: str, shape: Shape) -> None:
        self.block_tokens = shape.block_tokens
        self.client = fc.connect(endpoint, timeout_s=3.0, transfer_timeout_s=TIMEOUT_S)
        model = make_model(ModelShape(layers=shape.layers), dtype=getattr(torch, shape.dtype))
        self.dtype, self.heads, self.dim = model.dtype, model.config.num_key_value_heads, model.config.head_dim
        self.engine = TransformersEngine(
            model, self.client, weights=shape.model, block_tokens=shape.block_tokens, timeout_s=TIMEOUT_S
        )
        self.plane_bytes = [2 * self.heads * self.block_tokens * self.dim * self.dtype.itemsize] * shape.layers

    def store(self, tokens: np.ndarray, kv: Kv) -> bool:
        cache = DynamicCache()
        for layer, rows in enumerate(kv):
            blocks = torch.from_numpy(rows).view(self.dtype)
            blocks = blocks.view(-1, 2, self.heads, self.block_tokens, self.dim).permute(1, 2, 0, 3, 4).flatten(2, 3)
            cache.update(blocks[:1], blocks[1:], layer)
        before = self.failures()
        self.engine.store(tokens.tolist(), cache)
        return self.failures() == before

    def failures(self) -> int:
        stats = self.engine.stats()
        return stats.stores_failed + stats.stores_refused

    def lookup(self, tokens: np.ndarray) -> int:
        """The engine has no lookup apart from its restore."""
        return self.load(tokens)[0]

    def load(self, tokens: np.ndarray) -> tuple[int, Kv]:
        cache, restored = self.engine.restore(tokens.tolist())
        blocks = restored.tokens // self.block_tokens
        kv = []
        for layer, size in enumerate(self.plane_bytes):
            rows = np.zeros((0, size), np.uint8)
            if blocks:
                pair = torch.stack([cache.layers[layer].keys[0], cache.layers[layer].values[0]])
                pair = pair.unflatten(2, (blocks, self.block_tokens)).permute(2, 0, 1, 3, 4).contiguous()
                rows = pair.view(torch.uint8).numpy().reshape(blocks, size)
            kv.append(rows)
        return blocks, kv

    def abort(self, tokens: np.ndarray) -> Callable[[], bytes]:
        """A restore cannot be aborted: it comes back at its deadline, and then writes no more."""
        self.engine._timeout_s = 0.0
        try:
            cache, _ = self.engine.restore(tokens.tolist())
        finally:
            self.engine._timeout_s = TIMEOUT_S
        return lambda: b"".join(
            layer.keys.contiguous().view(torch.uint8).numpy().tobytes()
            for layer in cache.layers
            if layer.keys is not None
        )

    def close(self) -> None:
        self.client.close()


def test_transformers(tmp_path: Path) -> None:
    check_connector(TransformersHarness, tmp_path)
