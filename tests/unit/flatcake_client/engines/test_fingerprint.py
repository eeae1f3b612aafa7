"""What changes KV of equal shapes changes the name; what does not, does not."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from flatcake_client.engines.fingerprint import (
    SAMPLE_BYTES,
    SAMPLES_PER_FILE,
    adapter_digest,
    config_digest,
    folder_of,
    turns_by_context,
    weights_digest,
)

LLAMA = {"hidden_size": 64, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "rms_norm_eps": 1e-5}


def test_a_configuration_is_itself_wherever_it_came_from():
    moved = LLAMA | {"_name_or_path": "/other", "transformers_version": "9", "torch_dtype": "bfloat16"}
    assert config_digest(moved) == config_digest(dict(reversed(LLAMA.items())))
    changed = [
        LLAMA,
        LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 32.0}},
        LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}},
        LLAMA | {"rope_theta": 1e6},
        LLAMA | {"rms_norm_eps": 1e-6},
        LLAMA | {"text_config": {"sliding_window": 4096}},
    ]
    digests = [config_digest(each) for each in changed] + [config_digest(LLAMA, quantization="fp8")]
    assert all(one != other for one, other in itertools.combinations(digests, 2))


@pytest.mark.parametrize(
    ("config", "turns"),
    [
        (LLAMA, False),
        ({"rope_scaling": {"type": "longrope"}}, True),
        ({"rope_parameters": {"rope_type": "dynamic"}}, True),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, True),
        ({"text_config": {"rope_scaling": {"type": "su"}}}, True),
        ({"rope_scaling": None, "quantization_config": {"activation_scheme": "dynamic", "type": "dynamic"}}, False),
    ],
    ids=str,
)
def test_the_longest_context_counts_where_the_rope_depends_on_it(config, turns):
    assert turns_by_context(config) == turns
    digests = {config_digest(config, context_tokens=tokens) for tokens in (4096, 8192)}
    assert len(digests) == 1 + turns


def test_weights_are_known_by_samples_of_their_files(tmp_path):
    size_bytes = 3 * SAMPLES_PER_FILE * SAMPLE_BYTES
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(bytes(size_bytes))
    (tmp_path / "config.json").write_text("{}")
    before = weights_digest(tmp_path)
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert weights_digest(tmp_path) == before
    assert weights_digest(tmp_path, "dummy") != before
    with (tmp_path / "b.safetensors").open("r+b") as file:
        file.seek(size_bytes - 1)
        file.write(b"x")
    changed = weights_digest(tmp_path)
    (tmp_path / "c.safetensors").write_bytes(b"")
    assert len({before, changed, weights_digest(tmp_path)}) == 3
    assert weights_digest(tmp_path / "a.safetensors") != weights_digest(tmp_path / "b.safetensors"), "of one file"


def test_weights_without_files_that_are_sampled_are_known_by_their_path(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.tensors").write_bytes(b"")
    assert weights_digest(tmp_path / "a") != weights_digest(tmp_path / "b")


def test_where_a_model_lies(tmp_path):
    assert folder_of(str(tmp_path)) == tmp_path
    assert folder_of("nobody/has-this-model") is None
    assert folder_of("s3://bucket/model") is None
    assert folder_of("a" * 5000) is None, "a path that is too long is one where nothing lies"


def test_a_model_of_the_hub_lies_where_the_engine_downloads_it(tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub")
    folder = snapshot(tmp_path / "there", "some/model", "c0ffee00" * 5)
    assert folder_of("some/model", None, str(tmp_path / "there")) == folder
    assert folder_of("some/model", "c0ffee00" * 5, str(tmp_path / "there")) == folder
    assert folder_of("some/model", "other", str(tmp_path / "there")) is None
    assert folder_of("some/model", None, str(tmp_path / "here")) is None
    assert folder_of("some/model") is None
    assert [path.name for path in tmp_path.iterdir()] == ["there"], "nothing is made where nothing lies"


def snapshot(hub: Path, model: str, commit: str) -> Path:
    """As the hub's own cache lies on a disk, of weights alone."""
    root = hub / f"models--{model.replace('/', '--')}"
    folder = root / "snapshots" / commit
    folder.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(commit)
    (folder / "model.safetensors").write_bytes(commit.encode())
    return folder


def test_an_adapter_is_its_weights_and_its_configuration(tmp_path):
    assert adapter_digest(None) is None
    (tmp_path / "adapter_model.safetensors").write_bytes(b"1")
    assert adapter_digest(tmp_path) is None, "half of it"
    digests = set()
    for weights, config in ((b"1", "{}"), (b"2", "{}"), (b"1", '{"lora_alpha": 2}')):
        (tmp_path / "adapter_model.safetensors").write_bytes(weights)
        (tmp_path / "adapter_config.json").write_text(config)
        digests.add(adapter_digest(tmp_path))
    assert len(digests) == 3
    assert None not in digests
    (tmp_path / "adapter_model.safetensors").unlink()
    assert adapter_digest(tmp_path) is None
