"""Unix sockets: whose they are, and who may open them when."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from pathlib import Path

import pytest

from flatcake_server.app import Node
from flatcake_server.config import NodeConfig
from flatcake_server.sockets import take_socket
from flatcake_transport.errors import Unavailable


def listening(path, backlog):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(backlog)
    return listener


def test_nothing_is_there(tmp_path):
    take_socket(tmp_path / "deep" / "fc.sock")
    assert (tmp_path / "deep").is_dir()


def test_a_socket_nobody_listens_to_is_taken_away(tmp_path):
    listening(tmp_path / "fc.sock", 1).close()
    (tmp_path / "fc.sock.fds").touch()
    take_socket(tmp_path / "fc.sock")
    assert list(tmp_path.iterdir()) == []


def test_a_living_daemon_keeps_its_socket(tmp_path):
    with listening(tmp_path / "fc.sock", 1), pytest.raises(Unavailable, match="another daemon answers"):
        take_socket(tmp_path / "fc.sock")
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
            take_socket(tmp_path / "fc.sock")
    assert (tmp_path / "fc.sock").exists()


def test_a_file_is_no_socket(tmp_path):
    (tmp_path / "fc.sock").write_text("notes")
    with pytest.raises(Unavailable, match="no socket"):
        take_socket(tmp_path / "fc.sock")
    assert (tmp_path / "fc.sock").read_text() == "notes"


def test_the_default_socket_is_not_put_where_others_could_replace_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = tmp_path / "flatcake" / "flatcake.sock"
    take_socket(path)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.parent.chmod(0o770)
    with pytest.raises(Unavailable, match="chmod 700"):
        take_socket(path)
    take_socket(path.with_name("chosen.sock"))


def test_a_directory_that_cannot_be_made_says_which_option(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable, match="choose another --socket"):
        take_socket(tmp_path / "file" / "fc.sock")


def test_sockets_are_their_owner_s_until_they_have_their_mode(tmp_path, monkeypatch):
    config = NodeConfig(
        socket=tmp_path / "fc.sock", memory_bytes=1 << 20, grpc_listen="off", http_listen="off", socket_mode="0666"
    )
    before, real = {}, os.chmod

    def chmod(path, mode, **options):
        before[Path(path).name] = Path(path).stat().st_mode & 0o777
        real(path, mode, **options)

    async def starts() -> None:
        node = Node(config)
        await node.start()
        modes = [path.stat().st_mode & 0o777 for path in (config.socket, config.handover_path)]
        await node.stop()
        assert modes == [0o666] * 2

    umask = os.umask(0)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "chmod", chmod)
            asyncio.run(starts())
        assert before == {"fc.sock": 0o700, "fc.sock.fds": 0o700}
        assert os.umask(0) == 0, "it is as it was"
    finally:
        os.umask(umask)
