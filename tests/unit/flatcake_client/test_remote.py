"""A hit that goes on at another node: joined with this node's blocks, and lost without them."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hits import FakeHit, Movers
from images import FAR, Chain
from waiting import until

from flatcake_client.hit import _sources
from flatcake_client.lease import Lease
from flatcake_client.progress import CLOSED
from flatcake_client.records import Found, RemoteNode, Run
from flatcake_client.restore import Restore, RestoreUnavailable
from flatcake_client.rpc import _readable
from flatcake_transport.address import Address, Medium
from flatcake_transport.remote import RemoteMemory
from flatcake_transport.space import SpaceSpec

SPEC = SpaceSpec("m", "u8", 4, (64 << 10, 8 << 10, 64 << 10))


@pytest.fixture
def movers():
    made = Movers()
    yield made
    made.close()


@pytest.fixture
def chain(tmp_path):
    """Blocks 0..3 in memory, 4..7 in a file, 8..10 and 11..15 in two segments of another node's memory."""
    made = Chain(SPEC, tmp_path, np.random.default_rng(0))
    made.add(file_id=0, before=0, blocks=4, behind=0)
    made.add(file_id=1, before=0, blocks=4, behind=0)
    made.add(file_id=FAR, before=1, blocks=3, behind=2)
    made.add(file_id=FAR, before=0, blocks=5, behind=0)
    return made


@pytest.fixture(params=[False, True], ids=["as it is", "verified"])
def hit(chain, request):
    made = FakeHit(chain, verify=request.param)
    yield made
    made.close()


def begin(hit, movers):
    tools = movers.reading(hit)
    pages = [np.zeros((16, size), np.uint8) for size in SPEC.plane_bytes]
    return Restore(hit, tools, pages, np.arange(16), 0, 10.0, now_s=hit.clock), pages


def in_place(hit, pages, blocks):
    return all(np.array_equal(pages[layer][:blocks], hit.chain.kv[layer][:blocks]) for layer in range(3))


def test_blocks_of_both_nodes_are_joined(hit, movers):
    restore, pages = begin(hit, movers)
    for layer in range(3):
        restore.wait_layer(layer)
        assert np.array_equal(pages[layer], hit.chain.kv[layer])
    assert restore.wait() == 16
    assert restore.stats.bytes_by_medium == {"memory": 12 * sum(SPEC.plane_bytes), "ssd": 4 * sum(SPEC.plane_bytes)}
    assert hit.remote[0].tools.staging.stats().windows_out == 0


def test_a_peer_that_dies_costs_its_blocks_only(hit, movers):
    restore, pages = begin(hit, movers)
    hit.remote[0].mover.dead = True
    assert restore.wait() == 8
    assert in_place(hit, pages, 8)
    with pytest.raises(RestoreUnavailable, match="peer is dead") as raised:
        restore.wait_layer(2)
    assert raised.value.usable_blocks == 8
    assert not hit.reported
    assert hit.remote[0].tools.staging.stats().windows_out == 0


def test_the_end_of_the_owners_lease_costs_its_blocks_only(hit, movers):
    restore, pages = begin(hit, movers)
    hit.remote[0].lost = True
    assert restore.wait() == 8
    assert in_place(hit, pages, 8)
    with pytest.raises(RestoreUnavailable, match="lease"):
        restore.wait_layer(0)


@pytest.mark.parametrize(("closed", "said"), [(True, CLOSED), (False, "lease on the hit has ended")])
def test_the_end_of_our_lease_is_not_told_as_that_of_the_owners(hit, movers, closed, said):
    """Which hangs on ours, and ends with it."""
    restore, _ = begin(hit, movers)
    hit.remote[0].lease = restore._remote[0]._lease = Lease(
        8, 8.0, hit.clock(), lambda *_: True, lambda: not hit.lease.alive(), now_s=hit.clock
    )
    hit.lease.end()
    if closed:
        restore._closing.set()  # as `close` does before the one who waits lets go of the lock
    with pytest.raises(RestoreUnavailable, match=said):
        restore.wait_layer(0)


