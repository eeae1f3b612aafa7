"""LoRA inside the real engine: adapters that change every token, KV that is found by its own adapter only."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from daemon import Daemon
from engines.vllm.running import BLOCK, SHAPE, Engine, Witness, prompt
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

RANK = SHAPE.kv_heads * SHAPE.digit_base
OPTIONS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}


def permuted(model: torch.nn.Module, seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """By layer, A and B of a change to `o_proj` that has each head write other digits: a model as sharp, with other tokens.

    A head writes digit d of a stream as the column R_d: sum_d R_perm(d) code_d^T. What is added is
    sum_d (R_other(d) - R_d) R_d^T times that. The rows of `lm_head` give each R_d but for a part that all digits share, and in
    these differences that part is gone.
    """
    rng = np.random.default_rng(seed)
    head = model.lm_head.weight.double()
    tokens = torch.arange(SHAPE.vocab_size)
    change = {}
    for layer in range(SHAPE.layers):
        weight = model.model.layers[layer].self_attn.o_proj.weight.double()
        a, b = torch.zeros(RANK, weight.shape[1]), torch.zeros(weight.shape[0], RANK)
        for stream in range(SHAPE.kv_heads):
            digits = tokens // SHAPE.digit_base**stream % SHAPE.digit_base
            columns = torch.stack([head[digits == digit].mean(0) for digit in range(SHAPE.digit_base)])
            columns -= columns.mean(0)
            columns *= (1 - 1 / SHAPE.digit_base) ** 0.5 / columns.norm(dim=1).mean()
            # The head that writes this stream is that before it; the first of its query heads copies.
            first = (stream - 1) % SHAPE.kv_heads * (SHAPE.heads // SHAPE.kv_heads) * SHAPE.head_dim
            rows = slice(stream * SHAPE.digit_base, (stream + 1) * SHAPE.digit_base)
            a[rows, first : first + SHAPE.head_dim] = (columns @ weight[:, first : first + SHAPE.head_dim]).float()
            b[:, rows] = (columns[rng.permutation(SHAPE.digit_base)] - columns).T.float()
        change[f"model.layers.{layer}.self_attn.o_proj"] = (a, b)
    return change


def write_adapter(folder: Path, change: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    folder.mkdir(exist_ok=True)
    tensors = {}
    for name, (a, b) in change.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(torch.bfloat16).contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(torch.bfloat16).contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["o_proj"]}))


def merged(seed: int | None) -> Witness:
    """The witness whose weights are those of the base model and an adapter together."""
    witness = Witness()
    for name, (a, b) in permuted(witness.model, seed).items() if seed is not None else ():
        weight = witness.model.get_submodule(name).weight
        weight.data += b @ a
    return witness


@pytest.mark.timeout(300)
def test_an_adapter_finds_its_own_kv_only(model, tmp_path):
    base = Witness()
    adapters: dict[int | None, LoRARequest | None] = {None: None}
    for seed in (1, 2):
        write_adapter(tmp_path / f"adapter{seed}", permuted(base.model, seed))
        adapters[seed] = LoRARequest(f"adapter{seed}", seed, str(tmp_path / f"adapter{seed}"))
    witnesses = {seed: merged(seed) for seed in adapters}
    ids = prompt(60, 400)
    expected = {seed: witness(ids) for seed, witness in witnesses.items()}
    assert len({tuple(tokens) for tokens in expected.values()}) == 3, "each has a text of its own"
    request = {"prompt_token_ids": ids}
    with Daemon(tmp_path) as node:
        with Engine(model, node.endpoint, **OPTIONS) as engine:
            for loads in (0, 1):
                for seed, adapter in adapters.items():
                    assert engine.ask_raw(request, lora=adapter) == [expected[seed]], (loads, seed)
                    assert engine.counts()["loads"] == loads, seed
                    engine.forget()
            # Together in one batch, each with the KV of its own.
            assert engine.ask_raw(request, request, lora=[adapters[1], adapters[2]]) == [expected[1], expected[2]]
            assert engine.counts()["hit_tokens"] == 2 * (400 // BLOCK * BLOCK)
        # After a restart the adapter is found again; one of the same name with other weights is not.
        write_adapter(tmp_path / "adapter2", permuted(base.model, 3))
        with Engine(model, node.endpoint, **OPTIONS) as engine:
            assert engine.ask_raw(request, lora=adapters[1]) == [expected[1]]
            assert engine.counts()["loads"] == 1
            assert engine.ask_raw(request, lora=adapters[2]) == [merged(3)(ids)]
            assert engine.counts()["loads"] == 0
        node.check()
