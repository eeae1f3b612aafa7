"""An engine process as far as FlatCake sees one: both halves of the connector, stepped as vLLM steps them, without a model."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig, LoadConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

from flatcake_client.engines.vllm import FlatCakeConnector

BLOCKS = 64
HEADS, HEAD_DIM = 2, 8


def configuration(endpoint: str, shape: Any) -> Any:
    """What of vLLM's configuration the connector reads."""
    transfer = KVTransferConfig(
        kv_connector="FlatCakeConnector",
        kv_connector_module_path="flatcake_client.engines.vllm",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"endpoint": endpoint, "weights": "w", "load_timeout_s": 3.0, "store_timeout_s": 3.0},
    )
    model = SimpleNamespace(
        model=shape.model, dtype=getattr(torch, shape.dtype), quantization=None, revision=None, seed=0,
        hf_config=SimpleNamespace(to_dict=dict), multimodal_config=None, get_total_num_hidden_layers=lambda: shape.layers,
    )  # fmt: skip
    return SimpleNamespace(
        kv_transfer_config=transfer,
        model_config=model,
        cache_config=SimpleNamespace(
            cache_dtype="auto", prefix_caching_hash_algo="sha256_cbor", block_size=shape.block_tokens,
            enable_prefix_caching=True,
        ),
        load_config=LoadConfig(load_format="auto"),
        parallel_config=SimpleNamespace(
            rank=0, tensor_parallel_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
    )  # fmt: skip


def cache_configuration(shape: Any, spec: Any = None) -> KVCacheConfig:
    spec = spec or FullAttentionSpec(
        block_size=shape.block_tokens, num_kv_heads=HEADS, head_size=HEAD_DIM, dtype=getattr(torch, shape.dtype)
    )
    names = [f"model.layers.{layer}.attn" for layer in range(shape.layers)]
    return KVCacheConfig(
        num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)],
    )  # fmt: skip


