"""A real model, a real client, a real daemon: the same tokens whatever is restarted, and whenever."""

from __future__ import annotations

import gc
from threading import Thread

import numpy as np
import pytest
import torch
from daemon import Daemon

import flatcake_client as fc
from flatcake_client.engines.models import ModelShape, make_model
from flatcake_client.engines.transformers import RequestHints, TransformersEngine

torch.set_num_threads(1)

SHAPES = {"llama": ModelShape(), "qwen3": ModelShape("qwen3", layers=3, heads=8, kv_heads=4, digit_base=4)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BLOCK = 16
SYSTEM = 6 * BLOCK
REPLY = 10


def tokens_of(count, seed):
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


class Engine:
    """A model and a client, as one engine process has them; `prompt -> tokens`, and what a run without the store says."""

    def __init__(self, daemon, model):
        self.client = fc.connect(daemon.endpoint, timeout_s=5)
        self.model = model
        # A conversation's turns here have two or three new blocks: some are stored beside their prefill, some after it.
        self.engine = TransformersEngine(model, self.client, block_tokens=BLOCK, stream_blocks_min=3)

    def ask(self, prompt, **hints):
        return self.engine.generate(prompt, REPLY, RequestHints(**hints))

    def plain(self, prompt):
        return self.engine.generate(prompt, REPLY, cached=False).tokens

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.close()


class Talk:
    """An agent's conversation: a shared system prompt, then its own turns."""

    def __init__(self, name, seed):
        self.name, self.seed, self.turn, self.reply = name, seed, 0, None
        self.context = tokens_of(SYSTEM, 0)

    def step(self, engine):
        """One turn; the reply is compared with that of a run without the store."""
        self.turn += 1
        self.context = [*self.context, *tokens_of(40, 100 * self.seed + self.turn)]
        hints = {"session": self.name, "shared_tokens": SYSTEM, "sharers": 3, "previous_reply_tokens": self.reply}
        reply = engine.ask(self.context, **hints)
        assert reply.tokens == engine.plain(self.context), (
            f"{self.name}, turn {self.turn}: other tokens than without store"
        )
        self.context = [*self.context, *reply.tokens]
        self.reply = len(reply.tokens)
        return reply

    @property
    def held(self):
        """Tokens of full blocks that were stored when the last turn ended."""
        return (len(self.context) - 1) // BLOCK * BLOCK


@pytest.fixture
def daemon(tmp_path):
    with Daemon(tmp_path) as daemon:
        yield daemon
        daemon.check()
        gc.collect()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", SHAPES)
def test_tokens_are_the_same_across_restarts_of_engine_and_daemon(daemon, family, dtype):
    model = make_model(SHAPES[family], dtype=DTYPES[dtype])
    talks = [Talk(f"agent-{n}", n + 1) for n in range(3)]
    with Engine(daemon, model) as engine:
        first = [talk.step(engine) for talk in talks]
        assert [reply.restored.tokens for reply in first] == [0, SYSTEM, SYSTEM]
        assert {(part.medium, part.reason) for part in first[0].stored} == {("memory", "shared"), ("ssd", "first-turn")}
        for talk in talks:
            held = talk.held
            assert talk.step(engine).restored.tokens == held

    with Engine(daemon, model) as engine:  # another engine: all of it is in the daemon
        for talk in talks:
            held = talk.held
            reply = talk.step(engine)
            assert reply.restored.tokens == held
            assert reply.restored.bytes_by_medium["memory"]
            assert reply.restored.bytes_by_medium["ssd"]

        daemon.check()
        daemon.kill()
        daemon.start()
        # Memory died with the daemon, and the head of every chain with it: computed once, by whom comes first.
        shared = talks[0].step(engine)
        assert shared.restored.tokens == 0
        for talk in talks[1:]:
            reply = talk.step(engine)
            assert reply.restored.tokens >= SYSTEM + BLOCK
            assert reply.restored.bytes_by_medium["ssd"]
        assert engine.engine.stats().restores_failed <= 1  # the call that noticed
        for talk in talks:
            held = talk.held
            assert talk.step(engine).restored.tokens == held


def test_zeroed_and_foreign_kv_from_the_store_give_other_tokens(daemon):
    model = make_model(SHAPES["llama"], dtype=torch.bfloat16)
    prompt, foreign = tokens_of(200, 1), tokens_of(200, 2)
    with Engine(daemon, model) as engine:
        expected = engine.ask(prompt).tokens
        other = engine.ask(foreign).tokens
        for source, spoil in ((prompt, True), (foreign, False)):
            cache, restored = engine.engine.restore(source)
            assert restored.tokens == 192
            for layer in cache.layers if spoil else ():
                layer.keys.zero_()
                layer.values.zero_()
            greedy = engine.engine.decode(prompt[192:], cache)
            assert [next(greedy) for _ in range(REPLY)] not in (expected, other)
        assert engine.ask(prompt).tokens == expected


def test_an_engine_works_before_its_daemon_without_it_and_after(tmp_path):
    model = make_model(SHAPES["llama"], dtype=torch.bfloat16)
    daemon = Daemon(tmp_path)
    talk = Talk("agent", 1)
    with Engine(daemon, model) as engine:
        assert talk.step(engine).stored == ()
        assert engine.engine.stats().restores_failed == 1
        with daemon:
            assert talk.step(engine).stored
            held = talk.held
            assert talk.step(engine).restored.tokens == held
            daemon.kill()
            assert talk.step(engine).restored.tokens == 0
            daemon.start()
            talk.step(engine)
            held = talk.held
            assert talk.step(engine).restored.tokens == held
            daemon.check()


def test_concurrent_sessions_of_one_engine(daemon):
    model = make_model(SHAPES["llama"], dtype=torch.bfloat16)
    talks = [Talk(f"agent-{n}", n + 1) for n in range(6)]
    failures = []

    def converse(engine, talk):
        try:
            for _ in range(4):
                talk.step(engine)
        except BaseException as error:
            failures.append(error)
            raise

    with Engine(daemon, model) as engine:
        threads = [Thread(target=converse, args=(engine, talk)) for talk in talks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        stats = engine.engine.stats()
        assert (stats.restores_failed, stats.restores_cut, stats.stores_failed, stats.stores_refused) == (0, 0, 0, 0)
        for talk in talks:
            held = talk.held
            assert talk.step(engine).restored.tokens == held


@pytest.mark.parametrize("moment", ["restore", "write"])
def test_a_daemon_killed_in_the_middle_of_a_turn_costs_no_token(daemon, moment, monkeypatch):
    model = make_model(SHAPES["qwen3"], dtype=torch.bfloat16)
    talk = Talk("agent", 1)
    with Engine(daemon, model) as engine:
        talk.step(engine)
        talk.step(engine)
        target, name = {"restore": (fc.Hit, "restore"), "write": (fc.Turn, "write_layer")}[moment]
        real = getattr(target, name)

        def kill_first(*args, **options):
            if daemon.process.poll() is None:
                daemon.kill()
            return real(*args, **options)

        monkeypatch.setattr(target, name, kill_first)
        talk.step(engine)
        monkeypatch.undo()
        daemon.start()
        talk.step(engine)
        held = talk.held
        assert talk.step(engine).restored.tokens == held
