"""A real LMCache engine in this process: its cache engine, its pinned pool, and pages of ours in place of a GPU's."""

from __future__ import annotations

import itertools
import os
from typing import Any

import numpy as np
import torch
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
from lmcache.v1.metadata import LMCacheMetadata

HEADS, DIM = 2, 16
NUMBERS = itertools.count()
# On a busy machine a hasty lookup is a miss, and hits are counted.
PATIENT = {"timeout_s": 20.0, "load_timeout_s": 20.0, "store_timeout_s": 20.0}


class HostPages(MockGPUConnector):
    """Moves chunks between LMCache's memory and `kv`, (2, layers, tokens, heads x dim), as a GPU connector does on a device."""

    def batched_from_gpu(self, memory_objs, starts, ends, kv=None, **kwargs):
        for each, start, end in zip(memory_objs, starts, ends, strict=True):
            each.tensor.copy_(kv[:, :, start:end])

    def batched_to_gpu(self, memory_objs, starts, ends, kv=None, **kwargs):
        for each, start, end in zip(memory_objs, starts, ends, strict=True):
            kv[:, :, start:end] = each.tensor


class InProcess:
    """LMCache as an engine embeds it. `kv` is what the engine has in its pages."""

    def __init__(
        self,
        endpoint: str,
        *,
        model: str = "m",
        layers: int = 3,
        chunk_tokens: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        settings: dict[str, Any] | None = None,
        adapter: str = "FlatCakeConnectorAdapter",
        extra: dict[str, Any] | None = None,
        **config: Any,
    ) -> None:
        self.layers, self.chunk_tokens, self.dtype = layers, chunk_tokens, dtype
        prefix = "remote_storage_plugin.flatcake."
        ours = {
            "module_path": "flatcake_client.engines.lmcache",
            "class_name": adapter,
            "endpoint": endpoint,
        }
        ours |= PATIENT | (settings or {})
        self.config = LMCacheEngineConfig.from_defaults(
            chunk_size=chunk_tokens,
            local_cpu=False,
            max_local_cpu_size=0.03,
            remote_storage_plugins=["flatcake"],
            extra_config={prefix + key: value for key, value in ours.items()} | (extra or {}),
            **({"pre_caching_hash_algorithm": "sha256_cbor", "blocking_timeout_secs": 60} | config),
        )
        shape = (layers, 2, chunk_tokens, HEADS, DIM)
        self.metadata = LMCacheMetadata(
            model_name=model,
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=dtype,
            kv_shape=shape,
            chunk_size=chunk_tokens,
        )
        self.name = f"test-{os.getpid()}-{next(NUMBERS)}"
        self.engine = LMCacheEngineBuilder.get_or_create(
            self.name, self.config, self.metadata, HostPages(shape), lambda *_: None, lambda each, _: each
        )
        self.engine.post_init()

    @property
    def backend(self) -> Any:
        return next(each for name, each in self.engine.storage_manager.storage_backends.items() if "Remote" in name)

    @property
    def connector(self) -> Any:
        return self.backend.connection.getWrappedConnector()

    def kv(self, tokens: int, seed: int | None = None) -> torch.Tensor:
        """Pages for so many tokens, empty or with bytes of a seed."""
        shape = (2, self.layers, tokens, HEADS * DIM)
        if seed is None:
            return torch.zeros(shape, dtype=self.dtype)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.dtype)

    def store(self, tokens: np.ndarray, kv: torch.Tensor) -> None:
        self.engine.store(torch.from_numpy(tokens), kv=kv)

    def lookup(self, tokens: np.ndarray) -> int:
        return int(self.engine.lookup(torch.from_numpy(tokens)))

    def retrieve(self, tokens: np.ndarray, kv: torch.Tensor) -> int:
        return int(self.engine.retrieve(torch.from_numpy(tokens), kv=kv).sum())

    def answered(self) -> int:
        """Chunks whose store has ended, one way or the other."""
        stats = self.connector.stats()
        return stats.chunks_stored + stats.chunks_there + stats.chunks_store_failed + stats.chunks_declined

    def close(self) -> None:
        LMCacheEngineBuilder.destroy(self.name)
