"""What makes two requests of the same tokens differ: images, salts, adapters, prompt embeddings. vLLM's own requests and hashes."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conformance.connectors import Shape, kv_of
from daemon import Daemon
from engines.vllm.harness import VllmHarness
from msgspec.structs import replace
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

TOKENS = np.arange(6 * 16 + 1) % 250


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("node")) as daemon:
        yield daemon
        daemon.check()


@pytest.fixture
def harness(daemon, request):
    harness = VllmHarness(daemon.endpoint, Shape(model=request.node.name))
    yield harness
    harness.close()


def image(name: str, offset: int = 20, length: int = 30) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset=offset, length=length))


def found(harness: VllmHarness, **extra: object) -> int:
    harness.extra = extra
    return harness.lookup(TOKENS)


def stored(harness: VllmHarness, **extra: object) -> bool:
    harness.extra = extra
    return harness.store(TOKENS, kv_of(harness, TOKENS))


def found_by_another(daemon: Daemon, harness: VllmHarness, **extra: object) -> int:
    """By an engine that is started now."""
    another = VllmHarness(daemon.endpoint, harness.shape)
    try:
        return found(another, **extra)
    finally:
        another.close()


def test_an_image_is_in_the_blocks_that_it_begins_in_and_all_behind(harness):
    assert stored(harness, mm_features=[image("a" * 64)])
    assert found(harness, mm_features=[image("a" * 64)]) == 6
    assert found(harness, mm_features=[image("b" * 64)]) == 1, "what is before the image is the same"
    assert found(harness) == 1
    assert found(harness, mm_features=[image("a" * 64, offset=21)]) == 1
    assert found(harness, mm_features=[image("a" * 64), image("c" * 64, offset=70, length=3)]) == 4
    assert stored(harness, mm_features=[image("b" * 64)]), "beside the first"
    assert found(harness, mm_features=[image("a" * 64)]) == found(harness, mm_features=[image("b" * 64)]) == 6


def test_a_salt_is_in_every_block(harness):
    assert stored(harness, cache_salt="tenant-1")
    assert [found(harness, cache_salt=salt) for salt in ("tenant-1", "tenant-2", None)] == [6, 0, 0]


def adapter(folder: Path, weights: bytes, config: str = "{}") -> None:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "adapter_config.json").write_text(config)


def test_an_adapter_is_its_name_its_path_and_its_weights(harness, daemon, tmp_path):
    adapter(tmp_path / "a", b"1" * 9000)
    adapter(tmp_path / "b", b"1" * 9000)
    first = LoRARequest("one", 1, str(tmp_path / "a"))
    assert stored(harness, lora_request=first)
    assert found(harness, lora_request=first) == 6
    assert found(harness) == 0, "the base model"
    assert found(harness, lora_request=LoRARequest("two", 2, str(tmp_path / "a"))) == 0
    assert found(harness, lora_request=LoRARequest("one", 1, str(tmp_path / "b"))) == 0
    assert found(harness, lora_request=LoRARequest("one", 5, str(tmp_path / "a"))) == 6, "taken out and loaded again"
    # Other weights, and another scale, under the same name.
    for weights, config in ((b"1" * 8999 + b"2", "{}"), (b"1" * 9000, '{"lora_alpha": 2}')):
        adapter(tmp_path / "a", weights, config)
        assert found_by_another(daemon, harness, lora_request=first) == 0
    adapter(tmp_path / "a", b"1" * 9000)
    assert found_by_another(daemon, harness, lora_request=first) == 6
    nowhere = LoRARequest("three", 3, str(tmp_path / "nowhere"))
    assert stored(harness, lora_request=nowhere)
    assert found(harness, lora_request=nowhere) == 6, "it cannot be read here: it is this process's own"


@pytest.mark.parametrize(
    "changed", [LoRARequest("one", 1, "-"), LoRARequest("one", 1, "-", load_inplace=True), LoRARequest("one", 2, "-")]
)
def test_an_adapter_whose_files_changed_under_vllm_is_this_process_s_own(harness, daemon, tmp_path, changed, caplog):
    """Its own cache has KV of both by one name and path, and may have loaded either: at once, or when it had no room for the first."""
    adapter(tmp_path, b"1" * 9000)
    first, changed = LoRARequest("one", 1, str(tmp_path)), replace(changed, lora_path=str(tmp_path))
    assert stored(harness, lora_request=first)
    (tmp_path / "README.md").write_text("is not loaded")
    assert found(harness, lora_request=first) == 6
    adapter(tmp_path, b"1" * 8999 + b"2")
    assert found(harness, lora_request=changed) == 0
    assert "Give changed weights a new path" in caplog.text
    assert stored(harness, lora_request=changed)
    assert found(harness, lora_request=changed) == 6
    assert found_by_another(daemon, harness, lora_request=first) == 0, "what was stored may be of the first"
    adapter(tmp_path, b"1" * 9000)
    assert found(harness, lora_request=first) == 0, "what it has now is not known"
    assert found_by_another(daemon, harness, lora_request=first) == 6
    shutil.rmtree(tmp_path)
    assert found(harness, lora_request=first) == 0


def test_prompt_embeddings_are_in_their_blocks(harness):
    embeddings = torch.randn(len(TOKENS), 8)
    assert stored(harness, prompt_embeds=embeddings)
    assert found(harness, prompt_embeds=embeddings) == 6
    other = embeddings.clone()
    other[40] += 1
    assert found(harness, prompt_embeds=other) == 2
    assert found(harness) == 0
