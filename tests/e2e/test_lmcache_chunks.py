"""LMCache's chunks in a real daemon, without LMCache: batches, holes, sessions continued, and a daemon that is gone."""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest
from kv import connect

import flatcake_client as fc
from flatcake_client.engines.lmcache_chunks import LOOKUPS_MAX, PLANE_BYTES_MAX, ChunkKind, ChunkStore

KIND = ChunkKind("m", "bfloat16", "2x4x16x8", 8192 + 100, 16)
BIG = ChunkKind("m", "bfloat16", "2x4x16x80", PLANE_BYTES_MAX + 8192, 16)


class Engine:
    """A store, and buffers whose bytes follow from the chunk's name."""

    def __init__(self, daemon, kind=KIND, **options):
        self.client = connect(daemon, **options)
        self.store_of = ChunkStore(self.client)
        self.kind = kind

    def bytes_of(self, name):
        return np.random.default_rng(list(name)).integers(0, 256, self.kind.chunk_bytes, dtype=np.uint8)

    def store(self, names, lanes=(), timeout_s=10.0):
        buffers = [self.bytes_of(name) for name in names]
        addresses = [buffer.ctypes.data for buffer in buffers]
        return self.store_of.store(self.kind, names, addresses, lanes, deadline_s=time.monotonic() + timeout_s)

    def find(self, names, lanes=(), **options):
        found = set()
        deadline_s = time.monotonic() + 5
        for run in self.store_of.search(self.kind, names, lanes, pin=False, deadline_s=deadline_s, **options):
            found |= {names[position] for position in run.positions}
        return found

    def load(self, names, lanes=(), timeout_s=10.0):
        """The names that came; every byte is compared."""
        buffers = {name: np.zeros(self.kind.chunk_bytes, np.uint8) for name in names}
        came = set()
        deadline_s = time.monotonic() + timeout_s
        for run in self.store_of.search(self.kind, names, lanes, pin=True, deadline_s=deadline_s):
            mine = [names[position] for position in run.positions]
            usable = self.store_of.bring(
                self.kind, run, [buffers[name].ctypes.data for name in mine], deadline_s=deadline_s
            )
            for name in mine[:usable]:
                assert np.array_equal(buffers[name], self.bytes_of(name))
            came |= set(mine[:usable])
        return came


def names_of(prefix, count):
    return [f"{prefix}{n}".encode() for n in range(count)]


@pytest.fixture
def engine(request, daemon):
    made = Engine(daemon, getattr(request, "param", KIND))
    yield made
    made.client.close()


@pytest.mark.parametrize("engine", [KIND, BIG], ids=["one plane", "two planes"], indirect=True)
def test_a_batch_comes_back_in_any_order_and_with_holes(engine):
    names = names_of("a", 8)
    assert engine.find(names) == set()
    assert len(engine.store(names).positions) == 8
    assert len(engine.store(names).positions) == 0
    shuffled = [names[n] for n in (5, 0, 7, 2)]
    assert engine.load(shuffled) == set(shuffled)
    holes = [b"x", names[0], b"y", *names[3:6], b"z", b"w", names[7]]
    assert engine.load(holes) == {names[0], *names[3:6], names[7]}
    assert engine.find(holes, prefix_only=True) == set()


def test_batches_of_a_conversation_are_appended_to_one_session(daemon, engine):
    chain = names_of("a", 12)
    for end in (4, 8, 12):
        engine.find(chain[:end])  # LMCache asks for the whole prompt, then stores what was missing
        engine.store(chain[end - 4 : end])
    fork = [*chain[:4], *names_of("b", 4)]
    assert engine.find(fork) == set(chain[:4])
    engine.store(fork[4:])
    assert engine.load(chain) == set(chain)
    assert engine.load(fork) == set(fork)
    sessions = list(daemon.admin().sessions())
    assert sorted(session["blocks"] for session in sessions) == [4, 12]
    stats = engine.store_of.stats()
    assert (stats.turns_continued, stats.turns_apart) == (3, 1)


def test_a_predecessor_that_is_gone_or_was_never_stored_is_no_hindrance(daemon, engine):
    chain = names_of("a", 4)
    engine.find(chain)
    assert len(engine.store(chain[2:]).positions) == 2, "what was asked for before it is not stored"
    assert engine.find(chain) == set(chain[2:])
    assert engine.store_of.stats().turns_apart == 1
    daemon.check()


def test_lanes_are_told_apart_and_stored_together(daemon, engine):
    names = [b"r0-0", b"r1-0", b"r0-1", b"r1-1"]
    lanes = [0, 1, 0, 1]
    engine.store(names, lanes)
    assert daemon.status()["sessions"] == 1
    later = [b"r0-0", b"r1-0", b"r0-1", b"r1-1", b"r0-2", b"r1-2"]
    assert engine.find(later, [0, 1] * 3) == set(names)
    engine.store(later[4:], [0, 1])
    assert engine.load(later, [0, 1] * 3) == set(later)
    assert daemon.status()["sessions"] == 1, "the second batch continues what the first one ended with"


def test_a_prompt_of_holes_costs_a_bounded_number_of_questions(engine):
    names = names_of("a", 500)
    assert engine.find(names) == set()
    assert engine.store_of.stats().lookups <= LOOKUPS_MAX
    alone = names_of("b", 200)
    before = engine.store_of.stats().lookups
    assert engine.find(alone, list(range(200))) == set()
    assert engine.store_of.stats().lookups - before <= LOOKUPS_MAX


def test_a_daemon_that_is_stopped_or_dead_is_a_miss_in_time(daemon):
    engine = Engine(daemon, timeout_s=0.5)
    names = names_of("a", 4)
    engine.store(names)
    daemon.signal(signal.SIGSTOP)
    try:
        started_s = time.monotonic()
        assert engine.load(names, timeout_s=1.0) == set()
        with pytest.raises(fc.FlatCakeError):
            engine.store(names_of("b", 4), timeout_s=1.0)
        assert time.monotonic() - started_s < 4
    finally:
        daemon.signal(signal.SIGCONT)
    daemon.kill()
    assert engine.load(names) == set()
    with pytest.raises(fc.FlatCakeError):
        engine.store(names_of("c", 4))
    assert engine.store_of.stats().chunks_store_failed == 8
    engine.client.close()


def test_other_kinds_never_meet(daemon):
    names = names_of("a", 3)
    other = ChunkKind("m", "float16", KIND.layout, KIND.chunk_bytes, 16)
    engines = [Engine(daemon), Engine(daemon, other), Engine(daemon)]
    engines[0].store(names)
    assert [engine.find(names) for engine in engines] == [set(names), set(), set(names)]
    for engine in engines:
        engine.client.close()
