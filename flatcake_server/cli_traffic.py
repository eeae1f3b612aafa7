"""`flatcake analyze` and `flatcake tune`: what a trace says, and what to set for it. No daemon is asked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer
from rich.table import Table
from rich.text import Text

from flatcake_server.cli_output import Json, Step, console, print_json, progress_bar
from flatcake_server.traffic.report import HIT_SHARES, MODELS, report
from flatcake_server.traffic.reuse import analyse
from flatcake_server.traffic.simulate import Rates
from flatcake_server.traffic.spans import Traffic, gather
from flatcake_server.traffic.tune import Recommendation
from flatcake_server.traffic.tune import tune as recommend
from flatcake_transport.page import require, write_page
from flatcake_transport.profiles import PROFILES, generate
from flatcake_transport.trace import Request, read_trace, write_trace
from flatcake_transport.units import approximate_size, parse_duration, parse_size

_STEP_REQUESTS: Final = 512
T = TypeVar("T")

Trace = Annotated[
    Path | None,
    typer.Argument(
        metavar="TRACE",
        help="A trace: flatcake-trace/1, Mooncake's JSONL, or kv-cache-tester's session JSON (a file, or a directory of "
        "them); gzip or plain.",
        show_default=False,
    ),
]
ProfileName = Annotated[
    str | None,
    typer.Option("--profile", metavar="NAME", help=f"Generated traffic instead of a trace: {', '.join(PROFILES)}."),
]
Sessions = Annotated[
    int, typer.Option("--sessions", metavar="N", min=0, help="Of the profile. 0: as many as fit its trace.")
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Of the profile: another one, other requests.")]
Spread = Annotated[
    str,
    typer.Option("--spread", metavar="DURATION", help="Over which sessions start, where a trace has no starts."),
]
Model = Annotated[str, typer.Option("--model", metavar="NAME", help=f"Bytes a token of: {', '.join(MODELS)}.")]
TokenBytes = Annotated[
    str | None,
    typer.Option("--bytes-per-token", metavar="SIZE", help="KV bytes of one token in all layers, in place of --model."),
]
Save = Annotated[
    Path | None, typer.Option("--save-trace", metavar="FILE", help="Also write the trace, compact and gzip.")
]
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot", metavar="DIR", help="Also draw: a PNG each, and index.html with all. Needs flatcake[plots]."
    ),
]


def analyze(
    trace: Trace = None,
    profile: ProfileName = None,
    sessions: Sessions = 0,
    seed: Seed = 1,
    spread: Spread = "24h",
    model: Model = "llama-3.1-8b",
    bytes_per_token: TokenBytes = None,
    memory_bytes: Annotated[
        str, typer.Option("--memory-bytes", metavar="SIZE", help="Memory that could stand in front of SSD.")
    ] = "64GiB",
    save_trace: Save = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """How a trace reuses its blocks. Used once, distance, sessions, hit rate against cache size; and what to do."""
    plots = _plots(plot)
    token_bytes = _token_bytes(model, bytes_per_token)
    name, traffic = _read(trace, profile, sessions, seed, spread, save_trace)
    with progress_bar("analysing") as step:
        reuse = analyse(traffic, step)
    document = report(
        name, traffic, reuse, bytes_per_token=token_bytes, memory_bytes=_some_bytes("--memory-bytes", memory_bytes)
    )
    tables = _analysis_tables(document)
    if plots and plot:
        write_page(plot, f"Traffic of {name}", document["advice"]["summary"], plots.analysis_plots(document), tables)
    if json:
        print_json(document)
        return
    _print_tables(tables)
    out = console()
    out.print(Text(document["advice"]["summary"], style="bold"))
    for reason in document["advice"]["reasons"]:
        out.print(Text(f"  - {reason}"))


def tune(
    trace: Trace = None,
    profile: ProfileName = None,
    sessions: Sessions = 0,
    seed: Seed = 1,
    spread: Spread = "24h",
    model: Model = "llama-3.1-8b",
    bytes_per_token: TokenBytes = None,
    memory_bytes_max: Annotated[
        str, typer.Option("--memory-bytes-max", metavar="SIZE", help="The most the arena may be.")
    ] = "64GiB",
    ssd_bytes_max: Annotated[
        str | None,
        typer.Option("--ssd-bytes-max", metavar="SIZE", help="The most the disks may hold. Default: no end."),
    ] = None,
    memory_rate: Annotated[
        str, typer.Option("--memory-rate", metavar="SIZE", help="Restored from memory in a second.")
    ] = "10GB",
    ssd_rate: Annotated[str, typer.Option("--ssd-rate", metavar="SIZE", help="Restored from SSD in a second.")] = "3GB",
    prefill_rate: Annotated[
        float, typer.Option("--prefill-rate", metavar="N", min=1, help="Tokens that the engine computes in a second.")
    ] = 10_000,
    save_trace: Save = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Options that fit a trace. Replays placement and reclaim over candidate thresholds, arena and SSD sizes."""
    plots = _plots(plot)
    token_bytes = _token_bytes(model, bytes_per_token)
    rates = Rates(_some_bytes("--memory-rate", memory_rate), _some_bytes("--ssd-rate", ssd_rate), prefill_rate)
    limits = {"ssd_bytes_max": _some_bytes("--ssd-bytes-max", ssd_bytes_max)} if ssd_bytes_max else {}
    name, traffic = _read(trace, profile, sessions, seed, spread, save_trace)
    with progress_bar("trying settings") as step:
        found = recommend(
            traffic,
            bytes_per_token=token_bytes,
            memory_bytes_max=_some_bytes("--memory-bytes-max", memory_bytes_max),
            rates=rates,
            progress=step,
            **limits,
        )
    tables = _tuning_tables(found)
    if plots and plot:
        figures = plots.tuning_plots(found.curves, asdict(found))
        write_page(plot, f"Settings for {name}", " ".join(found.reasons[:1]), figures, tables, found.toml())
    if json:
        print_json({"trace": name, "bytes_per_token": token_bytes} | asdict(found) | {"toml": found.toml()})
        return
    _print_tables(tables)
    out = console()
    for reason in found.reasons:
        out.print(Text(f"  - {reason}"))
    out.print(Text(f"\n# for flatcake.toml, from {name}", style="dim"))
    sys.stdout.write(found.toml())


