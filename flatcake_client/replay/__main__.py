"""`python -m flatcake_client.replay`: what `flatcake replay` runs. Exit codes: 0 done; 1 a block was wrong; 2 the command is wrong;
3 it cannot run here now; 130 stopped, the report is whole as far as it goes.

A peer runs in an environment of its own, because what it pins does not go together with anything: `--system NAME` becomes this
program again, in .venv-NAME with bench/peers/NAME.py as adapter.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from flatcake_client.replay import report
from flatcake_client.replay.options import PEERS, STDOUT, Options, parse
from flatcake_client.replay.plots import load_plots
from flatcake_client.replay.sweep import Sweep, on_signal
from flatcake_transport.errors import FlatCakeError
from flatcake_transport.page import require, write_page

EXIT_WRONG: Final = 1
EXIT_USAGE: Final = 2
EXIT_UNAVAILABLE: Final = 3
EXIT_INTERRUPTED: Final = 130
PIPE_COLUMNS: Final = 240  # rich assumes 80 where there is no terminal, and cuts what grep is looking for
# The harness makes and checks bytes in the interpreter in which a store's threads move them, and an engine's GPU does not. A thread
# whose read has landed would wait 5 ms for its turn behind that: with 0.5, restores took two thirds of the time on two busy cores.
SWITCH_S: Final = 0.0005
WIDE_COLUMNS: Final = 170  # the whole table


class Shown:
    """Progress on stderr, the report in its file after each load: `sweep.Watcher`."""

    def __init__(self, options: Options, bar: Progress) -> None:
        self._options, self._bar = options, bar
        self._task: TaskID | None = None
        self._began_s = 0.0
        self._said = 0
        self.unwritten: OSError | None = None  # of the last report: the replay goes on without it

    def load(self, load: float, requests: int) -> None:
        name = f"{self._options.system} {self._options.ablation}".strip()
        self._task = self._bar.add_task(f"{name}, load {load:g}", total=requests)
        self._began_s = time.monotonic()

    def request(self) -> None:
        if self._task is not None:
            self._bar.advance(self._task)

    def saved(self, document: dict[str, Any]) -> None:
        file = self._options.json_file
        if file is not None and file != STDOUT:
            try:
                write_whole(file, json.dumps(document, indent=1) + "\n")
                self.unwritten = None
            except OSError as error:
                self.unwritten = error
        for run in document["runs"][self._said :]:
            self._said += 1
            self._bar.console.print(
                f"load {run['load']:g}: {run['requests']:,} of {run['requests_planned']:,} requests in "
                f"{time.monotonic() - self._began_s:.1f} s, {report.percent(run['delivered_hit'])} delivered"
            )


def write_whole(file: Path, text: str) -> None:
    """Never half of it: who reads while we write, or after a power cut, sees the one before."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(file)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(file)) from error  # a full disk names no file


def main(arguments: list[str]) -> int:
    """Raises: ValueError, FlatCakeError, OSError: as `run` below turns into a line."""
    options = parse(arguments)
    if options.plot_dir is not None:  # before the long work, not after it
        require()
        options.plot_dir.mkdir(parents=True, exist_ok=True)
    if options.compare:
        documents = report.read_documents(options.compare)
        _show(documents, options)
        return 0
    if options.system in PEERS and options.adapter is None:
        _become_peer(options.system, arguments)
    if options.json_file is not None and not options.json_file.absolute().parent.is_dir():
        raise ValueError(f"--json {options.json_file}: its directory does not exist")
    if options.json_file is not None and options.json_file.is_dir():
        raise ValueError(f"--json {options.json_file} is a directory: give a file")
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    sweep = Sweep(options, ["flatcake", "replay", *arguments])
    before = {number: signal.signal(number, on_signal(sweep)) for number in (signal.SIGINT, signal.SIGTERM)}
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=_console(stderr=True), disable=not sys.stderr.isatty()) as bar:
            shown = Shown(options, bar)
            document = sweep.run(shown)
    finally:
        sys.setswitchinterval(switch_s)
        for number, handler in before.items():
            signal.signal(number, handler)
    _show([document], options)
    if shown.unwritten is not None:
        raise shown.unwritten
    if document["partial"]:
        sys.stderr.write("flatcake replay: stopped; the report is of what was done\n")
        return EXIT_INTERRUPTED
    return EXIT_WRONG if any(run["wrong_blocks"] for run in document["runs"]) else 0


def run(arguments: list[str]) -> int:
    """Every error that a user can meet becomes one line and an exit code."""
    try:
        return main(arguments)
    except ValueError as error:
        return _said(error, EXIT_USAGE)
    except FlatCakeError as error:
        return _said(error, EXIT_UNAVAILABLE)
    except OSError as error:
        return _said(f"{error.filename or 'system'}: {error.strerror or error}", EXIT_UNAVAILABLE)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _said(error: object, code: int) -> int:
    sys.stderr.write(f"flatcake replay: {' '.join(str(error).split())}\n")
    return code


def _console(*, stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else PIPE_COLUMNS, highlight=False)


def _show(documents: list[dict[str, Any]], options: Options) -> None:
    lines = [report.headline(document) for document in documents]
    if options.json_file == STDOUT:
        sys.stdout.write(json.dumps(documents if options.compare else documents[0], indent=1) + "\n")
    else:
        _print_tables(documents, lines)
    if options.plot_dir is not None:  # last: a disk that is full takes nothing else away
        title = f"Replay of {documents[0]['trace']['name']}"
        tables = [("What was replayed", report.facts(documents[0])), ("By load", report.rows(documents))]
        commands = "\n".join(shlex.join(document["command"]) for document in documents)
        write_page(options.plot_dir, title, ". ".join(lines), load_plots(documents), tables, commands)


def _print_tables(documents: list[dict[str, Any]], lines: list[str]) -> None:
    out = _console()
    rows = report.rows(documents)
    if out.width < WIDE_COLUMNS:  # what else there is, is in --json and --plot
        rows = [[*row[:8], row[11], row[13], row[16]] for row in rows]
    for title, body in (("What was replayed", report.facts(documents[0])), ("By load", rows)):
        table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
        for n, heading in enumerate(body[0]):
            table.add_column(heading, justify="right" if n and len(body[0]) > 2 else "left", overflow="fold")
        for row in body[1:]:
            table.add_row(*map(Text, row))
        out.print(table)
    for line in lines:
        out.print(Text(line))


def _become_peer(name: str, arguments: list[str]) -> None:
    """Raises: ValueError: its adapter or environment is not here."""
    roots = dict.fromkeys((Path.cwd(), Path(__file__).resolve().parents[2]))
    adapter = next((file for root in roots if (file := root / "bench" / "peers" / f"{name}.py").is_file()), None)
    if adapter is None:
        raise ValueError(f"--system {name} needs bench/peers/{name}.py: run it in a checkout of FlatCake")
    python = next((file for root in roots if (file := root / f".venv-{name}" / "bin" / "python").exists()), None)
    if python is None:
        raise ValueError(f"--system {name} needs its environment, .venv-{name}: make it with `make peers`")
    command = [str(python), "-m", "flatcake_client.replay", *arguments, "--adapter", str(adapter)]
    os.execv(python, command)  # noqa: S606 - this program again, with another interpreter


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
