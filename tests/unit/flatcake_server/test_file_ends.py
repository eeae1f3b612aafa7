"""Files of branches that a conversation has left: they go before any session that was used since."""

from __future__ import annotations

import pytest
from core import Core

from flatcake_transport.errors import FlatCakeError
from flatcake_transport.space import SpaceSpec

ONE = SpaceSpec("one", "u8", 16, (4096,))
HEAD, OLD, NEW = [1] * 8, [2] * 10, [3] * 10


@pytest.fixture
def core(tmp_path):
    """41 of 64 pages: a session of three files, of which the second is a branch it has left; another used before its last use."""
    node = Core(tmp_path, ssd_bytes=64 << 12, memory_bytes=16 << 12)
    node.open(ONE)
    for path in (HEAD, HEAD + OLD, HEAD + NEW):
        node.put(ONE, path, session="a")
    node.put(ONE, [4] * 8, session="b")
    yield node
    node.check(data=True)
    node.check_rest()
    node.close()


def fill(core):
    """24 pages more: not all have room."""
    core.put(ONE, [5] * 8, session="c")
    core.put(ONE, [6] * 12, session="d")


def hits(core, *paths):
    return [core.hit(ONE, path)[0] for path in paths]


def counts(core):
    retirement = core.node.retirement
    return retirement.counts["left"], retirement.reclaimed[1]


def test_what_a_conversation_has_left_goes_before_a_session_used_since(core):
    core.hit(ONE, HEAD + NEW)
    fill(core)
    assert counts(core) == (1, 0)
    assert hits(core, HEAD + OLD, HEAD + NEW, [4] * 8, [5] * 8, [6] * 12) == [8, 18, 8, 8, 12]
    core.restart()
    core.open(ONE)
    assert hits(core, HEAD + OLD, HEAD + NEW, [4] * 8) == [8, 18, 8]
    core.put(ONE, HEAD + OLD, session="a")  # it may come back
    assert hits(core, HEAD + OLD) == [18]


def test_what_was_left_is_known_after_a_restart(core):
    core.restart()
    core.open(ONE)
    core.hit(ONE, HEAD + NEW)
    fill(core)
    assert counts(core) == (1, 0)
    assert hits(core, HEAD + OLD, HEAD + NEW, [4] * 8) == [8, 18, 8]


def test_what_is_still_used_is_not_left(core):
    core.hit(ONE, HEAD + NEW)
    core.hit(ONE, HEAD + OLD)
    fill(core)
    assert counts(core) == (0, 1)
    assert hits(core, HEAD + OLD, HEAD + NEW, [4] * 8) == [18, 18, 0]


def test_the_session_to_go_next_loses_what_it_left_and_then_goes_whole(core):
    core.hit(ONE, [4] * 8)
    fill(core)
    assert counts(core) == (1, 0)
    core.put(ONE, [7] * 12, session="e")
    assert counts(core) == (1, 1)
    assert hits(core, HEAD, [4] * 8) == [0, 8]


@pytest.mark.parametrize("hold", ["read", "written"])
def test_a_session_in_use_loses_nothing(core, hold):
    core.hit(ONE, HEAD + NEW, pin=hold == "read")
    turn = core.do(core.begin(ONE, [*HEAD, 7], session="a")) if hold == "written" else None
    fill(core)
    assert counts(core)[0] == 0
    assert hits(core, HEAD + OLD, [4] * 8) == [18, 0]
    if turn is not None:
        core.do(core.abort(turn))


def test_what_a_fork_in_memory_continues_stays_with_it(core):
    core.put(ONE, [*HEAD, *OLD, 7], session="fork", turn=2, previous_reply_tokens=8)
    assert core.store.catalog.find(ONE.fingerprint, "fork").memory_bytes > 0
    core.hit(ONE, [4] * 8)
    core.hit(ONE, HEAD + NEW)
    fill(core)
    assert counts(core) == (0, 1)
    assert hits(core, [*HEAD, *OLD, 7]) == [19]


@pytest.mark.parametrize("fault", ["delete", "journal"])
def test_a_disk_that_does_not_let_go(core, fault):
    core.hit(ONE, HEAD + NEW)
    core.put(ONE, [5] * 8, session="c")
    core.fail(fault)
    try:
        core.put(ONE, [6] * 12, session="d")
    except FlatCakeError:
        assert fault == "journal"
    disk = core.node.disks[1]
    assert bool(disk.failure) == (fault == "journal")
    assert len(disk.condemned) == (fault == "delete")
    assert hits(core, HEAD + OLD) == [8 if fault == "delete" else 0]
    core.check()
    if fault == "delete":
        core.do(core.store.tick(600.0))
        assert not disk.condemned


def test_a_session_with_nothing_else_ends_with_its_files(core):
    """Its last use was of what it has in another session's file, and of nothing of its own."""
    core.put(ONE, [*HEAD, *NEW, 8, 8], session="fork")
    for _ in range(2):
        core.hit(ONE, [4] * 8)
    core.hit(ONE, HEAD + NEW)
    for number in range(10, 14):
        core.put(ONE, [number] * 8, session=f"n{number}")
    core.check_rest()
