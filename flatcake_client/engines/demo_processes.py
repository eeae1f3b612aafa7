"""The demos' processes.

They are killed with SIGKILL at moments of the demo's choice and started again: a daemon on the same directory, an engine
with nothing. Their logs are files beside it, shown when something is not as it should be.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import flatcake_client as fc

START_TIMEOUT_S: Final = 120.0  # a busy machine takes a minute to import torch three times
ANSWER_TIMEOUT_S: Final = 120.0
PAUSE_S: Final = 0.05
LOG_TAIL_CHARACTERS: Final = 2000


class DemoFailed(Exception):
    """The demo cannot go on; says why."""


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait meanwhile: no child is started that nobody knows of, and none is left. Main thread only."""
    caught = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, _: caught.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if caught:
        raise KeyboardInterrupt


class _Process:
    """A child with its log in a file. Started and killed as often as one likes."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._command, self._log = command, log
        self._child: subprocess.Popen[str] | None = None

    def start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FLATCAKE_")}
        # The engine's threads shall not spin for each other while the daemon, or another program, wants the core.
        environment.setdefault("OMP_WAIT_POLICY", "passive")
        with self._log.open("a", encoding="utf-8") as log, undisturbed():
            self._child = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, text=True
            )

    def kill(self, after_s: float = 0.0) -> None:
        """SIGKILL: no goodbye. Twice is fine."""
        child, self._child = self._child, None
        if child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(after_s)
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()

    @property
    def child(self) -> subprocess.Popen[str]:
        """Raises: DemoFailed: it is not running."""
        if self._child is None or self._child.poll() is not None:
            raise self.failed("it ended")
        return self._child

    def failed(self, what: str) -> DemoFailed:
        tail = self._log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL_CHARACTERS:]
        return DemoFailed(f"{Path(self._log).stem}: {what}. Its log ends:\n{tail}")


class DaemonProcess(_Process):
    """`flatcake serve` on a directory, reached through a unix socket.

    `in_cluster`: peers reach it over loopback, and `wait` can ask for its status.
    """

    def __init__(self, directory: Path, *flags: str, in_cluster: bool = False) -> None:
        self._http = f"127.0.0.1:{free_port()}" if in_cluster else "off"
        self._socket = directory / "fc.sock"
        ssd_path = directory / "ssd"
        ssd_path.mkdir(exist_ok=True)
        places = ["--ssd-paths", str(ssd_path), "--socket", str(self._socket)]
        listen = ["--grpc-listen", "127.0.0.1:0" if in_cluster else "off", "--http-listen", self._http]
        super().__init__(
            [*_flatcake(), "serve", *places, *listen, *flags],
            directory / "daemon.log",
        )
        self.ssd_path = ssd_path

    @property
    def endpoint(self) -> str:
        return f"unix://{self._socket}"

    def wait_ready(self) -> None:
        """Raises: DemoFailed: it ended, or does not answer in time."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        with fc.connect(self.endpoint, timeout_s=1.0, name="demo") as client:
            while time.monotonic() < deadline_s:
                _ = self.child
                client.open_space("demo-probe", "uint8", 1, [4096])
                if client.stats().connected:
                    return
                time.sleep(PAUSE_S)
        raise self.failed("it does not answer")

    def wait(self, condition: Callable[[dict[str, Any]], bool], what: str) -> None:
        """Until its status is so. Raises: DemoFailed: it ended, or that never comes."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        # Not through whatever proxy the user's shell has.
        ask = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        while time.monotonic() < deadline_s:
            _ = self.child
            with (
                contextlib.suppress(OSError),
                ask(f"http://{self._http}/status", timeout=ANSWER_TIMEOUT_S) as said,
            ):
                if condition(json.load(said)):
                    return
            time.sleep(PAUSE_S)
        raise self.failed(f"{what}: it did not come to that")

    def check(self) -> bool:
        """The law, on the living daemon: every byte free, reserved or indexed, exactly one."""
        command = [*_flatcake(), "check", "--endpoint", self.endpoint, "--json"]
        return subprocess.run(command, check=False, capture_output=True, timeout=ANSWER_TIMEOUT_S).returncode == 0


class EngineProcess(_Process):
    """demo_engine.py with a model: asked one thing at a time."""

    def __init__(self, directory: Path, endpoint: str, setup: dict[str, Any]) -> None:
        module = "flatcake_client.engines.demo_engine"
        super().__init__([sys.executable, "-m", module, endpoint, json.dumps(setup)], directory / "engine.log")

    def wait_ready(self) -> None:
        """Raises: DemoFailed."""
        self._read(START_TIMEOUT_S)

    def send(self, request: dict[str, Any]) -> None:
        """Ask, and do not wait. Raises: DemoFailed."""
        pipe = self.child.stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps(request) + "\n")
            pipe.flush()
        except OSError as error:
            raise self.failed(f"it takes no request ({error})") from error

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises: DemoFailed: it ended, or does not answer in time."""
        self.send(request)
        return self._read(ANSWER_TIMEOUT_S)

    def _read(self, timeout_s: float) -> dict[str, Any]:
        pipe = self.child.stdout
        assert pipe is not None
        # An answer is one line and comes after its request, so nothing is left in the pipe's buffer here.
        readable, _, _ = select.select([pipe], [], [], timeout_s)
        line = pipe.readline() if readable else ""
        if not line:
            raise self.failed("it ended" if readable else "it does not answer")
        answer: dict[str, Any] = json.loads(line)
        return answer


class RedisProcess(_Process):
    """A redis-server of its own, on loopback, that keeps nothing.

    Raises: DemoFailed: there is none on this machine.
    """

    def __init__(self, directory: Path) -> None:
        server = shutil.which("redis-server") or shutil.which("valkey-server")
        if server is None:
            raise DemoFailed(
                "no redis-server and no valkey-server on this machine: apt-get install redis-server (the directory of the "
                "cluster is in it)"
            )
        self.port = free_port()
        where = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(directory)]
        super().__init__([server, *where, "--save", "", "--appendonly", "no"], directory / "redis.log")

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def wait_ready(self) -> None:
        """Raises: DemoFailed: it ended, or does not answer in time."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            _ = self.child
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port), PAUSE_S * 20) as wire,
            ):
                wire.sendall(b"PING\r\n")
                if wire.recv(64).startswith(b"+PONG"):
                    return
            time.sleep(PAUSE_S)
        raise self.failed("it does not answer")


def free_port() -> int:
    """A port of loopback that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _flatcake() -> list[str]:
    """The command of this installation."""
    beside = Path(sys.executable).with_name("flatcake")
    found = str(beside) if beside.exists() else shutil.which("flatcake")
    if found is None:
        raise DemoFailed("the command flatcake is not installed: pip install 'flatcake[transformers]'")
    return [found]
