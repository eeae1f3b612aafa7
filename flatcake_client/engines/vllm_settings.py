"""What the connector is told by `kv_connector_extra_config`, and the space that a vLLM engine's KV belongs to.

The space names everything that decides what a block's bytes mean: model configuration, a digest of the weights, dtypes,
parallel sizes, vLLM's version and its KV layout, the device. Any difference is a miss. Names and paths of LoRA adapters, images,
prompt embeddings and cache salts are in vLLM's block hashes, from which the keys are made; what an adapter's files hold is not,
so a digest of it goes into the keys' salt.

What cannot be stored right is declined when the engine starts, with what to do about it.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import vllm
from vllm.distributed.utils import get_pp_indices
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs

import flatcake_client as fc
from flatcake_client.deadline import checked_timeout
from flatcake_client.engines.fingerprint import (
    ADAPTER_CONFIG,
    WEIGHT_FILES,
    adapter_digest,
    config_digest,
    folder_of,
    weights_digest,
)

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = init_logger("vllm.flatcake")

INSTEAD: Final = (
    "A model with sliding windows runs with --disable-hybrid-kv-cache-manager, which makes them full and of one kind; one with "
    "Mamba layers cannot be stored: run it without kv_connector"
)
ADAPTER_FILES: Final = (ADAPTER_CONFIG, *(pattern.removeprefix("*") for pattern in WEIGHT_FILES))
ADAPTERS_MAX: Final = 4096
# What vLLM is told that changes KV of equal shapes and stands in neither a model's configuration nor a block's hash.
MODEL_SETTINGS: Final = ("quantization", "quantization_config", "model_impl", "model_class_overrides")
CACHE_SETTINGS: Final = ("kv_cache_dtype_skip_layers",)
ADAPTER_SETTINGS: Final = ("target_modules",)
MEDIA_SETTINGS: Final = (
    "mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate", "video_pruning_method", "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Settings:
    """Of `kv_connector_extra_config`. Times in seconds.

    Attributes:
        endpoint: of the daemon. Default: `FLATCAKE_ENDPOINT`, else the default socket.
        weights: version of the weights. Default: a digest of samples of the weight files.
        lookup_timeout_s: past it a request is computed as if nothing were stored.
        load_timeout_s: of a restore; past it what is in place is used and the rest computed.
        store_timeout_s: of a store; past it the turn is not stored.
        tokens_min: fewer tokens beyond vLLM's own prefix cache are not worth a load.
        layerwise: load what is all in memory inside the step, layer by layer, beside the computation; not before it.
        store_at: "finish": a turn with its reply, as one segment, when its request ends; "prefill": the prompt, layer by layer
            beside the last step of its prefill, and the reply when the request ends.
        stores_max: turns that wait for being stored; what is more is dropped, with a count.
        store_blocks_share: of vLLM's KV blocks at most this part is held by stores.
        staging_bytes: bound on host memory for reads and writes of session files, in each worker.
    """

    endpoint: str | None = None
    weights: str | None = None
    lookup_timeout_s: float = 1.0
    load_timeout_s: float = 30.0
    store_timeout_s: float = 10.0
    tokens_min: int = 1
    layerwise: bool = False
    store_at: str = "finish"
    stores_max: int = 64
    store_blocks_share: float = 0.25
    staging_bytes: int = 1 << 30

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Settings:
        """Raises: ValueError: an unknown name, or a value that makes no sense."""
        names = [field.name for field in fields(cls)]
        unknown = sorted(set(extra) - set(names))
        if unknown:
            raise ValueError(f"kv_connector_extra_config knows no {', '.join(unknown)}: it knows {', '.join(names)}")
        settings = cls(**extra)
        if settings.store_at not in ("finish", "prefill"):
            raise ValueError(f"store_at is {settings.store_at!r}: expected 'finish' or 'prefill'")
        for name in ("lookup_timeout_s", "load_timeout_s", "store_timeout_s"):
            checked_timeout(name, getattr(settings, name))
        if settings.stores_max < 1 or settings.tokens_min < 1 or not 0 < settings.store_blocks_share <= 1:
            raise ValueError("stores_max and tokens_min are 1 or more, store_blocks_share is above 0 and at most 1")
        return settings

    def connect(self) -> fc.Client:
        return fc.connect(
            self.endpoint,
            timeout_s=self.lookup_timeout_s,
            transfer_timeout_s=self.load_timeout_s,
            staging_bytes=self.staging_bytes,
        )


@dataclass(frozen=True, slots=True)
class Geometry:
    """Of one worker's KV. `names`: its layers, in order; `shards`: workers, each with as many layers of as many bytes."""

    names: tuple[str, ...]
    block_tokens: int
    page_bytes: int
    shards: int
    blocks: int


