"""`flatcake status`, `sessions`, `spaces` and `nodes`: what a running daemon says of itself."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from flatcake_server.cli_output import (
    EXIT_FOUND,
    Endpoint,
    Json,
    console,
    endpoint_or_default,
    fields_table,
    print_error,
    print_json,
    show_rows,
)
from flatcake_server.rpc_admin import AdminClient

_POOL_COLUMNS = (
    "name",
    "quota_bytes",
    "committed_bytes",
    "reserved_bytes",
    "releasing_bytes",
    "free_bytes",
    "sessions",
    "segments",
    "blocks",
    "files",
    "direct",
    "failure",
)

sessions_app = typer.Typer(help="List, show and drop sessions. Without a command: list.", invoke_without_command=True)

Limit = Annotated[int, typer.Option(metavar="N", min=1, help="At most so many.")]


def status(endpoint: Endpoint = None, json: Json = False) -> None:
    """What the daemon holds, how full it is, and what it has done."""
    with AdminClient(endpoint_or_default(endpoint)) as client:
        document = client.status()
    if json:
        print_json(document)
        return
    pools, counters = document.pop("pools", []), document.pop("counters", {})
    cluster = document.pop("cluster", None)
    document.get("index", {}).pop("bytes_per_block", None)  # of a few blocks it is no figure
    for name, (count, seconds) in document.pop("rpc_seconds", {}).items():
        document[f"{name} calls"] = f"{count:,}, {seconds / max(count, 1) * 1e6:,.0f} us each"
    out = console()
    out.print(fields_table("daemon", document))
    show_rows("where blocks live", pools, [name for name in _POOL_COLUMNS if pools and name in pools[0]])
    out.print(fields_table("since it started", {name: value for name, value in counters.items() if value}))
    if cluster:
        members = cluster.pop("members", [])
        out.print(fields_table("cluster", cluster))
        show_rows("nodes", members)
    for pool in pools:
        if pool.get("failure"):
            print_error(f"{pool['name']} is out of service: {pool['failure']}")
        elif pool.get("full"):
            print_error(f"{pool['name']} has room in its quota, but its disk is full: make room on it")


def spaces(endpoint: Endpoint = None, json: Json = False) -> None:
    """Each model in each layout that the daemon knows."""
    with AdminClient(endpoint_or_default(endpoint)) as client:
        rows = client.spaces()
    if json:
        print_json(rows)
        return
    show_rows("spaces", [_short(row) for row in rows])


def nodes(endpoint: Endpoint = None, json: Json = False) -> None:
    """The nodes of the cluster, as this one knows them. Exit code 1: it is by itself, or not joined."""
    with AdminClient(endpoint_or_default(endpoint)) as client:
        rows = client.nodes()
    if json:
        print_json(rows)
    else:
        show_rows("nodes", rows)
    if not rows:
        print_error("this node is by itself: its option directory is none")
    if not rows or rows[0]["state"] != "joined":
        raise typer.Exit(EXIT_FOUND)


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """A space has a number for each layer; equal ones say it once."""
    planes = row.get("plane_bytes")
    if not isinstance(planes, list) or not planes:
        return row
    same = len(set(planes)) == 1
    return row | {
        "plane_bytes": f"{len(planes)} x {planes[0]}" if same else f"{len(planes)}, {min(planes)} to {max(planes)}"
    }


@sessions_app.callback()
def sessions(context: typer.Context, endpoint: Endpoint = None, json: Json = False) -> None:
    if context.invoked_subcommand is None:
        list_sessions(endpoint=endpoint, json=json)
    elif endpoint or json:
        raise typer.BadParameter(f"options go after the command: flatcake sessions {context.invoked_subcommand} --json")


@sessions_app.command("list")
def list_sessions(
    space: Annotated[str, typer.Option(metavar="HEX", help="Only of the space with this fingerprint.")] = "",
    limit: Limit = 1000,
    endpoint: Endpoint = None,
    json: Json = False,
) -> None:
    """Sessions, most recently used first."""
    try:
        fingerprint = bytes.fromhex(space)
    except ValueError as error:
        raise typer.BadParameter(f"--space {space!r} is not hexadecimal: copy it from `flatcake spaces`") from error
    with AdminClient(endpoint_or_default(endpoint)) as client:
        rows = client.sessions(fingerprint=fingerprint, limit=limit)
    if json:
        print_json(rows)
    else:
        show_rows("sessions", rows)
    if len(rows) == limit:
        print_error(f"these are {limit}, and there may be more: give --limit")


@sessions_app.command("show")
def show_session(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As `flatcake sessions` lists it.")],
    endpoint: Endpoint = None,
    json: Json = False,
) -> None:
    """One session: its segments and files."""
    with AdminClient(endpoint_or_default(endpoint)) as client:
        document = client.session(name)
    if json:
        print_json(document)
        return
    tables = {
        key: rows for key, rows in document.items() if isinstance(rows, list) and rows and isinstance(rows[0], dict)
    }
    console().print(fields_table(name, {key: value for key, value in document.items() if key not in tables}))
    for key, rows in tables.items():
        show_rows(key, rows)


@sessions_app.command("drop")
def drop_sessions(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Sessions to forget.")],
    endpoint: Endpoint = None,
    json: Json = False,
) -> None:
    """Forget whole sessions and give their space back. What is being read, or has forks, stays."""
    with AdminClient(endpoint_or_default(endpoint)) as client:
        document = client.drop(names)
    if json:
        print_json(document)
    else:
        console().print(fields_table("drop", document))
    if set(names) - set(document.get("dropped", ())):
        raise typer.Exit(EXIT_FOUND)
