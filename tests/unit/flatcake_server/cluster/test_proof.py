"""Who knows the token can prove it, for one connection and one direction only."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flatcake_server.cluster.proof import Handshake, Nonces

SHAKE = Handshake(b"a" * 16, 1, b"n" * 16, b"b" * 16, 2, b"m" * 16)
TOKEN = b"sixteen bytes or more"


def test_a_proof_is_good_for_one_side_of_one_connection():
    proof = SHAKE.proof(TOKEN, "asker")
    assert SHAKE.proves(TOKEN, "asker", proof)
    assert not SHAKE.proves(TOKEN, "server", proof), "what was heard is not sent back"
    assert not SHAKE.proves(b"another token", "asker", proof)
    changes = [{"asker_nonce": b"x" * 16}, {"server_nonce": b"x" * 16}, {"asker": b"x" * 16}, {"server": b"x" * 16}]
    for change in [*changes, {"asker_node": 3}, {"server_node": 3}]:
        assert not replace(SHAKE, **change).proves(TOKEN, "asker", proof), change


def test_words_cannot_move_between_fields():
    one = replace(SHAKE, asker=b"ab", asker_nonce=b"c")
    assert not replace(SHAKE, asker=b"a", asker_nonce=b"bc").proves(TOKEN, "asker", one.proof(TOKEN, "asker"))


def test_a_nonce_is_taken_once_and_not_after_a_newer_one():
    nonces = Nonces(b"startnow")
    first, second, third = (nonces.give() for _ in range(3))
    for _ in range(10_000):  # strangers greet
        nonces.give()
    assert nonces.take(b"one", second)
    assert not nonces.take(b"one", second), "overheard"
    assert not nonces.take(b"one", first), "late"
    assert nonces.take(b"two", first), "of another asker"
    assert nonces.take(b"one", third)
    nonces.forget(b"one")
    assert not nonces.take(b"one", third)
    assert not nonces.take(b"three", second)
    assert nonces.take(b"one", nonces.give())


@pytest.mark.parametrize(
    "nonce", [b"", b"startnow", b"startnow" + b"\0" * 8, b"startnow" + b"\2" + b"\0" * 7, b"another!\1" + b"\0" * 7]
)
def test_what_was_never_given_is_not_taken(nonce):
    nonces = Nonces(b"startnow")
    nonces.give()
    assert not nonces.take(b"one", nonce)
