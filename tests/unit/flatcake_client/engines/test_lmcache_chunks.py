"""Chunks as blocks: buffers as pages, chains remembered. Batches against a real daemon: tests/e2e/test_lmcache_chunks.py."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flatcake_client.engines.lmcache_chunks import PLANE_BYTES_MAX, Chains, pages, planes_of


@given(st.integers(1, 1 << 28))
def test_planes_are_a_chunk_and_none_is_too_large(chunk_bytes):
    planes = planes_of(chunk_bytes)
    assert sum(planes) == chunk_bytes
    assert max(planes) <= PLANE_BYTES_MAX
    assert all(plane % 4096 == 0 for plane in planes[:-1])
    assert min(planes) > 0


@given(st.permutations(range(7)), st.integers(1, 7), st.sampled_from([1, 8, 64, 4096, 5000]))
def test_buffers_anywhere_are_slots_of_pages(order, count, gap):
    size = 3000
    pool = np.zeros(7 * (size + gap), np.uint8)
    at = [(size + gap) * place for place in order[:count]]
    planes, slots = pages([pool.ctypes.data + offset for offset in at], size)
    for number, slot in enumerate(slots):
        planes[0][slot] = number + 1
    for number, offset in enumerate(at):
        assert (pool[offset : offset + size] == number + 1).all()
    assert np.count_nonzero(pool) == count * size


def test_buffers_cut_from_a_pool_are_consecutive_slots():
    pool = np.zeros(5 * 8192, np.uint8)
    assert pages([pool.ctypes.data + 8192 * n for n in range(5)], 8000)[1].tolist() == [0, 1, 2, 3, 4]


def test_who_follows_whom_is_remembered_and_bounded():
    chains = Chains(links_max=3)
    chains.learn([b"a", b"b", b"c"])
    assert chains.before(b"a") is None
    assert (chains.before(b"b"), chains.before(b"c")) == (b"a", b"b")
    chains.stored(b"b", b"z")
    assert chains.before(b"c") == b"z", "it continues the segment, which ends elsewhere"
    chains.learn([b"p", b"q", b"r", b"s"])
    assert chains.before(b"b") is None
    assert chains.before(b"s") == b"r"
