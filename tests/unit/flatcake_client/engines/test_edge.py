"""What goes wrong behind an engine's edge is counted, said once, and answered."""

from __future__ import annotations

import logging

import flatcake_client as fc
from flatcake_client.engines.edge import Edge


def test_a_failure_has_an_answer_a_count_and_a_line_when_it_begins(caplog):
    edge = Edge(logging.getLogger("flatcake_client.test"), "its pages are computed")

    def fails(error):
        raise error

    for _ in range(3):
        assert edge.attempt("a store", 7, lambda: fails(fc.Unavailable("gone"))) == 7
    assert edge.attempt("a load", [], lambda: fails(KeyError("x"))) == []
    assert edge.failing()
    assert edge.attempt("a store", 7, lambda: 8) == 8
    edge.failed("a store", fc.Unavailable("gone"))
    edge.worked("a store")
    edge.worked("a load")
    assert not edge.failing()
    assert [record.message.split(":")[1].split()[1] for record in caplog.records] == ["store", "load", "store"]
    assert "its pages are computed meanwhile: KeyError('x')" in caplog.records[1].message
    assert [record.exc_info is not None for record in caplog.records] == [False, True, False]
    assert (edge.failures("a store"), edge.failures("a load"), edge.failures("a walk"), edge.failures()) == (4, 1, 0, 5)


def test_what_comes_and_goes_does_not_fill_the_log(caplog):
    """A verb that is called for each layer, and fails in one of them."""
    told = []
    edge = Edge(logging.getLogger("flatcake_client.test"), "", lambda: told.append(1))
    for _ in range(1000):
        edge.failed("a layer", KeyError("x"))
        edge.worked("a layer")
    assert (len(told), edge.failures()) == (1000, 1000)
    assert len(caplog.records) == 10


def test_counts_add_up():
    edge = Edge(logging.getLogger("flatcake_client.test"), "")
    edge.count(found=2, asked=3)
    edge.count(found=1)
    assert edge.counts() == {"found": 3, "asked": 3}
