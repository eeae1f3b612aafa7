"""A copy of what a restore brought: the right slots, or nothing; and nothing that an engine would have to catch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from flatcake_client.copying import keep_copy
from flatcake_client.target import Target
from flatcake_transport.errors import Overloaded, Unavailable
from flatcake_transport.mover import PagedSpan

KEYS = np.arange(8 * 16, dtype=np.uint8).reshape(8, 16)
SLOTS = np.array([30, 31, 32, 33, 34, 35, 36, 37])
PAGES = [np.zeros((40, 4), np.uint8), np.ones((40, 4), np.uint8)]


class Store:
    """A space that lacks blocks `lacks` of the prefix; `refuses` says what raises."""

    def __init__(self, lacks: range, refuses: dict[str, Exception] | None = None) -> None:
        self.lacks, self.refuses = lacks, refuses or {}
        self.written: list[tuple[int, int, list[int]]] = []
        self.committed = self.aborted = 0

    def _may(self, verb: str) -> None:
        if verb in self.refuses:
            raise self.refuses[verb]

    def begin_copy(self, keys, timeout_s):
        assert timeout_s > 0
        self._may("begin")
        return SimpleNamespace(
            parts=(SimpleNamespace(blocks=len(self.lacks)),) if self.lacks else (),
            blocks=self.lacks,
            write_layer=self._write,
            commit=self._commit,
            abort=self._abort,
        )

    def _abort(self, timeout_s):
        self.abort_timeout_s = timeout_s
        self.aborted += not self.committed

    def _write(self, layer, source, slots, timeout_s):
        self._may("write")
        self.written.append((layer, int(source[0, 0]), slots.tolist()))

    def _commit(self, timeout_s):
        self._may("commit")
        self.committed += 1


def target(slots):
    return Target([PagedSpan(pages, slots, 4) for pages in PAGES], range(2))


def copy(store, blocks=6, first_block=0):
    return keep_copy(store, KEYS[:blocks], target(SLOTS[first_block:]), first_block, 5.0)


def test_what_this_node_lacks_is_written_from_where_it_was_brought_to():
    store = Store(range(2, 6))
    assert copy(store) == 4
    assert store.written == [(0, 0, [32, 33, 34, 35]), (1, 1, [32, 33, 34, 35])]
    store = Store(range(3, 6))
    assert copy(store, first_block=3) == 3
    assert store.written == [(0, 0, [33, 34, 35]), (1, 1, [33, 34, 35])]
    assert (store.committed, store.aborted) == (1, 0)


def test_what_the_engine_had_before_is_nowhere_we_know_of():
    store = Store(range(2, 6))
    assert copy(store, first_block=3) == 0
    assert (store.written, store.committed, store.aborted) == ([], 0, 1)


def test_an_engine_that_wanted_less_than_the_prefix_copies_nothing():
    store = Store(range(6))
    assert keep_copy(store, KEYS, target(SLOTS[:6]), 0, 5.0) == 0
    assert not store.committed
    assert not store.aborted


def test_what_is_here_meanwhile_is_not_written_again():
    store = Store(range(0))
    assert copy(store) == 0
    assert (store.written, store.committed, store.aborted) == ([], 1, 0)


@pytest.mark.parametrize("verb", ["begin", "write", "commit"])
@pytest.mark.parametrize("error", [Overloaded("full"), Unavailable("gone"), ValueError("nonsense")])
def test_whatever_fails_is_no_error_of_the_engine_s(verb, error):
    assert copy(Store(range(6), {verb: error})) == 0


def test_what_is_left_of_its_time_is_all_that_giving_up_takes():
    store = Store(range(6), {"commit": Unavailable("late")})
    assert keep_copy(store, KEYS[:6], target(SLOTS), 0, 1e-3) == 0
    assert store.abort_timeout_s <= 1e-3
