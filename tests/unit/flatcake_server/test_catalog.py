"""A chain followed through sessions, beside the index asked for every key."""

from __future__ import annotations

import numpy as np
import pytest

from flatcake_server.catalog import ENTRIES_MAX, Catalog, Session
from flatcake_server.index import BlockIndex
from flatcake_server.records import Generation, SegmentRecord, SessionNo
from flatcake_transport.address import Address, Medium
from flatcake_transport.space import SpaceSpec

SPEC = SpaceSpec("m", "uint8", 16, (64, 32))
OTHER = SpaceSpec("other", "uint8", 16, (64, 32))


class Shelf:
    """A catalog with sessions in memory, and where each key's bytes are."""

    def __init__(self) -> None:
        self.catalog = Catalog(BlockIndex(10_000))
        self._base = 0
        self._generation = 1

    def session(self, spec: SpaceSpec = SPEC) -> Session:
        number = SessionNo(len(self.catalog) + 1)
        session = Session(number, f"s{number}", spec, spec.fingerprint, 0, 0.0, 0.0)
        self.catalog.add(session)
        return session

    def segment(self, session: Session, keys: np.ndarray) -> SegmentRecord:
        total = len(keys) * 64 + 4096  # a footer behind it, so that no two segments touch
        record = SegmentRecord(
            Generation(self._generation), session.session_no, Address.of(Medium.MEMORY, 0, self._base), total, 1, 0,
            "shared", keys, bytes(16),
        )  # fmt: skip
        self._base += total
        self._generation += 1
        self.catalog.publish(session, record)
        return record

    def found(self, keys: np.ndarray) -> np.ndarray:
        """The keys that stand in the runs of a chain's prefix."""
        runs = self.catalog.prefix(SPEC, SPEC.fingerprint, keys)
        assert all(run.blocks > 0 for run in runs)
        return np.concatenate([run.segment.keys[run.first_block :][: run.blocks] for run in runs] or [keys[:0]])


def new_keys(rng: np.random.Generator, blocks: int) -> np.ndarray:
    return rng.integers(0, 256, (blocks, 16), np.uint8)


@pytest.mark.parametrize("seed", range(40))
def test_the_prefix_is_that_of_the_index(seed):
    rng = np.random.default_rng(seed)
    shelf, chains = Shelf(), []
    for _ in range(6):
        base = chains[rng.integers(len(chains))] if chains and rng.random() < 0.7 else new_keys(rng, 0)
        head = base[: rng.integers(len(base) + 1)]
        sessions, parts = [shelf.session() for _ in range(rng.integers(1, 8))], [head]
        for turn in range(rng.integers(1, 8)):
            parts.append(new_keys(rng, rng.integers(1, 5)))
            shelf.segment(sessions[turn % len(sessions)], parts[-1])  # one session in order, or jumping about
        chains.append(np.concatenate(parts))
    for session in list(shelf.catalog.sessions.values())[:2]:  # holes
        for segment in list(session.segments)[:1]:
            shelf.catalog.unpublish(segment)
    for chain in chains:
        for asked in (chain, chain[: len(chain) // 2], np.concatenate([chain, new_keys(rng, 3)]), chain[:0]):
            blocks = len(shelf.catalog.index.prefix(asked))
            assert np.array_equal(shelf.found(asked), asked[:blocks])


def test_a_chain_that_leaves_within_a_segment_ends_there():
    rng = np.random.default_rng(0)
    shelf, keys = Shelf(), new_keys(rng, 10)
    shelf.segment(shelf.session(), keys)
    asked = np.concatenate([keys[2:7], new_keys(rng, 2)])
    assert np.array_equal(shelf.found(asked), keys[2:7])
    assert np.array_equal(shelf.found(keys[9:]), keys[9:])


def test_more_entries_than_are_followed_are_looked_up():
    rng = np.random.default_rng(0)
    shelf, keys = Shelf(), new_keys(rng, 3 * ENTRIES_MAX)
    for at in range(len(keys)):
        shelf.segment(shelf.session(), keys[at : at + 1])
    assert np.array_equal(shelf.found(keys), keys)


def test_blocks_of_another_space_end_the_prefix():
    rng = np.random.default_rng(0)
    shelf, keys = Shelf(), new_keys(rng, 8)
    shelf.segment(shelf.session(), keys[:4])
    shelf.segment(shelf.session(OTHER), keys[4:])
    assert np.array_equal(shelf.found(keys), keys[:4])
    assert len(shelf.found(keys[4:])) == 0


def test_a_session_in_order_is_entered_once(monkeypatch):
    rng = np.random.default_rng(0)
    shelf, keys = Shelf(), new_keys(rng, 40)
    session = shelf.session()
    for at in range(0, 40, 4):
        shelf.segment(session, keys[at : at + 4])
    asked, lookup = [], BlockIndex.lookup
    monkeypatch.setattr(BlockIndex, "lookup", lambda index, keys: asked.append(len(keys)) or lookup(index, keys))
    for first in (0, 2):
        assert np.array_equal(shelf.found(keys[first:]), keys[first:])
    assert asked == [1, 1]
