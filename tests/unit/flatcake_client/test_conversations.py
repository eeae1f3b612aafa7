"""Which turn of which conversation a request is."""

from __future__ import annotations

from flatcake_client.conversations import Conversations, Past


def hashes(*numbers: int) -> list[bytes]:
    return [bytes([number]) for number in numbers]


def test_by_name():
    known = Conversations()
    assert known.past("a", hashes(1)) == Past()
    known.turned("a", hashes(1, 2), Past(), 7)
    assert known.past("a", hashes(9)) == Past(1, 7)
    known.turned("a", hashes(9), known.past("a", []), 8)
    assert known.past("a", []) == Past(2, 8)
    assert known.past("b", hashes(1, 2)) == Past()


def test_by_the_blocks_it_goes_on_from():
    known = Conversations()
    known.turned(None, hashes(1, 2), Past(), 7)
    known.turned(None, hashes(1, 2, 3), known.past(None, hashes(1, 2, 3)), 9)
    assert known.past(None, hashes(1, 2, 3, 4)) == Past(2, 9)
    assert known.past(None, hashes(1, 2, 5)) == Past(1, 7), "a fork goes on from where it left"
    assert known.past(None, hashes(1)) == Past()
    known.turned(None, [], Past(), 1)


def test_the_oldest_are_forgotten():
    known = Conversations(kept_max=2)
    for name in "abc":
        known.turned(name, [], Past(), 1)
        known.turned(None, [name.encode()], Past(), 1)
    assert [known.past(name, []).turns for name in "abc"] == [0, 1, 1]
    assert [known.past(None, [name]).turns for name in (b"a", b"b", b"c")] == [0, 1, 1]
