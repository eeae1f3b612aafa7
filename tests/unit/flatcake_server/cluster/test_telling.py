"""What a node tells its directory, looks for there and sweeps out of it, with a directory that is a set."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from cluster_nodes import soon
from core import Yield
from waiting import pause

from flatcake_server import pace
from flatcake_server.cluster import telling as module
from flatcake_server.cluster.directory import Holder
from flatcake_server.cluster.members import Beat, Member, Membership, Verdict
from flatcake_server.cluster.publisher import Publisher
from flatcake_server.cluster.sweeper import Sweeper
from flatcake_server.cluster.telling import Telling
from flatcake_server.tasks import Background
from flatcake_transport.address import MISSING
from flatcake_transport.errors import Unavailable

ME, OTHER = Member(1, b"mine" * 4, ""), Member(2, b"away" * 4, "")
MINE, THEIRS, OLD = Holder(1, b"mine"), Holder(2, b"away"), Holder(2, b"dead")
KEYS = np.arange(40 * 16, dtype=np.uint8).reshape(40, 16)
ANCHORS = {KEYS[n - 1].tobytes() for n in (1, 2, 4, 8, 16, 32)}


class Directory:
    def __init__(self) -> None:
        self.entries: set[tuple[bytes, Holder]] = set()
        self.silent = False

    def _answer(self) -> None:
        if self.silent:
            raise Unavailable("the test's directory is silent")

    async def tell(self, me, batch):
        self._answer()
        mine = Holder(me.node_id, me.incarnation[:4])
        self.entries |= {(key, mine) for key in batch.puts}
        self.entries -= {(key, mine) for key in batch.withdrawn}

    async def probe(self, keys, *, peer_time_s):
        self._answer()
        return [[holder for held, holder in self.entries if held == key] for key in keys]

    async def sweep(self, buckets, dead):
        self._answer()
        gone = dead({holder for _, holder in self.entries})
        before = len(self.entries)
        self.entries = {entry for entry in self.entries if entry[1] not in gone}
        return before - len(self.entries)

    def of(self, holder):
        return {key for key, each in self.entries if each == holder}


class Node:
    """`held`: the keys of its index."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self.directory, self.counts = Directory(), Counter()
        self.membership = Membership(ME, 60.0)
        catalog = self.catalog = SimpleNamespace(present=self._present, segments=[], watch=None)
        publisher = Publisher(1e6, audit_s=0.01, audit_keys=2)
        sweeper = Sweeper(0.5, 0.05, buckets=8, rate_max=1e6)
        self.telling = Telling(
            catalog, self.membership, self.directory, publisher, sweeper, self.counts, time.monotonic,
            Background(self.counts).unforeseen,
        )  # fmt: skip
        self.watch = catalog.watch
        self.beat()

    def beat(self) -> None:
        beat = Beat(Verdict.RENEWED, None, (ME, OTHER))
        self.telling.beaten(beat, again=self.membership.answered(beat, time.monotonic()))

    def _present(self, keys):
        return np.where([key.tobytes() in self.held for key in keys], np.uint64(1), np.uint64(MISSING))

    def changes(self, *, visible: bool) -> None:
        self.held = {key.tobytes() for key in KEYS} if visible else set()
        self.watch([SimpleNamespace(keys=KEYS, first_block=0, blocks=len(KEYS))], visible)


@pytest.fixture
def node(monkeypatch):
    for name in ("PUBLISH_PAUSE_S", "RETRY_S", "SWEEP_PAUSE_S"):
        monkeypatch.setattr(module, name, 0.005)
    return Node()


def run(node, work):
    async def together():
        telling = node.telling
        loops = [
            asyncio.ensure_future(loop()) for loop in (telling.publishes_stored, telling.publishes, telling.sweeps)
        ]
        try:
            await work()
        finally:
            for loop in loops:
                loop.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await loop

    asyncio.run(together())


def test_what_is_held_is_told_and_what_went_is_taken_back(node):
    async def work():
        node.changes(visible=True)
        await soon(lambda: node.directory.of(MINE) == ANCHORS)
        node.changes(visible=False)
        await soon(lambda: not node.directory.of(MINE))

    run(node, work)


def test_what_the_directory_lost_behind_our_back_is_told_again(node):
    async def work():
        node.changes(visible=True)
        await soon(lambda: node.directory.of(MINE) == ANCHORS)
        node.directory.entries = set()
        await soon(lambda: node.directory.of(MINE) == ANCHORS)
        assert node.telling.publisher.stats().missing_total == len(ANCHORS)

    run(node, work)


