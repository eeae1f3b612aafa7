"""kill -9 of an engine at each step of a write, and while it reads: nothing half shows, everything it held comes back."""

from __future__ import annotations

import signal
import subprocess
import sys
from textwrap import dedent

import pytest
from daemon import Daemon
from kv import PATIENT_S, Kv, connect

STEPS = ("begun", "half", "written", "asked", "committed")
LAYERS = {"begun": 0, "half": 1}
HINTS = {"ssd": {}, "memory": {"share_counts": [2] * 6}}


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("kill"), lease_ttl="60s") as daemon:
        yield daemon


def engine(node, model, work):
    """A process that does `work` (it may use kv, keys, np) up to a line it prints, and then waits to be killed."""
    code = f"""
        import sys
        sys.path[:0] = {sys.path!r}
        import numpy as np
        import flatcake_client as fc
        from kv import Kv
        kv = Kv(fc.connect({node.endpoint!r}, timeout_s={PATIENT_S}), model={model!r})
        keys = kv.space.keys(kv.tokens(1, 6))
    """
    source = dedent(code) + dedent(work) + "\nprint('here', flush=True)\nsys.stdin.read()\n"
    return subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def kill(process):
    with process:
        process.kill()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("medium", HINTS)
@pytest.mark.parametrize("step", STEPS)
def test_writing(node, medium, step):
    """The same keys can be stored by another right away, and the bytes that were reserved are free."""
    model = f"{medium} {step}"
    before = node.status()
    with connect(node) as client:
        kv = Kv(client, model=model)
        work = f"""
            turn = kv.space.begin_turn(keys, session="dies", **{HINTS[medium]!r})
            for layer in range({LAYERS.get(step, 3)}):
                turn.write_layer(layer, kv.bytes_of(keys, layer), np.arange(6))
            if {step == "committed"}:
                turn.commit()
            if {step == "asked"}:
                print("about", flush=True)
                sys.stdin.readline()
                import threading
                threading.Thread(target=turn.commit, daemon=True).start()
        """
        process = engine(node, model, work)
        assert process.stdout is not None
        assert process.stdin is not None
        if step == "asked":  # the request is on its way to a daemon that has not read it yet
            assert process.stdout.readline() == b"about\n"
            node.signal(signal.SIGSTOP)
            process.stdin.write(b"\n")
            process.stdin.flush()
        assert process.stdout.readline() == b"here\n"
        kill(process)
        node.signal(signal.SIGCONT)
        node.until(lambda status: status["open_turns"] == 0 and status["clients"] == 1)
        blocks = kv.hit(kv.tokens(1, 6))
        assert blocks == 6 if step == "committed" else blocks in (0, 6) if step == "asked" else blocks == 0
        if not blocks:
            same = ("pools", "sessions", "segments")
            node.until(lambda status: [status[name] for name in same] == [before[name] for name in same])
        node.check()
        kv.store(kv.tokens(1, 6), session="lives", **HINTS[medium])
        assert kv.hit(kv.tokens(1, 6)) == 6


@pytest.mark.parametrize("medium", HINTS)
def test_reading(node, medium):
    """Leases of 60 s end with the process, in the middle of its restore."""
    model = f"reads {medium}"
    with connect(node) as client:
        kv = Kv(client, model=model)
        kv.store(kv.tokens(1, 6), session="read", **HINTS[medium])
        work = """
            hits = [kv.space.lookup(keys) for _ in range(5)]
            pages = [np.zeros((6, kv.plane_bytes), np.uint8) for _ in range(3)]
            hits[0].restore(pages, np.arange(6)).wait_layer(0)
        """
        process = engine(node, model, work)
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        status = node.status()
        assert (status["leases"], status["pinned_sessions"]) == (5, 1)
        kill(process)
        node.until(lambda status: status["leases"] == status["pinned_sessions"] == 0 and status["clients"] == 1)
        assert kv.hit(kv.tokens(1, 6)) == 6
        with node.admin() as admin:
            assert len(admin.drop([row["name"] for row in admin.sessions() if row["model"] == model])["dropped"]) == 1
        node.check()


def test_a_slow_writer_is_never_overtaken(node):
    """SIGSTOP in the middle of a turn, for longer than anything lasts: its space stays its own; it goes on and commits."""
    with connect(node) as client:
        kv = Kv(client, model="slow")
        work = """
            turn = kv.space.begin_turn(keys, session="slow")
            turn.write_layer(0, kv.bytes_of(keys, 0), np.arange(6))
            print("begun", flush=True)
            sys.stdin.readline()
            for layer in (1, 2):
                turn.write_layer(layer, kv.bytes_of(keys, layer), np.arange(6))
            turn.commit()
        """
        process = engine(node, "slow", work)
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"begun\n"
        process.send_signal(signal.SIGSTOP)
        reserved = node.pool("ssd")["reserved_bytes"]
        for seed in range(10, 20):  # others come and go meanwhile
            kv.store(kv.tokens(seed, 6), session=f"s{seed}")
        assert node.pool("ssd")["reserved_bytes"] >= reserved
        process.send_signal(signal.SIGCONT)
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"here\n"
        for seed in (1, *range(10, 20)):
            assert kv.hit(kv.tokens(seed, 6)) == 6
        kill(process)
        node.check()
