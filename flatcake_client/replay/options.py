"""What a replay is asked for: the command line as one value, checked before anything is started.

Defaults are a small node on a small disk: 256 tokens a block, 1 KiB of KV a token (a hundredth of a real model's), so that a disk of
3 GB/s is to these tokens what 400 GB/s would be to an 8B model's. The prefill rate is scaled likewise: restoring a token then takes
about a quarter of the time that computing it does, as on a node with several fast disks and one large GPU.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from flatcake_client.arguments import Parser
from flatcake_client.replay.systems import ABLATIONS, DAEMON_ABLATIONS
from flatcake_client.replay.workload import Shaping
from flatcake_transport.profiles import PROFILES
from flatcake_transport.trace import DAY_S
from flatcake_transport.units import parse_duration, parse_size

SYSTEMS: Final = ("flatcake", "none")  # and whatever has an adapter in bench/peers
PEERS: Final = ("mooncake", "lmcache")
LOADS_MAX: Final = 100
PREFETCHES_MAX: Final = 1024  # a thread each
STDOUT: Final = Path("-")  # the report goes to standard output, in place of tables


@dataclass(frozen=True, slots=True)
class Options:
    """Sizes are bytes, times seconds. `trace` or `profile`, or `compare`: reports to show instead of a run."""

    trace: Path | None = None
    profile: str = ""
    profile_sessions: int = 0
    spread_s: float = DAY_S
    shaping: Shaping = field(default_factory=Shaping)
    system: str = "flatcake"
    adapter: Path | None = None
    ablation: str = ""
    endpoint: str = ""
    loads: tuple[float, ...] = (1.0,)
    kv_bytes_per_token: int = 1024
    planes: int = 16
    memory_bytes: int = 512 << 20
    ssd_bytes: int = 4 << 30
    ssd_dir: Path = Path()
    pages_bytes: int = 2 << 30
    prefill_tokens_per_s: float = 700_000.0
    workers: int = 1
    prefetches: int = 0
    timeout_s: float = 60.0
    agent_context_tokens: int | None = None
    short_reply_tokens: int | None = None
    verify_all: bool = False
    drop_caches: bool = False
    json_file: Path | None = None
    plot_dir: Path | None = None
    each_request: bool = False
    compare: tuple[Path, ...] = ()


def parse(arguments: Sequence[str]) -> Options:
    """Raises: ValueError: what is given makes no sense together. SystemExit: argparse's own, for --help and unknown options."""
    told = _parser().parse_args(arguments)
    if told.compare:
        return Options(compare=tuple(told.compare), json_file=told.json, plot_dir=told.plot)
    if (told.trace is None) == (told.profile is None):
        raise ValueError("give a trace, or --profile NAME to generate one: one of the two")
    if told.profile is not None and told.profile not in PROFILES:
        raise ValueError(f"--profile {told.profile} is unknown: choose {', '.join(PROFILES)}")
    if told.system not in (*SYSTEMS, *PEERS) and told.adapter is None:
        raise ValueError(
            f"--system {told.system} is unknown: choose {', '.join((*SYSTEMS, *PEERS))}, or give --adapter FILE.py"
        )
    if told.ablation and (told.system != "flatcake" or told.adapter):
        raise ValueError("--ablation is of --system flatcake only")
    if told.ablation and told.ablation not in ABLATIONS:
        raise ValueError(f"--ablation {told.ablation} is unknown: choose {', '.join(ABLATIONS)}")
    thresholds = (told.agent_context_tokens, told.short_reply_tokens)
    if told.endpoint and (told.system != "flatcake" or told.adapter):
        raise ValueError("--endpoint is of --system flatcake only")
    if told.endpoint and (told.ablation in DAEMON_ABLATIONS or thresholds != (None, None)):
        named = f"thresholds and --ablation {' or '.join(DAEMON_ABLATIONS)}"
        raise ValueError(f"{named} need a daemon of the replay's own: leave --endpoint out")
    _refuse_counts(told)
    shaping = Shaping(
        limit=told.limit, sessions=told.sessions, turns=told.turns, max_tokens=told.max_tokens, from_s=told.start,
        window_s=told.window, block_tokens=told.block_tokens, dense_s=told.dense, rate=told.rate, seed=told.seed,
    )  # fmt: skip
    return Options(
        trace=told.trace, profile=told.profile or "", profile_sessions=told.profile_sessions, spread_s=told.spread,
        shaping=shaping, system=told.adapter.stem if told.adapter and told.system == "flatcake" else told.system,
        adapter=told.adapter, ablation=told.ablation, endpoint=told.endpoint, loads=_loads(told.load),
        kv_bytes_per_token=told.kv_bytes_per_token, planes=told.planes, memory_bytes=told.memory_bytes,
        ssd_bytes=told.ssd_bytes, ssd_dir=told.ssd_dir, pages_bytes=told.pages_bytes,
        prefill_tokens_per_s=told.prefill_rate, workers=told.workers, prefetches=told.prefetches,
        timeout_s=told.timeout, agent_context_tokens=told.agent_context_tokens,
        short_reply_tokens=told.short_reply_tokens, verify_all=told.verify_all, drop_caches=told.drop_caches, json_file=told.json,
        plot_dir=told.plot, each_request=told.each_request,
    )  # fmt: skip


def _refuse_counts(told: argparse.Namespace) -> None:
    """Raises: ValueError: a count or size that nothing can be done with."""
    for names, least, said in (
        ("prefill_rate rate workers planes kv_bytes_per_token timeout", 0, "above 0"),
        (
            "limit sessions turns max_tokens block_tokens profile_sessions prefetches seed agent_context_tokens short_reply_tokens",
            -1,
            "0 or more",
        ),
    ):
        for name in names.split():
            value = getattr(told, name)
            if value is not None and not least < value < math.inf:  # "nan" and "inf" are floats to argparse
                raise ValueError(f"--{name.replace('_', '-')} is {said}, not {value:g}")
    if told.prefetches > PREFETCHES_MAX:
        raise ValueError(f"--prefetches is at most {PREFETCHES_MAX}, not {told.prefetches}")


