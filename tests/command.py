"""`flatcake` as a user runs it: a process."""

from __future__ import annotations

import os
import subprocess
import sys

FLATCAKE = (sys.executable, "-m", "flatcake_server")


def flatcake(*arguments: object, endpoint: str = "") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FLATCAKE_")}
    if endpoint:
        environment["FLATCAKE_ENDPOINT"] = endpoint
    return subprocess.run(
        [*FLATCAKE, *map(str, arguments)], capture_output=True, text=True, timeout=100, env=environment, check=False
    )
