"""Copies of other nodes' prefixes in a node's memory: free room only, a share of it, and reclaimed as all else."""

from __future__ import annotations

import pytest
from core import ONE, Core

from flatcake_server.placement import Hints, Policy, place
from flatcake_transport.address import Medium
from flatcake_transport.errors import Overloaded
from flatcake_transport.space import SpaceSpec

TWO = SpaceSpec("two", "u8", 16, (4096,), shards=2)
PAGES = 64  # of memory; half of them for copies, of 3 blocks and a footer each


@pytest.fixture
def core(tmp_path):
    node = Core(tmp_path, memory_bytes=PAGES << 12, copy_after_hits=1, copy_memory_share=0.5)
    node.open(ONE)
    node.open(TWO)
    yield node
    node.check(data=True)
    node.check_rest()
    node.close()


def copies(core):
    return core.store.catalog.copied_bytes >> 12


def test_a_copy_is_a_shared_prefix_in_memory(core):
    turn = core.put(ONE, [1, 2, 3], copy=True, session="")
    assert [(part.reason, part.address.medium) for part in turn.parts] == [("copied", Medium.MEMORY)]
    assert core.hit(ONE, [1, 2, 3])[0] == 3
    session = core.store.catalog.sessions[next(iter(core.store.catalog.segments)).session_no]
    assert session.shared
    assert copies(core) == 4
    assert core.do(core.begin(ONE, [1, 2, 3], copy=True)) is None, "it is there"
    core.put(ONE, [1, 2, 3, 4], session="")
    assert core.hit(ONE, [1, 2, 3, 4])[0] == 4


def test_a_copy_that_is_given_up_takes_no_room(core):
    for _ in range(20):
        core.do(core.abort(core.do(core.begin(ONE, [1, 2, 3], copy=True, session=""))))
    assert copies(core) == 0
    assert core.store.reserver.copy_room_bytes() == PAGES << 11


def test_their_share_holds_at_every_instant(core):
    begun = [core.do(core.begin(ONE, [first, 1, 2], copy=True, session="")) for first in range(8)]
    with pytest.raises(Overloaded, match="no room"):
        core.do(core.begin(ONE, [9, 1, 2], copy=True, session=""))
    for turn in begun:
        core.do(core.commit(turn))
    assert copies(core) == PAGES // 2
    with pytest.raises(Overloaded, match="no room"):
        core.do(core.begin(ONE, [9, 1, 2], copy=True, session=""))
    assert core.store.reserver.copies_refused == 2
    core.put(ONE, [9, 1, 2], share_counts=[2] * 3)
    assert core.hit(ONE, [9, 1, 2])[0] == 3, "what engines store here has the rest"


def test_a_copy_displaces_nothing_and_does_not_go_to_disk(core):
    for first in range(14):  # 56 pages of 64
        core.put(ONE, [first, 1, 2], share_counts=[2] * 3, session=f"s{first}")
    core.put(ONE, [20, 1, 2], copy=True, session="")  # up to the high watermark
    with pytest.raises(Overloaded, match="no room"):
        core.do(core.begin(ONE, [21, 1, 2], copy=True, session=""))
    assert all(core.hit(ONE, [first, 1, 2])[0] == 3 for first in range(14))
    assert sum(core.node.room.reclaimed.values()) == 0


@pytest.mark.parametrize("bound", [{"sessions_max": 2}, {"index_blocks_max": 7}])
def test_nor_does_it_take_another_one_s_place_in_the_tables(tmp_path, bound):
    node = Core(tmp_path, copy_after_hits=1, copy_memory_share=0.5, **bound)
    node.open(ONE)
    for name in ("a", "b"):
        node.put(ONE, [ord(name), 1, 2], session=name)
    with pytest.raises(Overloaded, match="stored"):
        node.do(node.begin(ONE, [1, 2], copy=True, session=""))
    assert all(node.hit(ONE, [ord(name), 1, 2])[0] == 3 for name in ("a", "b"))
    node.check_rest()
    node.close()


def test_copies_are_reclaimed_as_all_else(core):
    for first in range(8):
        core.put(ONE, [first, 1, 2], copy=True, session="")
    for first in range(20, 40):
        core.put(ONE, [first, 1, 2], share_counts=[2] * 3, session=f"s{first}")
    assert copies(core) < PAGES // 2
    assert core.hit(ONE, [0, 1, 2])[0] == 0, "the least recently used went first"


def test_a_copy_is_written_once_at_a_time_and_by_all_shards_together(core):
    turn = core.do(core.begin(TWO, [1, 2], copy=True, session=""))
    assert core.do(core.begin(TWO, [1, 2], copy=True, session="", shard=1, client=1)) is turn
    with pytest.raises(Overloaded, match="being written"):
        core.do(core.begin(TWO, [1, 2], copy=True, session="", client=2))
    assert core.do(core.begin(TWO, [1, 2], session="", client=2)) is not turn, "an engine's own turn is another one"
    assert core.do(core.commit(turn)) is False
    assert core.do(core.commit(turn, shard=1, client=1)) is True
    core.do(core.store.client_gone(core.clients[2]))


def test_without_the_option_a_copy_is_refused(tmp_path):
    node = Core(tmp_path)
    node.open(ONE)
    with pytest.raises(Overloaded, match="no room"):
        node.do(node.begin(ONE, [1], copy=True))
    node.check_rest()
    node.close()


def test_a_copy_goes_to_memory_whatever_else_is_known_of_it():
    for hints in (Hints(1, 10, copy=True), Hints(9, 10**6, 10**4, [1, 1], copy=True)):
        assert [(part.blocks, part.medium, part.reason) for part in place(hints, Policy(), 2)] == [
            (2, Medium.MEMORY, "copied")
        ]
