"""`flatcake replay` and `flatcake bench`: the client's side does them, in processes of their own. Started from here, never imported.

Their options are their own: they are passed on as they are, `--help` included. A stop is passed on, too, and waited for, because the
report is written then, and a daemon ended.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Final

import typer

PASSED_ON: Final = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def replay(context: typer.Context) -> None:
    """A trace in real time, against any store. See its --help."""
    _become("flatcake_client.replay", context)


def bench(context: typer.Context) -> None:
    """Restores beside what the machine can do. See its --help."""
    _become("flatcake_client.bench", context)


def _become(module: str, context: typer.Context) -> None:
    child = subprocess.Popen([sys.executable, "-m", module, *context.args])
    # A terminal sends ^C to both, `kill` to this one only; the child takes any number of them.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: child.send_signal(number))
    raise typer.Exit(child.wait())