def geometry(config: VllmConfig, kv: KVCacheConfig) -> Geometry:
    """Raises: ValueError: KV that is not stored, and what to do."""
    parallel = config.parallel_config
    groups = kv.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
        raise ValueError(
            f"FlatCake stores models with one kind of KV, and this one has {len(groups)} ({kinds}). {INSTEAD}"
        )
    group = groups[0]
    specs = group.kv_cache_spec
    each = list(specs.kv_cache_specs.values()) if isinstance(specs, UniformTypeKVCacheSpecs) else [specs]
    for spec in each:
        # Their subclasses drop or share blocks in ways of their own.
        if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
            raise ValueError(f"FlatCake does not store {type(spec).__name__}. {INSTEAD}")
        if spec.non_causal:
            raise ValueError(
                "FlatCake does not store KV that depends on later tokens: run this model without kv_connector"
            )
        if spec.page_size_bytes != each[0].page_size_bytes or spec.block_size != each[0].block_size:
            raise ValueError("FlatCake needs layers of one size, and this model's differ: run it without kv_connector")
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ValueError("FlatCake does not store context-parallel KV: set the context parallel sizes to 1")
    stages = _layers_of_stages(config)
    if len(set(stages)) > 1:
        raise ValueError(f"FlatCake needs as many layers in each pipeline stage, and these have {stages}")
    hashed = getattr(kv, "hash_block_size", None) or config.cache_config.block_size
    if hashed != each[0].block_size:
        raise ValueError(
            f"prefix cache blocks of {hashed} tokens and KV blocks of {each[0].block_size}: make them equal"
        )
    _check_images(config)
    names = tuple(sorted(group.layer_names, key=_natural))
    shards = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    return Geometry(names, each[0].block_size, each[0].page_size_bytes, shards, kv.num_blocks)


def _layers_of_stages(config: VllmConfig) -> list[int]:
    """Of each pipeline stage, as vLLM divides them, `VLLM_PP_LAYER_PARTITION` included."""
    stages = config.parallel_config.pipeline_parallel_size
    layers = config.model_config.get_total_num_hidden_layers()
    bounds = [get_pp_indices(layers, stage, stages) for stage in range(stages)]
    return [end - start for start, end in bounds]


def _check_images(config: VllmConfig) -> None:
    """Raises: ValueError: an image's name in the block hashes would be its request's, and not its content's."""
    multimodal = getattr(config.model_config, "multimodal_config", None)
    if multimodal is None or multimodal.mm_processor_cache_gb or config.cache_config.enable_prefix_caching:
        return
    raise ValueError(
        "with mm_processor_cache_gb 0 and no prefix caching vLLM names images by their requests, so that one would be taken for "
        "another: turn either of them on"
    )


def open_space(client: fc.Client, config: VllmConfig, kv: KVCacheConfig, settings: Settings, shard: int) -> fc.Space:
    """The same in the scheduler and in every worker, and in every process that runs this model like this."""
    shape = geometry(config, kv)
    model = config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    if config.cache_config.cache_dtype != "auto":
        dtype = f"{dtype}/{config.cache_config.cache_dtype}"
    return client.open_space(
        model=f"{Path(model.model).name}/{_config_digest(config)}",
        dtype=dtype,
        block_tokens=shape.block_tokens,
        plane_bytes=[shape.page_bytes] * len(shape.names),
        shards=shape.shards,
        shard=shard,
        weights=settings.weights or _weights_digest(model, config.load_config),
        layout=_layout(config, kv),
    )


def shard_of(config: VllmConfig) -> int:
    """Of this worker: pipeline stages own layers, tensor-parallel ranks own heads; each pair is a shard of its own."""
    parallel = config.parallel_config
    return int(parallel.rank % (parallel.tensor_parallel_size * parallel.pipeline_parallel_size))


def _layout(config: VllmConfig, kv: KVCacheConfig) -> str:
    """What decides where a number lies in a page: vLLM's version and layout, the attention backend, the device."""
    attention = getattr(config, "attention_config", None)
    backend = f"{getattr(attention, 'backend', None)} {getattr(attention, 'backend_per_kind', None) or ''}".strip()
    device = current_platform.device_type
    # Backends are chosen, and on a CPU pages are packed, by what the processor can do.
    able = torch.backends.cpu.get_cpu_capability() if device == "cpu" else current_platform.get_device_capability()
    parallel = config.parallel_config
    return (
        f"vllm {vllm.__version__} {getattr(kv, 'kv_cache_layout', None)} {backend} {device} {able} "
        f"tp{parallel.tensor_parallel_size} pp{parallel.pipeline_parallel_size}"
    )


