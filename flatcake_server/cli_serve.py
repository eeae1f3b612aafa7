"""`flatcake serve`, with one flag for each option of `NodeConfig`; and the options as a commented `flatcake.toml`.

Flags are made from the model, so a new option needs no second declaration. They arrive here as text: sizes, durations
and lists are read by the model, the same way from every source.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from flatcake_server.config import NodeConfig, find_config, load_config, reader_of
from flatcake_server.config_checks import refuse_too_much_memory
from flatcake_transport.units import format_duration, format_size, parse_duration, parse_size

_TEXT_COLUMNS = 100
_HEADER = """\
# Configuration of one FlatCake node. Every option is here, with its unit, its reason and its default.
#
# Read by `flatcake serve --config FILE`, else from $FLATCAKE_CONFIG, ./flatcake.toml or /etc/flatcake/flatcake.toml.
# A variable FLATCAKE_<OPTION> goes over this file, a flag --<option> over both. Unknown options are refused.
# Sizes are bytes or take a unit (4GiB, 512MiB, 4GB); durations are seconds or take one (500ms, 30s, 10m, 1h).
"""


def to_text(name: str, value: object) -> str:
    """A value as TOML, and as people would write it: sizes and durations with units."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if reader_of(name) is parse_size:
        return json.dumps(format_size(int(str(value))))
    if reader_of(name) is parse_duration:
        return json.dumps(format_duration(float(str(value))))
    if isinstance(value, tuple):
        return json.dumps([str(item) for item in value])
    return json.dumps(value if isinstance(value, int | float) else str(value))


def _plain(name: str, value: object) -> str:
    """As a flag takes it."""
    return ",".join(map(str, value)) or "none" if isinstance(value, tuple) else to_text(name, value).strip('"') or '""'


def _metavar(name: str) -> str:
    field = NodeConfig.model_fields[name]
    if get_origin(field.annotation) is Literal:
        return "|".join(get_args(field.annotation))
    if name in {"socket", "ssd_paths"}:
        return "PATH"
    if isinstance(field.default, bool):
        return "true|false"
    sort = {parse_size: "SIZE", parse_duration: "DURATION"}.get(reader_of(name))  # type: ignore[call-overload]
    return sort or ("NUMBER" if isinstance(field.default, int | float) else "TEXT")


def _flag(name: str) -> inspect.Parameter:
    field = NodeConfig.model_fields[name]
    default = "" if field.default_factory else f"  [default: {_plain(name, field.default)}]"
    several = get_origin(field.annotation) is tuple
    option = typer.Option(
        f"--{name.replace('_', '-')}",
        metavar=_metavar(name),
        help=f"{field.description}{' Repeat it, or separate by commas.' if several else ''}{default}",
        show_default=False,
    )
    kind = list[str] | None if several else str | None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


def serve_command(run: Callable[[NodeConfig], int]) -> Callable[..., None]:
    """The function behind `flatcake serve`; `run` is the daemon, its value the exit code."""

    def serve(*, config: Path | None, print_config: bool, **flags: Any) -> None:
        node = load_config(find_config(config, os.environ), os.environ, _joined(flags))
        if print_config:
            sys.stdout.write(config_toml(node))
            return
        refuse_too_much_memory(node.memory_bytes, node.huge_pages)
        logging.basicConfig(
            level=node.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        raise typer.Exit(run(node))

    file = typer.Option(
        "--config",
        metavar="FILE",
        help="The TOML file.  [default: $FLATCAKE_CONFIG, ./flatcake.toml or /etc/flatcake/flatcake.toml]",
    )
    shown = typer.Option("--print-config", help="Print what would be served, as TOML, and stop.")
    parameters = [
        inspect.Parameter(
            "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, file]
        ),
        *map(_flag, NodeConfig.model_fields),
        inspect.Parameter(
            "print_config", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, shown]
        ),
    ]
    serve.__doc__ = """Run the daemon of this node until SIGTERM or SIGINT. Exit code 0: stopped when told."""
    # typer reads the signature; these two attributes are how Python lets a function state one.
    serve.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    serve.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return serve


def _joined(flags: dict[str, Any]) -> dict[str, object]:
    return {name: ",".join(value) if isinstance(value, list) else value for name, value in flags.items() if value != []}


def config_toml(config: NodeConfig) -> str:
    """A `flatcake.toml` that `load_config` reads back as `config`, with every option explained."""
    parts = [_HEADER]
    for name, field in NodeConfig.model_fields.items():
        lines = textwrap.wrap(field.description or "", _TEXT_COLUMNS, initial_indent="# ", subsequent_indent="# ")
        parts.append("\n".join([*lines, f"{name} = {to_text(name, getattr(config, name))}"]) + "\n")
    return "\n".join(parts)
