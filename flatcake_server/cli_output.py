"""How the command line shows what it was told: tables for people, JSON for scripts, one line for an error.

Documents come from the daemon as JSON; their field names carry the units (`_bytes`, `_s`, `_total`), and that is what the
cells go by, so a new field needs no change here.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from flatcake_server.config import find_config, load_config
from flatcake_transport.endpoint import ENDPOINT_VARIABLE, default_endpoint
from flatcake_transport.units import approximate_size

# Exit codes of every command.
EXIT_FOUND: Final = 1  # the answer is no: the law is broken, the demo differs, a session was not dropped
EXIT_USAGE: Final = 2  # the command or the configuration is wrong
EXIT_UNAVAILABLE: Final = 3  # no daemon, or it cannot do it now

_PIPE_COLUMNS: Final = 200  # rich assumes 80 where there is no terminal, and cuts what grep is looking for
_ANY_COLUMNS: Final = 10_000
_WALL_CLOCK_S: Final = 1e9  # seconds since 1970 exceed this; durations do not

Step = Callable[[int, int], None]  # (done, total); total 0: not known
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Endpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        "--socket",
        metavar="ENDPOINT",
        help="The daemon: unix:///path, /path or host:port.  [default: $FLATCAKE_ENDPOINT, or the configured socket]",
        show_default=False,
    ),
]


def console(*, stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else _PIPE_COLUMNS, highlight=False)


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Step]:
    """A bar on stderr while it lasts; nothing where stderr is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)


def print_json(document: object) -> None:
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def print_error(message: object) -> None:
    sys.stderr.write(f"flatcake: {' '.join(str(message).split())}\n")


def endpoint_or_default(endpoint: str | None, environ: Mapping[str, str] | None = None) -> str:
    """Where the daemon is when nobody says: the socket of the configuration, else the first default that is there."""
    environ = os.environ if environ is None else environ
    if told := endpoint or environ.get(ENDPOINT_VARIABLE):
        return told
    config = load_config(find_config(None, environ), environ)
    if "socket" in config.model_fields_set:
        return str(config.socket)
    return default_endpoint(environ, os.getuid())


def cell(name: str, value: Any) -> str:
    """One value for people; `name` says its unit."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {cell(f'{name}/{key}', item)}" for key, item in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(cell(name, item) for item in value) or "-"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _number(name, value)
    return {True: "yes", False: "no", None: "-", "": "-"}.get(value, str(value))


def _number(name: str, value: float) -> str:
    if "bytes" in name:
        return approximate_size(value)
    if name.endswith("_s"):
        return _age(time.time() - value) + " ago" if value > _WALL_CLOCK_S else _age(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _age(seconds: float) -> str:
    if seconds < 1:
        return f"{max(seconds, 0) * 1000:.0f} ms"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _heading(name: str) -> str:
    for unit in ("_bytes", "_total", "_s"):
        name = name.removesuffix(unit)
    return name.replace("_", " ")


def rows_table(title: str, rows: Sequence[Mapping[str, Any]], columns: Iterable[str] | None = None) -> Table | str:
    """One line a row. Without `columns`, those of the first row."""
    if not rows:
        return f"{title}: none"
    names = list(columns) if columns is not None else list(rows[0])
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for name in names:
        number = any(isinstance(row.get(name), int | float) for row in rows)
        table.add_column(_heading(name), justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell(name, row.get(name))) for name in names))
    return table


def show_rows(
    title: str, rows: Sequence[Mapping[str, Any]], columns: Iterable[str] | None = None, out: Console | None = None
) -> None:
    """As a table where its lines fit; on a narrower terminal each row is a table of its own. A pipe has room for any."""
    out = out or console()
    table = rows_table(title, rows, columns)
    if isinstance(table, str):
        out.print(table)
        return
    columns_needed = out.measure(table, options=out.options.update(max_width=_ANY_COLUMNS)).maximum
    if not out.is_terminal:
        out.width = max(out.width, columns_needed)
    if columns_needed <= out.width:
        out.print(table)
        return
    names = list(columns) if columns is not None else list(rows[0])
    for number, row in enumerate(rows, 1):
        out.print(fields_table(f"{title}, {number} of {len(rows)}", {name: row.get(name) for name in names}))


def fields_table(title: str, document: Mapping[str, Any]) -> Table:
    """One line a field."""
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
    headings = Counter(map(_heading, document))
    for name, value in document.items():
        heading = _heading(name) if headings[_heading(name)] == 1 else name.replace("_", " ")
        table.add_row(heading, Text(cell(name, value)))
    return table


def path_list(paths: Iterable[str] | None) -> list[Path]:
    """Paths given as `--x a --x b` or `--x a,b`; made absolute here, where the user stands."""
    return [Path(word.strip()).absolute() for text in paths or () for word in text.split(",") if word.strip()]
