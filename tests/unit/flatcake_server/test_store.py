"""The store's verbs on a node without a wire: what each client gets, what it costs, what is left."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from core import Core, chain

from flatcake_server.clients import StaleClient, UnknownSpace, UnknownTurn
from flatcake_server.handover import Handover
from flatcake_transport.errors import Overloaded, Unavailable
from flatcake_transport.handoff import Request, Verb
from flatcake_transport.space import SpaceSpec

ONE = SpaceSpec("one", "u8", 16, (4096, 8192))
TWO = SpaceSpec("two", "u8", 16, (4096,), shards=2)


@pytest.fixture
def core(tmp_path):
    node = Core(tmp_path)
    node.open(ONE)
    node.open(TWO)
    yield node
    node.check(data=True)
    if not node.store.turns:
        node.check_rest()
    node.close()


def test_a_turn_is_visible_when_it_is_committed(core):
    turn = core.do(core.begin(ONE, [1, 2, 3]))
    assert core.hit(ONE, [1, 2, 3])[0] == 0
    assert core.do(core.commit(turn)) is True
    assert core.hit(ONE, [1, 2, 3])[0] == 3
    assert core.hit(ONE, [1, 2, 9])[0] == 2
    assert core.hit(ONE, [9])[0] == 0
    assert core.do(core.begin(ONE, [1, 2])) is None, "all of it is stored"


def test_only_what_is_missing_is_stored(core):
    core.put(ONE, [1, 2])
    turn = core.put(ONE, [1, 2, 3, 4])
    assert [(part.plan.first_block, part.plan.blocks) for part in turn.parts] == [(2, 2)]
    assert core.hit(ONE, [1, 2, 3, 4])[0] == 4
    assert core.store.catalog.find(ONE.fingerprint, "s").turns == 2


def test_another_space_is_a_miss(core):
    core.put(ONE, [1, 2])
    keys = chain(ONE, [1, 2])
    assert core.store.lookup(core.clients[0], TWO.fingerprint, keys, pin=True).runs == []
    with pytest.raises(UnknownSpace):
        core.store.lookup(core.clients[0], SpaceSpec("no", "u8", 1, (1,)).fingerprint, keys, pin=True)


def test_a_turn_has_the_greatest_number_there_is(core):
    """A footer has 32 bits for it: a further turn without a number of its own goes by the same."""
    core.put(ONE, [1], turn=(1 << 32) - 1)
    core.put(ONE, [1, 2])
    core.restart()
    core.open(ONE)
    core.open(TWO)
    core.put(ONE, [1, 2, 3])
    assert core.hit(ONE, [1, 2, 3])[0] == 3
    assert {segment.turn for segment in core.store.catalog.segments} == {(1 << 32) - 1}


def test_two_turns_of_the_same_keys_leave_one_copy(core):
    turns = [core.do(core.begin(ONE, [1, 2, 3], client=client, session=f"s{client}")) for client in (0, 1)]
    used = core.node.disks[1].used_bytes
    core.run(*(core.commit(turn, client=client) for client, turn in enumerate(turns)))
    assert core.hit(ONE, [1, 2, 3])[0] == 3
    assert len(core.store.catalog.segments) == 1
    assert core.store.committer.duplicate_blocks == 3
    assert core.node.disks[1].used_bytes == used // 2
    assert len(core.store.catalog) == 1


def test_a_turn_is_its_writers_alone(core):
    turn = core.do(core.begin(ONE, [1]))
    other_shard = core.store.commit_turn(core.clients[0], turn.turn_id, 1, [])
    for work in (core.commit(turn, client=1), core.abort(turn, client=1), other_shard):
        with pytest.raises(UnknownTurn):
            core.do(work)
    core.do(core.abort(turn))
    with pytest.raises(UnknownTurn):
        core.do(core.abort(turn))


def test_an_aborted_turn_leaves_nothing(core):
    turn = core.do(core.begin(ONE, [1, 2], share_counts=[2, 1]))
    assert {part.reason for part in turn.parts} == {"shared", "first-turn"}
    core.do(core.abort(turn))
    assert len(core.store.catalog) == 0
    assert core.node.memory.used_bytes == core.node.disks[1].used_bytes == 0


def test_a_client_that_goes_takes_its_turns_and_leases_with_it(core):
    core.put(ONE, [1])
    core.hit(ONE, [1], pin=True)
    core.do(core.begin(ONE, [2]))
    core.do(core.store.client_gone(core.clients[0]))
    assert not core.store.turns
    assert core.store.leases.stats().leases == 0
    with pytest.raises(StaleClient):
        core.store.client(core.clients[0])
    core.do(core.store.client_gone(core.clients[0]))


def test_a_turn_whose_beginning_was_not_heard_of_is_given_back(core):
    for client, call in ((0, 5), (1, 7)):
        core.do(core.begin(ONE, [client], client=client, session=f"s{call}", request_id=call))
    core.do(core.store.abort_unheard(core.clients[0], 7))  # another's call of that name
    core.do(core.store.abort_unheard(core.clients[0], 9))  # one that began nothing
    assert len(core.store.turns) == 2
    core.do(core.store.abort_unheard(core.clients[1], 7))
    (turn,) = core.store.turns.values()
    assert turn.requests == {0: 5}
    core.do(core.store.abort_unheard(core.clients[0], 5))
    core.check_rest()


def test_a_client_that_goes_while_room_is_made_for_it_gets_no_turn(tmp_path):
    """The tables are full; what was its prefix is not what makes room."""
    core = Core(tmp_path, sessions_max=2)
    core.open(ONE)
    core.put(ONE, [1], session="a")
    core.put(ONE, [2], session="b")
    results = core.run(core.begin(ONE, [3], session="c"), core.store.client_gone(core.clients[0]))
    assert isinstance(results[0], StaleClient | UnknownTurn)
    assert not core.store.turns
    core.check()
    core.check_rest()
    core.close()


def test_full_tables_drop_the_least_recently_used_and_never_the_prefix(tmp_path):
    core = Core(tmp_path, sessions_max=3)
    core.open(ONE)
    for number in range(3):
        core.put(ONE, [number], session=f"s{number}")
    core.put(ONE, [0, 5], session="child of s0")
    assert core.hit(ONE, [0, 5])[0] == 2
    assert core.hit(ONE, [1])[0] == 0
    core.check()
    core.close()


@pytest.mark.parametrize("full", [{"sessions_max": 2}, {"index_blocks_max": 2}, {"open_turns_max": 2}])
def test_a_refused_turn_is_counted_once_whatever_is_full(tmp_path, full):
    core = Core(tmp_path, **full)
    core.open(ONE)
    turns = [core.do(core.begin(ONE, [number], session=f"s{number}")) for number in range(2)]
    with pytest.raises(Overloaded, match=f"{next(iter(full))} is"):
        core.do(core.begin(ONE, [3], session="new"))
    assert core.store.counts["turns_refused"] == 1
    core.run(*map(core.abort, turns))
    core.check_rest()
    core.close()


def test_a_full_index_makes_room_as_well(tmp_path):
    core = Core(tmp_path, index_blocks_max=6)
    core.open(ONE)
    for number in range(3):
        core.put(ONE, [number, 0], session=f"s{number}")
    core.put(ONE, [3, 0, 0, 0], session="new")
    assert core.hit(ONE, [3, 0, 0, 0])[0] == 4
    assert len(core.store.catalog.index) <= 6
    with pytest.raises(Overloaded, match="index_blocks_max"):
        core.do(core.begin(ONE, [4] * 7))
    assert core.hit(ONE, [3, 0, 0, 0])[0] == 4, "what cannot fit drops nothing"
    core.check()
    core.close()


def test_bounds_of_spaces_and_turns(tmp_path):
    core = Core(tmp_path, spaces_max=1, open_turns_max=2)
    core.open(TWO)
    core.open(ONE)
    with pytest.raises(ValueError, match="versions differ"):
        core.store.spaces.open(TWO, ONE.fingerprint)
    turns = [core.do(core.begin(ONE, [number])) for number in range(2)]
    with pytest.raises(Overloaded, match="open_turns_max"):
        core.do(core.begin(ONE, [2]))
    core.do(core.abort(turns[0]))
    core.put(ONE, [2])
    core.do(core.abort(turns[1]))
    core.check()
    core.close()


def test_a_shared_head_lives_on_its_own(core):
    turn = core.put(ONE, [1, 2, 3], share_counts=[9, 9, 1])
    assert [(part.session.name[:7], part.address.medium.name) for part in turn.parts] == [
        ("shared/", "MEMORY"),
        ("s", "SSD"),
    ]
    assert core.hit(ONE, [1, 2, 3])[0] == 3
    assert core.node.catalog.order.dependents(turn.parts[0].session.session_no) == 1


def test_sessions_without_a_name_continue_or_fork(core):
    core.put(ONE, [1, 2], session="")
    core.put(ONE, [1, 2, 3], session="")
    assert len(core.store.catalog) == 1
    core.put(ONE, [1, 7], session="")
    assert len(core.store.catalog) == 2
    assert all(session.name.startswith("fork/") for session in core.store.catalog.sessions.values())


def test_ranks_join_one_turn(core):
    turn = core.do(core.begin(TWO, [1, 2], shard=0))
    assert core.do(core.begin(TWO, [1, 2], shard=1, client=1)) is turn
    assert core.do(core.commit(turn, shard=1, client=1)) is False
    assert core.hit(TWO, [1, 2])[0] == 0
    assert core.do(core.commit(turn, shard=0)) is True
    assert core.hit(TWO, [1, 2])[0] == 2


def test_ranks_join_while_room_is_still_being_made(core):
    turns = core.run(core.begin(TWO, [1, 2], shard=0), core.begin(TWO, [1, 2], shard=1, client=1))
    assert turns[0] is turns[1]
    core.do(core.abort(turns[0], shard=0))
    with pytest.raises(Unavailable, match="another shard"):
        core.do(core.commit(turns[0], shard=1, client=1))


def test_a_rank_that_joins_a_turn_that_gets_no_room_is_refused_too(core):
    core.fail("create")
    results = core.run(core.begin(TWO, [1, 2], shard=0), core.begin(TWO, [1, 2], shard=1, client=1))
    assert all(isinstance(result, Unavailable | Overloaded) for result in results)
    assert not core.store.turns


def test_a_rank_that_never_comes_is_waited_for_as_long_as_a_lease(core):
    turn = core.do(core.begin(TWO, [1, 2], shard=0))
    core.do(core.commit(turn, shard=0))
    for _ in range(10):
        core.do(core.store.tick(600.0))
    assert core.store.turns
    core.do(core.store.tick(600.0))
    assert not core.store.turns


def test_a_slow_writer_is_waited_for_for_ever(core):
    turn = core.do(core.begin(ONE, [1, 2]))
    core.now_s += 10**6
    core.do(core.store.tick(600.0))
    core.do(core.commit(turn))
    assert core.hit(ONE, [1, 2])[0] == 2


def test_a_stopping_daemon_finishes_and_begins_nothing(core):
    turn = core.do(core.begin(ONE, [1]))
    core.store.draining = True
    with pytest.raises(Unavailable, match="stopping"):
        core.do(core.begin(ONE, [2]))
    core.do(core.commit(turn))
    assert core.hit(ONE, [1])[0] == 1


def test_one_space_too_many_costs_the_one_used_least_recently_a_second_opening(tmp_path):
    core = Core(tmp_path, spaces_max=2)
    core.open(ONE)
    core.put(ONE, [1, 2])
    core.open(TWO)
    turn = core.do(core.begin(TWO, [1], session="t"))
    core.hit(ONE, [1])
    core.open(replace(ONE, model="three"))
    assert len(core.store.spaces) == 2
    core.hit(ONE, [1])
    with pytest.raises(UnknownSpace):
        core.hit(TWO, [1])
    core.do(core.abort(turn))
    core.open(TWO)
    assert core.hit(TWO, [1])[0] == 0
    with pytest.raises(UnknownSpace):
        core.hit(replace(ONE, model="three"), [1])
    assert core.hit(ONE, [1, 2])[0] == 2
    core.close()


@pytest.mark.parametrize("state", ["there", "gone", "not to be told"])
def test_a_file_that_cannot_be_opened_costs_a_reader_its_blocks_only(core, monkeypatch, state):
    gone = state == "gone"
    path = [1, 2, 3, 4, 5, 6, 7]
    for blocks, session in ((2, "s"), (6, "t"), (7, "u")):
        core.put(ONE, path[:blocks], session=session)
    found, lease = core.hit(ONE, path, pin=True)
    assert found == 7
    handover = Handover(core.store, core.node.arena, core.node.config.handover_path, 0o600, 1)
    first, second, third = core.store.files_of_lease(core.clients[0], lease)
    files = core.node.disks[1].files
    real = files.open_read
    if gone:
        files.path_of(second).unlink()

    def open_read(file_id):
        if file_id == second and not gone:
            raise Unavailable("the test broke the open")
        return real(file_id)

    def stat(path, **options):
        if path == files.path_of(second):
            raise OSError(errno.EIO, "the test broke it")
        return real_stat(path, **options)

    monkeypatch.setattr(files, "open_read", open_read)
    real_stat = Path.stat
    if state == "not to be told":
        monkeypatch.setattr(Path, "stat", stat)

    def ask(start):
        reply, fds = core.do(handover._answer(core.clients[0], Request(Verb.LEASE, lease, start)))
        for fd in fds:
            os.close(fd)
        assert len(fds) == len(reply.file_ids)
        return reply.file_ids, reply.more

    assert ask(0) == ((first, third), False)
    assert ask(1) == ((third,), False)
    monkeypatch.setattr(Path, "stat", real_stat)
    assert core.store.counts["files_unopened"] == 1, "it is tried once a lease"
    assert core.store.lookup(core.clients[0], ONE.fingerprint, chain(ONE, path), pin=False).runs[
        -1
    ].segment.file_id == (first if gone else third)
    if gone:
        core.put(ONE, path, session="t")
        assert core.hit(ONE, path)[0] == 7


def test_a_lease_has_its_files_and_ends(core):
    core.put(ONE, [1, 2])
    _, lease = core.hit(ONE, [1, 2], pin=True)
    assert len(core.store.files_of_lease(core.clients[0], lease)) == 1
    with pytest.raises(LookupError):
        core.store.files_of_lease(core.clients[1], lease)
    core.now_s += 11
    core.do(core.store.tick(600.0))
    with pytest.raises(LookupError, match="has ended"):
        core.store.files_of_lease(core.clients[0], lease)
    assert core.store.renew(core.clients[0], [lease]) == []


def test_segments_keep_their_own_keys_only(core):
    """A view into the request would keep every chain that was ever sent."""
    core.put(ONE, [1, 2, 3])
    turn = core.put(ONE, [1, 2, 3, 4])
    assert turn.parts[0].keys.base is None


def test_a_failed_write_seals_the_file(core):
    core.put(ONE, [1] * 8)
    turn = core.do(core.begin(ONE, [1] * 9))
    core.do(core.abort(turn, failure="EIO"))
    core.put(ONE, [1] * 9)
    session = core.store.catalog.find(ONE.fingerprint, "s")
    assert [file.sealed for file in session.files][:-1].count(True) >= 1
    assert core.hit(ONE, [1] * 9)[0] == 9
