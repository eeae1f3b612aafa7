"""`flatcake replay`, `bench` and `demo`: the client's side does them, in programs of their own. Started from here, never imported.

The options of the first two are their own: they are passed on as they are, `--help` included.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

import typer

# A module as a program; that it is stopped while it loads is no error of it.
_RUN: Final = """
import runpy, sys
try:
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
except KeyboardInterrupt:
    sys.exit(130)
"""
PASSED_ON: Final = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def replay(context: typer.Context) -> None:
    """A trace in real time, against any store. See its --help."""
    become("flatcake_client.replay", context.args)


def bench(context: typer.Context) -> None:
    """Restores beside what the machine can do. See its --help."""
    become("flatcake_client.bench", context.args)


def become(module: str, arguments: Sequence[str]) -> NoReturn:
    """In place of this program: so its stops are those of the process that a user started, and so is its exit code."""
    os.execv(sys.executable, [sys.executable, "-c", _RUN, module, *arguments])  # noqa: S606 - a shell is what it is not
