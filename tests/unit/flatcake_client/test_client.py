"""The client against a daemon that stalls, refuses, restarts and dies: misses and clear errors, within the deadline."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from fake_daemon import FakeDaemon
from kv import Kv
from waiting import until

import flatcake_client as fc
from flatcake_client.rpc import SILENCE_MIN_S
from flatcake_transport.address import Medium


def descriptors(daemon) -> int:
    """Of this process; none of those that the daemon, which is here too, has handed over."""
    with daemon.handing:
        return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("medium", [Medium.MEMORY, Medium.SSD])
@pytest.mark.parametrize("verify", ["off", "all"])
def test_round_trip(daemon, client, medium, verify):
    daemon.medium, daemon.verify = medium, verify
    kv = Kv(client, plane_bytes=5000)
    first = kv.tokens(1, 7)
    assert kv.hit(first) == 0
    turn = kv.store(first, session="agent")
    assert turn.session == "agent"
    assert turn.blocks == range(7)
    assert [part.medium for part in turn.parts] == [medium.name.lower()]
    longer = kv.tokens(2, 5, after=first)
    assert kv.store(longer).blocks == range(7, 12)
    assert kv.hit(longer) == 12
    assert kv.hit(kv.tokens(3, 9, after=first)) == 7
    with kv.space.lookup(kv.space.keys(longer)) as hit:
        assert hit.tokens == 12 * 16
        assert hit.bytes_by_medium == {"memory": 0, "ssd": 0} | {medium.name.lower(): 12 * 3 * 5000}
        assert len(daemon.leases) == 1
    until(lambda: not daemon.leases)
    stats = client.stats()
    assert (stats.turns_begun, stats.turns_committed) == (2, 2)
    assert stats.restores == 2
    assert stats.connected


def test_a_stored_chain_is_not_stored_again(daemon, client):
    kv = Kv(client)
    kv.store(kv.tokens(1, 4))
    with kv.space.begin_turn(kv.space.keys(kv.tokens(1, 4))) as turn:
        assert turn.blocks == range(0)
        assert turn.commit()
    assert client.stats().turns_stored == 1


def test_holes_are_filled_and_nothing_else(daemon, client):
    """Blocks 2..3 of the chain are stored by another turn: the hull covers them, the parts do not."""
    kv = Kv(client)
    tokens = kv.tokens(1, 6)
    keys = kv.space.keys(tokens)
    with kv.space.begin_turn(keys[2:4]) as turn:
        for layer in range(3):
            turn.write_layer(layer, kv.bytes_of(keys[2:4], layer), [0, 1])
        turn.commit()
    turn = kv.store(tokens)
    assert turn.blocks == range(6)
    assert [(part.first_block, part.blocks) for part in turn.parts] == [(0, 2), (4, 2)]
    assert kv.hit(tokens) == 6


def test_shards_share_segments(daemon, client):
    ranks = [Kv(client, shards=2, shard=shard, plane_bytes=3000) for shard in range(2)]
    tokens = ranks[0].tokens(1, 5)
    keys = ranks[0].space.keys(tokens)
    turns = [rank.space.begin_turn(keys, session="s") for rank in ranks]
    visible = []
    for rank, turn in zip(ranks, turns, strict=True):
        rank.write(turn, keys)
        visible.append(turn.commit())
        assert ranks[0].hit(tokens) == (5 if visible[-1] else 0)
    assert visible == [False, True]
    assert ranks[1].hit(tokens) == 5


def test_hints_reach_the_daemon(daemon, client):
    kv = Kv(client)
    keys = kv.space.keys(kv.tokens(1, 3), salt=b"lora")
    turn = kv.space.begin_turn(
        keys, context_tokens=50, previous_reply_tokens=0, share_counts=np.asarray([3, 1, 1]), turn=2, salt=b"lora"
    )
    request = daemon.last_begin
    assert (request.context_tokens, request.previous_reply_tokens, request.turn) == (50, 0, 2)
    assert list(request.share_counts) == [3, 1, 1]
    assert len(request.root_key) == 16
    turn.abort()
    kv.space.begin_turn(keys).abort()
    assert not daemon.last_begin.HasField("context_tokens")
    assert not daemon.last_begin.HasField("turn")
    with pytest.raises(ValueError, match="one a key"):
        kv.space.begin_turn(keys, share_counts=[1])


def test_no_keys_ask_nobody(daemon, client):
    kv = Kv(client)
    with kv.space.lookup(kv.space.keys([1] * 15)) as hit:
        assert (hit.blocks, hit.tokens, hit.runs, hit.failure) == (0, 0, (), None)
    assert "lookup" not in daemon.calls
    turn = kv.space.begin_turn(kv.space.keys([]))
    assert turn.commit()
    assert "begin_turn" not in daemon.calls


def test_many_keys(daemon, client):
    """200,000 keys in one question."""
    kv = Kv(client, layers=1, plane_bytes=8)
    keys = np.random.default_rng(0).integers(0, 256, (200_000, 16), np.uint8)
    part = SimpleNamespace(segment=1 << 60, blocks=200_000, segment_bytes=1 << 24, file_id=1, file_offset=0)
    daemon.index = {key.tobytes(): (part, block) for block, key in enumerate(keys)}
    with kv.space.lookup(keys, timeout_s=30) as hit:
        assert hit.failure is None
        assert hit.blocks == 200_000
        assert len(hit.runs) == 1


def test_dead_daemon_is_a_miss_at_once_with_one_log_line(tmp_path, caplog):
    with fc.connect(f"unix://{tmp_path}/nobody.sock") as client, caplog.at_level(logging.WARNING):
        kv = Kv(client)
        started = time.monotonic()
        for _ in range(20):
            with kv.space.lookup(kv.space.keys(kv.tokens(1, 3)), timeout_s=5) as hit:
                assert hit.blocks == 0
                assert isinstance(hit.failure, fc.Unavailable)
                assert hit.restore([np.zeros((4, 8192), np.uint8)] * 3, [], 0).wait() == 0
        with pytest.raises(fc.Unavailable):
            kv.space.begin_turn(kv.space.keys(kv.tokens(1, 3)))
        assert time.monotonic() - started < 2.5, "a daemon that is not there must not cost deadlines"
        (said,) = [record.getMessage() for record in caplog.records if record.name.startswith("flatcake")]
        assert f"no daemon answers at {tmp_path}/nobody.sock: start one" in said
        stats = client.stats()
        assert not stats.connected
        assert stats.lookups_failed == 20
        assert stats.turns_refused == 1


def test_each_outage_is_said_once(daemon, client, caplog, monkeypatch):
    """Also one without a new greeting between: a daemon that was too slow once, and answered again."""
    monkeypatch.setattr(fc.client, "SAY_PAUSE_S", 0.0)
    kv = Kv(client)
    keys = kv.space.keys(kv.tokens(1, 3))
    for _ in range(2):
        daemon.fail["lookup"] = grpc.StatusCode.UNAVAILABLE
        assert all(kv.space.lookup(keys).failure for _ in range(5))
        del daemon.fail["lookup"]
        assert kv.space.lookup(keys).failure is None
    assert [record.levelname for record in caplog.records].count("WARNING") == 2
    monkeypatch.setattr(fc.client, "SAY_PAUSE_S", 60.0)
    for _ in range(5):
        daemon.fail["lookup"] = grpc.StatusCode.UNAVAILABLE
        kv.space.lookup(keys)
        del daemon.fail["lookup"]
        kv.space.lookup(keys)
    assert [record.levelname for record in caplog.records].count("WARNING") == 3


def test_stalled_daemon_costs_one_deadline(daemon, client):
    kv = Kv(client)
    keys = kv.space.keys(kv.tokens(1, 3))
    assert kv.space.lookup(keys).failure is None
    client._rpc._now_s = lambda: 0.0  # however slow this machine is, the pause is not over
    stall, asked = threading.Event(), daemon.calls["lookup"]
    daemon.fail["lookup"] = stall
    for _ in range(10):
        assert kv.space.lookup(keys, timeout_s=SILENCE_MIN_S + 0.05).failure is not None
    assert daemon.calls["lookup"] == asked + 1
    stall.set()


def test_a_hasty_caller_does_not_silence_the_daemon(daemon, client):
    kv = Kv(client)
    kv.store(kv.tokens(1, 3))
    stall = daemon.fail["lookup"] = threading.Event()
    assert kv.space.lookup(kv.space.keys(kv.tokens(1, 3)), timeout_s=0.01).blocks == 0
    stall.set()
    assert kv.hit(kv.tokens(1, 3)) == 3


def test_restarted_daemon_is_greeted_again(daemon, client):
    kv = Kv(client)
    kv.store(kv.tokens(1, 3))
    with kv.space.lookup(kv.space.keys(kv.tokens(1, 3))) as old:
        daemon.stop()
        assert kv.hit(kv.tokens(1, 3)) == 0
        assert not client.stats().connected
        daemon.start()
        assert kv.hit(kv.tokens(1, 3)) == 3
        pages = [np.zeros((3, 8192), np.uint8) for _ in range(3)]
        restore = old.restore(pages, np.arange(3))
        assert restore.wait() == 0, "a lease of the dead daemon still worked"
    assert client.stats().greetings == 2


@pytest.mark.parametrize("forget", ["clients", "spaces"])
def test_daemon_that_forgot_us_is_told_again(daemon, client, forget):
    kv = Kv(client)
    kv.store(kv.tokens(1, 3))
    getattr(daemon, forget).clear()
    assert kv.hit(kv.tokens(1, 3)) == 3
    getattr(daemon, forget).clear()
    assert kv.store(kv.tokens(2, 3)).blocks == range(3)


def test_space_opened_before_the_daemon_is_there(tmp_path):
    daemon = FakeDaemon(tmp_path)
    with fc.connect(daemon.endpoint) as client:
        kv = Kv(client)
        with daemon:
            kv.store(kv.tokens(1, 3))
            assert kv.hit(kv.tokens(1, 3)) == 3


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, fc.Overloaded),
        (grpc.StatusCode.UNAVAILABLE, fc.Unavailable),
        (grpc.StatusCode.INTERNAL, fc.Unavailable),
        (grpc.StatusCode.UNIMPLEMENTED, fc.Unavailable),
        (grpc.StatusCode.DATA_LOSS, fc.Corrupt),
        (grpc.StatusCode.NOT_FOUND, fc.Unavailable),
        (grpc.StatusCode.FAILED_PRECONDITION, fc.Unavailable),
    ],
)
def test_refusals(daemon, client, status, error):
    kv = Kv(client)
    daemon.fail = {"lookup": status, "begin_turn": status}
    assert kv.space.lookup(kv.space.keys(kv.tokens(1, 3))).blocks == 0
    with pytest.raises(error):
        kv.space.begin_turn(kv.space.keys(kv.tokens(1, 3)))


def test_another_machine_is_told_apart(daemon, tmp_path):
    daemon.boot_id = b"another boot"
    with fc.connect(daemon.endpoint) as client:
        kv = Kv(client)
        hit = kv.space.lookup(kv.space.keys(kv.tokens(1, 3)))
        assert "another machine" in str(hit.failure)
        for _ in range(10):
            kv.space.lookup(kv.space.keys(kv.tokens(1, 3)))
        assert daemon.calls["hello"] < 4, "a daemon must not be flooded with greetings that lead nowhere"


def test_refused_attach_is_a_miss(daemon):
    daemon.fail["attach"] = True
    with fc.connect(daemon.endpoint) as client:
        kv = Kv(client)
        assert "attach" in str(kv.space.lookup(kv.space.keys(kv.tokens(1, 3))).failure)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # from Python 3.12 on
def test_forked_child_is_told(daemon, client):
    """The child gets an error from every call, and its exit does not end the parent's connection."""
    kv = Kv(client)
    kv.store(kv.tokens(1, 3))
    hit = kv.space.lookup(kv.space.keys(kv.tokens(1, 3)))
    restore = hit.restore([np.zeros((3, 8192), np.uint8) for _ in range(3)], np.arange(3))
    turn = kv.space.begin_turn(kv.space.keys(kv.tokens(2, 3)))
    asks = [
        lambda: client.open_space("m", "d", 1, [1]),
        lambda: kv.space.lookup(hit.keys),
        lambda: kv.space.begin_turn(hit.keys),
        lambda: hit.restore([], []),
        lambda: restore.wait(),
        lambda: restore.wait_layer(0),
        lambda: turn.write_layer(0, np.zeros((3, 8192), np.uint8), [0, 1, 2]),
        lambda: turn.commit(),
    ]
    pid = os.fork()
    if pid == 0:
        code = 0
        for number, ask in enumerate(asks, 1):
            try:
                ask()
                code = number
            except RuntimeError as error:
                code = 0 if "fork" in str(error) else 100 + number
            except BaseException:  # noqa: BLE001
                code = 200 + number
            if code:
                break
        hit.release()
        turn.abort()
        client.close()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(daemon.attached) == 1, "the child ended the parent's connection"
    assert restore.wait() == 3
    assert len(daemon.turns) == 1
    turn.abort()
    hit.release()


