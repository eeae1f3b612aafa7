"""The connector over a store in memory: the same tokens with it, without it, and whatever breaks in it."""

from __future__ import annotations

import inspect
import logging
from threading import Thread

import numpy as np
import pytest
import torch
from engine_store import NAMES, InMemoryClient
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import flatcake_client as fc
from flatcake_client.engines.models import ModelShape, make_model
from flatcake_client.engines.probing import weights_digest
from flatcake_client.engines.transformers import RequestHints, TransformersEngine

torch.set_num_threads(1)

SHAPES = {"llama": ModelShape(), "qwen3": ModelShape("qwen3", layers=3, heads=8, kv_heads=4, digit_base=4)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BLOCK = 16
MODELS = {}


def model_of(family="llama", dtype="bf16", seed=0):
    """Made once: they are only read."""
    key = family, dtype, seed
    if key not in MODELS:
        MODELS[key] = make_model(SHAPES[family], seed=seed, dtype=DTYPES[dtype])
    return MODELS[key]


def tokens_of(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


def engine_of(client=None, model=None, **options):
    return TransformersEngine(model or model_of(), client or InMemoryClient(), block_tokens=BLOCK, **options)


@torch.no_grad()
def plain(model, prompt, count):
    """Greedy tokens without any cache at all: every step computes everything."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_turns_of_a_conversation_give_the_tokens_of_a_run_without_cache(family, dtype):
    model, client = model_of(family, dtype), InMemoryClient()
    context, held = tokens_of(100), 0
    for turn in range(3):
        # A new engine each turn: nothing is carried over but by the store.
        reply = engine_of(client, model).generate(context, 20, RequestHints(session="s"))
        assert reply.tokens == plain(model, context, 20)
        stored = sum(part.blocks for part in reply.stored)
        if turn:
            assert reply.restored.tokens == held // BLOCK * BLOCK
        held = len(context) + 19
        assert (reply.restored.tokens // BLOCK + stored) == held // BLOCK
        assert reply.restored.tokens + reply.computed_tokens == reply.prompt_tokens == len(context)
        context = [*context, *reply.tokens, *tokens_of(37, seed=turn + 1)]
    assert client.pinned == client.open_turns == 0


@pytest.mark.parametrize("length", [1, 2, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_the_last_token_of_a_prompt_is_never_restored(length):
    client, prompt = InMemoryClient(), tokens_of(length)
    first = engine_of(client).generate(prompt, 40)
    again = engine_of(client).generate(prompt, 40)
    assert again.tokens == first.tokens == plain(model_of(), prompt, 40)
    assert again.restored.tokens == (length - 1) // BLOCK * BLOCK
    assert again.stored == ()


def test_the_store_is_what_the_tokens_come_from():
    """Zeroed or foreign bytes in it give other tokens: else these tests would pass without a restore."""
    for spoil in ("zero", "foreign"):
        client, prompt = InMemoryClient(), tokens_of(200)
        expected = engine_of(client).generate(prompt, 12).tokens
        if spoil == "foreign":
            other = InMemoryClient()
            engine_of(other).generate(tokens_of(200, seed=9), 12)
            foreign = list(other.blocks.values())
        for index, key in enumerate(client.blocks):
            client.blocks[key] = (
                [bytes(len(plane)) for plane in client.blocks[key]] if spoil == "zero" else foreign[index]
            )
        assert engine_of(client).generate(prompt, 12).tokens != expected


def test_a_plane_is_keys_then_values_of_the_blocks_tokens():
    client, prompt, model = InMemoryClient(), tokens_of(3 * BLOCK + 1), model_of()
    engine = engine_of(client, model)
    engine.generate(prompt, 1)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        cache = model(torch.tensor([prompt]))[name]
    for block, planes in enumerate(client.blocks.values()):
        for layer, plane in enumerate(planes):
            span = slice(block * BLOCK, (block + 1) * BLOCK)
            kv = torch.stack([tensor[0, :, span] for tensor in (cache.layers[layer].keys, cache.layers[layer].values)])
            assert plane == kv.contiguous().view(torch.uint8).numpy().tobytes()
    assert len(client.blocks) == 3


@pytest.mark.parametrize("verb", NAMES)
@pytest.mark.parametrize(
    "error", [fc.Unavailable("x"), fc.Corrupt("x"), fc.Overloaded("x"), RuntimeError("x")], ids=repr
)
def test_whatever_fails_is_computed_counted_and_logged(verb, error, caplog):
    client, prompt, model = InMemoryClient(), tokens_of(100), model_of()
    engine = engine_of(client, model)
    expected = engine.generate(prompt, 10).tokens
    prompt = [*prompt, *expected, *tokens_of(20, seed=3)]
    client.fail[verb] = error
    with caplog.at_level(logging.INFO, "flatcake_client"):
        reply = engine.generate(prompt, 10)
    assert reply.tokens == plain(model, prompt, 10)
    stats = engine.stats()
    failures = stats.restores_failed, stats.stores_failed, stats.stores_refused
    if verb in ("lookup", "restore"):
        assert reply.restored.tokens == 0
        assert failures == (1, 0, 0)
    elif verb == "wait_layer":
        assert reply.restored.tokens == 0
        assert stats.restores_cut == 1
    else:
        assert reply.stored == ()
        assert failures == ((0, 0, 1) if isinstance(error, fc.Overloaded) else (0, 1, 0))
    assert len(caplog.records) == 1
    assert client.pinned == client.open_turns == 0
    client.fail.clear()
    assert engine.generate(prompt, 10).tokens == reply.tokens


@pytest.mark.parametrize("verb", ["lookup", "restore", "begin_turn", "commit"])
def test_an_outage_is_a_log_line_and_not_one_a_request(verb, caplog):
    client, prompt = InMemoryClient(), tokens_of(100)
    engine = engine_of(client)
    for seed in (3, 4):
        engine.generate(prompt, 2)
        client.fail[verb] = fc.Unavailable("gone")
        for _ in range(3):
            engine.generate([*prompt, *tokens_of(20, seed=seed)], 2)
        client.fail.clear()
        engine.generate([*prompt, *tokens_of(20, seed=seed)], 2)
    assert [record.levelname for record in caplog.records].count("WARNING") == 2


@pytest.mark.parametrize("usable", [0, 1, 4])
def test_a_restore_that_brings_less_is_completed_by_computing(usable, caplog):
    client, prompt = InMemoryClient(), tokens_of(100)
    engine = engine_of(client)
    expected = engine.generate(prompt, 10).tokens
    client.restore_blocks_max = usable
    reply = engine.generate(prompt, 10)
    assert (reply.tokens, reply.restored.tokens) == (expected, usable * BLOCK)
    assert reply.restored.bytes_by_medium["ssd"] == usable * sum(engine._space.spec.plane_bytes)
    assert engine.stats().restores_cut == 1
    assert "computed" in caplog.text


def test_landings_are_reused_without_leaving_traces():
    """Requests of other lengths share the landing; each brings all it needs."""
    client, model = InMemoryClient(), model_of()
    engine = engine_of(client, model)
    prompts = [tokens_of(length, seed=length) for length in (200, 40, 130, 40, 200)]
    expected = [engine.generate(prompt, 8).tokens for prompt in prompts]
    assert [plain(model, prompt, 8) for prompt in prompts] == expected
    assert [engine.generate(prompt, 8).tokens for prompt in prompts] == expected
    caches = [engine.restore(prompt)[0] for prompt in prompts]
    saved = [cache.layers[0].keys.clone() for cache in caches]
    engine.restore(tokens_of(200, seed=200))
    assert all(torch.equal(cache.layers[0].keys, keys) for cache, keys in zip(caches, saved, strict=True))


def test_hints_reach_the_store():
    client, prompt = InMemoryClient(), tokens_of(100)
    hints = RequestHints("agent-7", previous_reply_tokens=11, shared_tokens=2 * BLOCK + 5, sharers=9, salt=b"tenant")
    engine = engine_of(client)
    engine.generate(prompt, 10, hints)
    (told, blocks), *_ = client.turns
    assert (told.session, told.previous_reply_tokens, told.context_tokens) == ("agent-7", 11, 109)
    assert told.share_counts == [9, 9, 1, 1, 1, 1]
    assert told.salt == b"tenant"
    assert blocks == range(6)
    assert engine.restore(prompt, hints)[1].tokens == 96
    assert engine.restore(prompt, RequestHints(salt=b"other"))[1].tokens == 0


def test_only_equal_models_share():
    client, prompt = InMemoryClient(), tokens_of(100)
    engine_of(client, model_of(seed=0)).generate(prompt, 2)
    assert engine_of(client, make_model(SHAPES["llama"], dtype=torch.bfloat16)).restore(prompt)[1].tokens == 96
    for other in (model_of(seed=1), model_of(dtype="fp32"), model_of("qwen3")):
        assert engine_of(client, other, name="same").restore(prompt)[1].tokens == 0
    # Weights alike, configuration not: positions mean something else.
    altered = make_model(SHAPES["llama"], dtype=torch.bfloat16)
    altered.config.rms_norm_eps *= 2
    assert weights_digest(altered) != weights_digest(model_of())
    single = make_model(SHAPES["llama"], dtype=torch.bfloat16)
    single.model.layers[1].self_attn.v_proj.weight += 0.01
    assert weights_digest(single) != weights_digest(model_of())


def test_the_models_own_generate_takes_a_restored_cache():
    client, model = InMemoryClient(), model_of()
    engine, prompt = engine_of(client, model), tokens_of(100)
    expected = engine.generate(prompt, 12).tokens
    cache, restored = engine.restore(prompt)
    assert restored.tokens == 96
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0, **{name: cache}
    )
    assert output[0, 100:].tolist() == expected
    assert engine.store(output[0].tolist(), cache) == ()  # 7 blocks of ids, of which the cache holds one token less


def test_stop_tokens_end_a_reply():
    engine, prompt = engine_of(), tokens_of(60)
    full = engine.generate(prompt, 10).tokens
    assert engine.generate(prompt, 10, stop_tokens={full[3]}).tokens == full[: full.index(full[3]) + 1]


def test_without_cache_nothing_is_asked_or_stored():
    client = InMemoryClient()
    client.fail = dict.fromkeys(NAMES, AssertionError("asked"))
    reply = engine_of(client).generate(tokens_of(60), 4, cached=False)
    assert (reply.restored.tokens, reply.stored) == (0, ())


def test_concurrent_requests_do_not_mix():
    client, model = InMemoryClient(), model_of()
    engine = engine_of(client, model)
    prompts = [tokens_of(120 + 10 * n, seed=n) for n in range(6)]
    expected = [engine.generate(prompt, 6).tokens for prompt in prompts]
    replies = [None] * 6

    def ask(n):
        replies[n] = [engine.generate(prompts[n], 6).tokens for _ in range(3)]

    threads = [Thread(target=ask, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert replies == [[tokens] * 3 for tokens in expected]
    assert engine.stats().requests == 24


def test_what_cannot_be_stored_block_by_block_is_refused():
    training = make_model(SHAPES["llama"])
    training.train()
    with pytest.raises(ValueError, match="eval"):
        engine_of(model=training)
    small = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 16,
    }  # fmt: skip
    with pytest.raises(ValueError, match="SlidingWindow"):
        engine_of(model=MistralForCausalLM(MistralConfig(**small, sliding_window=8)).eval())
    by_length = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    with pytest.raises(ValueError, match="length of the prompt"):
        engine_of(model=LlamaForCausalLM(LlamaConfig(**small, rope_parameters=by_length)).eval())
    assert engine_of(model=LlamaForCausalLM(LlamaConfig(**small)).eval())
    with pytest.raises(ValueError, match="no causal LM"):
        engine_of(model=torch.nn.Linear(2, 2).eval())


@pytest.mark.parametrize("timeout_s", [float("inf"), 0])
def test_a_timeout_that_no_restore_would_take_is_refused_at_the_start(timeout_s):
    with pytest.raises(ValueError, match="timeout_s is"):
        engine_of(timeout_s=timeout_s)


@pytest.mark.parametrize(("prompt", "count"), [([], 3), ([1, 2], 0)])
def test_nothing_to_do_is_a_callers_bug(prompt, count):
    with pytest.raises(ValueError):
        engine_of().generate(prompt, count)