# -- traffic -----------------------------------------------------------------------------------------------------------


def _read(
    trace: Path | None, profile: str | None, sessions: int, seed: int, spread: str, save: Path | None
) -> tuple[str, Traffic]:
    if (trace is None) == (profile is None):
        raise ValueError("give a trace, or --profile NAME to generate one: one of the two")
    if trace is None:
        if profile not in PROFILES:
            raise ValueError(f"--profile {profile} is unknown: choose {', '.join(PROFILES)}")
        name, title = f"profile {profile}", f"generating {profile}"
    else:
        if not trace.exists():
            raise ValueError(f"{trace} does not exist: give a trace, or --profile NAME")
        name, title = trace.name, f"reading {trace.name}"
    spread_s = _read_as(parse_duration, "--spread", spread)

    def requests(step: Step) -> Iterator[Request]:
        if trace is None:
            return _counted(generate(PROFILES[str(profile)], sessions=sessions, seed=seed), step)
        return read_trace(trace, spread_s=spread_s, progress=step)

    if save is None:
        with progress_bar(title) as step:
            return name, gather(requests(step))
    if save.is_dir():
        raise ValueError(f"--save-trace {save} is a directory: give a file")
    with progress_bar(title) as step:
        try:
            write_trace(save, requests(step))
        except OSError as error:
            raise OSError(error.errno, error.strerror, error.filename or str(save)) from error  # a full disk names none
    with progress_bar(f"reading {save.name}") as step:
        return name, gather(read_trace(save, progress=step))


def _counted(requests: Iterator[Request], step: Step) -> Iterator[Request]:
    for n, request in enumerate(requests):
        if n % _STEP_REQUESTS == 0:
            step(n, 0)
        yield request


def _token_bytes(model: str, told: str | None) -> int:
    if told is not None:
        return _some_bytes("--bytes-per-token", told)
    if model not in MODELS:
        raise ValueError(f"--model {model} is unknown: choose {', '.join(MODELS)}, or give --bytes-per-token")
    return MODELS[model]


def _some_bytes(option: str, text: str) -> int:
    size_bytes = _read_as(parse_size, option, text)
    if not size_bytes:
        raise ValueError(f"{option} is above 0")
    return size_bytes


def _read_as(parse: Callable[[object], T], option: str, text: str) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error


