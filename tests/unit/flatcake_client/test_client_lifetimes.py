"""How long things live: descriptors, connections, turns and arrays, against threads, lost objects and deaf daemons."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
import time
import weakref
from pathlib import Path

import grpc
import numpy as np
import pytest
from kv import Kv
from waiting import pause, until

import flatcake_client as fc
from flatcake_client import handover
from flatcake_client.rpc import SILENCE_MIN_S
from flatcake_transport.address import Medium
from flatcake_transport.movers import posix
from flatcake_transport.window import OpenFile


def test_two_restores_of_a_hit_share_its_descriptors(daemon, client, monkeypatch):
    """Each asking for itself, the first one's would close when the second's take their place: numbers that soon mean other files."""
    monkeypatch.setattr(handover, "KEPT_MAX", 0)
    kv = Kv(client)
    kv.store(kv.tokens(1, 4))
    stall = daemon.fail["hand"] = threading.Event()
    with kv.space.lookup(kv.space.keys(kv.tokens(1, 4))) as hit:
        found: list[dict[int, OpenFile]] = []
        threads = [threading.Thread(target=lambda: found.append(hit.files(5.0))) for _ in range(2)]
        for thread in threads:
            thread.start()
        pause(0.05)
        stall.set()
        for thread in threads:
            thread.join()
        assert found[0] is found[1]
        for file in found[0].values():
            os.fstat(file.fd)


def test_who_stored_a_session_restores_it_without_asking(daemon, client):
    kv = Kv(client)
    kv.store(kv.tokens(1, 4))
    daemon.fail["hand"] = "is told"
    for _ in range(2):
        assert kv.hit(kv.tokens(1, 4)) == 4
        with kv.space.lookup(kv.space.keys(kv.tokens(1, 4))) as hit:
            assert set(hit.files(5.0)) == set(daemon.files)


def test_slots_and_keys_may_be_used_again_at_once(daemon, client):
    """An engine's slot array and keys are its own again when `restore` and `lookup` have returned."""
    kv = Kv(client)
    kv.store(kv.tokens(1, 4))
    keys = kv.space.keys(kv.tokens(1, 4)).copy()
    target = [np.zeros((8, kv.plane_bytes), np.uint8) for _ in range(kv.layers)]
    slots = np.arange(4)
    with kv.space.lookup(keys) as hit:
        keys[:] = 0
        restore = hit.restore(target, slots)
        restore.wait_layer(0)
        slots += 4
        assert restore.wait() == 4
    keys = kv.space.keys(kv.tokens(1, 4))
    for layer in range(kv.layers):
        assert np.array_equal(target[layer][:4], kv.bytes_of(keys, layer))
        assert not target[layer][4:].any()
    assert not daemon.corrupt


def test_a_connection_is_not_closed_while_a_turn_is_granted_on_it(daemon, client):
    """At its end the daemon would give the space of a turn away that is about to be written."""
    kv = Kv(client)
    kv.store(kv.tokens(1, 3))
    stall = daemon.fail["begin_turn"] = threading.Event()
    turns: list[fc.Turn] = []
    old = client._connection
    asking = threading.Thread(target=lambda: turns.append(kv.space.begin_turn(kv.space.keys(kv.tokens(2, 3)))))
    asking.start()
    until(lambda: daemon.calls.get("begin_turn", 0) >= 2)
    old.retire()  # another thread finds it lost
    assert old.handover._socket.fileno() >= 0
    stall.set()
    asking.join()
    with pytest.raises(fc.Unavailable):
        old.turn_begins()
    turns[0].abort()
    assert old.handover._socket.fileno() == -1


def test_an_answer_that_cannot_be_taken_closes_nothing_under_a_turn(daemon, client, monkeypatch):
    """As at the limit of open files, where descriptors are dropped on the way: the daemon must not think the engine dead."""

    def unreadable(message):
        raise ValueError("no such answer")

    monkeypatch.setattr(handover, "KEPT_MAX", 0)
    kv = Kv(client)
    kv.store(kv.tokens(1, 3))
    keys = kv.space.keys(kv.tokens(2, 3))
    turn = kv.space.begin_turn(keys)
    turn.write_layer(0, kv.bytes_of(keys, 0), np.arange(3))
    old = client._connection
    with kv.space.lookup(kv.space.keys(kv.tokens(1, 3))) as hit, monkeypatch.context() as broken:
        broken.setattr(handover, "decode_reply", unreadable)
        with pytest.raises(fc.Unavailable):
            hit.files(5.0)
    assert old.lost()
    assert kv.hit(kv.tokens(1, 3)) == 3
    assert client._connection is not old
    assert old.handover._socket.fileno() >= 0, "the daemon sees an end, and gives the turn's space to others"
    for layer in range(1, kv.layers):
        turn.write_layer(layer, kv.bytes_of(keys, layer), np.arange(3))
    assert turn.commit()
    assert old.handover._socket.fileno() == -1
    assert kv.hit(kv.tokens(2, 3)) == 3


