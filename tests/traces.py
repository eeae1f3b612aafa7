"""Small traces for tests, and the plain rules that the fast code is held against."""

from __future__ import annotations

import json
from collections import OrderedDict

import numpy as np
from hypothesis import strategies as st

from flatcake_transport.trace import Request


def request(arrival_s, session, ids, *, turn=1, block_tokens=16, output_tokens=8, extra_tokens=0):
    ids = np.array(ids, np.int64)
    input_tokens = len(ids) * block_tokens + extra_tokens
    return Request(float(arrival_s), session, turn, input_tokens, output_tokens, block_tokens, ids)


def chained(paths):
    """Block ids of each path of words: equal exactly for equal prefixes."""
    names = {}
    return [[names.setdefault(tuple(path[: i + 1]), len(names)) for i in range(len(path))] for path in paths]


# Paths over two letters share prefixes often; sessions are few, so that they borrow from each other.
paths = st.lists(st.text("ab", max_size=6), min_size=1, max_size=14)


@st.composite
def traffics(draw):
    """Requests whose ids keep the chain law."""
    drawn = draw(paths.filter(any))
    sessions = draw(st.lists(st.sampled_from("xyz"), min_size=len(drawn), max_size=len(drawn)))
    gaps = draw(st.lists(st.integers(0, 3), min_size=len(drawn), max_size=len(drawn)))
    turns, requests, now = {}, [], 0
    for ids, session, gap in zip(chained(drawn), sessions, gaps, strict=True):
        now += gap
        turns[session] = turns.get(session, 0) + 1
        requests.append(request(now, session, ids, turn=turns[session]))
    return requests


class NaiveCache:
    """An LRU of blocks, block by block: looked up whole, then used from the last to the first."""

    def __init__(self, capacity):
        self.capacity, self.held = capacity, OrderedDict()

    def ask(self, ids):
        hits = sum(block in self.held for block in ids)
        for block in reversed(ids):
            self.held[block] = None
            self.held.move_to_end(block)
        while len(self.held) > self.capacity:
            self.held.popitem(last=False)
        return hits


def mooncake_lines(requests):
    return [
        json.dumps(
            {
                "timestamp": round(r.arrival_s * 1000),
                "input_length": r.input_tokens,
                "output_length": r.output_tokens,
                "hash_ids": r.ids.tolist(),
            }
        )
        for r in requests
    ]
