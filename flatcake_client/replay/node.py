"""A daemon of the replay's own: `flatcake serve` in a process and a session of its own, on a directory that goes with it.

Ctrl-C reaches the replay and not the daemon: what is under way ends as it would have, and the report is whole as far as it goes.
A replay that is killed takes its daemon along, where the system has setpriv.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import flatcake_client as fc
from flatcake_transport.errors import Unavailable

START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 10.0
LOG_TAIL_CHARACTERS: Final = 2000
_SERVE: Final = "from flatcake_server.cli import main; main()"


class Node:
    """Started when made; `close` ends it. Its log is `daemon.log` in the directory."""

    def __init__(self, directory: Path, options: Mapping[str, object]) -> None:
        """Raises: Unavailable: it does not serve; with the end of its log."""
        # Not in `directory`: a unix socket's path has 107 bytes at most.
        self._sockets = Path(tempfile.mkdtemp(prefix="flatcake-replay-"))
        self._socket = self._sockets / "fc.sock"
        ssd_path = directory / "ssd"
        ssd_path.mkdir(parents=True, exist_ok=True)
        self._log = directory / "daemon.log"
        flags = {"socket": self._socket, "ssd-paths": ssd_path.resolve(), "grpc-listen": "off", "http-listen": "off"}
        flags |= {name.replace("_", "-"): value for name, value in options.items()}
        command = [sys.executable, "-c", _SERVE, "serve", *(f"--{name}={value}" for name, value in flags.items())]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FLATCAKE_")}
        guard = ["setpriv", "--pdeathsig", "TERM", "--"] if shutil.which("setpriv") else []
        # A stop is a flag here (sweep.on_signal), so none can come between the start and our knowing of it.
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*guard, *command], stdout=log, stderr=log, env=environment, start_new_session=True
            )
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise

    @property
    def endpoint(self) -> str:
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def _wait_ready(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        with fc.connect(self.endpoint, timeout_s=1.0, name="replay-probe") as client:
            while time.monotonic() < deadline_s and self._process.poll() is None:
                if self._socket.exists():
                    client.open_space("replay-probe", "uint8", 1, [4096])
                    if client.stats().connected:
                        return
                time.sleep(0.02)
        tail = self._log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL_CHARACTERS:].strip()
        raise Unavailable(f"the replay's daemon does not serve. Its log ends:\n{tail}")

    def close(self) -> None:
        """Twice is fine."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._sockets, ignore_errors=True)
