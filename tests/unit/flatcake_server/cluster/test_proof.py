"""Who knows the token can prove it, for one connection and one direction only."""

from __future__ import annotations

from dataclasses import replace

from flatcake_server.cluster.proof import Handshake

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