def _plots(folder: Path | None) -> Any:
    """The module that draws, with what it needs; None where nothing is to be drawn."""
    if folder is None:
        return None
    from flatcake_server.traffic import plots

    require()  # before the long work, not after it
    return plots


# -- tables ------------------------------------------------------------------------------------------------------------

Rows = Sequence[Sequence[str]]


def _analysis_tables(document: Mapping[str, Any]) -> list[tuple[str, Rows]]:
    trace, blocks, hits = document["trace"], document["blocks"], document["hits"]
    facts = [
        ("what", ""),
        ("requests", f"{trace['requests']:,} of {trace['sessions']:,} sessions in {trace['duration_s'] / 3600:.2f} h"),
        ("mean prompt", f"{trace['input_tokens_mean']:,.0f} tokens, {trace['bytes_per_token']:,} bytes each"),
        (
            "blocks",
            f"{blocks['different']:,} of {trace['block_tokens']} tokens, {approximate_size(blocks['different_bytes'])}",
        ),
        ("used once", f"{_percent(blocks['used_once_share'])} of them"),
        ("hit rate of a cache without end", f"{_percent(hits['max_share_tokens'])} of tokens"),
        ("the same by blocks", _percent(hits["max_share_blocks"])),
        ("if each session had its own", _percent(hits["own_session_share_blocks"])),
    ]
    spans: list[Sequence[str]] = [("", "p50", "p90", "p99", "max")]
    for name, values, shown in (
        ("requests until a block is used again", document["reuse"]["distance_requests"], _count),
        ("seconds until then", document["reuse"]["gap_s"], _count),
        ("turns of a session", document["sessions"]["turns"], _count),
        ("tokens of its longest context", document["sessions"]["peak_tokens"], _count),
        ("bytes of its longest context", document["sessions"]["peak_bytes"], approximate_size),
        ("bytes of all its branches", document["sessions"]["distinct_bytes"], approximate_size),
    ):
        spans.append((name, *(shown(value) for value in values.values())))
    curve = [("LRU cache", "of all blocks", "hit rate")]
    for point in document["hit_rate_by_cache"]:
        if point["marked"]:
            part = f"1/{1 / point['marked']:.0f}"
            curve.append((approximate_size(point["cache_bytes"]), part, _percent(point["hit_share"])))
    needed = [("of all hits there can be", "LRU cache")]
    for share, point in zip(HIT_SHARES, document["cache_for_hits"], strict=True):
        needed.append((_percent(share), approximate_size(point["cache_bytes"])))
    used = [("working set", "mean", "max")]
    for name, values in document["working_set"]["summary"].items():
        shown = approximate_size if name.endswith("bytes") else _count
        label = name.removesuffix("_bytes").replace("_", " ")
        used.append((label, shown(values["mean"]), shown(values["max"])))
    return [
        (f"traffic of {trace['name']}", facts),
        ("reuse and sessions", spans),
        ("hit rate against cache size", curve),
        ("cache size against hits", needed),
        ("over time", used),
    ]


def _tuning_tables(found: Recommendation) -> list[tuple[str, Rows]]:
    tables: list[tuple[str, Rows]] = []
    for option, points in found.curves.items():
        rows: list[Sequence[str]] = [
            (option, "hit rate", "from memory", "restore", "recompute", "memory held", "SSD held", "")
        ]
        for point in points:
            value = point["value"]
            rows.append(
                (
                    approximate_size(value) if option.endswith("bytes") else f"{value:,}",
                    _percent(point["hit_share"]),
                    _percent(point["memory_hit_share"]),
                    f"{1000 * point['restore_s']:.1f} ms",
                    f"{1000 * point['recompute_s']:.1f} ms",
                    approximate_size(point["memory_peak_bytes"]),
                    approximate_size(point["ssd_peak_bytes"]),
                    "chosen" if value == getattr(found, option) else "",
                )
            )
        tables.append((f"{option}, the others as chosen so far", rows))
    return tables


def _print_tables(tables: Sequence[tuple[str, Rows]]) -> None:
    out = console()
    for title, rows in tables:
        table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
        for i, heading in enumerate(rows[0]):
            table.add_column(heading, justify="left" if i == 0 else "right", overflow="fold")
        for row in rows[1:]:
            table.add_row(*(Text(cell) for cell in row))
        out.print(table)


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:,.1f}"
