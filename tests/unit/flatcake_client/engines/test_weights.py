"""Which weights KV is of: never found after a change by who has others, and by nobody while both may be in the engine's cache."""

from __future__ import annotations

import pytest

import flatcake_client as fc
from flatcake_client.engines.weights import Weights


def weights_of(engine="engine-1"):
    return Weights("files-1", lambda: engine, "flush it")


def changed(weights, to=None):
    weights.changed(to)
    weights.flushed()
    return weights.salt()


def test_nothing_is_found_between_a_change_and_the_flush_after_it():
    weights = weights_of()
    assert weights.salt() == b""
    weights.flushed()
    assert weights.salt() == b""
    for to in (None, "files-2", "files-1"):
        weights.changed(to)
        with pytest.raises(fc.Unavailable, match="flush it"):
            weights.salt()
    weights.flushed()
    assert weights.salt() == b"", "those it started with, loaded again"


def test_a_change_without_a_name_is_this_engines_alone():
    one, other = weights_of(), weights_of("engine-2")
    salts = [changed(one), changed(one), changed(other), changed(other)]
    assert len({b"", *salts}) == 5


def test_ranks_that_hear_of_the_same_changes_have_the_same_salt():
    ranks = [weights_of() for _ in range(2)]
    for to in (None, None, "files-2", None):
        assert len({changed(rank, to) for rank in ranks}) == 1


def test_weights_with_a_name_are_shared_by_who_made_the_same_change():
    one, other = weights_of(), weights_of("engine-2")
    changed(one)
    assert changed(one, "files-2") == changed(other, "files-2") != b""
    assert changed(one, "files-1") == b""


def test_the_same_weights_loaded_once_more_are_no_change():
    weights = weights_of()
    weights.changed("files-1")
    assert weights.salt() == b""
    changed(weights, "files-2")
    weights.changed("files-2")
    assert weights.salt() == b"files-2"