def test_entries_of_the_dead_go_and_those_of_members_stay(node):
    async def work():
        node.directory.entries = {(b"k" * 16, holder) for holder in (THEIRS, OLD)}
        await soon(lambda: node.counts["entries_swept"] == 1)
        assert node.directory.of(THEIRS) == {b"k" * 16}
        assert not node.directory.of(OLD)

    run(node, work)


def test_a_silent_directory_is_counted_and_told_later(node):
    async def work():
        node.directory.silent = True
        node.changes(visible=True)
        await soon(lambda: node.counts["directory_failures"] > 3)
        node.directory.silent = False
        await soon(lambda: node.directory.of(MINE) == ANCHORS)

    run(node, work)


def test_others_have_their_turn_while_all_that_is_stored_is_published(node, monkeypatch):
    monkeypatch.setattr(pace, "SLICE_S", 0.0)
    monkeypatch.setattr(pace, "REST_S", 0.0)
    node.held = {key.tobytes() for key in KEYS}
    node.catalog.segments = [SimpleNamespace(keys=KEYS, first_block=0, blocks=len(KEYS))] * 50
    turns = []

    async def others():
        while len(turns) < 100:
            turns.append(await Yield())

    async def work():
        beside = asyncio.ensure_future(others())
        await node.telling.publish_stored()
        beside.cancel()

    asyncio.run(work())
    assert len(turns) >= 49, "one a segment"
    assert node.telling.publisher.wants() == ANCHORS


@pytest.mark.parametrize("where", ["take", "audit", "tell", "probe"])
def test_what_nobody_foresaw_does_not_end_the_telling(node, monkeypatch, where):
    owner = node.directory if where in ("tell", "probe") else node.telling.publisher
    fails_at_first(monkeypatch, owner, where)

    async def work():
        node.changes(visible=True)
        await soon(lambda: node.counts["directory_failures"] == 1 and node.directory.of(MINE) == ANCHORS)
        node.directory.entries = set()
        await soon(lambda: node.directory.of(MINE) == ANCHORS)

    run(node, work)


@pytest.mark.parametrize("where", ["add", "remove"])
def test_no_commit_fails_for_what_is_not_told_and_it_is_told_later(node, monkeypatch, caplog, where):
    fails_at_first(monkeypatch, node.telling.publisher, where)

    async def work():
        await soon(lambda: not node.telling._untold.is_set())
        node.catalog.segments = [SimpleNamespace(keys=KEYS, first_block=0, blocks=len(KEYS))]
        node.changes(visible=True)
        await soon(lambda: node.directory.of(MINE) == ANCHORS)
        node.changes(visible=False)
        if where == "add":
            await soon(lambda: not node.directory.of(MINE))

    run(node, work)
    assert (node.counts["directory_failures"], node.counts["unforeseen"]) == (1, 1)
    assert "told later" in caplog.text


def test_what_was_stored_before_the_start_is_told_whatever_goes_wrong_at_first(node, monkeypatch):
    fails_at_first(monkeypatch, node.telling.publisher, "add")
    node.held = {key.tobytes() for key in KEYS}
    node.catalog.segments = [SimpleNamespace(keys=KEYS, first_block=0, blocks=len(KEYS))]

    async def work():
        await soon(lambda: node.directory.of(MINE) == ANCHORS)

    run(node, work)
    assert (node.counts["directory_failures"], node.counts["unforeseen"]) == (1, 1)


@pytest.mark.parametrize("where", ["take", "sweep"])
def test_what_nobody_foresaw_does_not_end_the_sweeping(node, monkeypatch, where):
    fails_at_first(monkeypatch, node.directory if where == "sweep" else node.telling._sweeper, where)

    async def work():
        await soon(lambda: node.counts["directory_failures"] == 1)
        node.directory.entries = {(b"k" * 16, OLD)}
        await soon(lambda: node.counts["entries_swept"] == 1)

    run(node, work)


def fails_at_first(monkeypatch, owner, name):
    real, calls = getattr(owner, name), []

    def call(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 1:
            raise RuntimeError("the test broke it")
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, call)


def test_a_node_that_is_not_sure_of_its_number_tells_nothing(node):
    async def work():
        node.membership.failed(time.monotonic(), 0.0)
        node.changes(visible=True)
        node.directory.entries = {(b"k" * 16, OLD)}
        await asyncio.to_thread(pause, 0.03)
        assert node.telling.publisher.stats().pending == len(ANCHORS)
        assert not any(node.counts.values())
        node.beat()
        await soon(lambda: node.directory.of(MINE) == ANCHORS and not node.directory.of(OLD))

    run(node, work)