def test_a_turn_that_the_engine_lost_is_aborted_when_its_writes_rest(daemon, client, monkeypatch):
    """Closed under a write that waits for its thread, its descriptor's number would be another file of the engine's."""
    go, tried = threading.Event(), []

    def late(fd, memory, offset):
        go.wait(10)
        tried.append(Path(f"/proc/self/fd/{fd}").readlink())
        return os.pwritev(fd, [memory.data], offset)

    monkeypatch.setattr(posix, "_pwritev", late)
    kv = Kv(client)
    keys = kv.space.keys(kv.tokens(1, 3))
    turn = kv.space.begin_turn(keys)
    turn.write_layer(0, kv.bytes_of(keys, 0), np.arange(3))
    del turn
    gc.collect()
    assert kv.hit(kv.tokens(1, 3)) == 0
    assert not daemon.aborted
    go.set()
    until(lambda: client.stats().turns_aborted == 1)
    assert tried == [daemon.path(1)]
    assert daemon.aborted == [""]
    assert not daemon.turns
    assert client._connection._turns == 0


def test_a_daemon_that_is_slow_to_accept_is_reached(daemon, tmp_path):
    """A machine busy with other things, such as a daemon's start: the first question waits, within its deadline."""
    front = socket.socket(socket.AF_UNIX)
    sockets, threads = [front], []
    front.bind(f"{tmp_path}/slow.sock")
    front.listen()

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = front.accept()
                pause(0.3)
                back = socket.socket(socket.AF_UNIX)
                sockets.extend((caller, back))
                back.connect(f"{tmp_path}/fake.sock")
                for ends in ((caller, back), (back, caller)):
                    threads.append(threading.Thread(target=pass_on, args=ends))
                    threads[-1].start()

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    with fc.connect(f"unix://{tmp_path}/slow.sock", timeout_s=5.0) as client:
        kv = Kv(client)
        assert kv.space.lookup(kv.space.keys(kv.tokens(1, 3))).failure is None
    front.shutdown(socket.SHUT_RDWR)
    acceptor.join()
    for end in sockets:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join()
    for end in sockets:
        end.close()


@pytest.mark.parametrize("medium", [Medium.MEMORY, Medium.SSD])
def test_the_engines_arrays_are_let_go_without_a_collection(daemon, client, medium):
    """Engines switch the collector off while they serve: what a request held must not wait for it."""
    daemon.medium = medium
    kv = Kv(client)
    kv.store(kv.tokens(1, 3))
    gc.collect()
    gc.disable()
    try:
        target = [np.zeros((3, kv.plane_bytes), np.uint8) for _ in range(kv.layers)]
        gone = [weakref.ref(pages) for pages in target]
        with kv.space.lookup(kv.space.keys(kv.tokens(1, 3))) as hit:
            restore = hit.restore(target, np.arange(3))
            assert restore.wait() == 3
        found = weakref.ref(hit)
        del target, restore, hit
        assert [pages() is None for pages in gone] == [True] * kv.layers
        assert found() is None
    finally:
        gc.enable()


def test_an_abort_that_was_not_heard_is_said_again(daemon, client, monkeypatch):
    """A daemon that hangs for a moment would else keep the turn's space as long as the engine lives."""
    monkeypatch.setattr("flatcake_client.space.ABORT_AGAIN_S", 0.01)
    kv = Kv(client)
    daemon.fail["abort_turn"] = daemon.fail["commit_turn"] = grpc.StatusCode.UNAVAILABLE
    with pytest.raises(fc.Unavailable):
        kv.store(kv.tokens(1, 3))
    until(lambda: daemon.calls["abort_turn"] > 2)
    assert daemon.turns
    daemon.fail.clear()
    until(lambda: not daemon.turns)  # also when the engine asks nothing any more
    daemon.fail["abort_turn"] = grpc.StatusCode.UNAVAILABLE
    with kv.space.begin_turn(kv.space.keys(kv.tokens(2, 3))):
        pass
    connection = client._connection
    client.close()
    assert connection.handover._socket.fileno() == -1, "the end of the connection says it, too"


