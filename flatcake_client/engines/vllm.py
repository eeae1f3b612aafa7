"""FlatCake as vLLM's KV connector. Translates; what it does is in the two halves and in the client.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "FlatCakeConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "flatcake_client.engines.vllm", "kv_load_failure_policy": "recompute"}'

vLLM makes one of these in its scheduler (vllm_scheduler.py: asks, decides) and one in each worker (vllm_worker.py: moves). They
talk only through the jobs of a step (vllm_jobs.py). Settings and the space are in vllm_settings.py.

- Text never depends on FlatCake: every failure is a miss or a recompute, a count and a log line.
- The edge where no foreign or own exception gets further is here: `_safely`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from flatcake_client.engines.vllm_jobs import FlatCakePromMetrics, FlatCakeStats, StepJobs
from flatcake_client.engines.vllm_scheduler import SchedulerSide
from flatcake_client.engines.vllm_settings import Settings, geometry, open_space, shard_of
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

T = TypeVar("T")


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
        log.info("FlatCake: %s, space %s", role.name.lower(), space.spec.fingerprint.hex())

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # Scheduler.

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._asked.bind_pool(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        _safely(None, lambda: self._asked.arrived(request))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        miss: tuple[int | None, bool] = (0, False)
        return _safely(miss, lambda: self._asked.matched(request, num_computed_tokens))

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        # Not `_safely`: a load that vLLM waits for and nobody does would never end.
        self._asked.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        names = {"memory": CacheHitSource.HOST, "ssd": CacheHitSource.DISK}
        unknown: dict[str, int] = {}
        tokens = _safely(unknown, lambda: self._asked.sources(request, num_external_tokens))
        return {names[medium]: count for medium, count in tokens.items() if count}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._asked.jobs(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        _safely(None, lambda: self._asked.heard(connector_output))

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return _safely(False, lambda: self._asked.ended(request, block_ids)), None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def has_pending_block_frees(self) -> bool:
        return self._asked.holds_blocks()

    def reset_cache(self) -> bool | None:
        self._asked.reset()
        return True

    # Worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._moved.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        self._moved.unregister()

    def restore_kv_caches(self) -> None:
        self._moved.restore()

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:  # noqa: ARG003 - vLLM's signature
        return True

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        _safely(None, lambda: self._moved.begin(self._jobs))

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ARG002 - vLLM's signature
        _safely(None, lambda: self._moved.start(self._jobs))

    def wait_for_layer_load(self, layer_name: str) -> None:
        _safely(None, lambda: self._moved.wait_layer(layer_name))

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,  # noqa: ARG002 - vLLM's signature
        attn_metadata: AttentionMetadata,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        _safely(None, lambda: self._moved.layer_computed(layer_name))

    def wait_for_save(self) -> None:
        _safely(None, self._moved.computed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        idle = self.has_connector_metadata() and self._jobs.idle
        sent, received = self._moved.finished(finished_req_ids, idle=idle)
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._moved.failures()

    # Both.

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                _safely(None, side.close)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        side = self._scheduler or self._worker
        return side.tally.take() if side is not None else None

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
        jobs = self._get_connector_metadata()
        assert isinstance(jobs, StepJobs)
        return jobs


def _safely(otherwise: T, act: Callable[[], T]) -> T:
    """The edge to the engine: what goes wrong with a cache is no reason to stop."""
    try:
        return act()
    except Exception:
        log.exception("FlatCake failed inside vLLM; the request is computed")
        return otherwise


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
