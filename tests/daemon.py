"""A real daemon for tests: `flatcake serve` in a process of its own, on a directory of the test's."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

from flatcake_server.rpc_admin import AdminClient

START_TIMEOUT_S = STOP_TIMEOUT_S = 60.0  # of a busy machine: none of what is tested


class Daemon:
    """One node. Start, stop, kill and start again on the same directory; `check` is the law.

    `wrapper` is a Python file run in the daemon's process before it starts: where a test breaks the world.
    """

    def __init__(self, root: Path, *, wrapper: Path | None = None, **options: object) -> None:
        self.root = root
        self.options: dict[str, object] = {
            "memory_bytes": 64 << 20,
            "ssd_bytes": 512 << 20,
            "ssd_paths": root / "ssd",
            "socket": root / "fc.sock",
            "grpc_listen": "off",
            "http_listen": "off",
            "drain_timeout": "2s",
        } | options
        self.wrapper = wrapper
        self.process: subprocess.Popen[bytes] | None = None
        self.log = root / "daemon.log"

    @property
    def endpoint(self) -> str:
        return f"unix://{self.options['socket']}"

    @property
    def ssd_paths(self) -> list[Path]:
        return [Path(path) for path in str(self.options["ssd_paths"]).split(",") if path]

    def start(self) -> Self:
        """Return once the daemon answers. Raises: AssertionError: it ended instead, with its log."""
        for path in self.ssd_paths:
            path.mkdir(parents=True, exist_ok=True)
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in self.options.items()]
        code = "import runpy, sys; w = sys.argv.pop(1); w and runpy.run_path(w); from flatcake_server.cli import main; main()"
        with self.log.open("ab") as log:
            environment = {name: value for name, value in os.environ.items() if not name.startswith("FLATCAKE_")}
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, str(self.wrapper or ""), "serve", *flags],
                stdout=log,
                stderr=log,
                env=environment,
            )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            assert self.process.poll() is None, f"the daemon ended:\n{self.log_tail()}"
            assert time.monotonic() < deadline_s, f"the daemon does not answer:\n{self.log_tail()}"
            with contextlib.suppress(Exception), AdminClient(self.endpoint, timeout_s=5.0) as admin:
                admin.status()
                return self
            self.wait(0.05)

    def wait(self, timeout_s: float) -> bool:
        """True when the daemon ends within the time."""
        assert self.process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        return self.process.returncode is not None

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(10)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the daemon did not stop:\n{self.log_tail()}") from None

    def restart(self) -> Self:
        self.stop()
        return self.start()

    def status(self) -> dict[str, Any]:
        with AdminClient(self.endpoint) as admin:
            return admin.status()

    def admin(self) -> AdminClient:
        return AdminClient(self.endpoint)

    def pool(self, medium: str) -> dict[str, Any]:
        return next(pool for pool in self.status()["pools"] if pool["medium"] == medium)

    def check(self) -> dict[str, Any]:
        """The law on the living daemon. Raises: AssertionError: it is broken."""
        with AdminClient(self.endpoint) as admin:
            report = [step.report for step in admin.check() if step.report][-1]
        assert report["ok"], json.dumps(report["findings"], indent=1)
        return report

    def until(self, condition: Any, timeout_s: float = 15.0) -> dict[str, Any]:
        """The first status for which `condition(status)` holds."""
        deadline_s = time.monotonic() + timeout_s
        while not condition(status := self.status()):
            assert time.monotonic() < deadline_s, f"never came: {json.dumps(status, indent=1)}\n{self.log_tail()}"
            select.select([], [], [], 0.02)
        return status

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
