"""Tensor and pipeline parallel workers in processes of their own: each stores and loads its shard, and all agree on what is there."""

from __future__ import annotations

import pytest
from daemon import Daemon
from engines.vllm.running import (
    BLOCK,
    Engine,
    Ranks,
    Witness,
    fail_stores,
    prompt,
    shard_of_rank,
    spoil_loads,
    unspoil,
    write_model,
)

from flatcake_client.engines.models import ModelShape

SHAPE = ModelShape(layers=4)
PATIENT = {"lookup_timeout_s": 10.0}  # three processes on two cores: what is late is a miss, and hits are counted here
BLOCKS = 9
TOKENS = BLOCKS * BLOCK + 5


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Of four layers, which two stages share."""
    return write_model(tmp_path_factory.mktemp("model"), shape=SHAPE)


@pytest.fixture(scope="module")
def expected():
    return Witness(shape=SHAPE)


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("node"), memory_bytes=32 << 20, ssd_bytes=256 << 20, lease_ttl="3s") as daemon:
        yield daemon
        daemon.check()


PARALLEL = pytest.mark.parametrize(
    "options", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tensor", "pipeline"]
)


@PARALLEL
@pytest.mark.timeout(400)
def test_ranks(model, expected, node, options):
    ids = prompt(400, TOKENS)
    with Ranks(model, node.endpoint, extra=PATIENT, **options) as engine:
        shards, fingerprints = zip(*engine.call(shard_of_rank), strict=True)
        assert shards == (0, 1)
        assert set(fingerprints) == {engine.scheduler._space.spec.fingerprint.hex()}
        assert engine.ask(ids, tokens=12) == [expected(ids, 12)]
        assert [counts["stored_blocks"] for counts in engine.counts_of_ranks()] == [BLOCKS, BLOCKS]
        check_failing_ranks(engine, expected, ids)
        check_conversations(engine, expected)
    node.until(lambda status: not status["leases"] and not status["open_turns"])
    node.kill()
    node.start()
    with Ranks(model, node.endpoint, extra=PATIENT, **options) as engine:
        assert engine.ask(ids, tokens=12) == [expected(ids, 12)], "after both were started anew"
        assert engine.counts()["hit_tokens"] == BLOCKS * BLOCK
        assert [counts["loaded_blocks"] for counts in engine.counts_of_ranks()] == [BLOCKS, BLOCKS]


def check_failing_ranks(engine: Ranks, expected: Witness, ids: list[int]) -> None:
    for rank in (0, 1):
        engine.forget()
        engine.counts()
        engine.call(spoil_loads, rank, 4, True)
        assert engine.ask(ids) == [expected(ids)], "what one rank lacks, all compute"
        assert engine.counts()["load_failed_blocks"] == BLOCKS - 4
        engine.call(unspoil)
    # Were it not told, the text would be another: the shard of the second rank counts.
    engine.forget()
    engine.call(spoil_loads, 1, 4, False)
    assert engine.ask(ids) != [expected(ids)]
    engine.call(unspoil)
    engine.forget()
    other = prompt(410, 2 * BLOCK + 5)
    engine.call(fail_stores, 1)
    assert engine.ask(other) == [expected(other)]
    engine.call(unspoil)
    engine.forget()
    engine.counts()
    assert engine.ask(other) == [expected(other)]
    assert engine.counts()["loads"] == 0, "what one rank did not store is not there"
    engine.forget()


def check_conversations(engine: Ranks, expected: Witness) -> None:
    """Several at once that grow, through loads and stores of both ranks."""
    contexts = [prompt(420 + number, 100 + 30 * number) for number in range(3)]
    for turn in range(2):
        replies = engine.ask(*contexts, tokens=20)
        assert replies == [expected(ids, 20) for ids in contexts], turn
        engine.forget()
        contexts = [
            ids + reply + prompt(430 + turn, 40) for ids, reply in zip(contexts, replies, strict=True)
        ]  # fmt: skip
    counts = engine.counts()
    assert (counts["loads"], counts["load_failed_blocks"], counts["errors"]) == (3, 0, 0)


@pytest.mark.timeout(300)
def test_another_number_of_ranks_is_another_space(model, expected, node):
    ids = prompt(400, TOKENS)
    with Engine(model, node.endpoint) as engine:
        assert engine.ask(ids, tokens=12) == [expected(ids, 12)]
        assert engine.counts()["loads"] == 0
