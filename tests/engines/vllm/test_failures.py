"""Whatever fails, at whatever moment: tokens are those of the model, vLLM goes on, and nothing is left behind."""

from __future__ import annotations

import signal
import threading
import time

import pytest
from engines.vllm.running import BLOCK, Held, prompt
from vllm import SamplingParams

from flatcake_client import Hit, Restore, Space, Turn
from flatcake_client.keys import KeyArray
from flatcake_client.paged_kv import Loaded, PagedKv, Stored
from flatcake_transport.errors import Corrupt, Overloaded, Unavailable

BLOCKS = 9
TOKENS = BLOCKS * BLOCK + 5


@pytest.fixture(scope="module")
def stored(engine, expected):
    """A context of nine blocks that is stored."""
    ids = prompt(200, TOKENS)
    assert engine.ask(ids) == [expected(ids)]
    return ids


@pytest.fixture(autouse=True)
def _nothing_is_left(engine, node):
    yield
    engine.drain()
    assert not engine.scheduler._known
    assert not engine.scheduler._storing
    assert not engine.scheduler._held_blocks
    assert not engine.worker._open
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    node.until(lambda status: not status["leases"] and not status["open_turns"])


@pytest.mark.parametrize("usable", range(BLOCKS + 1))
def test_every_block_may_fail_to_come(engine, expected, stored, monkeypatch, usable):
    load = PagedKv.load

    def cut(kv, keys, first_block, slots, *rest):
        loaded = load(kv, keys, first_block, slots, *rest)
        for pages in kv.pages:
            pages[slots[usable:]] = 7
        return Loaded(min(loaded.blocks, usable))

    monkeypatch.setattr(PagedKv, "load", cut)
    assert engine.ask(stored) == [expected(stored)]
    counts = engine.counts()
    assert (counts["loads"], counts["load_failed_blocks"]) == (1, BLOCKS - usable)


@pytest.mark.parametrize("usable", [0, 4])
def test_a_failed_block_among_requests_that_share_it(engine, expected, stored, monkeypatch, usable):
    load = PagedKv.load

    def cut(kv, keys, first_block, slots, *rest):
        load(kv, keys, first_block, slots, *rest)
        for pages in kv.pages:
            pages[slots[usable:]] = 7
        return Loaded(usable)

    monkeypatch.setattr(PagedKv, "load", cut)
    prompts = [stored + prompt(201 + number, 30 * number) for number in range(4)]
    assert engine.ask(*prompts) == [expected(ids) for ids in prompts]


