"""Ranges of session files for peers: only those of a peer's lease, within bounds, and given back in every case."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest
from core import Core, Yield, chain, suspect
from opened import open_below
from waiting import until

from flatcake_server.cluster.doubts import WAITING_MAX, Doubts
from flatcake_server.cluster.serving import STAGED_S, FileServer
from flatcake_server.law import differs
from flatcake_server.records import Suspect
from flatcake_transport.errors import Overloaded, Unavailable
from flatcake_transport.remote import RemoteMemory
from flatcake_transport.served import RANGES_MAX, STAGED_BYTES_MAX, FileRange
from flatcake_transport.space import SpaceSpec

SPEC = SpaceSpec("one", "u8", 16, (4096, 8192))
PATH = [1, 2, 3]
PAGE = 4096


@pytest.fixture
def core(tmp_path):
    node = Core(tmp_path)
    node.open(SPEC)
    node.put(SPEC, PATH)
    yield node
    node.close()


class Served:
    """A server with two slots, and a peer (client 1) that has a lease on all of it."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.bounce = np.zeros(2 * STAGED_BYTES_MAX, np.uint8)
        self.memory = RemoteMemory(b"worker", b"key", 7, len(self.bounce))
        self.now_s = 50.0
        self.server = FileServer(core.store, self.bounce, lambda: self.memory, now_s=lambda: self.now_s)
        self.peer = core.clients[1]
        found = core.store.lookup(self.peer, SPEC.fingerprint, chain(SPEC, PATH), pin=True)
        self.lease, self.file = found.lease_id, found.runs[0].segment.file_id
        path = core.node.disks[1].files.path_of(self.file)
        self.files, self.content = path.parent, path.read_bytes()

    def stage(self, *ranges: FileRange, peer: int = 0, lease: int = 0, timeout_s: float = 5.0):
        asked = ranges or (FileRange(self.file, 0, PAGE),)
        return self.core.do(self.server.stage(peer or self.peer, lease or self.lease, asked, timeout_s))


@pytest.fixture
def served(core):
    made = Served(core)
    yield made
    core.loop.run_until_complete(made.server.close())


def test_ranges_lie_one_behind_the_other(served):
    before = open_below(served.files)
    reply = served.stage(FileRange(served.file, 2 * PAGE, PAGE), FileRange(served.file, 0, 2 * PAGE))
    bytes_ = served.bounce[reply.offset :][: 3 * PAGE].tobytes()
    assert bytes_ == served.content[2 * PAGE : 3 * PAGE] + served.content[: 2 * PAGE]
    assert reply.memory == served.memory.sealed()
    assert 0 < reply.ttl_ms < STAGED_S * 1000
    assert len(served.server) == 1
    served.server.unstage(served.peer, [reply.staged_id, 99])
    served.server.unstage(served.peer, [reply.staged_id])
    assert len(served.server) == 0
    assert served.server.counts == {"staged": 1, "staged_bytes": 3 * PAGE}
    assert open_below(served.files) == before


def test_only_files_of_the_peers_own_lease(served):
    for wrong in (
        {"peer": served.core.clients[0]},
        {"lease": served.lease + 1},
    ):
        with pytest.raises(LookupError):
            served.stage(**wrong)
    with pytest.raises(LookupError, match="none of lease"):
        served.stage(FileRange(served.file + 1, 0, PAGE))
    served.core.store.release(served.peer, [served.lease])
    with pytest.raises(LookupError, match="ended"):
        served.stage()
    assert served.server.counts["staging_failures"] == 4


def test_what_is_no_range_is_refused(served):
    size = STAGED_BYTES_MAX // 2
    for ranges in (
        [FileRange(served.file, 1, PAGE)],
        [FileRange(served.file, 0, PAGE + 1)],
        [FileRange(served.file, 0, 0)],
        [FileRange(served.file, 0, size)] * 3,
        [FileRange(served.file, 0, PAGE)] * (RANGES_MAX + 1),
    ):
        with pytest.raises(ValueError):
            served.stage(*ranges)
    with pytest.raises(ValueError):
        served.core.do(served.server.stage(served.peer, served.lease, [], 5.0))


