"""Keys against the rule said naively, and the chain's own properties."""

from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flatcake_client.keys import chain_keys, root_key
from flatcake_transport.space import Fingerprint

TOKENS = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 3), max_size=40)


def naive(tokens: list[int], block_tokens: int, root: bytes, extra: bytes) -> list[bytes]:
    keys, parent = [], root
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        text = parent
        for token in tokens[start : start + block_tokens]:
            text += bytes([token & 255, token >> 8 & 255, token >> 16 & 255, token >> 24])
        parent = hashlib.sha256(text + extra).digest()[:16]
        keys.append(parent)
    return keys


@given(TOKENS, st.integers(1, 5), st.binary(min_size=16, max_size=16), st.binary(max_size=5), st.binary(max_size=5))
def test_keys_follow_the_rule(tokens: list[int], block_tokens: int, print_: bytes, salt: bytes, extra: bytes) -> None:
    root = root_key(Fingerprint(print_), salt)
    assert root == hashlib.sha256(print_ + salt).digest()[:16]
    keys = chain_keys(tokens, block_tokens, root, extra or None)
    assert [key.tobytes() for key in keys] == naive(tokens, block_tokens, root, extra)


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_keys_agree_exactly_as_far_as_contexts_do(one: list[int], other: list[int], block_tokens: int) -> None:
    root = bytes(16)
    keys, others = chain_keys(one, block_tokens, root), chain_keys(other, block_tokens, root)
    for block in range(min(len(keys), len(others))):
        end = (block + 1) * block_tokens
        assert np.array_equal(keys[block], others[block]) == (one[:end] == other[:end])
