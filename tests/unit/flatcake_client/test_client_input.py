"""What a caller gets wrong is a ValueError that names it, and costs nobody anything."""

from __future__ import annotations

import numpy as np
import pytest
from kv import Kv

import flatcake_client as fc


@pytest.mark.parametrize(
    ("hints", "said"),
    [
        ({"session": 42}, "a session is a name"),
        ({"context_tokens": -1}, "context_tokens is -1"),
        ({"previous_reply_tokens": 1 << 32}, "previous_reply_tokens is"),
        ({"turn": 1.5}, "turn is 1.5"),
        ({"share_counts": [1, -1, 1]}, "share counts are 0 to"),
    ],
)
def test_wrong_hints_are_named(daemon, client, hints, said):
    kv = Kv(client)
    with pytest.raises(ValueError, match=said):
        kv.space.begin_turn(kv.space.keys(kv.tokens(1, 3)), **hints)
    assert "begin_turn" not in daemon.calls


@pytest.mark.parametrize("timeout_s", [float("inf"), float("nan")])
def test_nothing_waits_without_an_end(daemon, client, timeout_s):
    """To the wire such a time is over at once, and the daemon would be left alone for its silence."""
    kv = Kv(client)
    kv.store(kv.tokens(1, 3))
    keys = kv.space.keys(kv.tokens(1, 3))
    turn = kv.space.begin_turn(kv.space.keys(kv.tokens(2, 3)))
    target = [np.zeros((3, kv.plane_bytes), np.uint8) for _ in range(kv.layers)]
    with kv.space.lookup(keys) as hit:
        for waits in (
            lambda: kv.space.lookup(keys, timeout_s=timeout_s),
            lambda: hit.restore(target, np.arange(3), timeout_s=timeout_s),
            lambda: kv.space.begin_turn(keys, timeout_s=timeout_s),
            lambda: turn.write_layer(0, target[0], np.arange(3), timeout_s),
            lambda: client.close(timeout_s),
            lambda: fc.connect(daemon.endpoint, timeout_s=timeout_s),
            lambda: fc.connect(daemon.endpoint, transfer_timeout_s=timeout_s),
        ):
            with pytest.raises(ValueError, match="a timeout is"):
                waits()
    kv.write(turn, kv.space.keys(kv.tokens(2, 3)))
    with pytest.raises(ValueError, match="a timeout is"):
        turn.commit(timeout_s)
    assert turn.commit(), "and nothing was lost by asking"


@pytest.mark.parametrize(
    "keys",
    [np.zeros((3, 15), np.uint8), np.zeros(16, np.uint8), np.zeros((3, 16), np.int8), [b"x" * 16], None],
    ids=["15 bytes", "1-d", "signed", "list", "none"],
)
def test_wrong_keys_are_a_callers_bug(client, keys):
    space = Kv(client).space
    for ask in (space.lookup, space.begin_turn):
        with pytest.raises(ValueError, match=r"\(n, 16\) uint8"):
            ask(keys)


def test_space_sizes(client):
    with pytest.raises(ValueError, match="shard 2"):
        client.open_space("m", "d", 1, [1], shards=2, shard=2)
    with pytest.raises(ValueError, match="raise staging_bytes"):
        client.open_space("m", "d", 1, [1 << 30])
    assert client.open_space("m", "d", 1, [24 << 20]).spec.layers == 1, "buffers grow with the planes"
    assert client.stats().staging["reads"].bytes_made == 0


@pytest.mark.parametrize("endpoint", ["nonsense", "http://x:1", "::1:7450", "unix:", "host:port"])
def test_wrong_endpoints(endpoint):
    with pytest.raises(ValueError, match="endpoint"):
        fc.connect(endpoint)
