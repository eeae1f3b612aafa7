"""SGLang's linker as a harness of the connector suite: real device pools, on a CPU, driven as its tree and scheduler drive it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch
from conformance.connectors import Kv, Shape
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.mem_cache.utils import get_storage_hash_str
from waiting import until

HEADS, DIM, LATENT = 2, 16, 48
PAGES = 64
get_storage_hash_str([1], None, page_size=1)  # compiles SGLang's hash at its first use in an environment: half a minute


class LinkerHarness:
    """Its pages are those of a device pool. One lock: a scheduler is one thread."""

    def __init__(self, endpoint: str, shape: Shape, *, mla=False) -> None:
        self.block_tokens, self.layers = shape.block_tokens, shape.layers
        dtype, size = getattr(torch, shape.dtype), PAGES * shape.block_tokens
        self.kvcache = (
            MLATokenToKVPool(size, shape.block_tokens, dtype, LATENT - 16, 16, shape.layers, "cpu", False)
            if mla
            else MHATokenToKVPool(size, shape.block_tokens, dtype, HEADS, DIM, shape.layers, "cpu", False)
        )
        kv = [(k,) for k in self.kvcache.kv_buffer] if mla else list(zip(self.kvcache.k_buffer, self.kvcache.v_buffer, strict=True))  # fmt: skip
        self.buffers = kv
        self.plane_bytes = [sum(b[: self.block_tokens].nbytes for b in buffers) for buffers in kv]
        params = SimpleNamespace(
            page_size=shape.block_tokens,
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: self.kvcache),
            pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, attn_tp_cache_group=None, tp_cache_group=None,
            mtp_draft_device_pools=(), sidecar_draft_device_pools=(), req_to_token_pool=None,
        )  # fmt: skip
        self.linker = create_unified_cache_linker(
            SimpleNamespace(model_path=shape.model, enable_linker_mla_dedup=False),
            params,
            backend="dynamic",
            config={
                "linker": "FlatCakeLinker",
                "linker_module_path": "flatcake_client.engines.sglang_linker",
                "linker_extra_config": {"endpoint": endpoint, "timeout_s": 1.0, "transfer_timeout_s": 3.0},
            },
            components={ComponentType.FULL},
        )
        self.lock, self.rids, self.random = threading.Lock(), itertools.count(), np.random.default_rng(1)

    def hashes(self, tokens: np.ndarray) -> list[str]:
        blocks = len(tokens) // self.block_tokens
        return get_storage_hash_str(tokens[: blocks * self.block_tokens].tolist(), None, page_size=self.block_tokens)

    def take(self, count: int) -> np.ndarray:
        return self.random.permutation(np.arange(1, PAGES))[:count]

    def rows(self, pages: np.ndarray) -> torch.Tensor:
        return torch.from_numpy((pages[:, None] * self.block_tokens + np.arange(self.block_tokens)).reshape(-1))

    def pages_of(self, buffer: torch.Tensor) -> np.ndarray:
        """(pages, bytes) over the pool's own memory."""
        return buffer.view(torch.uint8).numpy().reshape(len(buffer) // self.block_tokens, -1)

    def store(self, tokens: np.ndarray, kv: Kv, session: str | None = None) -> bool:
        with self.lock:
            hashes = self.hashes(tokens)
            pages = self.take(len(hashes))
            for buffers, rows in zip(self.buffers, kv, strict=True):
                for buffer, part in zip(buffers, np.split(rows, len(buffers), axis=1), strict=True):
                    self.pages_of(buffer)[pages] = part
            queued = self.linker.offload(
                [PoolTransfer(PoolName.KV, keys=hashes, device_indices=self.rows(pages))], session
            )
            if not queued:
                return False
            until(lambda: self.linker.num_completed_offloads() == 1)
            return self.linker.pop_completed_offload()

    def lookup(self, tokens: np.ndarray) -> int:
        """A request that is matched, and aborted before it is scheduled."""
        with self.lock:
            rid = f"r{next(self.rids)}"
            lengths = self.linker.lookup(rid, [PoolTransfer(PoolName.KV, keys=self.hashes(tokens))])
            assert lengths == list(range(1, len(lengths) + 1))
            self.linker.cancel_queued_load(rid)
            return len(lengths)

    def load(self, tokens: np.ndarray) -> tuple[int, Kv]:
        with self.lock:
            pages, _, count = self.queue(tokens)
            landed = 0
            if count:
                index = self.linker.start_layer_wise_loading()
                self.linker.layer_done_counter.set_consumer(index)
                for layer in range(self.layers):
                    self.linker.layer_done_counter.wait_until(layer)
                landed = count if self.linker.finish_layer_wise_loading(index) else 0
            kv = [np.concatenate([self.pages_of(b)[pages] for b in buffers], axis=1) for buffers in self.buffers]
            return landed, kv

    def queue(self, tokens: np.ndarray) -> tuple[np.ndarray, str, int]:
        """Match a request and queue its load, into pages that hold other bytes."""
        hashes, rid = self.hashes(tokens), f"r{next(self.rids)}"
        pages = self.take(len(hashes))
        for buffers in self.buffers:
            for buffer in buffers:
                self.pages_of(buffer)[pages] = 7
        count = len(self.linker.lookup(rid, [PoolTransfer(PoolName.KV, keys=hashes)]))
        if count:
            transfer = PoolTransfer(PoolName.KV, keys=hashes[:count], device_indices=self.rows(pages[:count]))
            assert self.linker.load(rid, [transfer])
        return pages, rid, count

    def abort(self, tokens: np.ndarray) -> Callable[[], bytes]:
        """Queued, and aborted before its batch starts: none of it is brought."""
        with self.lock:
            pages, rid, count = self.queue(tokens)
            assert self.linker.cancel_queued_load(rid) == bool(count)
            assert self.linker.start_layer_wise_loading() == -1
        return lambda: b"".join(self.pages_of(b)[pages].tobytes() for buffers in self.buffers for b in buffers)

    def close(self) -> None:
        self.linker.close()
