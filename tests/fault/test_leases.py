"""Leases: they keep what is read in its place, end by themselves, and what was read past their end is an error, never data."""

from __future__ import annotations

import time

import numpy as np
import pytest
from daemon import Daemon
from faults import files_of
from kv import Kv, connect
from waiting import until
from wire import Refused, Wire, some_keys

import flatcake_client as fc
from flatcake_transport.movers import posix

OPTIONS = {"memory_bytes": 2 << 20, "ssd_bytes": 16 << 20, "leases_max": 50}


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """Its leases lapse soon."""
    with Daemon(tmp_path_factory.mktemp("lease"), lease_ttl="2s", **OPTIONS) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def lasting(tmp_path_factory):
    """Its leases lapse in no test."""
    with Daemon(tmp_path_factory.mktemp("lasting"), lease_ttl="600s", **OPTIONS) as daemon:
        yield daemon


@pytest.fixture(autouse=True)
def law(node, lasting):
    yield
    for each in (node, lasting):
        each.until(lambda status: status["leases"] == status["pinned_sessions"] == status["open_turns"] == 0)
        each.check()


def pages_for(kv, blocks):
    return [np.full((blocks, kv.plane_bytes), 9, np.uint8) for _ in range(kv.layers)]


def stored(kv, blocks):
    """How much of context 1 is there. Asks without a lease, which on a busy machine could lapse."""
    return kv.space.lookup(kv.space.keys(kv.tokens(1, blocks)), pin=False, timeout_s=20).blocks


def test_lookups_without_reads_leave_no_pins(node):
    """A thousand, released and forgotten by turns, more than there may be leases at once."""
    with connect(node) as client:
        kv = Kv(client, model="pins")
        kv.store(kv.tokens(1, 4))
        keys, found = kv.space.keys(kv.tokens(1, 4)), 0
        for number in range(1000):
            hit = kv.space.lookup(keys, pin=number % 10 != 0)
            found += hit.blocks == 4
            if number % 3:
                hit.release()
        assert found > 100, "what is forgotten may fill the table, until it lapses"
        assert node.status()["leases"] <= 50
        node.until(lambda status: status["leases"] == status["pinned_sessions"] == 0)
        assert stored(kv, 4) == 4


def test_as_many_leases_as_there_may_be_are_misses_beyond(lasting):
    with connect(lasting) as client:
        kv = Kv(client, model="bound")
        kv.store(kv.tokens(1, 4))
        keys = kv.space.keys(kv.tokens(1, 4))
        hits = [kv.space.lookup(keys) for _ in range(60)]
        assert sum(hit.blocks == 4 for hit in hits) == 50
        assert all(isinstance(hit.failure, fc.Overloaded) for hit in hits[50:])
        for hit in hits:
            hit.release()
        assert stored(kv, 4) == 4


@pytest.mark.parametrize("medium", ["memory", "ssd"])
def test_a_slow_reader_gets_an_error_never_other_data(node, medium):
    """Its lease ends, its bytes are reused by others: nothing of them reaches its slots."""
    with connect(node) as client, connect(node) as others:
        kv, flood = Kv(client, model=f"slow {medium}"), Kv(others, model=f"flood {medium}", plane_bytes=20_000)
        hints = {"share_counts": [2] * 6} if medium == "memory" else {}
        kv.store(kv.tokens(1, 6), session="read", **hints)
        hit = kv.space.lookup(kv.space.keys(kv.tokens(1, 6)))
        assert hit.bytes_by_medium[medium] == 6 * 3 * kv.plane_bytes
        restore = hit.restore(pages := pages_for(kv, 6), np.arange(6))
        node.until(lambda status: status["leases"] == 0)
        for seed in range(30):
            counts = [2] * 12 if medium == "memory" else None
            flood.store(flood.tokens(seed, 12), session=f"f{seed}", share_counts=counts)
        with node.admin() as admin:
            assert all(row["model"] != f"slow {medium}" for row in admin.sessions()), "it was never reclaimed"
        assert restore.wait() == 0
        with pytest.raises(fc.Unavailable) as raised:
            restore.wait_layer(0)
        assert raised.value.usable_blocks == 0
        assert all((page == 9).all() for page in pages)
        hit.release()


def test_a_read_that_is_overtaken_by_its_leases_end(node, monkeypatch):
    """The disk answers only when the lease is over and the file is gone: short reads, nothing in the slots."""
    with connect(node) as client:
        kv = Kv(client, model="overtaken")
        kv.store(kv.tokens(1, 6), session="overtaken")
        hit = kv.space.lookup(kv.space.keys(kv.tokens(1, 6)))
        real, waited = posix._preadv, []

        def late(fd, data, offset):
            if not waited:
                waited.append(True)
                monkeypatch.setattr(type(hit.lease), "keep", lambda *_: None)
                node.until(lambda status: status["leases"] == 0)
                with node.admin() as admin:
                    assert admin.drop(["overtaken"])["dropped"] == ["overtaken"]
            return real(fd, data, offset)

        monkeypatch.setattr(posix, "_preadv", late)
        assert hit.restore(pages := pages_for(kv, 6), np.arange(6)).wait() == 0
        assert all((page == 9).all() for page in pages)
        hit.release()


def test_progress_keeps_a_lease_beyond_its_ttl(tmp_path, monkeypatch):
    """A disk so slow that the restore takes longer than the ttl: renewed by its progress, all of it comes."""
    ttl_s = 6.0  # half of it is for the renewal: so long may this machine stall
    with Daemon(tmp_path, lease_ttl=f"{ttl_s}s") as node, connect(node, buffer_bytes=1 << 20, buffers=1) as client:
        kv = Kv(client, model="progress", layers=8, plane_bytes=100_000)
        kv.store(kv.tokens(1, 6), session="progress")
        real, asked_s, read = posix._preadv, [], []

        def slow(fd, data, offset):
            asked_s.append(time.monotonic())
            if not read:
                until(lambda: time.monotonic() - asked_s[0] > ttl_s, 30)
            read.append(offset)
            return real(fd, data, offset)

        monkeypatch.setattr(posix, "_preadv", slow)
        assert kv.hit(kv.tokens(1, 6)) == 6
        assert len(read) > 1, "it was all read at once"


def test_a_leased_session_is_not_dropped(lasting):
    with connect(lasting) as client, lasting.admin() as admin:
        kv = Kv(client, model="busy")
        kv.store(kv.tokens(1, 4), session="busy")
        with kv.space.lookup(kv.space.keys(kv.tokens(1, 4))):
            assert admin.drop(["busy"]) == {"dropped": [], "busy": ["busy"], "needed": [], "unknown": []}
        assert admin.drop(["busy", "never"]) == {"dropped": ["busy"], "busy": [], "needed": [], "unknown": ["never"]}
        assert stored(kv, 4) == 0


def test_leases_of_a_client_that_goes_end_with_it(lasting):
    keys = some_keys(1, 4)
    with Wire(f"unix:{lasting.options['socket']}") as wire:
        with wire.handover() as life:
            life.recv(1 << 16)
            wire.commit(wire.begin(keys, session="goes"))
            lease = wire.lookup(keys).lease_id
            assert lasting.status()["pinned_sessions"] == 1
        lasting.until(lambda status: status["leases"] == 0)
        with pytest.raises(Refused, match="stale:"):
            wire.call("Renew", lease_ids=[lease])
    assert files_of(lasting.root / "ssd")
