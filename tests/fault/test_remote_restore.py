"""Restores of another node's memory: right bytes, or the usable prefix in time, whatever happens to that node."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hits import FakeHit, Movers
from images import Chain
from ucx_peer import OPTIONS, PATIENT_S, PEER_TIMEOUT_S, ucx_here
from waiting import pause, until

from flatcake_client.lease import Lease
from flatcake_client.records import Run
from flatcake_client.remote_path import RemoteArena
from flatcake_client.restore import Restore, RestoreCorrupt, RestoreUnavailable
from flatcake_client.tools import Tools
from flatcake_transport.errors import Unavailable
from flatcake_transport.movers.ucx import UcxMover
from flatcake_transport.movers.ucx_process import UcxProcess
from flatcake_transport.space import SpaceSpec

NODE = 3  # of the images
PLANE_BYTES = 64 << 10
SPEC = SpaceSpec("m", "u8", 4, (PLANE_BYTES,) * 3)
BLOCKS = 4 + 20


class Node:
    """Blocks 0..3 of a chain in a file here, 4..23 in the memory of a node that a process serves."""

    def __init__(self, root: Path, *, verify: bool) -> None:
        self.chain = Chain(SPEC, root, np.random.default_rng(0))
        self.chain.add(file_id=1, before=1, blocks=4, behind=0)
        self.chain.add(file_id=0, before=3, blocks=12, behind=1)
        self.chain.add(file_id=0, before=0, blocks=8, behind=0)
        size = len(self.chain.arena)
        self.fd = os.memfd_create("arena")
        os.ftruncate(self.fd, size)
        self.arena = np.frombuffer(mmap.mmap(self.fd, size), np.uint8)
        self.arena[:] = self.chain.arena
        self.process = UcxProcess([(self.fd, size)], options=OPTIONS)
        self.movers = Movers()
        self.tools = Tools(1 << 20, 8 << 20, buffers=4)
        self.tools.fit(SPEC)
        self.hit = FakeHit(self.chain, verify=verify)
        self.reported: list[Run] = []
        self.leased = True
        self.pages = [np.zeros((BLOCKS, PLANE_BYTES), np.uint8) for _ in range(3)]

    def restore(self, peer_timeout_s: float = PATIENT_S, timeout_s: float = 60.0) -> Restore:
        lease = Lease(9, 1e6, 0.0, lambda *_: self.leased, lambda: not self.leased)
        source = RemoteArena(
            NODE, self.process.memories()[0], lease, self.tools.remote(peer_timeout_s),
            self.hit.verify, self.reported.extend,
        )  # fmt: skip
        self.hit.remote = [source]
        return Restore(self.hit, self.movers.reading(self.hit), self.pages, np.arange(BLOCKS), 0, timeout_s)

    def right(self, blocks: int) -> bool:
        return all(
            np.array_equal(page[:blocks], kv[:blocks]) for page, kv in zip(self.pages, self.chain.kv, strict=True)
        )

    def close(self) -> None:
        self.tools.close()
        self.process.close()
        self.movers.close()
        self.hit.close()
        os.close(self.fd)


@pytest.fixture(params=[False, True], ids=["unchecked", "checked"])
def node(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    ucx_here()
    for name, value in OPTIONS.items():
        monkeypatch.setenv(f"UCX_{name}", value)
    node = Node(tmp_path, verify=request.param)
    yield node
    node.close()


def test_both_nodes_blocks_come_into_their_slots(node: Node) -> None:
    restore = node.restore()
    for layer in range(3):
        restore.wait_layer(layer)
    assert restore.wait() == BLOCKS
    assert node.right(BLOCKS)
    movers, staging = node.tools.stats()
    assert movers["remote"].bytes_moved >= 20 * 3 * PLANE_BYTES
    assert staging["remote reads"].windows_out == 0


def test_damage_there_is_found_and_told(node: Node) -> None:
    node.chain.arena = node.arena  # flip it where it is served
    node.chain.flip(4 + 12 + 2, 1)
    restore = node.restore()
    if not node.hit.verify:  # nobody looked
        assert restore.wait() == BLOCKS
        return
    with pytest.raises(RestoreCorrupt) as caught:
        restore.wait_layer(2)
    assert 4 + 12 <= caught.value.usable_blocks <= 4 + 12 + 2
    assert node.right(caught.value.usable_blocks)
    assert node.reported == [node.chain.runs[2]]


def test_a_stopped_node_costs_its_blocks_and_one_timeout(node: Node) -> None:
    timeout_s = 2 * PEER_TIMEOUT_S
    node.tools.remote(timeout_s)
    os.kill(node.process._child.pid, signal.SIGSTOP)
    restore, started_s = node.restore(), time.monotonic()
    with pytest.raises(RestoreUnavailable) as caught:
        restore.wait_layer(2)
    assert time.monotonic() - started_s < 2 * timeout_s + 1.0, "each retry waited for the same silence"
    assert caught.value.usable_blocks == 4
    assert node.right(4)
    for page in node.pages:
        page[4:] = 0  # other requests' blocks by now
    os.kill(node.process._child.pid, signal.SIGCONT)
    pause(0.2)
    assert not any(page[4:].any() for page in node.pages)
    until(lambda: node.tools.stats()[1]["remote reads"].windows_lingering == 0)


def test_a_node_that_dies_costs_its_blocks(node: Node) -> None:
    restore = node.restore()
    os.kill(node.process._child.pid, signal.SIGKILL)
    with pytest.raises(RestoreUnavailable) as caught:
        restore.wait_layer(2)
    assert caught.value.usable_blocks == 4
    assert node.right(4)


def test_past_the_lease_nothing_there_is_trusted(node: Node) -> None:
    restore = node.restore()
    node.leased = False
    with pytest.raises(RestoreUnavailable, match="lease") as caught:
        restore.wait_layer(2)
    assert caught.value.usable_blocks == 4
    assert node.right(4)


@pytest.mark.parametrize("node", [False], ids=["unchecked"], indirect=True)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_process_that_reads_costs_its_blocks_and_is_replaced(node: Node, how: signal.Signals) -> None:
    mover = node.tools.remote(PEER_TIMEOUT_S).files
    assert isinstance(mover, UcxMover)
    assert node.restore().wait() == BLOCKS
    mover._link._pause_s = 600.0  # the moment ends when the test says so
    reader, began_s = mover.process_id, time.monotonic()
    os.kill(node.process._child.pid, signal.SIGSTOP)  # so that the restore is under way for certain
    restore = node.restore()
    with pytest.raises(RestoreUnavailable):  # its time is over; what it began to read is under way still
        node.restore(timeout_s=0.2).wait_layer(2)
    os.kill(reader, how)
    with pytest.raises(RestoreUnavailable) as caught:
        restore.wait_layer(2)
    assert time.monotonic() - began_s < 2 * PEER_TIMEOUT_S + 1.5
    assert caught.value.usable_blocks == 4
    assert node.right(4)
    assert node.tools.stats()[1]["remote reads"].windows_out == 0
    assert not node.tools.reads_peers, "nobody asks other nodes for a moment"
    mover._link._retry_s = 0.0
    os.kill(node.process._child.pid, signal.SIGCONT)

    def whole() -> (
        bool
    ):  # the node may have to start again what serves it: UCX aborts there when a reader dies in a get
        with contextlib.suppress(Unavailable):
            return node.tools.reads_peers and node.restore().wait() == BLOCKS
        return False

    until(whole)
    assert node.right(BLOCKS)
    assert mover.process_id != reader
