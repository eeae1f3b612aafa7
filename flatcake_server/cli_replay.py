"""`flatcake replay`: the client's side does it, in a process of its own. Started from here, never imported.

Its options are its own: they are passed on as they are, `--help` included. A stop is passed on, too, and waited for, because the
report is written then.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Final

import typer

_REPLAY_MODULE: Final = "flatcake_client.replay"
PASSED_ON: Final = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def replay(context: typer.Context) -> None:
    """Replay a trace in real time, with real bytes, against FlatCake or another store. See its --help."""
    child = subprocess.Popen([sys.executable, "-m", _REPLAY_MODULE, *context.args])
    # A terminal sends ^C to both, `kill` to this one only; the child takes any number of them.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: child.send_signal(number))
    raise typer.Exit(child.wait())
