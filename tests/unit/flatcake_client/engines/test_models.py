"""The made-up models: text hangs on every part of the KV, and on nothing else: not on dtype, not on how prefill is split."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from flatcake_client.engines.models import SCORE_GAP_MIN, SCORE_PEAK, ModelShape, make_model, pointer_offsets

torch.set_num_threads(1)

FAMILIES = ("llama", "qwen3")
DEEPER = {
    "layers": 5, "hidden": 128, "intermediate": 96, "heads": 8, "kv_heads": 4, "head_dim": 64, "digit_base": 4,
    "reach_tokens": 300,
}  # fmt: skip
PROMPT = 400
REPLY = 12


def prompt_of(shape: ModelShape, seed: int, tokens: int = PROMPT) -> list[int]:
    return np.random.default_rng(1000 + seed).integers(0, shape.vocab_size, tokens).tolist()


@torch.no_grad()
def run(model, tokens, cache=None):
    """Last logits after the tokens, and the cache. No code of the connector."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = DynamicCache() if cache is None else cache
    return model(torch.tensor([tokens]), **{name: cache}).logits[0, -1].float(), cache


def reply(model, prompt, splits=(), spoil=None):
    """Greedy tokens, and the smallest lead of the best token in parts of a digit's 4. The last token is always computed."""
    cache, start = None, 0
    for end in (*splits, len(prompt) - 1):
        _, cache = run(model, prompt[start:end], cache)
        start = end
    if spoil is not None:
        spoil(cache)
    tokens, leads, fresh = [], [], prompt[start:]
    for _ in range(REPLY):
        logits, cache = run(model, fresh, cache)
        best = logits.topk(2).values
        leads.append(float(best[0] - best[1]) / 4)
        fresh = [int(logits.argmax())]
        tokens += fresh
    return tokens, min(leads)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", [{}, DEEPER], ids=["tiny", "deeper"])