def test_the_end_of_the_parent_is_seen_though_a_child_lives(daemon):
    """The child's copy of the socket is closed at once, else leases of a killed parent would never end."""
    code = dedent(f"""
        import os, signal, sys
        sys.path[:0] = {sys.path!r}
        import flatcake_client as fc
        from kv import Kv
        kv = Kv(fc.connect({daemon.endpoint!r}))
        if os.fork() == 0:
            os.read(0, 1)  # lives until the test says so
            os._exit(0)
        print("forked", flush=True)
        os.read(0, 1)
    """)
    stdin, tell = os.pipe()
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stdin=stdin, stdout=subprocess.PIPE) as parent:
        os.close(stdin)
        assert parent.stdout.readline() == b"forked\n"
        assert len(daemon.attached) == 1
        parent.kill()
        deadline = time.monotonic() + 5
        while daemon.attached and time.monotonic() < deadline:
            os.sched_yield()
        attached = set(daemon.attached)
        os.close(tell)
    assert not attached


def test_a_connection_outlives_its_turns_and_no_longer(daemon, client):
    """Another daemon was greeted meanwhile: the old connection stays until the turn begun on it is over, then it is closed."""
    kv = Kv(client)
    turn = kv.space.begin_turn(kv.space.keys(kv.tokens(1, 3)))
    old = client._connection
    daemon.clients.clear()
    kv.store(kv.tokens(2, 3))
    assert client._connection is not old
    assert old.lost()
    assert old.handover._socket.fileno() >= 0, "closed under a turn"
    turn.abort()
    assert old.handover._socket.fileno() == -1


