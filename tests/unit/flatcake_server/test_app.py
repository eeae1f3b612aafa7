"""What a start finds where its socket should be, and what one that fails leaves behind: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import threading
from collections import Counter
from pathlib import Path

import pytest
import typer
from core import Yield

from flatcake_server import adopt, app
from flatcake_server.app import Node
from flatcake_server.cli_serve import serve_command
from flatcake_server.config import NodeConfig
from flatcake_server.journal import RocksRecords
from flatcake_transport.errors import Unavailable

STEPS = [
    "Arena",
    "load_node_secrets",
    "build_cluster",
    "Reports",
    "RpcServer",
    "take_over",
    "parse_listen",
    "start_web",
]


class Cluster:
    """Of a node that is built and not started; letting it go fails."""

    service = stats = None

    def __init__(self):
        self.remote, self.stops = self, 0

    async def exported_files(self, _client_id, _lease_id):
        return {}

    async def stop(self):
        self.stops += 1
        raise RuntimeError("the test broke the end of the cluster")


@pytest.mark.parametrize("step", STEPS)
def test_a_start_that_fails_lets_everything_go(tmp_path, monkeypatch, step):
    """Whatever the step, and whatever fails while it is let go."""
    config = NodeConfig(
        socket=tmp_path / "fc.sock", ssd_paths=(tmp_path / "ssd",), ssd_bytes=1 << 30, memory_bytes=1 << 24,
        grpc_listen="127.0.0.1:0", http_listen="127.0.0.1:0",
    )  # fmt: skip
    cluster = Cluster()
    (tmp_path / "ssd").mkdir()

    def fails(*_arguments, **_options):
        raise KeyError(f"{step} was broken by the test")

    async def starts():
        with monkeypatch.context() as patch:
            patch.setattr(app, "build_cluster", lambda *_: cluster)
            patch.setattr(app, step, fails)
            node = Node(config)
            with pytest.raises(KeyError, match="broken by the test"):
                await node.start()
            assert await node.stop(), "twice is fine"
        assert (cluster.stops > 0) == (STEPS.index(step) > STEPS.index("build_cluster"))
        assert asyncio.all_tasks() == {asyncio.current_task()}
        node = Node(config)
        await node.start()
        assert await node.stop()

    before = held(tmp_path)  # arenas of other tests in this process, which may go meanwhile
    asyncio.run(starts())
    assert not held(tmp_path) - before
    assert not (tmp_path / "fc.sock.fds").exists()


def config_on(tmp_path, *names):
    return NodeConfig(
        socket=tmp_path / "fc.sock", ssd_paths=tuple(tmp_path / name for name in names), ssd_bytes=1 << 30,
        memory_bytes=1 << 24, grpc_listen="off", http_listen="off",
    )  # fmt: skip


def test_a_node_starts_without_a_disk_that_is_not_mounted(tmp_path):
    """One of several: it is said, and nothing is made in its place."""
    (tmp_path / "ssd").mkdir()
    node = Node(config_on(tmp_path, "ssd", "unmounted"))

    async def story():
        await node.start()
        assert node.healthy() == ""
        assert await node.stop()

    asyncio.run(story())
    assert [bool(disk.failure) for disk in node.disks.values()] == [False, True]
    assert "mkdir -p" in node.disks[2].failure
    assert not (tmp_path / "unmounted").exists()


@pytest.mark.parametrize("names", [("ssd",), ("ssd", "unmounted")])
def test_a_node_whose_disks_all_hang_or_are_gone_does_not_start(tmp_path, monkeypatch, names):
    (tmp_path / "ssd").mkdir()
    monkeypatch.setattr(adopt, "OPEN_S", 0.01)
    monkeypatch.setattr(app, "CLOSE_TIMEOUT_S", 0.01)
    answers = threading.Event()
    opens = app.Disk.open
    monkeypatch.setattr(app.Disk, "open", lambda disk: answers.wait() if disk.path.exists() else opens(disk))
    node = Node(config_on(tmp_path, *names))

    async def story():
        try:
            with pytest.raises(Unavailable, match=r"has not answered|does not exist"):
                await node.start()
            assert not await node.stop(), "its thread is still there: the process must be ended under it"
        finally:
            answers.set()

    asyncio.run(story())


def test_a_start_that_reads_its_journal_ends_when_it_is_told_to(tmp_path, monkeypatch):
    """However long that is: it hangs in no disk. Nothing is left open either."""
    (tmp_path / "ssd").mkdir()
    monkeypatch.setattr(app, "CLOSE_TIMEOUT_S", 60.0)
    scan, begun, over = RocksRecords.scan, threading.Event(), threading.Event()

    def endless(records, prefix):
        for record in scan(records, prefix):
            begun.set()
            while not over.is_set():
                yield record

    async def story():
        with monkeypatch.context() as patch:
            patch.setattr(RocksRecords, "scan", endless)
            node = Node(config_on(tmp_path, "ssd"))
            starting = asyncio.ensure_future(node.start())
            await asyncio.to_thread(begun.wait)
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            assert await node.stop()
            assert not over.is_set()
        node = Node(config_on(tmp_path, "ssd"))
        await node.start()
        assert node.healthy() == ""
        assert await node.stop()

    giving_up = threading.Timer(50.0, over.set)
    giving_up.start()
    try:
        asyncio.run(story())
    finally:
        giving_up.cancel()
        over.set()


def test_paths_that_hang_at_the_end_keep_no_other_from_being_closed(tmp_path, monkeypatch):
    """However many: each is closed in a thread of its own."""
    names = [f"ssd{number}" for number in range(40)]  # more than asyncio has threads on any machine
    node, together = Node(config_on(tmp_path, *names)), threading.Barrier(len(names))
    monkeypatch.setattr(app.Disk, "close", lambda _disk: together.wait())
    monkeypatch.setattr(app, "CLOSE_TIMEOUT_S", 60.0)

    async def story():
        node.build_store()
        try:
            assert await node.stop()
        finally:
            together.abort()

    asyncio.run(story())


def test_a_configuration_is_read_without_asking_a_disk(tmp_path, monkeypatch):
    """It may hang, and nobody would hear a signal: paths are looked at in their own threads, with a deadline."""
    real = {name: getattr(os, name) for name in ("stat", "lstat", "statvfs", "access", "open", "readlink")}
    asked, seen = [], []

    def watched(name):
        def call(path, *arguments, **options):
            if str(path).startswith(str(tmp_path / "ssd")):
                asked.append(name)
            return real[name](path, *arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for name in real:
            patch.setattr(os, name, watched(name))
        with pytest.raises(typer.Exit):
            serve_command(lambda config: seen.append(config) or 0)(
                config=None, print_config=False, ssd_paths=[str(tmp_path / "ssd")], socket=str(tmp_path / "fc.sock")
            )
    assert seen[0].ssd_paths == (tmp_path / "ssd",)
    assert asked == []


def test_a_daemon_may_open_as_many_and_as_large_files_as_its_user():
    numbers = resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE
    before = [resource.getrlimit(number) for number in numbers]
    try:
        for number, (_, hard) in zip(numbers, before, strict=True):
            resource.setrlimit(number, (1 << 20 if number == resource.RLIMIT_FSIZE else 512, hard))
        app._raise_limits()
        assert [resource.getrlimit(number) for number in numbers] == [(hard, hard) for _, hard in before]
    finally:
        for number, limits in zip(numbers, before, strict=True):
            resource.setrlimit(number, limits)


def test_a_lost_path_that_hangs_does_not_keep_the_process(tmp_path, monkeypatch):
    """Its threads would, if nobody noticed them: the interpreter waits for them at its end."""
    (tmp_path / "ssd").mkdir()
    monkeypatch.setattr(app, "CLOSE_TIMEOUT_S", 0.01)
    node, begun, answers = Node(config_on(tmp_path, "ssd")), threading.Event(), threading.Event()

    def hangs():
        begun.set()
        answers.wait()

    async def story():
        await node.start()
        hanging = asyncio.ensure_future(node.disks[1].read(hangs))
        try:
            await asyncio.to_thread(begun.wait)
            node.retirement.fail_disk(node.disks[1], "EIO")
            assert not await node.stop()
        finally:
            answers.set()
            await hanging

    asyncio.run(story())


@pytest.mark.parametrize("hangs", [False, True])
def test_sigterm_ends_a_start_as_well(tmp_path, monkeypatch, hangs):
    """One that waits for a disk, a directory or a peer, too."""
    steps = []

    async def starts(_node):
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await (asyncio.Event().wait() if hangs else Yield())
        finally:
            steps.append("let go")

    monkeypatch.setattr(Node, "start", starts)
    assert asyncio.run(asyncio.wait_for(app.run(config_on(tmp_path)), 30)) == 0
    assert steps == ["let go"]
    assert gc.isenabled()
    gc.unfreeze()


def test_no_thread_that_hangs_keeps_the_process(tmp_path, monkeypatch):
    """The interpreter would wait for it at its end."""
    monkeypatch.setattr(app, "CLOSE_TIMEOUT_S", 0.01)
    answers, exits = threading.Event(), []

    def ends(code):
        exits.append(code)
        answers.set()

    thread = threading.Thread(target=answers.wait, name="flatcake-nvmet_0")

    async def starts(_node):
        thread.start()
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(app.os, "_exit", ends)
    monkeypatch.setattr(Node, "start", starts)
    try:
        asyncio.run(asyncio.wait_for(app.run(config_on(tmp_path)), 30))
    finally:
        answers.set()
    assert exits == [app.CANNOT_NOW]
    gc.unfreeze()


def held(root):
    """Open files below a directory, and arenas."""
    names = map(target_of, Path("/proc/self/fd").iterdir())
    return Counter(name for name in names if str(root) in name or "arena" in name)


def target_of(link):
    with contextlib.suppress(OSError):
        return str(link.readlink())
    return ""
