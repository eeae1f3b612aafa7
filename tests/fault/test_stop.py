"""How a daemon ends or stalls: SIGTERM drains, SIGSTOP is a miss within the deadline, and a fork of a client is told so."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from daemon import Daemon
from kv import Kv, connect
from waiting import until

import flatcake_client as fc
from flatcake_server.rpc_admin import AdminClient


def test_sigterm_waits_for_an_open_turn(tmp_path):
    """No new turn is begun, the open one commits, then the daemon ends with 0; what was committed is there again."""
    with Daemon(tmp_path, drain_timeout="20s") as daemon, connect(daemon) as client:
        kv = Kv(client)
        keys = kv.space.keys(kv.tokens(1, 6))
        with kv.space.begin_turn(keys, session="s") as turn:
            daemon.signal(signal.SIGTERM)
            refused = until_refused(kv)
            assert "stopping" in str(refused)
            assert not daemon.wait(0.2)
            kv.write(turn, keys)
            assert turn.commit()
        assert daemon.wait(10)
        assert daemon.process is not None
        assert daemon.process.returncode == 0
        daemon.start()
        assert kv.hit(kv.tokens(1, 6)) == 6
        daemon.check()


def until_refused(kv):
    """Begin turns until one is refused."""
    for seed in range(1000, 3000):
        try:
            kv.space.begin_turn(kv.space.keys(kv.tokens(seed, 1)), session="late").abort()
        except (fc.Unavailable, fc.Overloaded) as error:
            return error
    raise AssertionError("turns are begun for ever")


def test_sigterm_gives_up_on_a_turn_that_never_ends(tmp_path):
    with Daemon(tmp_path, drain_timeout="0.3s") as daemon, connect(daemon) as client:
        kv = Kv(client)
        keys = kv.space.keys(kv.tokens(1, 6))
        turn = kv.space.begin_turn(keys, session="s")
        assert daemon.stop() == 0
        kv.write(turn, keys)
        with pytest.raises(fc.Unavailable):
            turn.commit()
        daemon.start()
        assert kv.hit(kv.tokens(1, 6)) == 0
        assert daemon.check()["sessions"] == 0


def test_a_second_signal_changes_nothing(daemon):
    for _ in range(3):
        daemon.signal(signal.SIGTERM)
    assert daemon.stop() == 0


def test_a_stopped_daemon_is_a_miss_within_the_deadline(daemon):
    """SIGSTOP: every call ends in time; woken up, the daemon is what it was."""
    with connect(daemon) as patient, connect(daemon, transfer_timeout_s=0.5) as client:
        Kv(patient).store(Kv(patient).tokens(1, 6))
        kv = Kv(client)
        keys = kv.space.keys(kv.tokens(2, 4))
        turn = kv.space.begin_turn(keys, session="t")
        daemon.signal(signal.SIGSTOP)
        try:
            started = time.monotonic()
            hit = kv.space.lookup(kv.space.keys(kv.tokens(1, 6)), timeout_s=0.4)
            assert hit.blocks == 0
            assert isinstance(hit.failure, fc.Unavailable)
            with pytest.raises(fc.Unavailable):
                kv.space.begin_turn(kv.space.keys(kv.tokens(3, 4)), timeout_s=0.4)
            kv.write(turn, keys)
            with pytest.raises(fc.Unavailable):
                turn.commit(timeout_s=0.4)
            assert time.monotonic() - started < 5
        finally:
            daemon.signal(signal.SIGCONT)
        assert until_hit(kv, kv.tokens(1, 6)) == 6
        # The commit was asked for, and answered to nobody: stored whole, or not at all.
        assert kv.hit(kv.tokens(2, 4)) in (0, 4)
    daemon.until(lambda status: status["open_turns"] == status["clients"] == 0)


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def until_hit(kv, tokens):
    """A client that was let down asks again only after a pause."""
    deadline_s = time.monotonic() + 10
    while not (blocks := kv.hit(tokens)) and time.monotonic() < deadline_s:
        pass
    return blocks


def test_a_forked_child_is_told_and_harms_nobody(daemon):
    """Lookups, turns and restores raise in the child; its end takes nothing from the parent."""
    with connect(daemon) as client:
        kv = Kv(client)
        kv.store(kv.tokens(1, 6))
        keys = kv.space.keys(kv.tokens(2, 4))
        turn = kv.space.begin_turn(keys, session="t")
        hit = kv.space.lookup(kv.space.keys(kv.tokens(1, 6)))
        read, write = os.pipe()
        child = os.fork()
        if not child:
            said = b""
            for call in (
                lambda: kv.space.lookup(keys),
                lambda: kv.space.begin_turn(keys),
                lambda: turn.commit(),
                lambda: hit.restore([], []),
                lambda: client.open_space("m", "u8", 1, [1]),
            ):
                try:
                    call()
                    said += b"nothing "
                except RuntimeError as error:
                    said += b"told " if "connect() in the child" in str(error) else b"unclear "
                except BaseException as error:  # noqa: BLE001
                    said += repr(error).encode()
            turn.abort()
            hit.release()
            client.close()
            os.write(write, said)
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(read, 1000).split() == [b"told"] * 5
        os.close(read)
        os.close(write)
        kv.write(turn, keys)
        assert turn.commit()
        assert kv.hit(kv.tokens(2, 4)) == 4
        hit.release()
        assert daemon.status()["clients"] == 1


def test_nothing_is_left_behind_by_kills(tmp_path):
    """Killed and started five times: descriptors and threads of a client, and sockets, stay as many."""
    with Daemon(tmp_path) as daemon, connect(daemon) as client:
        kv = Kv(client)
        kv.store(kv.tokens(0, 4))
        counts = []
        for _ in range(4):
            daemon.kill()
            assert kv.space.lookup(kv.space.keys(kv.tokens(0, 4))).blocks == 0
            daemon.start()
            assert until_hit(kv, kv.tokens(0, 4)) == 4
            counts.append(open_descriptors())
        until(lambda: open_descriptors() <= min(counts) + 2)  # gRPC closes its own a moment later
        assert sorted(path.name for path in tmp_path.iterdir()) == ["daemon.log", "fc.sock", "fc.sock.fds", "ssd"]
        assert daemon.stop() == 0
        assert sorted(path.name for path in tmp_path.iterdir()) == ["daemon.log", "ssd"]


def test_a_disk_that_hangs_holds_up_neither_the_clock_nor_the_end(tmp_path):
    """Deleting never returns, for good: leases and clients still end by the clock, and SIGTERM still ends the daemon."""
    wrapper = tmp_path / "hang.py"
    wrapper.write_text(
        "import threading\n"
        "from flatcake_server.session import SessionFiles\n"
        "SessionFiles.delete = lambda self, file_id: threading.Event().wait()\n"
    )
    with Daemon(tmp_path, wrapper=wrapper, lease_ttl="3s", drain_timeout="1s") as daemon:
        with connect(daemon) as client:
            kv = Kv(client)
            kv.store(kv.tokens(1, 4), session="goes")
            kv.store(kv.tokens(2, 4), session="stays")
            with AdminClient(daemon.endpoint, timeout_s=1.0) as admin, pytest.raises(fc.Unavailable):
                admin.drop(["goes"])
            assert kv.hit(kv.tokens(2, 4)) == 4
            kv.space.lookup(kv.space.keys(kv.tokens(2, 4)))  # pinned, and never released
            daemon.until(lambda status: status["leases"] == 0 and status["counters"]["lookups_total"] >= 2)
        daemon.signal(signal.SIGTERM)
        assert daemon.wait(20), daemon.log_tail()
        assert "hangs" in daemon.log_tail()