def test_a_turn_whose_beginning_was_not_heard_of_is_disowned(daemon, client, monkeypatch):
    """The daemon may have begun it just as we stopped waiting; its grant would last as long as our connection."""
    monkeypatch.setattr("flatcake_client.space.ABORT_AGAIN_S", 0.01)
    kv = Kv(client)
    keys = kv.space.keys(kv.tokens(1, 3))
    kv.space.lookup(keys)
    daemon.fail["begin_turn"] = threading.Event()
    daemon.fail["abort_turn"] = grpc.StatusCode.UNAVAILABLE
    with pytest.raises(fc.Unavailable):
        kv.space.begin_turn(keys, timeout_s=1.0)
    daemon.fail.pop("begin_turn").set()
    until(lambda: daemon.calls.get("abort_turn", 0) > 1)
    assert not daemon.unheard, "what was not heard is said again"
    del daemon.fail["abort_turn"]
    until(lambda: daemon.unheard)
    assert daemon.unheard == [daemon.last_begin.request_id]
    daemon.fail["begin_turn"] = grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(fc.Overloaded):
        kv.space.begin_turn(keys)
    assert client.linger.settle(20)
    assert len(daemon.unheard) == 1, "said once; and one that was refused has begun nothing"


def test_a_silent_daemon_is_not_told_of_turns_that_were_refused_here(daemon, client):
    """They have not begun; to say otherwise of each would cost a second each."""
    kv = Kv(client)
    keys = kv.space.keys(kv.tokens(1, 3))
    kv.space.lookup(keys)
    stalls = [daemon.fail.setdefault(verb, threading.Event()) for verb in ("lookup", "begin_turn", "abort_turn")]
    kv.space.lookup(keys, timeout_s=SILENCE_MIN_S + 0.05)
    for _ in range(6):
        with pytest.raises(fc.Unavailable):
            kv.space.begin_turn(keys)
    assert client.linger.settle(20)
    assert "abort_turn" not in daemon.calls
    for stall in stalls:
        stall.set()


def test_a_restore_that_waits_for_staging_is_closed_at_once(daemon, client):
    kv = Kv(client)
    kv.store(kv.tokens(1, 3))
    with kv.space.lookup(kv.space.keys(kv.tokens(1, 3))) as hit:
        target = [np.zeros((3, kv.plane_bytes), np.uint8) for _ in range(kv.layers)]
        hit.restore(target, np.arange(3)).close()
        staging = client.tools.reading().staging
        windows = [staging.open_window(0.0) for _ in range(staging._windows_max)]
        restore = hit.restore(target, np.arange(3), timeout_s=60)
        waiting = threading.Thread(target=restore.wait)
        waiting.start()
        until(lambda: bool(staging._waiting))
        began_s = time.monotonic()
        restore.close()
        waiting.join(10)
        assert time.monotonic() - began_s < 3
        for window in windows:
            window.close()


def test_another_calls_deadline_costs_no_written_turn(daemon, client):
    kv = Kv(client)
    tokens = kv.tokens(1, 3)
    turn = kv.space.begin_turn(kv.space.keys(tokens), session="s")
    kv.write(turn, kv.space.keys(tokens))
    stall = daemon.fail["lookup"] = threading.Event()
    assert kv.space.lookup(kv.space.keys(tokens), timeout_s=SILENCE_MIN_S + 0.05).blocks == 0
    turn.commit()
    stall.set()
    del daemon.fail["lookup"]
    assert client.stats().turns_committed == 1


