"""Daemons and engines as processes, killed, stopped and starved at random: a cache may forget, never lie, and never hold an engine up.

In a soak only, two minutes each. Budgets are tiny, so that reclaim runs all the time. At the end nothing is wrong with what engines were
given, nothing is held any more, and the law holds on the living nodes, offline, and after another start.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Self

import pytest
from cluster import node
from daemon import Daemon
from faults import small_disk
from hypothesis import settings
from redis_server import RedisServer, needs_redis
from ucx_peer import ucx_here
from waiting import pause

from flatcake_server import offline
from flatcake_transport.errors import FlatCakeError

SOAK = settings().max_examples > 1000
pytestmark = pytest.mark.skipif(not SOAK, reason="takes minutes: `make soak`")
HERE = Path(__file__).parent
MIB = 1 << 20
TORTURE_S = 120.0
BLAMED = "wrong: "  # torture_engine.py says it at once
REST_S = 120.0  # of a busy machine
OPTIONS = {
    "memory_bytes": 2 * MIB,
    "lease_ttl": "4s",
    "session_trim_after": "3s",
    "drain_timeout": "1s",
    "huge_pages": "off",
}


class Engines:
    """As many processes a node as asked for; one that was killed is followed by another."""

    def __init__(self, root: Path, count: int) -> None:
        self._root, self._count, self._started = root, count, 0
        self._stop = root / "stop"
        self.living: list[tuple[Daemon, subprocess.Popen[bytes], Path]] = []

    def start(self, daemon: Daemon) -> None:
        self._started += 1
        report = self._root / f"engine{self._started}"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path])}
        words = [sys.executable, HERE / "torture_engine.py", daemon.endpoint, self._started, self._stop, report]
        with report.with_suffix(".log").open("wb") as log:
            process = subprocess.Popen(list(map(str, words)), stdout=log, stderr=log, env=environment)
        self.living.append((daemon, process, report))

    def kill(self, which: int) -> None:
        daemon, process, report = self.living.pop(which)
        process.kill()
        process.wait()
        assert BLAMED not in report.with_suffix(".log").read_text()
        self.start(daemon)

    def end(self) -> Counter[str]:
        """What all of them did. Raises: AssertionError: one failed, or was told something wrong."""
        self._stop.touch()
        done: Counter[str] = Counter()
        for _, process, report in self.living:
            code = process.wait(REST_S)
            assert code == 0, report.with_suffix(".log").read_text()[-3000:]
            *wrong, counts = report.read_text().splitlines()
            assert wrong == []
            done.update(json.loads(counts))
        return done

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for _, process, _ in self.living:
            process.kill()
            process.wait()


class World:
    """What may happen, one thing after the other."""

    def __init__(self, nodes: list[Daemon], engines: Engines, disk: Path | None, seed: int) -> None:
        self.nodes, self.engines, self.disk, self.random = nodes, engines, disk, random.Random(seed)

    def happen(self) -> None:
        happenings = [self.kill, self.term, self.stop, self.kill_engine, self.stop_engine, self.drop, self.check]
        if self.disk is not None:
            happenings += [self.fill, self.drain]
        self.random.choice(happenings)(self.random.choice(self.nodes))
        pause(self.random.uniform(0.0, 3.0))

    def kill(self, daemon: Daemon) -> None:
        daemon.kill()
        daemon.start()

    def term(self, daemon: Daemon) -> None:
        daemon.restart()

    def stop(self, daemon: Daemon) -> None:
        daemon.signal(signal.SIGSTOP)
        pause(self.random.choice([0.1, 1.0, 4.0]))
        daemon.signal(signal.SIGCONT)

    def kill_engine(self, daemon: Daemon) -> None:
        self.engines.kill(self.random.randrange(len(self.engines.living)))

    def stop_engine(self, daemon: Daemon) -> None:
        _, process, _ = self.random.choice(self.engines.living)
        process.send_signal(signal.SIGSTOP)
        pause(self.random.choice([0.3, 5.0]))  # shorter and longer than a lease
        process.send_signal(signal.SIGCONT)

    def drop(self, daemon: Daemon) -> None:
        with daemon.admin() as admin:
            names = [row["name"] for row in admin.sessions(limit=20)]
            admin.drop(self.random.sample(names, min(5, len(names))))

    def check(self, daemon: Daemon) -> None:
        daemon.check()

    def fill(self, daemon: Daemon) -> None:
        assert self.disk is not None
        free = os.statvfs(self.disk)
        with (self.disk / "ballast").open("wb") as file, contextlib.suppress(OSError):
            os.posix_fallocate(
                file.fileno(), 0, max(1, free.f_bavail * free.f_frsize - self.random.choice([0, 1 * MIB]))
            )

    def drain(self, daemon: Daemon) -> None:
        assert self.disk is not None
        (self.disk / "ballast").unlink(missing_ok=True)


def rests(status: dict) -> bool:
    """Nobody holds anything, and nothing is on its way out of a path that is well."""
    cluster = status["cluster"] or {}
    held = status["leases"], status["open_turns"], status["clients"] - cluster.get("attached", 0)
    leaving = [pool["releasing_bytes"] for pool in status["pools"] if not pool["failure"]]
    return not any((*held, cluster.get("loans", 0), cluster.get("staged", 0), *leaving))


def torture(nodes: list[Daemon], root: Path, engines_a_node: int, disk: Path | None = None) -> Counter[str]:
    with Engines(root, engines_a_node) as engines:
        for daemon in nodes * engines_a_node:
            engines.start(daemon)
        world = World(nodes, engines, disk, seed=engines_a_node)
        ends_s = time.monotonic() + TORTURE_S
        while time.monotonic() < ends_s:
            with contextlib.suppress(FlatCakeError):  # an operator whom a busy node does not answer
                world.happen()
        if disk is not None:
            world.drain(nodes[0])
        done = engines.end()
    for daemon in nodes:
        daemon.until(rests, REST_S)
        assert not daemon.status()["counters"]["unforeseen_total"]
        with daemon.admin() as admin:
            report = [step.report for step in admin.check(data=True) if step.report][-1]
        assert report["ok"], report["findings"]
        assert daemon.stop() in (0, 3), "3: a disk of a busy machine may take longer than a stop waits"
        assert "nobody foresaw" not in daemon.log.read_text(errors="replace")
        for path in daemon.ssd_paths:
            assert offline.check(path, data=True).findings == []
    for daemon in nodes:
        daemon.start()
        daemon.check()
    return done


def test_one_node_with_a_disk_that_others_fill(tmp_path):
    with small_disk(tmp_path, 40 * MIB) as disk:
        paths = f"{tmp_path / 'ssd0'},{tmp_path / 'ssd1'},{disk / 'ssd'}"
        with Daemon(tmp_path, ssd_paths=paths, ssd_bytes=3 * 16 * MIB, verify="all", **OPTIONS) as daemon:
            done = torture([daemon], tmp_path, 3, disk)
    assert done["compared"] > 0
    assert done["committed"] > 0


@needs_redis
def test_two_nodes_that_read_each_other(tmp_path):
    ucx_here()
    with RedisServer(tmp_path / "redis") as redis:
        told = {"directory": "redis", "redis_url": redis.url, "peer_timeout": "1s", "copy_after_hits": 2}
        told |= {"ucx_listen": "127.0.0.1:0", "ucx_bounce_bytes": 8 * MIB, "ssd_bytes": 16 * MIB, **OPTIONS}
        with contextlib.ExitStack() as stack:
            nodes = [stack.enter_context(node(tmp_path, number, **told)) for number in (1, 2)]
            done = torture(nodes, tmp_path, 2)
    assert done["compared"] > 0
    assert done["committed"] > 0
