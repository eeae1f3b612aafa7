"""A prefill beside its restore and its store: in which order things happen, and that no order and no failure changes a token."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from engine_store import InMemoryClient, InMemoryTurn

import flatcake_client as fc
from flatcake_client.arrival import Arrival
from flatcake_client.engines.models import ModelShape, make_model
from flatcake_client.engines.transformers import RequestHints, TransformersEngine

torch.set_num_threads(1)

BLOCK, LAYERS = 16, 3
SHAPE = ModelShape("qwen3", layers=LAYERS, heads=8, kv_heads=4, digit_base=4)
MODEL = make_model(SHAPE, dtype=torch.bfloat16)
WAIT_S = 10


def tokens_of(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


def engine_of(client, **options):
    return TransformersEngine(MODEL, client, block_tokens=BLOCK, **options)


def plain(prompt, count):
    return engine_of(InMemoryClient()).generate(prompt, count, cached=False).tokens


@pytest.fixture
def on_layer():
    """`on_layer(l, act)`: call `act` before decoder layer l runs, until the test is over."""
    hooks = []
    yield lambda layer, act: hooks.append(MODEL.model.layers[layer].register_forward_pre_hook(lambda *_: act()))
    for hook in hooks:
        hook.remove()


def stored_client(prompt):
    client = InMemoryClient()
    engine_of(client).generate(prompt, 1)
    client.layer_waits.clear()
    return client


def test_a_layer_is_computed_before_the_next_one_has_landed(monkeypatch):
    prompt = tokens_of(100)
    client = stored_client(prompt)
    asked = [threading.Event() for _ in range(LAYERS)]
    seen = []
    real = Arrival.wait_layer

    def wait_layer(arrival, layer):
        asked[layer].set()
        real(arrival, layer)

    monkeypatch.setattr(Arrival, "wait_layer", wait_layer)
    for layer in range(1, LAYERS):  # lands only after its attention has asked for it: those before it are computed
        client.slow_layers[layer] = lambda layer=layer: seen.append(asked[layer].wait(WAIT_S))
    reply = engine_of(client).generate(prompt, 8)
    assert seen == [True] * (LAYERS - 1), "prefill stood still until all had landed"
    assert (reply.tokens, reply.restored.tokens) == (plain(prompt, 8), 96)
    assert client.layer_waits == list(range(LAYERS))
    assert reply.restored.waited_s > 0
    assert client.pinned == 0


@pytest.mark.parametrize("cut_layer", range(LAYERS))
@pytest.mark.parametrize("usable", [0, 1, 5])
@pytest.mark.parametrize("streamed", [True, False])
def test_a_restore_that_fails_in_the_middle_of_prefill_is_a_shorter_one(cut_layer, usable, streamed):
    prompt = tokens_of(100)
    client = stored_client(prompt)
    prompt = [*prompt, *tokens_of(60, seed=1)]
    client.restore_blocks_max, client.restore_cut_layer = usable, cut_layer
    engine = engine_of(client, stream_blocks_min=1 if streamed else 1000)
    reply = engine.generate(prompt, 8)
    assert (reply.tokens, reply.restored.tokens) == (plain(prompt, 8), usable * BLOCK)
    assert engine.stats().restores_cut == 1
    assert client.pinned == client.open_turns == 0
    client.restore_blocks_max = None
    again = engine.generate(prompt, 8)
    assert (again.tokens, again.restored.tokens) == (reply.tokens, 159 // BLOCK * BLOCK), "stored after all"


def test_a_restore_that_raises_anything_is_computed():
    prompt = tokens_of(100)
    client = stored_client(prompt)
    client.slow_layers[1] = lambda: 1 / 0
    engine = engine_of(client)
    reply = engine.generate(prompt, 8)
    assert (reply.tokens, reply.restored.tokens) == (plain(prompt, 8), 0)
    assert engine.stats().restores_cut == 1


def test_a_layer_is_stored_before_the_next_one_is_computed(on_layer, monkeypatch):
    client, prompt = InMemoryClient(), tokens_of(100)
    written, seen = threading.Event(), []
    real = InMemoryTurn.write_layer

    def write_layer(turn, layer, source, slots):
        real(turn, layer, source, slots)
        if layer == 0:
            written.set()

    monkeypatch.setattr(InMemoryTurn, "write_layer", write_layer)
    engine = engine_of(client, stream_blocks_min=6)
    on_layer(1, lambda: seen.append(written.wait(WAIT_S)))
    reply = engine.generate(prompt, 30)
    assert seen[0], "nothing was stored while the prompt was computed"
    assert reply.tokens == plain(prompt, 30)
    # Two turns: the prompt's, and what the reply completed. To who places them they are one.
    assert [(hints.turn, hints.context_tokens, blocks) for hints, blocks in client.turns] == [
        (None, 100, range(6)),
        (1, 129, range(6, 8)),
    ]
    assert sum(part.blocks for part in reply.stored) == engine.stats().stored_blocks == 8
    at_once = InMemoryClient()
    engine_of(at_once, overlap=False).generate(prompt, 30)
    assert at_once.blocks == client.blocks, "the same bytes, whichever way"


def test_what_continues_a_restored_prefix_is_stored_while_it_is_computed():
    client, context, held = InMemoryClient(), tokens_of(100), 0
    for turn in range(3):
        engine = engine_of(client, stream_blocks_min=2)
        reply = engine.generate(context, 12, RequestHints(session="s"))
        assert reply.tokens == plain(context, 12)
        assert reply.restored.tokens == held
        held = (len(context) + 11) // BLOCK * BLOCK
        context = [*context, *reply.tokens, *tokens_of(50, seed=turn + 1)]
    at_once = InMemoryClient()
    engine_of(at_once, overlap=False).generate(context[:held], 1)
    assert set(at_once.blocks) <= set(client.blocks)


@pytest.mark.parametrize("verb", ["begin_turn", "write_layer", "commit"])
@pytest.mark.parametrize("error", [fc.Unavailable("x"), fc.Overloaded("x"), RuntimeError("x")], ids=repr)
def test_a_store_that_fails_beside_prefill_costs_no_token(verb, error):
    client, prompt = InMemoryClient(), tokens_of(100)
    client.fail[verb] = error
    engine = engine_of(client, stream_blocks_min=1)
    reply = engine.generate(prompt, 8)
    assert (reply.tokens, reply.stored) == (plain(prompt, 8), ())
    stats = engine.stats()
    assert (stats.stores_failed, stats.stores_refused) == ((0, 1) if isinstance(error, fc.Overloaded) else (1, 0))
    assert client.open_turns == 0
    assert not client.blocks


def test_a_store_that_hangs_holds_up_no_first_token(monkeypatch):
    client, prompt = InMemoryClient(), tokens_of(100)
    computed = threading.Event()
    real = InMemoryTurn.write_layer

    def write_layer(turn, layer, source, slots):
        assert computed.wait(WAIT_S), "the first token waited for the store"
        real(turn, layer, source, slots)

    monkeypatch.setattr(InMemoryTurn, "write_layer", write_layer)
    engine = engine_of(client, stream_blocks_min=1)
    decode = engine.decode
    monkeypatch.setattr(engine, "decode", lambda *args: (computed.set(), decode(*args))[1])
    reply = engine.generate(prompt, 8)
    assert reply.tokens == plain(prompt, 8)
    assert sum(part.blocks for part in reply.stored) == 6


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("stored", [True, False], ids=["a hit", "no hit"])
def test_a_failing_model_leaves_nothing_open(on_layer, stored, error):
    prompt = tokens_of(100)
    client = stored_client(prompt) if stored else InMemoryClient()

    def fail():
        raise error("out of it")

    engine = engine_of(client, stream_blocks_min=1)
    on_layer(1, fail)
    with pytest.raises(error):
        engine.generate([*prompt, *tokens_of(60, seed=1)], 8)
    assert client.pinned == client.open_turns == 0
    assert not any(thread.name == "flatcake-store" for thread in threading.enumerate())