class VllmHarness:
    def __init__(self, endpoint: str, shape: Any) -> None:
        config, cache = configuration(endpoint, shape), cache_configuration(shape)
        self.shape, self.block_tokens = shape, shape.block_tokens
        self.scheduler = FlatCakeConnector(config, KVConnectorRole.SCHEDULER, cache)
        self.worker = FlatCakeConnector(config, KVConnectorRole.WORKER, cache)
        size = (BLOCKS, HEADS, shape.block_tokens, 2 * HEAD_DIM)
        dtype = getattr(torch, shape.dtype)
        self.pages = [torch.zeros(size, dtype=dtype) for _ in range(shape.layers)]
        self.plane_bytes = [pages[0].numel() * pages.element_size() for pages in self.pages]
        self.worker.register_kv_caches(dict(zip(cache.kv_cache_groups[0].layer_names, self.pages, strict=True)))
        hash_function = get_hash_fn_by_name("sha256_cbor")
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(shape.block_tokens, hash_function)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._rng = np.random.default_rng(0)
        self.extra: dict[str, Any] = {}  # of every request: images, a salt, an adapter

    def store(self, tokens: np.ndarray, kv: list[np.ndarray]) -> bool:
        with self._lock:
            request, slots = self._request(tokens)
            self._matched(request)
            self.scheduler.update_state_after_alloc(request, blocks_of(slots), 0)
            for pages, rows in zip(self.pages, kv, strict=True):
                pages.view(torch.uint8).view(BLOCKS, -1)[slots] = torch.from_numpy(rows)
            request.num_computed_tokens = len(tokens)
            request.append_output_token_ids(1)
            totals = self.worker._worker.tally.totals
            stored = totals["stores"]
            self._end(request, slots, RequestStatus.FINISHED_STOPPED)
            self.worker._worker._crew.settle(10)
            return totals["stores"] > stored

    def lookup(self, tokens: np.ndarray) -> int:
        with self._lock:
            request, slots = self._request(tokens)
            found = self._matched(request) // self.block_tokens
            self._end(request, slots, RequestStatus.FINISHED_ABORTED)
            self.scheduler._scheduler._lookups._tidy.settle(5)
            return found

    def load(self, tokens: np.ndarray) -> tuple[int, list[np.ndarray]]:
        with self._lock:
            request, slots = self._request(tokens)
            for pages in self.pages:
                pages[slots] = 7
            usable, found = 0, self._matched(request)
            if found:
                failed = self._load(request, slots, found)
                lost = [index for index, slot in enumerate(slots) if slot in failed]
                usable = min([*lost, found // self.block_tokens])
            kv = [self._bytes(pages, slots) for pages in self.pages]
            request.num_computed_tokens = usable * self.block_tokens
            self._end(request, slots, RequestStatus.FINISHED_ABORTED)
            self.scheduler._scheduler._lookups._tidy.settle(5)
            return usable, kv

    def abort(self, tokens: np.ndarray) -> Callable[[], bytes]:
        with self._lock:
            request, slots = self._request(tokens)
            found = self._matched(request)
            assert found
            self.scheduler.update_state_after_alloc(request, blocks_of(slots), found)
            request.num_computed_tokens = found
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            received = self._step(set())[1]
            self._end(request, slots, RequestStatus.FINISHED_ABORTED, until_received=request.request_id not in received)
            return lambda: b"".join(self._bytes(pages, slots).tobytes() for pages in self.pages)

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()

    def _request(self, tokens: np.ndarray) -> tuple[Request, list[int]]:
        sampling = SamplingParams(max_tokens=2)
        name = str(next(self._numbers))
        request = Request(name, tokens.tolist(), sampling, None, block_hasher=self._hasher, **self.extra)
        self.scheduler.on_new_request(request)
        free = self._rng.permutation(np.arange(1, BLOCKS))
        return request, free[: len(tokens) // self.block_tokens].tolist()

    def _matched(self, request: Request) -> int:
        deadline_s = time.monotonic() + 20
        while (answer := self.scheduler.get_num_new_matched_tokens(request, 0))[0] is None:
            assert time.monotonic() < deadline_s
            self._step(set())
        return answer[0]

    def _load(self, request: Request, slots: list[int], found: int) -> set[int]:
        self.scheduler.update_state_after_alloc(request, blocks_of(slots), found)
        failed, received = set(), set()
        deadline_s = time.monotonic() + 20
        while request.request_id not in received:
            assert time.monotonic() < deadline_s
            _, received, lost = self._step(set())
            failed |= lost
        return failed

    def _end(self, request: Request, slots: list[int], status: RequestStatus, *, until_received: bool = False) -> None:
        request.status = status
        sending, _ = self.scheduler.request_finished_all_groups(request, (slots,))
        ended = {request.request_id}
        deadline_s = time.monotonic() + 20
        while sending or until_received or ended:
            assert time.monotonic() < deadline_s
            sent, received, _ = self._step(ended)
            ended = set()
            sending = sending and request.request_id not in sent
            until_received = until_received and request.request_id not in received

    def _step(self, ended: set[str]) -> tuple[set[str], set[str], set[int]]:
        """One of vLLM's, with nothing to compute."""
        output = SimpleNamespace(
            total_num_scheduled_tokens=0,
            num_scheduled_tokens={},
            preempted_req_ids=set(),
            kv_connector_block_state=None,
        )
        jobs = self.scheduler.build_connector_meta(output)
        self.worker.handle_preemptions(jobs)
        self.worker.bind_connector_metadata(jobs)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        sent, received = self.worker.get_finished(ended)
        failed = self.worker.get_block_ids_with_load_errors()
        self.worker.clear_connector_metadata()
        self.scheduler.update_connector_output(SimpleNamespace(finished_sending=sent, finished_recving=received))
        return sent or set(), received or set(), failed

    @staticmethod
    def _bytes(pages: torch.Tensor, slots: list[int]) -> np.ndarray:
        return pages.view(torch.uint8).view(BLOCKS, -1)[slots].numpy().copy()


def blocks_of(slots: list[int]) -> Any:
    return SimpleNamespace(get_block_ids=lambda: (slots,))
