"""Turns whose writes are slow, fail, or find no staging: told by commit, and never given back under a write."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from homes import FakeHome, Gate
from waiting import until

from flatcake_client import writer
from flatcake_client.records import Grant
from flatcake_client.writer import Turn, WriteTools
from flatcake_transport.errors import Overloaded, Unavailable
from flatcake_transport.footer import CHECKSUM_NONE, CHECKSUM_XXH3
from flatcake_transport.movers.memory import MemoryMover
from flatcake_transport.movers.posix import PosixMover
from flatcake_transport.space import SpaceSpec
from flatcake_transport.window import StagingPool

SPEC = SpaceSpec("m", "u8", 4, (5000, 5000))
PAGES = np.random.default_rng(0).integers(0, 256, (10, 5000), np.uint8)
BUFFER = 1 << 20


@pytest.fixture
def gate():
    mover = Gate(PosixMover(threads=2))
    yield mover
    mover.open.set()
    mover.close()


@pytest.fixture
def memory():
    mover = MemoryMover(threads=1)
    yield mover
    mover.close()


@pytest.fixture
def home(tmp_path):
    return FakeHome(SPEC, tmp_path)


@pytest.fixture
def make(home, gate, memory):
    def make_turn(parts=((0, 4, False),), *, timeout_s=5.0, windows=2, checksums=True, memory_checksums=True):
        tools = WriteTools(gate, memory, StagingPool(BUFFER * windows, BUFFER, 1))
        return Turn(
            home, home.grant(parts), SPEC, 0, tools,
            checksums=checksums, memory_checksums=memory_checksums, timeout_s=timeout_s,
        )  # fmt: skip

    return make_turn


def test_writes_go_on_behind_write_layer(make, gate, home):
    gate.open.clear()
    turn = make()
    turn.write_layer(1, PAGES, [3, 2, 1, 0])
    turn.write_layer(0, PAGES, [0, 1, 2, 3])
    assert len(gate.submitted) == 2
    assert not home.committed
    gate.open.set()
    assert turn.commit()
    assert np.array_equal(home.segment(turn.parts[0])[:5000], PAGES[0])


def test_each_layer_exactly_once(make):
    turn = make()
    turn.write_layer(0, PAGES, [0, 1, 2, 3])
    for layer in (0, 2, -1):
        with pytest.raises(ValueError, match="exactly once"):
            turn.write_layer(layer, PAGES, [0, 1, 2, 3])
    with pytest.raises(ValueError, match=r"layers \[1\] were not written"):
        turn.commit()
    turn.write_layer(1, PAGES, [0, 1, 2, 3])
    assert turn.commit()
    for act in (turn.commit, lambda: turn.write_layer(0, PAGES, [0, 1, 2, 3])):
        with pytest.raises(ValueError, match="over"):
            act()


@pytest.mark.parametrize(
    ("source", "slots", "match"),
    [
        (PAGES, [0, 1, 2], "4 blocks"),
        (PAGES, [0, 1, 2, 10], "slots reach"),
        (PAGES, [0, 1, 2, 2], "twice"),
        (PAGES, [0.0, 1.0, 2.0, 3.0], "integers"),
        (PAGES[:, :4999], [0, 1, 2, 3], "4999 bytes"),
    ],
)
def test_what_does_not_fit_changes_nothing(make, home, source, slots, match):
    turn = make()
    with pytest.raises(ValueError, match=match):
        turn.write_layer(0, source, slots)
    turn.write_layer(0, PAGES, [0, 1, 2, 3])
    turn.abort()
    assert home.aborted == [""]


def test_a_failed_write_is_told_by_commit_and_seals_the_file(make, gate, home):
    turn = make()
    gate.fails = lambda offset: offset == 0
    turn.write_layer(0, PAGES, [0, 1, 2, 3])
    turn.write_layer(1, PAGES, [0, 1, 2, 3])
    with pytest.raises(Unavailable, match="told to fail"):
        turn.commit()
    assert not home.committed
    assert len(home.aborted) == 1
    assert "told to fail" in home.aborted[0]
    assert home.outcomes == ["failed"]
    turn.abort()
    assert len(home.aborted) == 1


def test_a_failed_write_is_sealed_also_by_abort(make, gate, home):
    with make() as turn:
        gate.fails = lambda _: True
        turn.write_layer(0, PAGES, [0, 1, 2, 3])
        gate.fails = lambda _: False
        while not turn.transfers[0].done():
            pass
        turn.write_layer(1, PAGES, [0, 1, 2, 3])
        assert len(gate.submitted) == 1, "a turn that failed writes no more"
    assert home.aborted[0]


def test_a_slow_write_outlives_commit_and_is_given_back_later(make, gate, home):
    gate.open.clear()
    turn = make(timeout_s=0.01)
    turn.write_layer(0, PAGES, [0, 1, 2, 3], timeout_s=5)
    turn.write_layer(1, PAGES, [0, 1, 2, 3], timeout_s=5)
    with pytest.raises(Unavailable, match="in time"):
        turn.commit()
    assert home.aborted == [], "space was given back under a write"
    assert home.fd >= 0, "a descriptor was closed under a write"
    gate.open.set()
    until(lambda: home.fd == -1)  # nobody comes by, and it is given back
    assert home.aborted == [""]


def test_a_write_that_fails_after_it_was_given_up_seals_the_file(make, gate, home, monkeypatch):
    monkeypatch.setattr(writer, "ABORT_TIMEOUT_S", 20.0)
    gate.open.clear()
    gate.fails = lambda _: True
    turn = make(timeout_s=0.01)
    turn.write_layer(0, PAGES, [0, 1, 2, 3], timeout_s=5)
    started_s = time.monotonic()
    turn.abort(0.0)
    assert time.monotonic() - started_s < 10.0
    assert home.aborted == []
    gate.open.set()
    assert home.linger.settle(5)
    assert len(home.aborted) == 1
    assert home.aborted[0], "the daemon goes on writing to a file whose state is unknown"


@pytest.mark.parametrize("timeout_s", [0, -1, 1e-9])
def test_without_time_left_nothing_is_published_while_its_writes_go_on(make, gate, home, timeout_s):
    gate.open.clear()
    turn = make()
    turn.write_layer(0, PAGES, [0, 1, 2, 3])
    turn.write_layer(1, PAGES, [0, 1, 2, 3])
    with pytest.raises(Unavailable, match="in time"):
        turn.commit(timeout_s)
    assert home.committed == home.aborted == []
    gate.open.set()
    assert home.linger.settle(5)
    assert home.aborted == [""]


def test_no_staging_drops_the_write(make, gate, home):
    gate.open.clear()
    turn = make(windows=1)
    turn.write_layer(0, PAGES, [0, 1, 2, 3])
    turn.write_layer(1, PAGES, [0, 1, 2, 3], timeout_s=0.01)
    gate.open.set()
    with pytest.raises(Unavailable, match="yielded"):
        turn.commit()
    assert home.linger.settle(5)
    assert home.aborted == [""], "nothing was torn, so nothing is sealed"


def test_a_write_that_waits_for_staging_hears_that_the_turn_is_given_up(make, gate, home):
    gate.open.clear()
    turn = make(windows=1)
    turn.write_layer(0, PAGES, [0, 1, 2, 3])
    writing = threading.Thread(target=turn.write_layer, args=(1, PAGES, [0, 1, 2, 3], 600.0), daemon=True)
    writing.start()
    until(lambda: turn._tools.staging.stats().waits)
    giving_up = threading.Thread(target=turn.abort, args=(60.0,), daemon=True)
    giving_up.start()
    writing.join(20)
    assert not writing.is_alive()
    gate.open.set()
    giving_up.join(20)
    assert not giving_up.is_alive()
    until(lambda: home.outcomes)
    assert home.aborted == [""]
    assert home.outcomes == ["aborted"], "nobody made it wait too long"


def test_a_turn_that_is_given_up_under_its_writes_did_not_yield(make, gate, home):
    gate.open.clear()
    with make() as turn:
        turn.write_layer(0, PAGES, [0, 1, 2, 3])
        turn.abort(0.0)
    gate.open.set()
    until(lambda: home.outcomes)
    assert home.outcomes == ["aborted"]


def test_a_turn_that_yielded_has_done_so_also_when_its_context_is_left_before_its_writes_rest(make, gate, home):
    gate.open.clear()
    with make(windows=1) as turn:
        turn.write_layer(0, PAGES, [0, 1, 2, 3])
        turn.write_layer(1, PAGES, [0, 1, 2, 3], timeout_s=0.0)
        with pytest.raises(Unavailable, match="yielded"):
            turn.commit(0.0)
    gate.open.set()
    until(lambda: home.outcomes)
    assert home.outcomes == ["yielded"]


def test_a_commit_without_answer_gives_the_space_back(make, home):
    home.commit_error = Unavailable("no answer")
    turn = make()
    for layer in range(2):
        turn.write_layer(layer, PAGES, [0, 1, 2, 3])
    with pytest.raises(Unavailable, match="no answer"):
        turn.commit()
    assert home.aborted == [""]
    assert home.outcomes == ["failed"]


def test_overloaded_while_writing_is_unavailable(make, home):
    home.hand_error = Overloaded("too many files")
    turn = make()
    for layer in range(2):
        turn.write_layer(layer, PAGES, [0, 1, 2, 3])
    with pytest.raises(Unavailable, match="too many files"):
        turn.commit()


def test_leaving_the_context_aborts(make, home):
    with make([(0, 2, True), (2, 2, False)]) as turn:
        turn.write_layer(0, PAGES, [0, 1, 2, 3])
    assert home.outcomes == ["aborted"]
    with pytest.raises(ZeroDivisionError), make() as turn:
        raise ZeroDivisionError
    assert home.outcomes == ["aborted", "aborted"]


def test_memory_may_go_without_checksums(make, home):
    turn = make([(0, 2, True), (2, 2, False)], memory_checksums=False)
    for layer in (0, 1):
        turn.write_layer(layer, PAGES, [0, 1, 2, 3])
    turn.commit()
    (memory_algorithm, memory_sums), (file_algorithm, file_sums) = home.committed[0]
    assert (memory_algorithm, memory_sums) == (CHECKSUM_NONE, b"")
    assert file_algorithm == CHECKSUM_XXH3
    assert len(file_sums) == 2 * 8


def test_without_verification_there_are_no_checksums(make, home):
    turn = make([(0, 2, True), (2, 2, False)], checksums=False)
    for layer in range(2):
        turn.write_layer(layer, PAGES, [0, 1, 2, 3])
    turn.commit()
    assert home.committed == [[(0, b""), (0, b"")]]


def test_nothing_to_store(home):
    turn = Turn(home, Grant(0, (), "s"), SPEC, 0, None, checksums=True, timeout_s=1.0)
    turn.write_layer(0, PAGES, [])
    assert turn.commit()
    assert home.outcomes == ["stored"]
    assert not home.committed