def test_beyond_the_file_there_is_nothing(served):
    before = open_below(served.files)
    with pytest.raises(Unavailable, match="not read"):
        served.stage(FileRange(served.file, 1 << 40, PAGE))
    assert open_below(served.files) == before
    assert len(served.server) == 0


def test_slots_are_bounded_and_come_back_with_the_lease(served):
    first, _ = served.stage(), served.stage()
    with pytest.raises(Overloaded):
        served.stage(timeout_s=0.01)
    served.server.unstage(served.core.clients[0], [first.staged_id])
    assert len(served.server) == 2, "another peer's word counts nothing"
    served.core.store.release(served.peer, [served.lease])
    served.server.sweep()
    assert len(served.server) == 0
    assert served.server.counts["staging_full"] == 1


def test_a_staging_that_nobody_gives_back_is_taken_back(served):
    served.stage()
    served.now_s += STAGED_S / 2
    served.server.sweep()
    assert len(served.server) == 1
    served.now_s += STAGED_S / 2
    served.server.sweep()
    assert len(served.server) == 0


def test_an_asker_that_gives_up_holds_no_slot(served):
    async def give_up() -> None:
        for _ in range(5):
            work = asyncio.ensure_future(
                served.server.stage(served.peer, served.lease, [FileRange(served.file, 0, PAGE)], 5.0)
            )
            await Yield()
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        await asyncio.get_running_loop().run_in_executor(None, until, lambda: served.server._serving.slots_free == 2)

    served.core.do(give_up())
    assert len(served.server) == 0


def test_a_lease_that_ends_while_it_is_read_stages_nothing(served):
    real = served.server._read

    def slow(*arguments):
        staged = real(*arguments)
        served.core.store.release(served.peer, [served.lease])
        return staged

    served.server._read = slow
    with pytest.raises(LookupError, match="ended"):
        served.stage()
    assert served.server._serving.slots_free == 2


def damage(core, address: int) -> None:
    segment = core.store.catalog.segments.get(address)
    with core.node.disks[1].files.path_of(segment.file_id).open("r+b") as file:
        file.seek(segment.file_offset)
        byte = file.read(1)[0]
        file.seek(segment.file_offset)
        file.write(bytes([byte ^ 0xFF]))


def doubted(core, *segments: Suspect) -> Counter[str]:
    counts: Counter[str] = Counter()

    async def work() -> None:
        doubts = Doubts(core.store, lambda address: differs(core.store, core.node.arena, address), counts)
        doubts.add(segments)
        if doubts._work is not None:
            await doubts._work
        await doubts.close()

    core.do(work())
    return counts


def test_a_peers_doubt_is_looked_into(core):
    (segment,) = core.store.catalog.segments
    meant = suspect(segment)
    assert doubted(core, meant, meant, Suspect(12345, 1)) == {"doubts": 1, "doubts_refuted": 1}
    assert core.hit(SPEC, PATH)[0] == len(PATH)
    damage(core, segment.address)
    assert doubted(core, Suspect(segment.address, segment.generation - 1)) == {}, "of what stood there before"
    assert doubted(core, meant) == {"doubts": 1}
    assert core.store.counts["corrupt_segments"] == 1
    keys = chain(SPEC, PATH)
    assert core.store.lookup(core.clients[0], SPEC.fingerprint, keys, pin=False).runs == []


def test_doubts_of_a_disk_that_cannot_be_read_lose_nothing(core):
    (segment,) = core.store.catalog.segments

    async def broken(address: int) -> bool:
        raise Unavailable("the disk hangs")

    counts: Counter[str] = Counter()

    async def work() -> None:
        doubts = Doubts(core.store, broken, counts)
        doubts.add([suspect(segment)] * (WAITING_MAX + 1))
        await doubts._work

    core.do(work())
    assert counts == {"doubts": 1}
    assert core.hit(SPEC, PATH)[0] == len(PATH)