def test_buffers_grow_with_the_planes(daemon):
    with fc.connect(daemon.endpoint, buffer_bytes=4096, staging_bytes=16 << 20) as client:
        kv = Kv(client, plane_bytes=300_001)
        kv.store(kv.tokens(1, 5))
        assert kv.hit(kv.tokens(1, 5)) == 5


def test_close_gives_all_back(daemon, client):
    kv = Kv(client)
    kv.store(kv.tokens(1, 3))
    hit = kv.space.lookup(kv.space.keys(kv.tokens(1, 3)))
    restore = hit.restore([np.zeros((3, 8192), np.uint8) for _ in range(3)], np.arange(3))
    restore.wait_layer(0)
    turn = kv.space.begin_turn(kv.space.keys(kv.tokens(2, 3)))
    turn.write_layer(0, np.zeros((3, 8192), np.uint8), [0, 1, 2])
    before = descriptors(daemon)
    client.close()
    client.close()
    assert not daemon.turns
    until(lambda: not daemon.leases)
    assert daemon.aborted == [""]
    assert descriptors(daemon) < before
    assert kv.space.lookup(hit.keys).blocks == 0
    with pytest.raises(fc.Unavailable, match="closed"):
        kv.space.begin_turn(hit.keys)
    turn.abort()
    hit.release()


def test_no_descriptor_is_left(daemon, client):
    kv = Kv(client)
    kv.store(kv.tokens(1, 3))
    assert kv.hit(kv.tokens(1, 3)) == 3
    before = descriptors(daemon)
    for n in range(10):
        assert kv.hit(kv.tokens(1, 3)) == 3
        kv.store(kv.tokens(10 + n, 2))
        with kv.space.begin_turn(kv.space.keys(kv.tokens(50 + n, 3))) as turn:
            turn.write_layer(0, np.zeros((3, 8192), np.uint8), [0, 1, 2])
    assert client.linger.settle(5)
    assert descriptors(daemon) == before


def test_threads_share_a_client(daemon, client):
    kv = Kv(client)
    failures = []

    def use(number: int) -> None:
        try:
            for n in range(5):
                tokens = kv.tokens(100 * number + n, 4)
                kv.store(tokens, session=f"s{number}")
                assert kv.hit(tokens) == 4
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    until(lambda: not daemon.leases)  # who gives back waits a moment for the daemon, and no longer
    assert client.stats().greetings == 1