def test_neither_rounding_nor_the_split_of_prefill_changes_a_token(family, sizes):
    shape = ModelShape(family, **sizes)
    for seed in range(3 if sizes else 6):
        exact, rounded = (make_model(shape, seed=seed, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
        prompt = prompt_of(shape, seed)
        expected, lead = reply(exact, prompt)
        assert lead > 0.9, f"seed {seed}: the best token leads by {lead} digits only"
        for splits in ((), (64,), (16, 17, 333)):
            tokens, lead = reply(rounded, prompt, splits)
            assert tokens == expected, f"seed {seed}, splits {splits}"
            assert lead > 0.8, f"seed {seed}, splits {splits}: the best token leads by {lead} digits only"
            assert reply(exact, prompt, splits)[0] == expected


def keys_and_values(cache):
    return [(layer.keys, layer.values) for layer in cache.layers]


def zero_all(cache):
    for tensor in sum(keys_and_values(cache), ()):
        tensor.zero_()


def zero(what: int, layer: int):
    return lambda cache: keys_and_values(cache)[layer][what].zero_()


def zero_head(head: int):
    return lambda cache: keys_and_values(cache)[-1][1][:, head].zero_()


def swap_layers(cache):
    (k0, v0), (k1, v1) = keys_and_values(cache)[:2]
    for a, b in ((k0, k1), (v0, v1)):
        saved = a.clone()
        a.copy_(b)
        b.copy_(saved)


def swap_keys_and_values(cache):
    for keys, values in keys_and_values(cache):
        saved = keys.clone()
        keys.copy_(values)
        values.copy_(saved)


def zero_every_second_block(cache):
    # Moving keys and values together would be no error: keys carry their position, attention does not care for the order.
    for _, values in keys_and_values(cache):
        values[:, :, : PROMPT // 32 * 32].unflatten(2, (-1, 2, 16))[:, :, :, 1].zero_()


def shift_values_by_one(cache):
    for _, values in keys_and_values(cache):
        values.copy_(values.roll(1, dims=2))


def mix_heads(cache):
    for tensor in sum(keys_and_values(cache), ()):
        tensor.copy_(tensor.roll(1, dims=1))


SPOILS = {
    "all zeroed": zero_all,
    "keys of a layer zeroed": zero(0, 1),
    "values of the first layer zeroed": zero(1, 0),
    "values of the last layer zeroed": zero(1, -1),
    "first head zeroed": zero_head(0),
    "last head zeroed": zero_head(-1),
    "layers swapped": swap_layers,
    "keys for values": swap_keys_and_values,
    "every second block zeroed": zero_every_second_block,
    "values a token late": shift_values_by_one,
    "heads mixed": mix_heads,
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sizes", [{}, DEEPER], ids=["tiny", "deeper"])
def test_any_wrong_kv_gives_other_tokens(family, dtype, sizes):
    shape = ModelShape(family, **sizes)
    for seed in range(2):
        model = make_model(shape, seed=seed, dtype=dtype)
        expected, _ = reply(model, prompt_of(shape, seed))
        for name, spoil in SPOILS.items():
            assert reply(model, prompt_of(shape, seed), spoil=spoil)[0] != expected, f"seed {seed}: {name}"


@pytest.mark.parametrize("family", FAMILIES)
def test_kv_of_another_context_gives_other_tokens(family):
    shape = ModelShape(family)
    for seed in range(5):
        model = make_model(shape, seed=seed)
        mine, other = prompt_of(shape, seed), prompt_of(shape, seed + 100)
        _, foreign = run(model, other[:-1])

        def spoil(cache, foreign=foreign):
            for (keys, values), (other_keys, other_values) in zip(
                keys_and_values(cache), keys_and_values(foreign), strict=True
            ):
                keys.copy_(other_keys)
                values.copy_(other_values)

        assert reply(model, mine, spoil=spoil)[0] != reply(model, mine)[0]


def test_the_far_half_of_the_context_counts():
    shape = ModelShape(**DEEPER)
    for seed in range(5):
        model, prompt = make_model(shape, seed=seed), prompt_of(shape, seed)
        changed = prompt_of(shape, seed + 50)[: PROMPT // 2] + prompt[PROMPT // 2 :]
        assert reply(model, changed)[0] != reply(model, prompt)[0]


def test_seeds_and_shapes_make_models_again():
    first, again, other = (make_model(ModelShape(), seed=seed) for seed in (1, 1, 2))
    states = [model.state_dict() for model in (first, again, other)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert not torch.equal(states[0]["lm_head.weight"], states[2]["lm_head.weight"])
    assert make_model(ModelShape(), dtype=torch.bfloat16).model.rotary_emb.inv_freq.dtype == torch.float32


def test_pointers_are_sharp_and_of_all_magnitudes():
    shape = ModelShape(layers=16, heads=16, kv_heads=8, digit_base=2, hidden=64, head_dim=64, reach_tokens=2000)
    offsets = pointer_offsets(shape, np.random.default_rng(0))
    assert offsets.shape == (16, 8, 2)
    assert offsets.min() < 40
    assert offsets.max() > 1500
    assert 100 < np.exp(np.log(offsets).mean()) < 400
    omega = 10000.0 ** (-np.arange(32) / 32)
    # The best-known case, naively: a query at the position itself, far from the start.
    share = np.where(np.arange(32) < 16, np.exp(-np.arange(32) / 4) + 0.03, 0)
    score = np.array([(share / share.sum() * np.cos(omega * d)).sum() for d in range(4096)])
    for offset in offsets.ravel()[:20].tolist():
        both = SCORE_PEAK * (score[np.abs(np.arange(4096) - offset)] + 0.9 * score)
        assert both.argmax() == offset
        assert np.sort(both)[-1] - np.sort(both)[-2] >= SCORE_GAP_MIN


@pytest.mark.parametrize(
    "sizes",
    [
        {"heads": 2, "kv_heads": 2},
        {"heads": 5, "kv_heads": 2},
        {"hidden": 32},
        {"head_dim": 16},
        {"head_dim": 34},
        {"reach_tokens": 16},
        {"reach_tokens": 5000},
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes):
    with pytest.raises(ValueError):
        ModelShape(**sizes)
