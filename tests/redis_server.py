"""A real redis-server for tests, in a process of its own, on loopback; and six of them as a Redis Cluster."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any, Self

import pytest
from ports import free_port
from waiting import until

SERVER = shutil.which("redis-server") or shutil.which("valkey-server")
needs_redis = pytest.mark.skipif(
    SERVER is None, reason="no redis-server on this machine: the Redis directory is untested"
)


class RedisServer:
    """`keep`: the data outlives a stop, as with a snapshot. `restart` starts again on the same port."""

    def __init__(self, root: Path, *, keep: bool = True, **options: str) -> None:
        self.root, self.keep = root, keep
        self.port = free_port()
        self.options = options
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> Self:
        assert SERVER is not None
        self.root.mkdir(parents=True, exist_ok=True)
        options = {"port": str(self.port), "bind": "127.0.0.1", "dir": str(self.root), "save": "", "appendonly": "no"}
        words = [word for name, value in (options | self.options).items() for word in (f"--{name}", value)]
        with (self.root / "redis.log").open("ab") as log:
            self.process = subprocess.Popen([SERVER, *words], stdout=log, stderr=log)
        until(self._answers, 30)
        return self

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.root / "redis.log").read_text()[-2000:]
        try:
            return self.command("PING") == b"+PONG\r\n"
        except OSError:
            return False

    def command(self, *words: str) -> bytes:
        """The raw reply, its first packet."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            text = f"*{len(words)}\r\n" + "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
            connection.sendall(text.encode())
            return connection.recv(1 << 16)

    def stop(self) -> None:
        """With its data kept: a snapshot is written first. Else as a kill."""
        assert self.process is not None
        if self.keep:
            self.command("SAVE")
        self.process.kill()
        self.process.wait(10)

    def restart(self, *, keep: bool) -> None:
        self.keep = keep
        self.stop()
        if not keep:
            (self.root / "dump.rdb").unlink(missing_ok=True)
        self.start()

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)


class RedisCluster:
    """Three primaries, a replica each."""

    def __init__(self, root: Path) -> None:
        self.servers: list[RedisServer] = []
        self._root = root

    @property
    def url(self) -> str:
        return ",".join(server.url for server in self.servers)

    def __enter__(self) -> Self:
        for number in range(6):
            options: dict[str, Any] = {
                "cluster-enabled": "yes",
                "cluster-node-timeout": "3000",  # a busy machine is no death
                "repl-diskless-sync-delay": "0",
            }
            self.servers.append(RedisServer(self._root / str(number), keep=False, **options).start())
        cli = shutil.which("redis-cli") or shutil.which("valkey-cli")
        addresses = [f"127.0.0.1:{server.port}" for server in self.servers]
        made = subprocess.run(
            [str(cli), "--cluster", "create", *addresses, "--cluster-replicas", "1", "--cluster-yes"],
            capture_output=True,
            check=False,
            timeout=60,
        )
        assert made.returncode == 0, made.stdout.decode()[-2000:]
        until(lambda: all(b"cluster_state:ok" in server.command("CLUSTER", "INFO") for server in self.servers), 30)
        until(lambda: sum(b"master_link_status:up" in s.command("INFO", "replication") for s in self.servers) == 3, 30)
        return self

    def replicated(self) -> None:
        """Wait until replicas have all that primaries have: they are sent it a moment after the answer."""
        until(lambda: all(map(_is_replicated, self.servers)), 30)

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.__exit__()


def _is_replicated(server: RedisServer) -> bool:
    """Also of a replica. A primary hears once a second what its replicas have."""
    told = server.command("INFO", "replication").decode()
    offset = re.search(r"master_repl_offset:(\d+)", told)
    assert offset is not None
    return "role:slave" in told or set(re.findall(r"offset=(\d+)", told)) == {offset[1]}
