"""The connector, with vLLM's own requests, hashes and base classes, in the suite of all connectors; and what it declines."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conformance.connectors import Shape, check_connector
from engines.vllm.harness import VllmHarness, cache_configuration, configuration
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import CacheConfig, LoadConfig, LoRAConfig, ModelConfig, MultiModalConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MambaSpec, SlidingWindowSpec

from flatcake_client.engines import vllm_settings
from flatcake_client.engines.vllm import FlatCakeConnector
from flatcake_client.engines.vllm_jobs import COUNTERS, FlatCakePromMetrics, FlatCakeStats
from flatcake_client.engines.vllm_settings import (
    ADAPTER_SETTINGS,
    CACHE_SETTINGS,
    MEDIA_SETTINGS,
    MODEL_SETTINGS,
    Settings,
    _config_digest,
    _weights_digest,
    geometry,
    shard_of,
)
from flatcake_client.engines.vllm_worker import by_block


@pytest.mark.timeout(300)
def test_vllm(tmp_path):
    check_connector(VllmHarness, tmp_path)


def window(tokens: int = 16) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=tokens, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=64)


def test_what_is_not_stored_is_declined_with_what_to_do():
    shape = Shape()
    config = configuration("unix:///nowhere", shape)
    with pytest.raises(ValueError, match="disable-hybrid-kv-cache-manager"):
        geometry(config, cache_configuration(shape, window()))
    mamba = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))
    with pytest.raises(ValueError, match="run it without kv_connector"):
        geometry(config, cache_configuration(shape, mamba))
    hybrid = cache_configuration(shape)
    hybrid.kv_cache_groups.append(KVCacheGroupSpec(["w"], window()))
    with pytest.raises(ValueError, match=r"has 2 \(FullAttentionSpec, SlidingWindowSpec\)"):
        geometry(config, hybrid)
    config.parallel_config.decode_context_parallel_size = 2
    with pytest.raises(ValueError, match="context parallel"):
        geometry(config, cache_configuration(shape))


def test_what_would_be_found_by_others_is_declined():
    shape = Shape()
    config = configuration("unix:///nowhere", shape)
    config.model_config.multimodal_config = SimpleNamespace(mm_processor_cache_gb=0)
    assert geometry(config, cache_configuration(shape))
    config.cache_config.enable_prefix_caching = False
    with pytest.raises(ValueError, match="vLLM names images by their requests"):
        geometry(config, cache_configuration(shape))
    config.model_config.multimodal_config.mm_processor_cache_gb = 4
    assert geometry(config, cache_configuration(shape))
    prefix = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, non_causal=True)
    with pytest.raises(ValueError, match="depends on later tokens"):
        geometry(config, cache_configuration(shape, prefix))
    config.cache_config.block_size = 32
    with pytest.raises(ValueError, match="32 tokens and KV blocks of 16"):
        geometry(config, cache_configuration(shape))


def test_ranks_are_shards(monkeypatch):
    shape = Shape(layers=4)
    config = configuration("unix:///nowhere", shape)
    config.parallel_config.tensor_parallel_size = config.parallel_config.pipeline_parallel_size = 2
    found = geometry(config, cache_configuration(Shape(layers=2)))
    assert (found.shards, len(found.names)) == (4, 2)
    config.parallel_config.rank = 3
    assert shard_of(config) == 3
    monkeypatch.setattr(vllm_settings, "get_pp_indices", lambda _layers, stage, _: ((0, 1), (1, 4))[stage])
    with pytest.raises(ValueError, match=r"as many layers in each pipeline stage, and these have \[1, 3\]"):
        geometry(config, cache_configuration(Shape(layers=2)))


def test_the_longest_context_is_in_the_space_where_it_decides_how_keys_are_turned():
    digests = set()
    for rope, longest in (("longrope", 4096), ("longrope", 8192), ("default", 4096), ("default", 8192)):
        config = configuration("unix:///nowhere", Shape())
        described = {"rope_parameters": {"rope_type": rope}}
        config.model_config.hf_config = SimpleNamespace(to_dict=lambda described=described: described)
        config.model_config.max_model_len = longest
        digests.add(_config_digest(config))
    assert len(digests) == 3


def told(owner: str, **settings: object) -> str:
    """The digest of an engine that was told these."""
    config = configuration("unix:///nowhere", Shape())
    place = config.model_config if owner == "model_config" else getattr(config, owner, None) or SimpleNamespace()
    vars(place).update(settings)
    setattr(config, owner, place)
    return _config_digest(config)


def test_what_changes_kv_and_stands_in_no_configuration_is_in_the_space():
    digests = [
        told("model_config"), told("cache_config", kv_cache_dtype_skip_layers=[]), told("lora_config", target_modules=None),
        told("model_config", quantization="fp8"), told("model_config", quantization_config={"linear": "mxfp8"}),
        told("model_config", model_impl="transformers"), told("model_config", model_class_overrides={"A": "b:B"}),
        told("cache_config", kv_cache_dtype_skip_layers=["0"]), told("lora_config", target_modules=["q_proj"]),
    ]  # fmt: skip
    assert digests[0] == digests[1] == digests[2], "nothing"
    assert len(set(digests)) == 7
    for owner, names in ((ModelConfig, MODEL_SETTINGS), (CacheConfig, CACHE_SETTINGS), (LoRAConfig, ADAPTER_SETTINGS)):
        assert set(names) <= {field.name for field in fields(owner)}


def test_what_is_done_to_images_is_in_the_space():
    """Their hashes have what a request asks for, and not what the engine was told."""
    digests = [
        told("model_config", multimodal_config=MultiModalConfig(**media)) for media in (
            {}, {"mm_processor_kwargs": {}}, {"mm_processor_kwargs": {"do_rescale": False}},
            {"mm_processor_kwargs": {"size": {"shortest_edge": 224}}}, {"media_io_kwargs": {"video": {"num_frames": 40}}},
            {"video_pruning_rate": 0.5}, {"video_pruning_rate": 0.5, "video_pruning_method": "vidcom2"},
            {"mm_encoder_attn_dtype": "fp8"},
        )
    ]  # fmt: skip
    assert digests[0] == digests[1], "nothing"
    assert len(set(digests)) == 7
    assert set(MEDIA_SETTINGS) <= {field.name for field in fields(MultiModalConfig)}


def test_a_model_that_drafts_is_in_the_space(tmp_path):
    """Its KV lies beside the other."""
    load, of_draft = LoadConfig(load_format="auto"), SimpleNamespace(to_dict=dict)

    def drafting(path: Path | str, own_load: object = None) -> str:
        draft = SimpleNamespace(model=str(path), revision=None, seed=0, hf_config=of_draft)
        return told("speculative_config", draft_model_config=draft, draft_load_config=own_load)

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
    digests = [
        told("model_config"), told("speculative_config", draft_model_config=None), drafting(Shape().model),
        drafting(tmp_path / "a"), drafting(tmp_path / "a", load), drafting(tmp_path / "b"),
    ]  # fmt: skip
    assert digests[0] == digests[1] == digests[2], "a part of the model"
    assert digests[3] == digests[4]
    assert len(set(digests)) == 3


def test_weights_are_their_files_or_else_their_path(tmp_path):
    def digest(path: Path, load_format: str = "auto", weights: Path | str = "") -> str:
        model = configuration("unix:///nowhere", Shape(model=str(path))).model_config
        model.model_weights = str(weights)
        return _weights_digest(model, LoadConfig(load_format=load_format))

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.tensors").write_bytes(name.encode())
    assert digest(tmp_path / "a", "tensorizer") != digest(tmp_path / "b", "tensorizer")
    for name in ("a", "b"):
        (tmp_path / name / "model.safetensors").write_bytes(b"same")
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    assert digest(tmp_path / "a", "dummy") != digest(tmp_path / "b", "dummy")
    (tmp_path / "b" / "model.safetensors").write_bytes(b"else")
    assert digest(tmp_path / "a") != digest(tmp_path / "a", weights=tmp_path / "b") == digest(tmp_path / "b")
    assert digest(tmp_path / "a", weights="s3://x/1") != digest(tmp_path / "a", weights="s3://x/2")
    single, digests = tmp_path / "x.gguf", set()
    for weights in (b"first", b"second"):
        single.write_bytes(weights)
        digests.add(digest(single))
    assert len(digests) == 2
    assert digest(Path("x" * 5000)) == digest(Path("x" * 5000)), "known by its name"


def test_weights_of_the_hub_are_those_in_the_download_directory(tmp_path):
    """Elsewhere may be another commit of the model, which this engine has not loaded."""
    digests = set()
    for commit, weights in (("a", b"first"), ("b", b"second")):
        root = tmp_path / commit / "models--some--model"
        (root / "snapshots" / commit).mkdir(parents=True)
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text(commit)
        (root / "snapshots" / commit / "model.safetensors").write_bytes(weights)
        model = configuration("unix:///nowhere", Shape(model="some/model")).model_config
        digests.add(_weights_digest(model, LoadConfig(download_dir=str(tmp_path / commit))))
    assert len(digests) == 2


def test_layers_are_in_order_whatever_their_names():
    found = geometry(configuration("unix:///nowhere", Shape()), cache_configuration(Shape(layers=12)))
    assert [name.split(".")[2] for name in found.names] == [str(layer) for layer in range(12)]


def test_settings():
    assert Settings.of({"tokens_min": 64}).tokens_min == 64
    for wrong, match in (
        ({"tokens": 1}, "knows no tokens: it knows endpoint, weights"),
        ({"store_at": "never"}, "expected 'finish' or 'prefill'"),
        ({"load_timeout_s": 0}, "load_timeout_s is 0: expected seconds, more than 0"),
        ({"store_timeout_s": float("inf")}, "store_timeout_s is inf"),
        ({"stores_max": 0}, "1 or more"),
    ):
        with pytest.raises(ValueError, match=match):
            Settings.of(wrong)
    assert not FlatCakeConnector.requires_piecewise_for_cudagraph({})
    assert FlatCakeConnector.requires_piecewise_for_cudagraph({"layerwise": True})
    config = configuration("unix:///nowhere", Shape())
    config.kv_transfer_config.kv_load_failure_policy = "fail"
    with pytest.raises(ValueError, match="recompute"):
        FlatCakeConnector(config, None, cache_configuration(Shape()))


@pytest.mark.parametrize(
    "size", [(64, 2, 16, 16), (2, 64, 16, 16), (128, 2, 8, 16), (2, 128, 8, 16)],
    ids=["blocks first", "K and V first", "two kernel blocks", "both"],
)  # fmt: skip
def test_every_layout_is_seen_by_block(size):
    found = geometry(configuration("unix:///nowhere", Shape()), cache_configuration(Shape()))
    cache = torch.arange(64 * 2 * 16 * 16, dtype=torch.int16).view(torch.bfloat16).view(size)
    pages = by_block(cache, found)
    assert pages.shape[0] == 64
    assert pages.data_ptr() == cache.data_ptr(), "a view"
    axis = size.index(max(size[:2]))
    parts = size[axis] // 64
    assert torch.equal(
        pages[3].flatten().view(torch.int16), cache.movedim(axis, 0)[3 * parts : 4 * parts].flatten().view(torch.int16)
    )
    with pytest.raises(ValueError, match="does not store this layout"):
        by_block(cache[..., :8], found)


def test_counters_through_vllm():
    registry = CollectorRegistry()
    types = {kind: partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    metrics = FlatCakePromMetrics(config, types, ["engine"], {0: ["0"]})
    stats = FlatCakeStats({"loads": 2}).aggregate(FlatCakeStats({"loads": 1, "stores": 4}))
    assert (stats.reduce(), stats.is_empty(), FlatCakeStats().is_empty()) == ({"loads": 3, "stores": 4}, False, True)
    metrics.observe(stats.to_dict())
    assert registry.get_sample_value("vllm:flatcake_loads_total", {"engine": "0"}) == 3
    assert registry.get_sample_value("vllm:flatcake_lookups_total", {"engine": "0"}) == 0
    assert set(stats.data) <= set(COUNTERS)
