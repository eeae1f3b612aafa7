"""`flatcake check`: whether the law holds, on a living daemon or on the directories of one that is not running.

With `--ssd-paths` it works offline, on the journal and the session files; a daemon that holds the directory refuses it.
`--rebuild` makes the journal anew from what the files say of themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flatcake_server.cli_output import (
    EXIT_FOUND,
    Endpoint,
    Json,
    console,
    endpoint_or_default,
    fields_table,
    path_list,
    print_error,
    print_json,
    progress_bar,
)
from flatcake_server.rpc_admin import AdminClient


def check(
    ssd_paths: Annotated[
        list[str] | None,
        typer.Option("--ssd-paths", metavar="PATH", help="Check these directories offline, without a daemon."),
    ] = None,
    data: Annotated[bool, typer.Option("--data", help="Also read every byte and compare checksums.")] = False,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="First make the journal anew from the session files. Needs --ssd-paths.")
    ] = False,
    endpoint: Endpoint = None,
    json: Json = False,
) -> None:
    """Whether every byte is free, reserved or indexed, exactly one. Exit code 0: the law holds; 1: it does not."""
    paths = path_list(ssd_paths)
    if rebuild and not paths:
        raise ValueError("--rebuild works on directories: name them with --ssd-paths, with the daemon stopped")
    if paths:
        reports = [_check_path(path, data=data, rebuild=rebuild) for path in paths]
        document: dict[str, Any] = {"ok": all(report["ok"] for report in reports), "paths": reports}
    else:
        reports = [document := _check_daemon(endpoint, data=data)]
    if json:
        print_json(document)
    else:
        for report in reports:
            findings = report.pop("findings", [])
            console().print(fields_table(str(report.pop("path", "daemon")), report))
            for finding in findings:
                print_error(finding)
    if not document["ok"]:
        raise typer.Exit(EXIT_FOUND)


def _check_daemon(endpoint: str | None, *, data: bool) -> dict[str, Any]:
    report: dict[str, Any] | None = None
    with AdminClient(endpoint_or_default(endpoint)) as client, progress_bar("checking the daemon") as step:
        for state in client.check(data=data):
            step(state.done, state.total)
            report = state.report or report
    if report is None:
        raise ValueError("the daemon ended the check without a report: see its log")
    report.pop("pools", None)
    return report


def _check_path(path: Path, *, data: bool, rebuild: bool) -> dict[str, Any]:
    from flatcake_server import offline

    rebuilt: dict[str, Any] = {}
    if rebuild:
        with progress_bar(f"rebuilding {path}") as step:
            counts = offline.rebuild(path, progress=step)
        rebuilt = {"rebuilt": counts}
        if counts["unchecked_segments"]:
            print_error(
                f"{path}: {counts['unchecked_segments']} segments have no checksums (they were stored with verify = off) and "
                "the old journal has none of them: nothing proves their bytes, so they are forgotten"
            )
    with progress_bar(f"checking {path}") as step:
        report = offline.check(path, data=data, progress=step)
    return {"path": str(path), "ok": report.ok, **rebuilt, **report.facts, "findings": list(report.findings)}
