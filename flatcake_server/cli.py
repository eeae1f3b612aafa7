"""The `flatcake` command: run a node, ask it, check it, and see what a machine can do.

Every error is one line on stderr that says what to do. Exit codes: 0 done; 1 the answer is no (the law is broken, the
demo differs); 2 the command or the configuration is wrong; 3 no daemon answers, or it cannot do it now. A command that
prints takes `--json`, and then stdout is one JSON document.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.table import Table
from rich.text import Text

from flatcake_server import cli_check, cli_replay, cli_show, cli_traffic
from flatcake_server.cli_output import (
    EXIT_FOUND,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
    Json,
    console,
    path_list,
    print_error,
    print_json,
)
from flatcake_server.cli_serve import serve_command
from flatcake_server.config import NodeConfig, find_config, load_config
from flatcake_server.doctor import examine
from flatcake_transport.errors import FlatCakeError

_DEMO_MODULE: Final = "flatcake_client.engines.demo"  # the client's side: started, never imported from here
_CLUSTER_DEMO_MODULE: Final = "flatcake_client.engines.demo_cluster"
_INTERRUPTED: Final = 130  # what a shell expects after ^C
# typer brings click in one version and carries its own copy in another; either way this is the base of its usage errors.
_ClickError: Any = typer.BadParameter.__bases__[0].__bases__[0]

app = typer.Typer(
    help="A KV-cache store for LLM serving: memory and SSD as peers, one home a block.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    invoke_without_command=True,
)


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        sys.stdout.write(f"flatcake {importlib.metadata.version('flatcake')}\n")
    elif context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")


def _run(config: NodeConfig) -> int:
    from flatcake_server import app as daemon

    return int(daemon.serve(config))


app.command("serve")(serve_command(_run))
app.command("status")(cli_show.status)
app.add_typer(cli_show.sessions_app, name="sessions")
app.command("spaces")(cli_show.spaces)
app.command("nodes")(cli_show.nodes)
app.command("check")(cli_check.check)
app.command("analyze")(cli_traffic.analyze)
app.command("tune")(cli_traffic.tune)
app.command("replay", context_settings=cli_replay.PASSED_ON)(cli_replay.replay)
app.command("bench", context_settings=cli_replay.PASSED_ON)(cli_replay.bench)


@app.command()
def doctor(
    ssd_paths: Annotated[
        list[str] | None,
        typer.Option("--ssd-paths", metavar="PATH", help="Directories to try; default: the configured ones."),
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", metavar="FILE", help="The node's TOML file.")] = None,
    json: Json = False,
) -> None:
    """What this machine can do for FlatCake, and why not. Exit code 1: a daemon could not run like this."""
    node = load_config(find_config(config, os.environ), os.environ)
    findings = examine(
        path_list(ssd_paths) or list(node.ssd_paths) or [Path.cwd()], node.memory_bytes, huge_pages=node.huge_pages
    )
    if json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        table = Table(header_style="bold", show_lines=False)
        for heading in ("", "what", "finding", "what to do"):
            table.add_column(heading, overflow="fold")
        colours = {"yes": "green", "no": "yellow", "fails": "red"}
        for finding in findings:
            state = Text(finding.state, style=colours[finding.state])
            table.add_row(state, Text(finding.name), Text(finding.detail), Text(finding.advice))
        console().print(table)
    if any(finding.state == "fails" for finding in findings):
        raise typer.Exit(EXIT_FOUND)


@app.command()
def demo(
    json: Json = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Three nodes and a Redis: a session that moves between them.")
    ] = False,
) -> None:
    """A real model, with and without the store. In a daemon of its own; every token is compared."""
    cli_replay.become(_CLUSTER_DEMO_MODULE if cluster else _DEMO_MODULE, ["--json"] if json else [])


def main() -> None:
    """Entry point: every error that a user can meet becomes one line and an exit code."""
    raise SystemExit(_exit_code(sys.argv[1:]))


def _exit_code(arguments: list[str]) -> int:
    try:
        result = app(arguments, prog_name="flatcake", standalone_mode=False)
    except _ClickError as error:
        print_error(f"{error.format_message()} See flatcake --help.")
        return EXIT_USAGE
    except FlatCakeError as error:
        print_error(error)
        return EXIT_UNAVAILABLE
    except ValueError as error:
        print_error(error)
        return EXIT_USAGE
    except OSError as error:
        print_error(f"{error.filename or 'system'}: {error.strerror or error}")
        return EXIT_UNAVAILABLE
    except (typer.Abort, KeyboardInterrupt):
        return _INTERRUPTED
    return result if isinstance(result, int) else 0
