"""Tokens are those of the model, whatever FlatCake has; and what it has is used."""

from __future__ import annotations

from engines.vllm.running import BLOCK, prompt

from flatcake_client.paged_kv import PagedKv


def test_what_was_stored_comes_back(engine, expected):
    ids = prompt(1, 500)
    assert engine.ask(ids, tokens=40) == [expected(ids, 40)]
    counts = engine.counts()
    # 540 tokens, of which the last is never computed.
    assert (counts["stores"], counts["stored_blocks"], counts["loads"]) == (1, 539 // BLOCK, 0)
    engine.forget()
    assert engine.ask(ids, tokens=40) == [expected(ids, 40)]
    counts = engine.counts()
    assert (counts["hit_tokens"], counts["loaded_blocks"], counts["load_failed_blocks"]) == (480, 15, 0)
    assert counts["stored_blocks"] == 0, "nothing was new"


def test_without_the_kv_the_tokens_are_others(engine, expected, monkeypatch):
    ids = prompt(2, 500)
    assert engine.ask(ids) == [expected(ids)]
    engine.forget()
    load = PagedKv.load

    def zeroed(kv, keys, first_block, slots, *rest):
        loaded = load(kv, keys, first_block, slots, *rest)
        for pages in kv.pages:
            pages[slots] = 0
        return loaded

    monkeypatch.setattr(PagedKv, "load", zeroed)
    assert engine.ask(ids) != [expected(ids)]


def test_a_whole_prompt_is_computed_at_its_last_block(engine, expected):
    for tokens in (BLOCK * 4, BLOCK * 4 + 1, BLOCK - 1, BLOCK, 1):
        ids = prompt(3, tokens)
        assert engine.ask(ids) == [expected(ids)]
        engine.forget()
        assert engine.ask(ids) == [expected(ids)]
        engine.forget()


def test_only_what_vllm_lacks_is_loaded(engine, expected):
    ids = prompt(4, 400)
    assert engine.ask(ids) == [expected(ids)]
    engine.forget()
    assert engine.ask(ids[:130]) == [expected(ids[:130])]
    engine.counts()
    assert engine.ask(ids) == [expected(ids)]
    assert engine.counts()["hit_tokens"] == 12 * BLOCK - 4 * BLOCK


def test_a_conversation_grows_and_forks(engine, expected):
    ids = prompt(5, 200)
    for turn in range(4):
        reply = engine.ask(ids, tokens=40)[0]
        assert reply == expected(ids, 40)
        counts = engine.counts()
        assert counts["hit_tokens"] == (0 if turn == 0 else (len(ids) - 51) // BLOCK * BLOCK)
        ids = ids + reply + prompt(50 + turn, 50)
        engine.forget()
    fork = ids[:300] + prompt(6, 100)
    assert engine.ask(fork) == [expected(fork)]
    assert engine.counts()["hit_tokens"] == 300 // BLOCK * BLOCK


def test_requests_that_run_together(engine, expected):
    system = prompt(7, 160)
    prompts = [system + prompt(70 + number, 40 * number) for number in range(6)]
    for _ in range(3):
        assert engine.ask(*prompts, tokens=12) == [expected(ids, 12) for ids in prompts]
        engine.forget()
    assert engine.counts()["load_failed_blocks"] == 0


def test_salts_do_not_share(engine, expected):
    ids = prompt(8, 200)
    for salt in ("a", "b", "a"):
        request = {"prompt_token_ids": ids, "cache_salt": salt}
        assert engine.ask_raw(request) == [expected(ids)]
        engine.forget()
    counts = engine.counts()
    assert (counts["loads"], counts["stores"]) == (1, 2)


def test_after_a_reset_nothing_from_before_is_found(engine, expected):
    ids = prompt(9, 200)
    assert engine.ask(ids) == [expected(ids)]
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    engine.counts()
    for loads in (0, 1):
        assert engine.ask(ids) == [expected(ids)]
        assert engine.counts()["loads"] == loads
        engine.forget()