def _loads(text: str) -> tuple[float, ...]:
    try:
        loads = tuple(float(word) for word in text.split(","))
    except ValueError as error:
        raise ValueError(f"--load {text} is no list of numbers: write one like 0.25,0.5,1,2,4") from error
    if not 0 < len(loads) <= LOADS_MAX or not all(0 < load < math.inf for load in loads):
        raise ValueError(f"--load {text}: expected 1 to {LOADS_MAX} numbers above 0")
    return loads


def _typed(parse_text: Callable[[object], float]) -> Callable[[str], float]:
    """Its own words in argparse's error."""

    def convert(text: str) -> float:
        try:
            return parse_text(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "flatcake replay",
        "Replay a trace in real time, with real bytes, against a store of KV blocks.",
        "Sizes like 512MiB or 4GB, durations like 30s or 5m. Ctrl-C leaves the report of what was done. docs/replay.md",
    )
    size, seconds = _typed(parse_size), _typed(parse_duration)
    _trace_options(parser, seconds)
    group = parser.add_argument_group("system")
    add = group.add_argument
    add("--system", metavar="NAME", default="flatcake", help=f"{', '.join((*SYSTEMS, *PEERS))} (default flatcake)")
    add("--adapter", metavar="FILE", type=Path, help="a system of your own: a file with open_system(budget)")
    add("--ablation", metavar="NAME", default="", help=f"FlatCake without one of its parts: {', '.join(ABLATIONS)}")
    add("--endpoint", metavar="ENDPOINT", default="", help="a FlatCake daemon that runs (default: one of its own)")
    add("--memory-bytes", metavar="SIZE", type=size, default=512 << 20, help="memory for blocks (default 512MiB)")
    add("--ssd-bytes", metavar="SIZE", type=size, default=4 << 30, help="disk for blocks (default 4GiB)")
    add("--ssd-dir", metavar="DIR", type=Path, default=Path(), help="where on the disk (default: here)")
    add("--prefetches", metavar="N", type=int, default=0, help="restores at once (default: the system's own)")
    add("--agent-context-tokens", metavar="N", type=int, help="the daemon's threshold (default: its own)")
    add("--short-reply-tokens", metavar="N", type=int, help="the daemon's threshold (default: its own)")
    group = parser.add_argument_group("engine")
    add = group.add_argument
    add("--kv-bytes-per-token", metavar="SIZE", type=size, default=1024, help="of all layers (default 1KiB)")
    add("--planes", metavar="N", type=int, default=16, help="layers (default 16)")
    add("--pages-bytes", metavar="SIZE", type=size, default=2 << 30, help="the engine's KV memory (default 2GiB)")
    add("--prefill-rate", metavar="N", type=float, default=700_000.0, help="tokens a second (default 700000)")
    add("--workers", metavar="N", type=int, default=1, help="prefills at once (default 1)")
    add("--timeout", metavar="DURATION", type=seconds, default=60.0, help="of a restore or store (default 60s)")
    add("--drop-caches", action="store_true", help="empty the kernel's file cache before each load; only root may")
    add("--verify-all", action="store_true", help="compare every byte, not all stamps and one block in eight")
    group = parser.add_argument_group("report")
    add = group.add_argument
    add(
        "--json",
        metavar="FILE",
        type=Path,
        nargs="?",
        const=STDOUT,
        help="the report, in FILE after each load, or here",
    )
    add("--plot", metavar="DIR", type=Path, help="draw: a PNG each, and index.html; needs flatcake[plots]")
    add("--each-request", action="store_true", help="with --json: one record a request, too")
    add("--compare", metavar="FILE", type=Path, nargs="+", help="run nothing: show reports side by side")
    return parser


def _trace_options(parser: argparse.ArgumentParser, seconds: Callable[[str], float]) -> None:
    parser.add_argument("trace", nargs="?", type=Path, help="flatcake-trace/1, Mooncake's JSONL, or kv-cache-tester's")
    group = parser.add_argument_group("requests")
    add = group.add_argument
    add("--profile", metavar="NAME", help=f"generated traffic instead of a trace: {', '.join(PROFILES)}")
    add("--profile-sessions", metavar="N", type=int, default=0, help="of the profile (default: as its trace)")
    add("--seed", metavar="N", type=int, default=1, help="of profile and re-timing (default 1)")
    add("--spread", metavar="DURATION", type=seconds, default=DAY_S, help="where a trace has no starts (default 24h)")
    add("--load", metavar="LIST", default="1", help="arrivals so many times as fast, one run after the other")
    add("--rate", metavar="X", type=float, default=1.0, help="all loads so many times as fast (default 1)")
    add("--dense", metavar="DURATION", type=seconds, default=0.0, help="re-time: at load 1 the requests take so long")
    add("--limit", metavar="N", type=int, default=0, help="requests at most")
    add("--sessions", metavar="N", type=int, default=0, help="the first so many sessions")
    add("--turns", metavar="N", type=int, default=0, help="the first so many turns of each")
    add("--max-tokens", metavar="N", type=int, default=0, help="a session ends at its first longer prompt")
    add("--from", dest="start", metavar="DURATION", type=seconds, default=0.0, help="of the trace's time")
    add("--window", metavar="DURATION", type=seconds, default=0.0, help="of the trace's time, from there")
    add("--block-tokens", metavar="N", type=int, default=0, help="a multiple of the trace's (default: the trace's)")
