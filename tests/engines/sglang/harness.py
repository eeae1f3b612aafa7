"""SGLang's storage as a harness of the connector suite: real host pool, real factory, batches of 128 as its controller makes them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import torch
from conformance.connectors import Kv, Shape
from engines.sglang.pools import get, layer_bytes, mha_pool, put
from sglang.srt.mem_cache.hicache_storage import (
    STORAGE_BATCH_SIZE,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
)
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_storage_hash_str

PAGES = 600
get_storage_hash_str([1], None, page_size=1)  # compiles SGLang's hash at its first use in an environment: half a minute


def config_of(endpoint, model="check", **more):
    extra = {
        "backend_name": "flatcake",
        "module_path": "flatcake_client.engines.sglang",
        "class_name": "FlatCakeStorage",
        "interface_v1": 1,
        "endpoint": endpoint,
        "timeout_s": 1.0,
        "transfer_timeout_s": 3.0,
    }
    fields = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": False, "model_name": model,
    }  # fmt: skip
    return HiCacheStorageConfig(**(fields | more), extra_config=extra)


class StorageHarness:
    """Its pages are those of a host pool, taken in no order."""

    def __init__(
        self, endpoint: str, shape: Shape, *, layout="layer_first", pool=mha_pool, prefix=True, **config
    ) -> None:
        self.block_tokens, self.layers, self.prefix = shape.block_tokens, shape.layers, prefix
        self.pool = pool(layout, shape.layers, shape.block_tokens, getattr(torch, shape.dtype), PAGES)
        self.plane_bytes = [layer_bytes(self.pool)] * shape.layers
        self.storage = StorageBackendFactory.create_backend(
            "dynamic", config_of(endpoint, shape.model, **config), self.pool
        )
        self.storage.register_mem_pool_host(self.pool)
        self.storage.on_host_pools_registered()
        self.random, self.lock = np.random.default_rng(1), threading.Lock()

    def hashes(self, tokens: np.ndarray) -> list[str]:
        blocks = len(tokens) // self.block_tokens
        return get_storage_hash_str(tokens[: blocks * self.block_tokens].tolist(), None, page_size=self.block_tokens)

    def take(self, pages: int) -> np.ndarray:
        """Pages of the pool, and with them its rows, shuffled."""
        with self.lock:
            rows = self.pool.alloc(pages * self.block_tokens).numpy()
            return self.random.permutation(rows.reshape(pages, -1)[:, 0] // self.block_tokens)

    def rows(self, pages: np.ndarray) -> torch.Tensor:
        return torch.from_numpy((pages[:, None] * self.block_tokens + np.arange(self.block_tokens)).reshape(-1))

    def batches(self, hashes: list[str]):
        """As SGLang's controller makes them: slice of the pages, and what is told of those before."""
        for start in range(0, len(hashes), STORAGE_BATCH_SIZE):
            before = hashes[:start] if self.prefix else None
            yield slice(start, start + STORAGE_BATCH_SIZE), HiCacheStorageExtraInfo(prefix_keys=before)

    def store(self, tokens: np.ndarray, kv: Kv) -> bool:
        hashes = self.hashes(tokens)
        pages = self.take(len(hashes))
        for layer in range(self.layers):
            for page, data in zip(pages, kv[layer], strict=True):
                put(self.pool, page, layer, data)
        answers = []
        for part, info in self.batches(hashes):
            answers += self.storage.batch_set_v1(hashes[part], self.rows(pages[part]), info)
            if not all(answers):
                break
        self.pool.free(self.rows(pages))
        return all(answers) and len(answers) == len(hashes)

    def lookup(self, tokens: np.ndarray) -> int:
        hashes, found = self.hashes(tokens), 0
        for part, info in self.batches(hashes):
            count = self.storage.batch_exists(hashes[part], info)
            assert 0 <= count <= len(hashes[part])
            found += count
            if count < len(hashes[part]):
                break
        return found

    def load(self, tokens: np.ndarray) -> tuple[int, Kv]:
        hashes, loaded = self.hashes(tokens), 0
        pages = self.take(len(hashes))
        for page in pages:
            for layer in range(self.layers):
                put(self.pool, page, layer, np.full(self.plane_bytes[layer], 7, np.uint8))
        for part, info in self.batches(hashes):
            answers = self.storage.batch_get_v1(hashes[part], self.rows(pages[part]), info)
            assert len(answers) == len(hashes[part]), "a page without an answer hangs SGLang"
            count = answers.index(False) if False in answers else len(answers)
            assert not any(answers[count:])
            loaded += count
            if count < len(answers):
                break
        kv = [np.array([get(self.pool, page, layer) for page in pages]) for layer in range(self.layers)]
        self.pool.free(self.rows(pages))
        return loaded, kv

    def abort(self, tokens: np.ndarray) -> Callable[[], bytes]:
        """SGLang gives up on a prefetch between two batches: the call that is under way returns, then the pages are others'."""
        hashes = self.hashes(tokens)
        pages = self.take(len(hashes))
        part, info = next(self.batches(hashes))
        self.storage.batch_get_v1(hashes[part], self.rows(pages[part]), info)
        self.pool.free(self.rows(pages))
        self.pool.kv_buffer.zero_()
        return lambda: self.pool.kv_buffer.view(torch.uint8).numpy().tobytes()

    def close(self) -> None:
        self.storage.close()
