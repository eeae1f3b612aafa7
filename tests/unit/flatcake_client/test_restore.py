"""Restores whose disk is slow or fails, whose lease ends, whose staging is taken: the usable prefix, in time, and nothing else."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from hits import FakeHit, Movers, time_from
from homes import Gate
from images import Chain

from flatcake_client import file_path
from flatcake_client.records import Run
from flatcake_client.restore import Restore, RestoreCorrupt, RestoreUnavailable
from flatcake_transport.address import Address, Medium
from flatcake_transport.errors import Unavailable
from flatcake_transport.space import SpaceSpec

SPEC = SpaceSpec("m", "u8", 4, (64 << 10, 64 << 10, 64 << 10))


@pytest.fixture
def chain(tmp_path):
    """Blocks 0..3 in memory, 4..9 in file 1, 10..13 in file 2."""
    made = Chain(SPEC, tmp_path, np.random.default_rng(0))
    made.add(file_id=0, before=0, blocks=4, behind=1)
    made.add(file_id=1, before=1, blocks=6, behind=0)
    made.add(file_id=2, before=0, blocks=4, behind=0)
    return made


@pytest.fixture
def hit(chain):
    made = FakeHit(chain)
    yield made
    made.close()


@pytest.fixture
def movers():
    made = Movers()
    made.files = Gate(made.files)
    yield made
    made.files.open.set()
    made.close()


@pytest.fixture
def pages():
    return [np.zeros((14, 64 << 10), np.uint8) for _ in range(3)]


def begin(hit, movers, pages, *, slots=None, first=0, timeout_s=10.0, ending=None, **options):
    tools = movers.reading(hit, **options)
    slots = np.arange(14) if slots is None else slots
    return Restore(hit, tools, pages, slots, first, timeout_s, now_s=hit.clock, ending=ending), tools


def right(chain, pages, layer, blocks):
    return np.array_equal(pages[layer][:blocks], chain.kv[layer][:blocks])


def test_layers_come_in_turn_and_are_read_ahead(chain, hit, movers, pages):
    restore, _ = begin(hit, movers, pages, extra_bytes=10 * (64 << 10))
    assert not movers.files.submitted, "nothing is read before it is waited for"
    restore.wait_layer(0)
    assert right(chain, pages, 0, 14)
    assert not pages[2][4:].any(), "what is read ahead stays in staging"
    assert len(movers.files.submitted) >= 2, "the next half is not being read"
    restore.wait_layer(2)
    assert all(right(chain, pages, layer, 14) for layer in range(3))
    assert restore.wait() == 14
    stats = restore.stats
    assert stats.bytes_by_medium == {"memory": 4 * 3 * (64 << 10), "ssd": 10 * 3 * (64 << 10)}
    assert stats.bytes_read == 10 * 3 * (64 << 10)
    assert stats.read_commands <= 3 * 2


def test_past_the_deadline_nothing_is_written(chain, hit, movers, pages):
    restore, tools = begin(hit, movers, pages, timeout_s=5.0)
    restore.wait_layer(0)
    movers.files.open.clear()
    before = [page[4:].copy() for page in pages]  # of files: two copies out of memory may be under way
    hit.clock.now_s += 5.0
    assert (usable := restore.wait()) <= 4, "no block of files has all its layers"
    assert all(right(chain, pages, layer, usable) for layer in range(3))
    with pytest.raises(RestoreUnavailable, match="deadline") as raised:
        restore.wait_layer(1)
    assert raised.value.usable_blocks == usable
    movers.files.open.set()
    while restore.moving():
        pass
    after = [page[4:] for page in pages]
    assert all(np.array_equal(*pair) for pair in zip(before, after, strict=True)), "written after the deadline"
    tools.staging.open_window(5.0).close()


def test_a_disk_that_hangs_costs_the_deadline_only(chain, hit, movers, pages):
    """A read that never lands ends the wait, keeps its window, and is in `moving`."""
    movers.files.open.clear()
    tools = movers.reading(hit)
    restore = Restore(hit, tools, pages, np.arange(14), 0, 0.05, now_s=time_from(lambda: movers.files.submitted))
    assert restore.wait() <= 4, "all but what is in memory hangs"
    assert restore.moving()
    restore.close()
    assert tools.staging.stats().windows_lingering == 1
    movers.files.open.set()


def test_a_lapsed_lease_is_an_error_after_the_copy(chain, hit, movers, pages):
    restore, _ = begin(hit, movers, pages, timeout_s=1000.0)
    restore.wait_layer(0)
    hit.clock.now_s += 8.0
    with pytest.raises(RestoreUnavailable, match="lease"):
        restore.wait_layer(2)
    assert restore.wait() == 0
    assert not pages[2][4:].any()


@pytest.mark.parametrize("file_id", [0, 1], ids=["memory", "file"])
def test_bytes_that_change_when_the_lease_ends_are_not_usable(tmp_path, movers, file_id):
    """The copy itself runs while the lease ends: what it brought may be anything. One layer: nothing is asked after it."""
    chain = Chain(SpaceSpec("m", "u8", 4, (64 << 10,)), tmp_path, np.random.default_rng(0))
    chain.add(file_id=file_id, before=0, blocks=4, behind=0)
    hit = FakeHit(chain)
    real = movers.memory.submit

    def slow(moves):
        if not hit.lost:
            chain.arena[:] = 0x55
        hit.lost = True
        return real(moves)

    if file_id:
        movers.files.fails = lambda _: setattr(hit, "lost", True) or False
    else:
        movers.memory.submit = slow
    tools = movers.reading(hit)
    pages = [np.zeros((4, 64 << 10), np.uint8)]
    restore = Restore(hit, tools, pages, np.arange(4), 0, 10.0, now_s=hit.clock)
    assert restore.wait() == 0
    with pytest.raises(RestoreUnavailable, match="lease"):
        restore.wait_layer(0)
    hit.close()


def test_progress_keeps_the_lease(chain, hit, movers, pages):
    restore, _ = begin(hit, movers, pages, timeout_s=1000.0)
    for layer in range(3):
        hit.clock.now_s += 4.0
        restore.wait_layer(layer)
    assert hit.renewed == 3
    assert restore.wait() == 14


def test_a_lease_that_is_not_renewed_ends_the_restore(chain, hit, movers, pages):
    hit.renewals = [False]
    hit.clock.now_s += 4.0
    restore, _ = begin(hit, movers, pages)
    assert restore.wait() == 0


def test_a_dead_file_costs_its_own_blocks(chain, hit, movers, pages):
    """All reads of file 2 fail: memory and file 1 are usable."""
    hit.files(1.0)
    dead = hit.opened[2].fd
    real = movers.files.submit

    def submit(moves):
        movers.files.fails = lambda _: any(getattr(move.source, "fd", -1) == dead for move in moves)
        return real(moves)

    movers.files.submit = submit
    restore, tools = begin(hit, movers, pages, extra_bytes=64 << 14)
    assert restore.wait() == 10
    assert all(right(chain, pages, layer, 10) for layer in range(3))
    with pytest.raises(RestoreUnavailable, match="told to fail") as raised:
        restore.wait_layer(0)
    assert raised.value.usable_blocks == 10
    assert tools.staging.stats().windows_out == 0
    assert not hit.reported, "a read that fails is not damage"


def test_a_fault_in_a_later_layer(chain, hit, movers, pages):
    """Layer 0 is there when file 2 begins to fail: the rest of what lies before it still comes to its own layers."""
    hit.files(1.0)
    dead = hit.opened[2].fd
    real = movers.files.submit

    def submit(moves):
        sources = [move.source for move in moves]
        movers.files.fails = lambda _: any(
            getattr(source, "fd", -1) == dead and source.offset >= 4 * (64 << 10) for source in sources
        )
        return real(moves)

    movers.files.submit = submit
    restore, _ = begin(hit, movers, pages)
    restore.wait_layer(0)
    assert restore.wait() == 10
    assert all(right(chain, pages, layer, 10) for layer in range(3))


def test_copies_under_way_at_the_deadline_have_landed(chain, hit, movers, pages):
    """A mover that copies only in `wait`: when the restore returns, none of its copies is still to come."""

    class Lazy:
        def __init__(self, moves):
            self.moves, self.landed = moves, False

        def done(self):
            return self.landed

        def wait(self, timeout_s=None):
            assert timeout_s is None
            if not self.landed:
                real(self.moves).wait()
                self.landed = True

    transfers = []
    real = movers.memory.submit

    def submit(moves):
        hit.clock.now_s += 2.0
        transfers.append(Lazy(moves))
        return transfers[-1]

    movers.memory.submit = submit
    restore, _ = begin(hit, movers, pages, timeout_s=3.0, job_bytes=64 << 10)
    assert restore.wait() == 0
    assert len(transfers) == 2, "a copy began after the deadline"
    assert all(transfer.landed for transfer in transfers)


def test_a_read_that_spans_segments_fails_for_one(tmp_path, movers):
    """Two small segments share a read, gap and all; the file ends in the second: the first is usable."""
    chain = Chain(SpaceSpec("m", "u8", 4, (1,)), tmp_path, np.random.default_rng(0))
    chain.add(file_id=1, before=0, blocks=2, behind=0)
    chain.add(file_id=1, before=0, blocks=2, behind=0)
    os.truncate(chain.path(1), chain.place(2, 0)[1])
    hit = FakeHit(chain)
    pages = [np.zeros((4, 1), np.uint8)]
    assert (
        Restore(hit, movers.reading(hit, extra_bytes=1 << 16), pages, np.arange(4), 0, 10.0, now_s=hit.clock).wait()
        == 2
    )
    assert np.array_equal(pages[0][:2], chain.kv[0][:2])
    assert len(movers.files.submitted[0]) == 1, "the segments did not share a read: this tests nothing"
    hit.close()


def test_a_fault_that_passes_costs_nothing(chain, hit, movers, pages):
    failures = [True]
    movers.files.fails = lambda _: bool(failures) and failures.pop()
    restore, _ = begin(hit, movers, pages)
    assert restore.wait() == 14
    assert all(right(chain, pages, layer, 14) for layer in range(3))


def test_no_descriptors_leaves_what_is_in_memory(chain, hit, movers, pages):
    def refuse(timeout_s):
        raise Unavailable("no descriptors")

    hit.files = refuse
    restore, _ = begin(hit, movers, pages)
    assert restore.wait() == 4
    assert all(right(chain, pages, layer, 4) for layer in range(3))


def test_no_arena_leaves_nothing_behind_it(chain, hit, movers, pages):
    def refuse(timeout_s):
        raise Unavailable("no arena")

    hit.arena = refuse
    restore, _ = begin(hit, movers, pages)
    assert restore.wait() == 0
    assert begin(hit, movers, pages, first=4)[0].wait() == 14


def test_an_arena_that_comes_after_the_deadline_is_not_copied_from(chain, hit, movers, pages):
    real = hit.arena

    def slow(timeout_s):
        hit.clock.now_s += timeout_s
        return real(timeout_s)

    hit.arena = slow
    restore, _ = begin(hit, movers, pages, timeout_s=1.0)
    assert restore.wait() == 0
    assert not any(page.any() for page in pages)


def test_a_run_outside_the_arena_is_no_crash(chain, hit, movers, pages):
    bad = Run(Address.of(Medium.MEMORY, 1, 1 << 40), 4, 0, 4, 1 << 20, 0, 0)
    hit.runs = (bad, *hit.runs[1:])
    assert begin(hit, movers, pages)[0].wait() == 0


def test_a_taken_window_makes_reads_wait(chain, hit, movers, pages):
    restore, tools = begin(hit, movers, pages)
    window = tools.staging.open_window(0)
    results = []
    waiting = threading.Thread(target=lambda: results.append(restore.wait()))
    waiting.start()
    while not tools.staging.stats().waits:
        pass
    assert not movers.files.submitted
    window.close()
    waiting.join(5)
    assert results == [14]


def test_staging_that_never_comes_is_the_deadline(chain, hit, movers, pages):
    tools = movers.reading(hit)
    tools.staging.open_window(0)
    restore = Restore(hit, tools, pages, np.arange(14), 0, 0.05, now_s=time_from(lambda: tools.staging.stats().waits))
    hit.lease._now_s = lambda: 100.0
    assert restore.wait() == 0
    assert right(chain, pages, 0, 4), "memory did not wait for staging"


def test_damage_is_reported_and_cut_off(chain, hit, movers, pages):
    hit.verify = True
    chain.flip(11, 1)
    restore, _ = begin(hit, movers, pages)
    with pytest.raises(RestoreCorrupt) as raised:
        restore.wait_layer(1)
    assert raised.value.usable_blocks == 10
    assert all(right(chain, pages, layer, 10) for layer in range(3))
    assert set(hit.reported) == {int(hit.runs[2].segment)}


def test_another_segment_is_told_by_its_footer(chain, hit, movers, pages):
    """Whole and undamaged, but of other keys."""
    hit.verify = True
    hit.keys = hit.keys.copy()
    hit.keys[10:] ^= 1
    assert begin(hit, movers, pages)[0].wait() == 10
    assert set(hit.reported) == {int(hit.runs[2].segment)}


def test_a_file_refused_by_its_footer_takes_no_window_along(tmp_path, movers):
    chain = Chain(SPEC, tmp_path, np.random.default_rng(0))
    chain.add(file_id=1, before=0, blocks=4, behind=0)
    hit = FakeHit(chain, verify=True)
    hit.keys = hit.keys ^ 1
    tools = movers.reading(hit)
    pages = [np.zeros((4, 64 << 10), np.uint8) for _ in range(3)]
    assert Restore(hit, tools, pages, np.arange(4), 0, 10.0, now_s=hit.clock).wait() == 0
    assert tools.staging.stats().windows_out == 0
    hit.close()


def test_nothing_is_called_damaged_without_a_lease(chain, hit, movers, pages):
    hit.verify = True
    chain.flip(0, 0)
    real = hit.arena

    def arena(timeout_s):
        hit.lost = True
        return real(timeout_s)

    hit.arena = arena
    assert begin(hit, movers, pages)[0].wait() == 0
    assert not hit.reported


def test_first_block_and_short_slots(chain, hit, movers, pages):
    restore, _ = begin(hit, movers, pages, first=3, slots=np.arange(7))
    assert restore.wait() == 7
    for layer in range(3):
        assert not pages[layer][:3].any()
        assert not pages[layer][7:].any()
        assert np.array_equal(pages[layer][3:7], chain.kv[layer][3:7])
    assert begin(hit, movers, pages, first=14)[0].wait() == 14
    assert begin(hit, movers, pages, first=9, slots=[1, 2])[0].wait() == 9


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"target": 2}, "one a layer"),
        ({"slots": [0] * 14}, "twice"),
        ({"slots": np.arange(14) + 1}, "slots reach"),
        ({"slots": np.arange(14) - 1}, "slots reach"),
        ({"slots": np.arange(14.0)}, "integers"),
        ({"first": 15}, "first_block"),
        ({"first": -1}, "first_block"),
        ({"short": True}, "layer 2 of the target"),
        ({"few": True}, "layer 1 of the target has 13 slots"),
        ({"frozen": True}, "read-only"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_fit(hit, movers, pages, change, match):
    target = pages[: change.get("target", 3)]
    if "short" in change:
        target[2] = target[2][:, 1:]
    if "few" in change:
        target[1] = target[1][:13]
    if "frozen" in change:
        target[1].flags.writeable = False
    with pytest.raises(ValueError, match=match):
        begin(hit, movers, target, slots=change.get("slots"), first=change.get("first", 0))


def test_there_is_no_such_layer(hit, movers, pages):
    restore, _ = begin(hit, movers, pages)
    for layer in (-1, 3):
        with pytest.raises(ValueError, match="layer"):
            restore.wait_layer(layer)


def test_closed_early(chain, hit, movers, pages):
    restore, tools = begin(hit, movers, pages)
    with restore:
        restore.wait_layer(0)
    restore.close()
    assert restore.wait() <= 4, "no block of files has all its layers"
    with pytest.raises(RestoreUnavailable, match="closed"):
        restore.wait_layer(2)
    while restore.moving():
        pass
    with tools.staging.open_window(1.0):
        pass


@pytest.mark.parametrize(("ending_bytes", "layers_left"), [(0, 0), (10 * (64 << 10), 1), (1 << 30, 2)])
def test_it_says_once_when_little_is_left_to_read(hit, movers, pages, monkeypatch, ending_bytes, layers_left):
    """A layer a buffer, two buffers: the next restore begins when so many bytes have not landed, and all are under way."""
    monkeypatch.setattr(file_path, "ENDING_BYTES", ending_bytes)
    said = []
    movers.files.open.set()
    extra_bytes = 10 * (64 << 10) - (68 << 10)
    ending = lambda: said.append(restore._files.layers_done)  # noqa: E731
    restore, _ = begin(hit, movers, pages, ending=ending, extra_bytes=extra_bytes)
    for layer in range(3):
        restore.wait_layer(layer)
    assert restore.wait() == 14
    # The third layer is asked for when the first is scattered, and that is seen after the next step.
    assert [3 - layers_left <= done <= max(2, 3 - layers_left) for done in said] == [True]


def test_what_is_all_in_memory_leaves_the_disk_alone(hit, movers, pages):
    said = []
    restore, _ = begin(hit, movers, pages, slots=np.arange(4), ending=lambda: said.append(1))
    assert restore.wait() == 4
    assert said == [1]
