"""Whom a lookup asks, and whom next."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest

from flatcake_server.cluster.directory import Holder
from flatcake_server.cluster.remote import RemoteLookup
from flatcake_transport.errors import Unavailable


def lookup_of(nodes, unusable=()):
    known = {node: SimpleNamespace(node_id=node, incarnation=b"tagged") for node in nodes}
    membership = SimpleNamespace(
        known=known, live=lambda node, _: known.get(node), me=SimpleNamespace(node_id=1), beats_failed=0
    )
    peers = SimpleNamespace(usable=lambda member: member.node_id not in unusable)
    return RemoteLookup(None, membership, None, peers, None, Counter(), 1.0, True, lambda: 0.0, lambda _: None)


def holders_of(*anchors):
    return [[Holder(node, b"tagg") for node in nodes] for nodes in anchors]


def asked(lookup, holders, dead=()):
    """Whom it asked, in order, and what came of it."""
    order = []

    async def find(member):
        order.append(member.node_id)
        if member.node_id in dead:
            raise Unavailable("gone")
        return 100 + member.node_id

    try:
        return order, asyncio.run(lookup._of_the_best(ANCHORS, holders, find))
    except Unavailable as error:
        return order, str(error)


HOLDERS = holders_of([2, 3, 4], [2, 3], [2])
ANCHORS = [b"a", b"b", b"c"]


@pytest.mark.parametrize(
    ("dead", "unusable", "expected"),
    [
        ((), (), ([2], 102)),
        ((2,), (), ([2, 3], 103)),
        ((2, 3), (), ([2, 3], "gone")),
        ((), (2,), ([3], 103)),
        ((), (2, 3, 4), ([], 0)),
    ],
)
def test_the_best_is_asked_and_then_once_the_next_best(dead, unusable, expected):
    assert asked(lookup_of([2, 3, 4], unusable), HOLDERS, dead) == expected


def test_the_only_node_that_holds_more_and_is_gone_is_a_failure_and_no_miss():
    order, said = asked(lookup_of([2]), holders_of([2]), dead=[2])
    assert order == [2]
    assert "does not answer" in said


def test_who_is_no_member_any_more_is_not_asked():
    assert asked(lookup_of([3]), HOLDERS) == ([3], 103)


def test_an_entry_that_misled_is_taken_out_if_its_owner_disowns_it():
    told = []

    async def probe(member, keys, timeout_s):
        return bytes(key == b"b" for key in keys)

    async def tell(member, batch):
        told.append((member.node_id, batch.puts, batch.withdrawn))

    async def nothing(member):
        return 0

    async def ask():
        lookup, tasks = lookup_of([2, 3, 4]), []
        lookup.peers.probe, lookup.directory = probe, SimpleNamespace(tell=tell)
        lookup.spawn = lambda work: tasks.append(asyncio.ensure_future(work))
        assert await lookup._of_the_best(ANCHORS, HOLDERS, nothing) == 0
        await asyncio.gather(*tasks)
        assert lookup.counts["stale_hints"] == 1

    asyncio.run(ask())
    assert told == [(2, (), (b"a", b"c"))]
