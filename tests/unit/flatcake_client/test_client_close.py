"""The end of a client: all is given back within its time, whatever hangs, and what cannot be then is given back later."""

from __future__ import annotations

import gc
import sys
import threading
import time

import numpy as np
from kv import Kv
from waiting import until

import flatcake_client as fc
from flatcake_client import hit as hit_module
from flatcake_client.client import Held
from flatcake_transport.movers import posix


def test_close_takes_its_time_and_no_more_though_nobody_answers(daemon, client):
    kv = Kv(client)
    kv.store(kv.tokens(1, 3))
    hits = [kv.space.lookup(kv.space.keys(kv.tokens(1, 3))) for _ in range(60)]
    assert all(hit.blocks == 3 for hit in hits)
    stall = daemon.fail["release"] = threading.Event()
    started_s = time.monotonic()
    client.close(0.1)
    assert time.monotonic() - started_s < 60 * hit_module.RELEASE_WAIT_S / 2
    stall.set()


def test_a_close_that_has_no_time_left_ends_the_connection_where_nothing_moves(daemon):
    """An engine that goes on would else keep its life line, and what hangs on it, and the movers' threads."""
    client = fc.connect(daemon.endpoint, timeout_s=20.0)
    kv = Kv(client)
    kv.store(kv.tokens(1, 3))
    hit = kv.space.lookup(kv.space.keys(kv.tokens(1, 3)))
    assert daemon.attached
    client.close(0.0)
    until(lambda: not daemon.attached)
    assert hit.blocks == 3, "the engine has it still"


def test_close_waits_for_nobody_who_greets(daemon, monkeypatch):
    """And what is greeted too late is not kept."""
    client = fc.connect(daemon.endpoint, timeout_s=60.0)
    greeted, go, greet = threading.Event(), threading.Event(), client._greet

    def slow(deadline_s):
        connection = greet(deadline_s)
        greeted.set()
        go.wait(60)
        return connection

    monkeypatch.setattr(client, "_greet", slow)
    asking, closing = threading.Thread(target=Kv, args=(client,)), threading.Thread(target=client.close)
    asking.start()
    assert greeted.wait(30)
    closing.start()
    closing.join(30)
    waited = closing.is_alive()
    go.set()
    asking.join()
    closing.join()
    assert not waited
    until(lambda: not daemon.attached)


def test_a_greeting_that_meets_a_close_is_neither_kept_nor_told_of(daemon, client, monkeypatch, caplog):
    """The channel that it makes in place of a broken one would be nobody's to close."""
    dial = client._rpc._dial

    def closed_meanwhile():
        client.close()
        dial()

    client._rpc._broken = True
    monkeypatch.setattr(client._rpc, "_dial", closed_meanwhile)
    hit = Kv(client).space.lookup(np.zeros((3, 16), np.uint8))
    assert "the client is closed" in str(hit.failure)
    assert "hello" not in daemon.calls
    assert not [record for record in caplog.records if record.name.startswith("flatcake")]


def test_close_waits_for_no_read_that_the_engine_lost(daemon, monkeypatch):
    """The disk hangs, and so would whoever waits for the threads that read it."""
    client, go, preadv = fc.connect(daemon.endpoint, timeout_s=20.0), threading.Event(), posix._preadv
    kv = Kv(client)
    kv.store(kv.tokens(1, 3))

    def hang(*args):
        go.wait(60)
        return preadv(*args)

    monkeypatch.setattr(posix, "_preadv", hang)
    hit = kv.space.lookup(kv.space.keys(kv.tokens(1, 3)))
    target = [np.zeros((3, kv.plane_bytes), np.uint8) for _ in range(kv.layers)]
    assert hit.restore(target, np.arange(3), timeout_s=0.2).wait() == 0
    del hit
    gc.collect()
    turn = kv.space.begin_turn(kv.space.keys(kv.tokens(2, 3)))
    with turn._lock:  # it is being written
        closing = threading.Thread(target=client.close, args=(0.2,))
        closing.start()
        closing.join(30)
    waited = closing.is_alive()
    asking = threading.Thread(target=client.stats)
    try:
        assert not waited
        asking.start()
        asking.join(30)
        assert not asking.is_alive(), "figures wait for no disk"
        del turn
        gc.collect()
        until(lambda: client.stats().turns_aborted == 1)
    finally:
        go.set()
        closing.join()


def test_a_connection_that_a_write_kept_open_at_close_is_closed_when_it_has_landed(daemon, monkeypatch):
    """Else the turn's space would be nobody's for as long as the engine has the client."""
    client, go, pwritev = fc.connect(daemon.endpoint, timeout_s=20.0), threading.Event(), posix._pwritev

    def hang(*args):
        go.wait(60)
        return pwritev(*args)

    monkeypatch.setattr(posix, "_pwritev", hang)
    kv = Kv(client)
    keys = kv.space.keys(kv.tokens(1, 3))
    turn = kv.space.begin_turn(keys)
    turn.write_layer(0, kv.bytes_of(keys, 0), np.arange(3))
    client.close(0.1)
    assert daemon.attached, "the daemon may not give the space to others yet"
    go.set()
    until(lambda: not daemon.attached)
    until(lambda: client.stats().turns_aborted == 1)


def test_a_turn_that_is_lost_after_the_close_is_given_back(daemon):
    client = fc.connect(daemon.endpoint, timeout_s=20.0)
    kv = Kv(client)
    turn = kv.space.begin_turn(kv.space.keys(kv.tokens(1, 3)))
    with turn._lock:  # it is being written
        closing = threading.Thread(target=client.close, args=(0.1,))
        closing.start()
        closing.join()
    assert daemon.attached
    del turn
    gc.collect()
    until(lambda: not daemon.attached)


def test_what_is_held_may_grow_while_it_is_listed():
    """As lookups go on while their client is closed."""

    class Some:
        pass

    held, some, failures = Held(), [Some() for _ in range(20_000)], []

    def listing() -> None:
        try:
            while adding.is_alive():
                held.all()
        except RuntimeError as error:  # it changed while it was listed
            failures.append(error)

    adding = threading.Thread(target=lambda: [held.add(each) for each in some])
    watching = threading.Thread(target=listing)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in (adding, watching):
            thread.start()
        for thread in (adding, watching):
            thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert not failures
    assert len(held.all()) == len(some)
