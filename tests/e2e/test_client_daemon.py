"""The client on a real daemon: what it stores comes back, and the daemon's end, kill or stall is a miss and nothing worse."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from textwrap import dedent

import numpy as np
import pytest
from daemon import Daemon
from kv import PATIENT_S, Kv, connect

import flatcake_client as fc


@pytest.mark.parametrize("verify", ["off", "all"])
def test_media_and_windows(tmp_path, verify):
    """Shared heads go to memory, the rest to SSD; odd planes, small buffers, several parts a hit."""
    with (
        Daemon(tmp_path, verify=verify) as daemon,
        connect(daemon, buffer_bytes=1 << 20, staging_bytes=16 << 20) as client,
    ):
        kv = Kv(client, layers=5, plane_bytes=70_001)
        head = kv.tokens(0, 12)
        contexts = [kv.tokens(n, 9, after=head) for n in range(1, 5)]
        for number, tokens in enumerate(contexts):
            kv.store(tokens, session=f"s{number}", share_counts=[4] * 12 + [1] * 9)
        for tokens in contexts:
            assert kv.hit(tokens) == 21
            longer = kv.tokens(99, 4, after=tokens)
            kv.store(longer, session=None)
            assert kv.hit(longer) == 25
        with kv.space.lookup(kv.space.keys(contexts[0])) as hit:
            media = hit.bytes_by_medium
            assert media == {"memory": 12 * 5 * 70_001, "ssd": 9 * 5 * 70_001}
        assert client.stats().corrupt_segments == 0
        daemon.until(lambda status: status["leases"] == 0 and status["open_turns"] == 0)
        daemon.check()


def test_ranks(tmp_path):
    """Two clients, one a tensor-parallel rank each: nothing is visible before both have committed."""
    with Daemon(tmp_path) as daemon, connect(daemon, name="rank0") as one, connect(daemon, name="rank1") as other:
        ranks = [Kv(one, shards=2, shard=0, plane_bytes=5000), Kv(other, shards=2, shard=1, plane_bytes=5000)]
        tokens = ranks[0].tokens(1, 6)
        keys = ranks[0].space.keys(tokens)
        turns = [rank.space.begin_turn(keys, session="s") for rank in ranks]
        assert turns[0].blocks == turns[1].blocks == range(6)
        for rank, turn in zip(ranks, turns, strict=True):
            assert ranks[0].hit(tokens) == 0
            rank.write(turn, keys)
            assert turn.commit() == (rank is ranks[1])
        assert [rank.hit(tokens) for rank in ranks] == [6, 6]
        daemon.check()


def test_first_commit_of_a_key_wins(tmp_path):
    """Sixteen threads of two clients store the same blocks: all end well, one payload stands."""
    with Daemon(tmp_path) as daemon, connect(daemon) as one, connect(daemon) as other:
        kvs = [Kv(one), Kv(other)]
        tokens = kvs[0].tokens(1, 8)
        failures = []

        def store(number: int) -> None:
            try:
                kvs[number % 2].store(tokens, session=f"s{number}")
            except BaseException as error:  # noqa: BLE001
                failures.append(error)

        threads = [threading.Thread(target=store, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert kvs[0].hit(tokens) == 8
        daemon.check()


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_restart_is_misses_then_hits(tmp_path, end):
    with Daemon(tmp_path) as daemon, connect(daemon) as client:
        kv = Kv(client)
        tokens = kv.tokens(1, 8)
        kv.store(tokens, session="s")
        hit = kv.space.lookup(kv.space.keys(tokens))
        pages = [np.zeros((8, kv.plane_bytes), np.uint8) for _ in range(3)]
        restore = hit.restore(pages, np.arange(8))
        restore.wait_layer(0)
        turn = kv.space.begin_turn(kv.space.keys(kv.tokens(2, 4)), session="t")
        getattr(daemon, end)()
        assert 0 <= restore.wait() <= 8
        assert kv.hit(tokens) == 0
        with pytest.raises(fc.Unavailable):
            kv.space.begin_turn(kv.space.keys(kv.tokens(3, 4)))
        kv.write(turn, kv.space.keys(kv.tokens(2, 4)))
        with pytest.raises(fc.Unavailable):
            turn.commit()
        hit.release()
        daemon.start()
        assert kv.hit(tokens) == 8
        kv.store(kv.tokens(2, 4), session="t")
        assert kv.hit(kv.tokens(2, 4)) == 4
        assert client.stats().greetings == 2
        daemon.check()


def test_stalled_daemon(tmp_path):
    """SIGSTOP: calls end at their deadline; the restore that has its descriptors goes on until the lease would lapse."""
    with Daemon(tmp_path) as daemon, connect(daemon) as client:
        kv = Kv(client)
        tokens = kv.tokens(1, 8)
        kv.store(tokens)
        hit = kv.space.lookup(kv.space.keys(tokens))
        pages = [np.zeros((8, kv.plane_bytes), np.uint8) for _ in range(3)]
        restore = hit.restore(pages, np.arange(8))
        restore.wait_layer(0)
        daemon.signal(signal.SIGSTOP)
        started = time.monotonic()
        for _ in range(5):
            assert kv.space.lookup(kv.space.keys(tokens), timeout_s=0.3).blocks == 0
        assert restore.wait() == 8
        assert time.monotonic() - started < PATIENT_S / 4, "not even one that waits for an answer"
        daemon.signal(signal.SIGCONT)
        hit.release()


def test_giving_back_does_not_wait_for_a_stalled_daemon(tmp_path):
    with Daemon(tmp_path) as daemon, connect(daemon, timeout_s=20) as client:
        kv = Kv(client)
        tokens = kv.tokens(1, 8)
        kv.store(tokens)
        with kv.space.lookup(kv.space.keys(tokens)) as hit:
            assert hit.blocks == 8
            daemon.signal(signal.SIGSTOP)
            started = time.monotonic()
        assert time.monotonic() - started < 5
        daemon.signal(signal.SIGCONT)
        daemon.until(lambda status: kv.hit(tokens) == 8 and status["leases"] == 0)  # long before it lapses


def test_a_client_that_dies_leaves_nothing(tmp_path):
    """SIGKILL at each step of a turn: never visible, and all given back."""
    with Daemon(tmp_path) as daemon, connect(daemon) as client:
        kv = Kv(client)
        for step in range(3):
            code = dedent(f"""
                import os, signal, sys
                sys.path[:0] = {sys.path!r}
                import numpy as np
                import flatcake_client as fc
                from kv import Kv
                kv = Kv(fc.connect({daemon.endpoint!r}, timeout_s={PATIENT_S}))
                keys = kv.space.keys(kv.tokens(1, 6))
                turn = kv.space.begin_turn(keys, session="dies")
                for layer in range((0, 1, 3)[{step}]):
                    turn.write_layer(layer, kv.bytes_of(keys, layer), np.arange(6))
                os.kill(os.getpid(), signal.SIGKILL)
            """)
            assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
            daemon.until(lambda status: status["open_turns"] == 0 and status["clients"] == 1)
            assert kv.hit(kv.tokens(1, 6)) == 0
        kv.store(kv.tokens(1, 6), session="lives")
        assert kv.hit(kv.tokens(1, 6)) == 6
        daemon.check()


def test_a_flipped_bit_is_a_miss(tmp_path):
    with Daemon(tmp_path, verify="all") as daemon, connect(daemon) as client:
        kv = Kv(client)
        tokens = kv.tokens(1, 4)
        longer = kv.tokens(2, 4, after=tokens)
        kv.store(tokens, session="s")
        kv.store(longer, session="s")
        run = kv.space.lookup(kv.space.keys(longer), pin=False).runs[1]
        (path,) = (tmp_path / "ssd").rglob(f"{run.file_id:016x}.kv")
        with path.open("r+b") as file:
            file.seek(run.file_offset + 5)
            byte = file.read(1)
            file.seek(run.file_offset + 5)
            file.write(bytes([byte[0] ^ 1]))
        with kv.space.lookup(kv.space.keys(longer)) as hit:
            assert hit.blocks == 8
            pages = [np.zeros((8, kv.plane_bytes), np.uint8) for _ in range(3)]
            restore = hit.restore(pages, np.arange(8))
            with pytest.raises(fc.Corrupt) as raised:
                restore.wait_layer(0)
            assert raised.value.usable_blocks == 4
        assert kv.hit(longer) == 4, "the damaged segment is quarantined"
        assert client.stats().corrupt_segments == 1


def test_leases_hold_against_reclaim_and_no_longer(tmp_path):
    """A pinned session stays while the store is filled around it; released, it goes like any other."""
    with Daemon(tmp_path, ssd_bytes=16 << 20) as daemon, connect(daemon) as client:
        kv = Kv(client, plane_bytes=64 << 10)
        kv.store(kv.tokens(0, 8), session="pinned")
        with kv.space.lookup(kv.space.keys(kv.tokens(0, 8))) as hit:
            for n in range(1, 20):
                try:
                    kv.store(kv.tokens(n, 8), session=f"s{n}")
                except fc.Overloaded:
                    continue
            pages = [np.zeros((8, kv.plane_bytes), np.uint8) for _ in range(3)]
            assert hit.restore(pages, np.arange(8)).wait() == 8
            for layer in range(3):
                assert np.array_equal(pages[layer], kv.bytes_of(hit.keys, layer))
        for n in range(20, 40):
            kv.store(kv.tokens(n, 8), session=f"s{n}")
        assert kv.hit(kv.tokens(0, 8)) == 0
        daemon.check()


def test_an_expired_lease_is_an_error(tmp_path):
    with Daemon(tmp_path, lease_ttl="1s") as daemon, connect(daemon) as client:
        kv = Kv(client)
        kv.store(kv.tokens(0, 8))
        hit = kv.space.lookup(kv.space.keys(kv.tokens(0, 8)))
        daemon.until(lambda status: status["leases"] == 0)
        pages = [np.zeros((8, kv.plane_bytes), np.uint8) for _ in range(3)]
        assert hit.restore(pages, np.arange(8)).wait() == 0
        assert not any(page.any() for page in pages)
        hit.release()