@pytest.mark.parametrize("ends", [lambda hit, restore: restore.close(), lambda hit, restore: hit.release()])
def test_a_hanging_disk_holds_up_nobody_who_gives_back(daemon, client, monkeypatch, ends):
    """Neither who closes, nor who waits in another thread: both would stand until the lease is to be renewed."""
    kv = Kv(client)
    tokens = kv.tokens(1, 3)
    kv.store(tokens)
    reading, go_on, preadv = threading.Event(), threading.Event(), posix._preadv

    def hang(*args):
        reading.set()
        go_on.wait(30)
        return preadv(*args)

    monkeypatch.setattr(posix, "_preadv", hang)
    hit = kv.space.lookup(kv.space.keys(tokens))
    restore = hit.restore(
        [np.zeros((3, kv.plane_bytes), np.uint8) for _ in range(kv.layers)], np.arange(3), timeout_s=60
    )
    waiting = threading.Thread(target=restore.wait)
    waiting.start()
    assert reading.wait(10)
    began_s = time.monotonic()
    ends(hit, restore)
    waiting.join(10)
    assert time.monotonic() - began_s < 3
    go_on.set()
    hit.release()


def test_a_release_without_answer_ends_no_silence(daemon, client):
    """Sent before the daemon fell silent."""
    kv = Kv(client)
    kv.store(kv.tokens(1, 3))
    hit = kv.space.lookup(kv.space.keys(kv.tokens(1, 3)))
    came, stall = daemon.calls.get("release", 0), threading.Event()
    daemon.fail["release"] = stall
    releasing = threading.Thread(target=hit.release, daemon=True)
    releasing.start()
    until(lambda: daemon.calls.get("release", 0) > came)
    silent_until_s = client._rpc._silent_until_s = time.monotonic() + 100
    releasing.join(30)
    stall.set()
    assert client._rpc._silent_until_s == silent_until_s


@pytest.mark.parametrize("medium", [Medium.MEMORY, Medium.SSD])
@pytest.mark.parametrize("ends", ["the daemon", "the connection"])
def test_a_turn_whose_space_may_be_somebody_elses_is_written_no_further(daemon, client, medium, ends):
    daemon.medium = medium
    kv = Kv(client)
    keys = kv.space.keys(kv.tokens(1, 3))
    turn = kv.space.begin_turn(keys)
    turn.write_layer(0, kv.bytes_of(keys, 0), np.arange(3))
    until(lambda: all(transfer.done() for transfer in turn.transfers))
    if ends == "the daemon":
        daemon.stop()
        daemon.start()
    else:
        daemon.drop_connections()
    before = daemon.stored_bytes(medium)
    for layer in range(1, kv.layers):
        turn.write_layer(layer, kv.bytes_of(keys, layer), np.arange(3))
    with pytest.raises(fc.Unavailable, match="is gone"):
        turn.commit()
    assert daemon.stored_bytes(medium) == before
    assert client.stats().turns_failed == 1
    assert kv.hit(kv.tokens(1, 3)) == 0


def test_two_that_release_a_hit_at_once_close_nothing_under_its_reads(daemon, client, monkeypatch):
    """Closed under a read that waits for its thread, its descriptor's number would be another file of the engine's."""
    reading, go, entered, leave = (threading.Event() for _ in range(4))
    read, preadv = [], posix._preadv

    def late(fd, memory, offset):
        reading.set()
        go.wait(30)
        read.append(Path(f"/proc/self/fd/{fd}").readlink())
        return preadv(fd, memory, offset)

    kv = Kv(client)
    kv.store(kv.tokens(1, 3))
    monkeypatch.setattr(posix, "_preadv", late)
    hit = kv.space.lookup(kv.space.keys(kv.tokens(1, 3)))
    restore = hit.restore([np.zeros((3, kv.plane_bytes), np.uint8) for _ in range(kv.layers)], np.arange(3))
    close = restore.close

    def held() -> None:
        if not entered.is_set():  # the first that releases is held up here
            entered.set()
            leave.wait(30)
        close()

    restore.close = held
    threads = [threading.Thread(target=restore.wait), threading.Thread(target=hit.release)]
    threads[0].start()
    assert reading.wait(10)
    threads[1].start()
    assert entered.wait(10)
    hit.release()
    for event in (go, leave):
        event.set()
    for thread in threads:
        thread.join()
    assert client.linger.settle(20)
    assert set(read) == {daemon.path(1)}


def test_who_finds_a_connection_stale_waits_no_longer_than_its_own_time_for_who_greets(daemon, client):
    kv = Kv(client)
    asking = threading.Thread(target=lambda: kv.space.lookup(kv.space.keys(kv.tokens(1, 3)), timeout_s=0.5))
    daemon.clients.clear()
    with client._lock:  # another's Hello gets no answer
        asking.start()
        asking.join(30)
        assert not asking.is_alive()
