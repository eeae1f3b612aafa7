"""What a start finds where its socket should be, and what one that fails leaves behind: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from pathlib import Path

import pytest

from flatcake_server import app
from flatcake_server.app import Node, _take_socket
from flatcake_server.config import NodeConfig
from flatcake_transport.errors import Unavailable


def listening(path, backlog):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(backlog)
    return listener


def test_nothing_is_there(tmp_path):
    _take_socket(tmp_path / "deep" / "fc.sock")
    assert (tmp_path / "deep").is_dir()


def test_a_socket_nobody_listens_to_is_taken_away(tmp_path):
    listening(tmp_path / "fc.sock", 1).close()
    (tmp_path / "fc.sock.fds").touch()
    _take_socket(tmp_path / "fc.sock")
    assert list(tmp_path.iterdir()) == []


def test_a_living_daemon_keeps_its_socket(tmp_path):
    with listening(tmp_path / "fc.sock", 1), pytest.raises(Unavailable, match="another daemon answers"):
        _take_socket(tmp_path / "fc.sock")
    assert (tmp_path / "fc.sock").exists()


def test_so_does_one_that_has_no_time(tmp_path):
    """Stopped, or with a full backlog: it may be alive."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(listening(tmp_path / "fc.sock", 0))
        for _ in range(8):
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(str(tmp_path / "fc.sock"))
        with pytest.raises(Unavailable, match="cannot be told"):
            _take_socket(tmp_path / "fc.sock")
    assert (tmp_path / "fc.sock").exists()


def test_a_file_is_no_socket(tmp_path):
    (tmp_path / "fc.sock").write_text("notes")
    with pytest.raises(Unavailable, match="no socket"):
        _take_socket(tmp_path / "fc.sock")
    assert (tmp_path / "fc.sock").read_text() == "notes"


def test_the_default_socket_is_not_put_where_others_could_replace_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = tmp_path / "flatcake" / "flatcake.sock"
    _take_socket(path)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.parent.chmod(0o770)
    with pytest.raises(Unavailable, match="chmod 700"):
        _take_socket(path)
    _take_socket(path.with_name("chosen.sock"))


def test_a_directory_that_cannot_be_made_says_which_option(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable, match="choose another --socket"):
        _take_socket(tmp_path / "file" / "fc.sock")


STEPS = ["Arena", "load_node_secrets", "build_cluster", "Reports", "RpcServer", "adopt", "parse_listen", "start_web"]


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


def held(root):
    """Open files below a directory, and arenas."""
    names = map(target_of, Path("/proc/self/fd").iterdir())
    return Counter(name for name in names if str(root) in name or "arena" in name)


def target_of(link):
    with contextlib.suppress(OSError):
        return str(link.readlink())
    return ""
