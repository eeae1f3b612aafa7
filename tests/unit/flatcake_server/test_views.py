from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from core import ONE, Core

from flatcake_server.rpc import Timings
from flatcake_server.views import Reports


class NoHandover:
    handed_total = 5


@pytest.fixture
def core(tmp_path):
    node = Core(tmp_path)
    node.open(ONE)
    node.put(ONE, [1, 2, 3], session="a", share_counts=[2, 1, 1])
    node.put(ONE, [9], session="b")
    yield node
    node.close()


@pytest.fixture
def reports(core):
    node = core.node
    return Reports(core.store, node.arena, node.memory, node.ssd_range, NoHandover(), node.identity, Timings(), 0.0)


def test_counts_add_up(core, reports):
    core.hit(ONE, [1, 2, 3], pin=True)
    turn = core.do(core.begin(ONE, [9, 10], session="b"))
    stats = reports.stats()
    for pool in stats.pools:
        parts = pool.committed_bytes + pool.reserved_bytes + pool.releasing_bytes + pool.free_bytes
        assert parts == pool.quota_bytes
        assert min(pool.committed_bytes, pool.reserved_bytes, pool.releasing_bytes, pool.free_bytes) >= 0
    assert sum(pool.blocks for pool in stats.pools) == stats.index.blocks == 4
    assert sum(pool.segments for pool in stats.pools) == stats.segments == 3
    assert (stats.leases, stats.pinned_sessions, stats.open_turns, stats.clients) == (1, 2, 1, 3)
    counters = stats.counters
    assert counters.hit_blocks_total == {"memory": 1, "ssd": 2}
    assert counters.hit_bytes_total == {"memory": 4096, "ssd": 8192}
    assert counters.stored_blocks_total == {"memory/shared": 1, "ssd/first-turn": 3}
    assert (counters.turns_begun_total, counters.turns_committed_total) == (3, 2)
    assert counters.descriptors_handed_total == 5
    json.dumps(asdict(stats))
    core.do(core.abort(turn))
    assert reports.stats().counters.turns_aborted_total == 1


def test_sessions_newest_first(core, reports):
    core.hit(ONE, [1, 2, 3])
    names = [row["name"] for row in core.do(reports.sessions(None, 10))]
    assert names[-1] == "b"
    assert len(names) == 3
    assert len(core.do(reports.sessions(None, 1))) == 1
    assert core.do(reports.sessions(b"x" * 16, 10)) == []
    row = core.do(reports.session("a"))
    assert (row["blocks"], row["tokens"], row["files"], row["readers"]) == (2, 32, 1, 0)
    assert [(segment["first_block"], segment["reason"]) for segment in row["segments"]] == [(1, "first-turn")]
    with pytest.raises(ValueError, match="no session is named"):
        core.do(reports.session("c"))


def test_spaces(core, reports):
    (space,) = core.do(reports.spaces())
    assert (space["model"], space["sessions"], space["blocks"], space["open"]) == ("one", 3, 4, True)
    core.restart()
    core_reports = Reports(
        core.store,
        core.node.arena,
        core.node.memory,
        core.node.ssd_range,
        NoHandover(),
        core.node.identity,
        Timings(),
        0.0,
    )
    (space,) = core.do(core_reports.spaces())
    assert space["open"] is False


def test_drop_says_what_stays_and_why(core, reports):
    shared = next(session.name for session in core.store.catalog.sessions.values() if session.shared)
    core.hit(ONE, [9], pin=True)
    report = core.do(reports.drop(["a", "b", "c"]))
    assert report == {"dropped": ["a"], "busy": ["b"], "needed": [], "unknown": ["c"]}
    core.put(ONE, [1, 2], session="a", share_counts=[2, 1])
    assert core.do(reports.drop([shared]))["needed"] == [shared]
    core.check()


def test_check(core, reports):
    steps = []
    report = core.do(reports.check(True, lambda done, total: steps.append((done, total))))
    assert report["ok"]
    assert (report["sessions"], report["segments"], report["blocks"]) == (3, 3, 4)
    assert steps[-1] == (3, 3)
    core.node.memory.allocate(4096)
    report = core.do(reports.check(False, lambda done, total: None))
    assert not report["ok"]
    assert report["findings"]