def test_bytes_that_change_as_the_owners_lease_ends_are_not_usable(hit, movers):
    restore, _ = begin(hit, movers)
    far, submit = hit.remote[0], hit.remote[0].mover.submit

    def late(moves):
        hit.chain.far_arena[:] = 0x55
        far.lost = True
        return submit(moves)

    far.mover.submit = late
    assert restore.wait() == 8


def test_the_owners_lease_is_kept_by_progress(hit, movers):
    restore, _ = begin(hit, movers)
    hit.remote[0].lease.keep = lambda timeout_s: kept.append(timeout_s)
    kept: list[float] = []
    assert restore.wait() == 16
    assert kept


def test_a_node_that_serves_no_memory_is_a_shorter_hit(hit, movers):
    restore, _ = begin(hit, movers)
    assert hit.remote[0].medium is Medium.MEMORY
    restore._remote[0]._files_of = lambda timeout_s: {}
    assert restore.wait() == 8


@pytest.mark.parametrize(("theirs_s", "ours_s"), [(30.0, 10.0), (10.0, 30.0)])
def test_an_owner_s_lease_is_counted_on_for_no_longer_than_ours(theirs_s, ours_s):
    """It hangs on ours: when that lapses, the daemon here gives it back."""
    told: list[float] = []
    client: Any = SimpleNamespace(tools=SimpleNamespace(remote=told.append), timeout_s=1.0)
    connection: Any = SimpleNamespace(
        welcome=SimpleNamespace(lease_ttl_s=ours_s, peer_timeout_s=7.0), lost=lambda: False
    )
    far = RemoteNode(3, 5, theirs_s, RemoteMemory(b"w", b"k", 0, 4096), verify=True)
    asked_s = time.monotonic()
    for since_s, alive in ((5.0, True), (10.5, False)):
        ours = Lease(7, ours_s, asked_s - since_s, lambda *_: True, connection.lost)
        (source,) = _sources(client, Found((), 7, (far,)), connection, asked_s - since_s, ours)
        assert source.lease.alive() == alive
        ours.end()
        assert not source.lease.alive(), "given back: its descriptors are closed, and their numbers may be other files"
    assert told == [7.0, 7.0], "silence is judged as the node says, not as the caller hurries"


@pytest.mark.parametrize("held", ["near", "far"])
def test_who_waits_for_one_staging_gives_back_the_other(hit, movers, held):
    """Else two restores, each with the window that the other one wants, would wait for each other until their deadlines."""
    tools = movers.reading(hit)
    near, far = tools.staging, hit.remote[0].tools.staging
    pages = [np.zeros((16, size), np.uint8) for size in SPEC.plane_bytes]
    restore, usable = Restore(hit, tools, pages, np.arange(16), 0, 60.0, now_s=hit.clock), []
    mine, theirs = (near, far) if held == "near" else (far, near)
    thread = threading.Thread(target=lambda: usable.append(restore.wait()))
    with mine.open_window(1.0):
        thread.start()
        until(lambda: theirs.stats().windows_out == 1)
        with theirs.open_window(10.0):
            assert not usable
    thread.join(20)
    assert usable == [16]
    assert in_place(hit, pages, 16)
    assert near.stats().windows_out == far.stats().windows_out == 0


def test_a_run_beyond_what_its_node_serves_is_no_part_of_a_hit():
    """It would be a caller's error to the mover, and raised in the engine."""
    node = RemoteNode(3, 1, 8.0, RemoteMemory(b"w", b"k", 0, 8192), verify=True, exported=frozenset({5}))

    def run(medium: Medium, offset: int, file_id: int = 0) -> Run:
        return Run(Address.of(medium, 3, offset), 1, 0, 1, 4096, file_id, 0)

    assert _readable(run(Medium.MEMORY, 4096), node)
    assert not _readable(run(Medium.MEMORY, 8192), node)
    assert not _readable(run(Medium.MEMORY, 0), None)
    assert _readable(run(Medium.SSD, 1 << 40, 5), node)
    assert not _readable(run(Medium.SSD, 1 << 40, 6), node)