def _config_digest(config: VllmConfig) -> str:
    model = config.model_config
    told = {"draft": _draft(config)}
    for owner, names in (
        (model, MODEL_SETTINGS),
        (config.cache_config, CACHE_SETTINGS),
        (getattr(config, "lora_config", None), ADAPTER_SETTINGS),
        (getattr(model, "multimodal_config", None), MEDIA_SETTINGS),
    ):
        told |= {name: str(value) for name in names if (value := getattr(owner, name, None))}
    return config_digest(model.hf_config.to_dict(), context_tokens=getattr(model, "max_model_len", None), **told)


def _draft(config: VllmConfig) -> str:
    """The model that drafts tokens, whose KV lies beside the other; "" where there is none, or it is a part of the model."""
    draft = getattr(getattr(config, "speculative_config", None), "draft_model_config", None)
    if draft is None or draft.model == config.model_config.model:
        return ""
    load = config.speculative_config.draft_load_config or config.load_config
    return f"{config_digest(draft.hf_config.to_dict())} {_weights_digest(draft, load)}"


def _weights_digest(model: ModelConfig, load: LoadConfig) -> str:
    """Of samples of the weight files: tells any trained models apart, whatever their path is, and costs milliseconds."""
    how = (f"{load.load_format}", f"{model.revision}", f"{model.seed}" if load.load_format == "dummy" else "")
    path = str(
        getattr(model, "model_weights", "") or model.model
    )  # vLLM may read them elsewhere than the configuration
    folder = Path(path) if os.path.isfile(path) else folder_of(path, model.revision, load.download_dir)  # noqa: PTH113 - Path's may raise
    if folder is not None and load.load_format != "dummy":
        return weights_digest(folder, *how)
    return hashlib.sha256(f"{' '.join(how)}{path}".encode()).hexdigest()[:32]


class Adapters:
    """Digests of LoRA adapters, each taken when its first request comes. Thread-safe.

    Once an adapter's files change vLLM may have either loaded (in place, or anew after it had no room for it), and its own cache KV of
    both, by name and path: from then on what it computes is stored for this process only.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[
            tuple[str, str], tuple[object, str]
        ] = {}  # its files when it was first seen, and their digest, "" before it is taken

    def salt(self, adapter: LoRARequest | None) -> bytes | None:
        """As its files are now: a request whose salt is another at its end may be of both. None: `learn` it first.

        Looks at names and times only: for a scheduler's thread.
        """
        if adapter is None:
            return b""
        key = (adapter.lora_name, adapter.lora_path)
        stamp = _stamp(_adapter_folder(adapter))
        with self._lock:
            seen, digest = self._known.pop(key, (stamp, ""))
            if seen != stamp:
                log.warning(
                    "the files of adapter %s at %s changed: what vLLM computes with it is not shared any more. Give changed weights a new path",
                    *key,
                )
                digest = os.urandom(16).hex()
            self._known[key] = stamp, digest
            if len(self._known) > ADAPTERS_MAX:  # the one asked for least recently, which vLLM has let go
                del self._known[next(iter(self._known))]
        return f"lora {adapter.lora_name} {adapter.lora_path} {digest}".encode() if digest else None

    def learn(self, adapter: LoRARequest | None) -> bytes | None:
        """Its salt, after its files were read where they had not been: samples of some 256 KiB each. None: it is forgotten already."""
        salt = self.salt(adapter)
        if adapter is None or salt is not None:
            return salt
        digest = adapter_digest(_adapter_folder(adapter)) or os.urandom(16).hex()
        key = (adapter.lora_name, adapter.lora_path)
        with self._lock:
            seen, before = self._known.get(key, (None, digest))
            if not before:
                self._known[key] = seen, digest
        return self.salt(adapter)


def _adapter_folder(adapter: LoRARequest) -> Path | None:
    return folder_of(os.path.expanduser(adapter.lora_path))  # noqa: PTH111 - Path's may raise


def _stamp(folder: Path | None) -> object:
    """Changes whenever a file of an adapter does, and costs microseconds."""
    try:
        entries = [entry for entry in os.scandir(folder) if entry.name.endswith(ADAPTER_FILES)] if folder else ()
        return sorted((entry.name, entry.stat().st_mtime_ns, entry.stat().st_size) for entry in entries)
    except OSError:  # it is taken away at this moment
        return None


def _natural(name: str) -> list[tuple[int, str]]:
    """Layers by number: `layers.2` before `layers.10`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
