"""Models whose layers keep their KV in several ways: declined when vLLM starts, with what helps; and run with what helps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from daemon import Daemon
from engines.vllm.running import BLOCK, Engine, Witness, prompt, write_model

from flatcake_client.engines.models import ModelShape

WINDOW = 256
# Pointers that reach no further than the window: the text is that of full attention, by which it is known.
SHAPE = ModelShape(layers=3, reach_tokens=200)


def sliding(folder: Path, *layers: int) -> Path:
    """The same weights, some of whose layers look back `WINDOW` tokens only."""
    write_model(folder, shape=SHAPE)
    config = json.loads((folder / "config.json").read_text())
    kinds = ["sliding_attention" if layer in layers else "full_attention" for layer in range(SHAPE.layers)]
    (folder / "config.json").write_text(json.dumps(config | {"layer_types": kinds, "sliding_window": WINDOW}))
    return folder


@pytest.fixture
def node(tmp_path):
    with Daemon(tmp_path) as daemon:
        yield daemon
        daemon.check()


@pytest.mark.parametrize("layers", [(1,), (0, 1, 2)], ids=["some layers", "all layers"])
def test_sliding_windows_are_declined(node, tmp_path, layers):
    with pytest.raises(ValueError, match="disable-hybrid-kv-cache-manager"):
        Engine(sliding(tmp_path / "model", *layers), node.endpoint)


def test_sliding_windows_without_the_hybrid_manager(node, tmp_path):
    model, expected = sliding(tmp_path / "model", 1), Witness(shape=SHAPE)
    with Engine(model, node.endpoint, disable_hybrid_kv_cache_manager=True) as engine:
        ids = prompt(500, 3 * WINDOW)
        for loads in (0, 1):
            assert engine.ask(ids, tokens=20) == [expected(ids, 20)]
            counts = engine.counts()
            assert counts["loads"] == loads
            engine.forget()
        assert counts["loaded_blocks"] == 3 * WINDOW // BLOCK - 1


@pytest.mark.parametrize("kind", ["Jamba", "Mamba2"])
def test_mamba_is_declined(node, tmp_path, kind):
    """Beside attention, and by itself."""
    import transformers

    size = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "tie_word_embeddings": False}
    size |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    size |= {
        "Jamba": {
            "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "attn_layer_period": 2,
            "attn_layer_offset": 1, "expert_layer_period": 8, "expert_layer_offset": 7, "num_experts": 2, "mamba_d_state": 8,
            "mamba_dt_rank": 8, "use_mamba_kernels": False,
        },
        "Mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16},
    }[kind]  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**size)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="Mamba layers cannot be stored: run it without kv_connector"):
        Engine(tmp_path / "model", node.endpoint)
