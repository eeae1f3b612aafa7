"""FlatCake as vLLM's KV connector. Translates; what it does is in the two halves and in the client.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "FlatCakeConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "flatcake_client.engines.vllm", "kv_load_failure_policy": "recompute"}'

vLLM makes one of these in its scheduler (vllm_scheduler.py: asks, decides) and one in each worker (vllm_worker.py: moves). They
talk only through the jobs of a step (vllm_jobs.py). Settings and the space are in vllm_settings.py.

- Text never depends on FlatCake: every failure is a miss or a recompute, a count and a log line.
- The edge where no foreign or own exception gets further is here (edge.py), around every call but those at the start (the
  constructor, `register_kv_caches`), where what cannot be right is declined. What stands in for an answer keeps vLLM's books:
  a load that vLLM waits for is reported, blocks that it keeps for a store are given back.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from flatcake_client.engines.edge import Edge
from flatcake_client.engines.vllm_jobs import FlatCakePromMetrics, FlatCakeStats, StepJobs
from flatcake_client.engines.vllm_scheduler import SchedulerSide
from flatcake_client.engines.vllm_settings import Settings, geometry, open_space, shard_of
from flatcake_client.engines.vllm_weights import watch_weights
from flatcake_client.engines.vllm_worker import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = init_logger("vllm.flatcake")


class FlatCakeConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Raises: ValueError: settings that make no sense, or a model whose KV is not stored; says what to do."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        settings = Settings.of(transfer.kv_connector_extra_config)
        shape = geometry(vllm_config, kv_cache_config)
        if transfer.kv_load_failure_policy != "recompute":
            raise ValueError(
                'FlatCake is a cache: set "kv_load_failure_policy": "recompute", so that a failed load is computed'
            )
        client = settings.connect()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            space = open_space(client, vllm_config, kv_cache_config, settings, shard=0)
            self._scheduler = SchedulerSide(
                client, space, shape, settings, loads=transfer.is_kv_consumer, stores=transfer.is_kv_producer
            )
            _warn_of_random_hashes(vllm_config)
        else:
            space = open_space(client, vllm_config, kv_cache_config, settings, shard_of(vllm_config))
            self._worker = WorkerSide(client, space, shape, settings)
            watch_weights()
        side = self._scheduler or self._worker
        assert side is not None
        self._edge = Edge(log, "its tokens are computed", partial(side.tally.add, "errors"))
        log.info("FlatCake: %s, space %s", role.name.lower(), space.spec.fingerprint.hex())

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # Scheduler.

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._asked.bind_pool(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        self._edge.attempt("on_new_request", None, lambda: self._asked.arrived(request))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        miss: tuple[int | None, bool] = (0, False)
        matched = lambda: self._asked.matched(request, num_computed_tokens)  # noqa: E731
        return self._edge.attempt("get_num_new_matched_tokens", miss, matched)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        block_ids = blocks.get_block_ids()[0]

        def allocated() -> bool:
            self._asked.allocated(request, block_ids, num_external_tokens)
            return True

        if not self._edge.attempt("update_state_after_alloc", False, allocated):
            self._asked.lost(request, block_ids, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        names = {"memory": CacheHitSource.HOST, "ssd": CacheHitSource.DISK}
        unknown: dict[str, int] = {}
        sources = lambda: self._asked.sources(request, num_external_tokens)  # noqa: E731
        tokens = self._edge.attempt("get_external_cache_hit_sources", unknown, sources)
        return {names[medium]: count for medium, count in tokens.items() if count}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self._asked.stores_prefills:
            for request_id in scheduler_output.num_scheduled_tokens:
                store = partial(self._asked.store_prefill, scheduler_output, request_id)
                self._edge.attempt("build_connector_meta", None, store)
        jobs = self._asked.jobs(scheduler_output)
        self._edge.attempt("build_connector_meta", None, lambda: self._asked.pause(jobs))
        return jobs

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._edge.attempt("update_connector_output", None, lambda: self._asked.heard(connector_output))

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._edge.attempt("request_finished", None, lambda: self._asked.ended(request, block_ids))
        return self._asked.owes(request.request_id), None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def has_pending_block_frees(self) -> bool:
        return self._edge.attempt("has_pending_block_frees", False, self._asked.holds_blocks)

    def reset_cache(self) -> bool | None:
        def reset() -> bool:
            self._asked.reset()
            return True

        return self._edge.attempt("reset_cache", False, reset)

    # Worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._moved.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        self._edge.attempt("unregister_kv_caches", None, self._moved.unregister)

    def restore_kv_caches(self) -> None:
        self._edge.attempt("restore_kv_caches", None, self._moved.restore)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:  # noqa: ARG003 - vLLM's signature
        return True

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self._edge.attempt(
            "handle_preemptions", None, lambda: self._moved.preempted(_jobs(kv_connector_metadata).preempted)
        )

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._edge.attempt("bind_connector_metadata", None, lambda: self._moved.begin(self._jobs))

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ARG002 - vLLM's signature
        self._edge.attempt("start_load_kv", None, lambda: self._moved.start(self._jobs))

    def wait_for_layer_load(self, layer_name: str) -> None:
        # Where this fails the layer has not been waited for, and its load fails when the layer is computed.
        self._edge.attempt("wait_for_layer_load", None, lambda: self._moved.wait_layer(layer_name))

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,  # noqa: ARG002 - vLLM's signature
        attn_metadata: AttentionMetadata,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        self._edge.attempt("save_kv_layer", None, lambda: self._moved.layer_computed(layer_name))

    def wait_for_save(self) -> None:
        self._edge.attempt("wait_for_save", None, self._moved.computed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        def finished() -> tuple[set[str], set[str]]:
            idle = self.has_connector_metadata() and self._jobs.idle
            return self._moved.finished(finished_req_ids, idle=idle)

        nothing: tuple[set[str], set[str]] = (set(), set())
        sent, received = self._edge.attempt("get_finished", nothing, finished)
        return sent or None, received or None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._edge.attempt("build_connector_worker_meta", None, self._moved.weights_gone)

    def _weights_changed(self) -> None:
        """Called by `vllm_weights`: those of this worker are others from now on."""
        self._moved.weights_changed()

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed = self._edge.attempt("get_block_ids_with_load_errors", None, self._moved.failures)
        # When nobody knows which came, none did.
        return self._moved.all_blocks() if failed is None else failed

    # Both.

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                self._edge.attempt("shutdown", None, side.close)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        side = self._scheduler or self._worker
        return self._edge.attempt("get_kv_connector_stats", None, side.tally.take) if side is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return FlatCakeStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVConnectorPromMetrics | None:
        return FlatCakePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers are waited for, or said to be computed, by code that a full CUDA graph would leave out."""
        settings = Settings.of(extra_config)
        return settings.layerwise or settings.store_at == "prefill"

    @property
    def _asked(self) -> SchedulerSide:
        assert self._scheduler is not None, "this is the connector of a worker"
        return self._scheduler

    @property
    def _moved(self) -> WorkerSide:
        assert self._worker is not None, "this is the connector of the scheduler"
        return self._worker

    @property
    def _jobs(self) -> StepJobs:
        return _jobs(self._get_connector_metadata())


def _jobs(metadata: KVConnectorMetadata) -> StepJobs:
    assert isinstance(metadata, StepJobs)
    return metadata


def _warn_of_random_hashes(config: VllmConfig) -> None:
    from vllm.v1.core import kv_cache_utils

    algorithm = config.cache_config.prefix_caching_hash_algo
    seed_of = getattr(kv_cache_utils, "get_none_hash_seed", None)
    if algorithm.startswith("xxhash") or seed_of is None:
        log.warning(
            "block hashes by %s may differ from one start of vLLM to the next, and then nothing stored before is found: "
            "set --prefix-caching-hash-algo sha256_cbor, and PYTHONHASHSEED to one value everywhere",
            algorithm,
        )