ERRORS = [Unavailable("gone"), Overloaded("full"), Corrupt("other bytes"), RuntimeError("a bug")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    ("owner", "verb"),
    [
        (Space, "keys_of_hashes"),
        (Space, "lookup"),
        (Hit, "restore"),
        (Restore, "wait_layer"),
        (Restore, "wait"),
        (Space, "begin_turn"),
        (Turn, "write_layer"),
        (Turn, "commit"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_every_call_may_fail(engine, expected, stored, monkeypatch, owner, verb, error):
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(owner, verb, fails)
    longer = stored + prompt(210, BLOCK)
    assert engine.ask(longer) == [expected(longer)]
    monkeypatch.undo()
    engine.forget()
    assert engine.ask(stored) == [expected(stored)]


def test_a_daemon_killed_in_a_load(engine, expected, stored, monkeypatch, node):
    restore = Hit.restore

    def killed(hit, *rest, **more):
        node.kill()
        return restore(hit, *rest, **more)

    monkeypatch.setattr(Hit, "restore", killed)
    assert engine.ask(stored) == [expected(stored)]
    monkeypatch.undo()
    assert engine.counts()["load_failed_blocks"] > 0
    engine.forget()
    assert engine.ask(stored) == [expected(stored)], "and without any"
    node.start()
    engine.forget()
    deadline_s = time.monotonic() + 20
    while not engine.counts()["loads"]:
        assert time.monotonic() < deadline_s, "the new daemon is never asked"
        engine.forget()
        assert engine.ask(stored) == [expected(stored)]


@pytest.mark.parametrize("moment", [(Space, "lookup"), (Hit, "restore"), (Turn, "commit")], ids=lambda each: each[1])
def test_a_daemon_that_hangs(engine, expected, stored, monkeypatch, node, moment):
    """Stopped, not dead: every wait has its deadline, and vLLM answers long before it goes on."""
    owner, verb = moment
    real = getattr(owner, verb)

    def hangs(*rest, **more):
        node.signal(signal.SIGSTOP)
        return real(*rest, **more)

    longer = stored + prompt(220 + len(verb), 40)
    assert expected(longer)
    monkeypatch.setattr(owner, verb, hangs)
    began_s = time.monotonic()
    try:
        assert engine.ask(longer) == [expected(longer)]
        # The lookup's second and the store's ten, at most, and what a loaded machine adds.
        assert time.monotonic() - began_s < 40
    finally:
        monkeypatch.undo()
        node.signal(signal.SIGCONT)


@pytest.mark.parametrize(
    "held",
    [None, (Space, "lookup"), (Hit, "restore"), (Restore, "wait"), (Space, "begin_turn"), (Turn, "commit")],
    ids=lambda each: each[1] if each else "new",
)
@pytest.mark.parametrize("steps", [0, 3])
def test_a_request_aborted_in_any_state(engine, expected, stored, monkeypatch, held, steps):
    longer = stored + prompt(230 + steps, 70)
    call = Held(monkeypatch, *held) if held else None
    sampling = SamplingParams(temperature=0, max_tokens=2, detokenize=False, ignore_eos=True)
    engine.llm.llm_engine.add_request("gone", {"prompt_token_ids": longer}, sampling)
    deadline_s = time.monotonic() + 20
    while call is not None and not call.reached.is_set() and engine.core.scheduler.requests:
        assert time.monotonic() < deadline_s
        engine.llm.llm_engine.step()
    for _ in range(steps):
        engine.llm.llm_engine.step()
    engine.llm.llm_engine.abort_request(["gone"])
    for _ in range(3):
        engine.core.step_fn()
    if call is not None:
        call.open.set()
    engine.drain()
    monkeypatch.undo()
    engine.forget()
    assert engine.ask(longer) == [expected(longer)]


def test_too_many_stores_are_dropped(engine, expected, monkeypatch):
    """The one that is begun holds its blocks until it has been stored; there is no room beside it for another."""
    prompts = [prompt(240 + number, 300) for number in range(4)]
    right = [expected(ids, 2) for ids in prompts]
    gate, stored = threading.Event(), []

    def held(_kv: PagedKv, keys: KeyArray, *_: object, **__: object) -> Stored:
        stored.append(len(keys))
        assert gate.wait(120)
        return Stored(len(keys))

    monkeypatch.setattr(PagedKv, "store", held)
    monkeypatch.setattr(engine.scheduler, "_held_blocks_max", 12)
    sampling = SamplingParams(temperature=0, max_tokens=2, detokenize=False, ignore_eos=True)
    outputs = engine.llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == right
    assert engine.scheduler._held_blocks == 9
    gate.set()
    engine.drain()
    counts = engine.counts()
    assert stored == [9]
    assert (counts["stores"], counts["stores_failed"], counts["stores_dropped"]) == (1, 0, 3)


def test_asleep_nothing_touches_the_kv(engine, expected, stored):
    engine.worker.unregister()
    engine.worker.unregister()
    assert engine.ask(stored) == [expected(stored)], "loads fail, and are computed"
    engine.worker.restore()
    engine.forget()
    engine.counts()
    assert engine.ask(stored) == [expected(stored)]
    counts = engine.counts()
    assert counts["loaded_blocks"] == BLOCKS, counts
