"""Tensor-parallel ranks of one turn: all of it shows, or nothing, and the bytes of nothing come back."""

from __future__ import annotations

import pytest
from daemon import Daemon
from faults import files_of
from kv import Kv, connect
from wire import Refused, Wire, some_keys

import flatcake_client as fc
from flatcake_transport.space import SpaceSpec

SPEC = SpaceSpec("ranks", "u8", 16, (4096,), shards=2)


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("shards"), memory_bytes=8 << 20) as daemon:
        yield daemon


@pytest.fixture
def baseline(node):
    """Nothing is reserved or visible when the test is over that was not before, and the law holds."""
    before = node.status()
    yield
    node.until(lambda status: status["open_turns"] == status["clients"] == 0 and status["pools"] == before["pools"])
    after = node.status()
    assert (after["sessions"], after["index"]["blocks"]) == (before["sessions"], before["index"]["blocks"])
    node.check()


@pytest.fixture
def ranks(node, request):
    with connect(node, name="rank0") as one, connect(node, name="rank1") as other:
        yield [
            Kv(client, model=request.node.name, shards=2, shard=shard, plane_bytes=5000)
            for shard, client in enumerate((one, other))
        ]


def begin(ranks, tokens, **hints):
    keys = ranks[0].space.keys(tokens)
    return keys, [rank.space.begin_turn(keys, session="r", **hints) for rank in ranks]


@pytest.mark.parametrize("hints", [{}, {"share_counts": [2] * 6}], ids=["ssd", "memory"])
def test_visible_when_all_have_committed(node, ranks, hints):
    tokens = ranks[0].tokens(1, 6)
    keys, turns = begin(ranks, tokens, **hints)
    assert turns[0].parts == turns[1].parts
    for shard in (1, 0):
        assert [rank.hit(tokens) for rank in ranks] == [0, 0]
        ranks[shard].write(turns[shard], keys)
        assert turns[shard].commit() is (shard == 0)
    assert [rank.hit(tokens) for rank in ranks] == [6, 6]
    with connect(node) as client:
        assert Kv(client, model="ranks of another", shards=2).hit(tokens) == 0
    node.check()


def test_a_rank_aborts_before_the_other_commits(baseline, ranks):
    tokens = ranks[0].tokens(1, 6)
    keys, turns = begin(ranks, tokens)
    turns[0].abort()
    ranks[1].write(turns[1], keys)
    with pytest.raises(fc.Unavailable, match="another shard"):
        turns[1].commit()
    assert [rank.hit(tokens) for rank in ranks] == [0, 0]


def test_a_rank_aborts_after_the_other_committed(baseline, ranks):
    tokens = ranks[0].tokens(1, 6)
    keys, turns = begin(ranks, tokens)
    ranks[1].write(turns[1], keys)
    assert turns[1].commit() is False
    turns[0].abort()
    assert [rank.hit(tokens) for rank in ranks] == [0, 0]


def test_space_comes_back_only_when_the_last_writer_has_ended(node, baseline, ranks):
    """One rank gave up; the other may still write where it was granted, however long it takes."""
    tokens = ranks[0].tokens(1, 6)
    reserved = node.pool("ssd")["reserved_bytes"]
    _, turns = begin(ranks, tokens)
    granted = node.pool("ssd")["reserved_bytes"]
    assert granted > reserved
    turns[0].abort()
    node.until(lambda status: status["counters"]["turns_aborted_total"])
    assert node.pool("ssd")["reserved_bytes"] == granted
    assert node.status()["open_turns"] == 1
    turns[1].abort()
    assert node.pool("ssd")["reserved_bytes"] == reserved


def test_a_rank_dies(node, baseline):
    """Its life line ends: the other's commit is refused, and nothing shows."""
    keys = some_keys(1, 5)
    target = f"unix:{node.options['socket']}"
    with Wire(target) as one, Wire(target) as other, other.handover() as life:
        life.recv(1 << 16)
        for wire in (one, other):
            wire.open(SPEC)
        with one.handover() as mine:
            mine.recv(1 << 16)
            turns = [wire.begin(keys, fingerprint=SPEC.fingerprint, shard=n) for n, wire in enumerate((one, other))]
            assert turns[0].turn_id == turns[1].turn_id
        node.until(lambda status: status["clients"] == 1)
        with pytest.raises(Refused, match="another shard"):
            other.commit(turns[1], shard=1)
        assert not other.lookup(keys, fingerprint=SPEC.fingerprint).runs


def test_a_rank_never_comes(tmp_path):
    """The one that came has committed; after a lease's time nobody waits for the other any more."""
    keys = some_keys(2, 5)
    with (
        Daemon(tmp_path, lease_ttl="1s") as node,
        Wire(f"unix:{node.options['socket']}") as one,
        one.handover() as life,
    ):
        life.recv(1 << 16)
        one.open(SPEC)
        turn = one.begin(keys, fingerprint=SPEC.fingerprint)
        assert one.commit(turn).visible is False
        node.until(lambda status: status["open_turns"] == 0)
        assert not one.lookup(keys, fingerprint=SPEC.fingerprint).runs
        node.until(lambda status: sum(pool["free_bytes"] - pool["quota_bytes"] for pool in status["pools"]) == 0)
        node.check()


def test_the_store_dies_between_two_commits(tmp_path):
    with Daemon(tmp_path) as daemon, connect(daemon) as one, connect(daemon) as other:
        ranks = [Kv(client, shards=2, shard=shard) for shard, client in enumerate((one, other))]
        tokens = ranks[0].tokens(1, 6)
        keys, turns = begin(ranks, tokens)
        ranks[0].write(turns[0], keys)
        turns[0].commit()
        ranks[1].write(turns[1], keys)
        daemon.kill()
        daemon.start()
        with pytest.raises(fc.Unavailable):
            turns[1].commit()
        assert [rank.hit(tokens) for rank in ranks] == [0, 0]
        assert files_of(tmp_path / "ssd") == []
        daemon.check()
        keys, turns = begin(ranks, tokens)
        for rank, turn in zip(ranks, turns, strict=True):
            rank.write(turn, keys)
            turn.commit()
        assert [rank.hit(tokens) for rank in ranks] == [6, 6]
        daemon.check()
