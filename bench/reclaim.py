"""What reclaim keeps where the room is short: the daemon's rules on real request traces, in numbers only (flatcake_server.traffic.simulate).

Before any session goes, the unused tails of files go, and no session goes for headroom. Each row is a trace with a node that has
a share of the room its different blocks need (an eighth of it memory): the hit rate where sessions go alone, that of this rule, that
of a cache without end; then the price, which is files made, and what is gained, which is sessions not dropped.

    replay   the requests of docs/replay's `half the room`, with the node of that replay, and an oracle's hit rate

Run: python bench/reclaim.py TRACE.jsonl.gz ... [--shares 16,4,2] [--replay TRACE.jsonl.gz] [--json]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from flatcake_client.replay.maximum import oracle_blocks
from flatcake_client.replay.workload import Shaping, shape
from flatcake_server.placement import Policy
from flatcake_server.traffic.simulate import Node, Outcome, Rates, share_counts, simulate
from flatcake_server.traffic.spans import Traffic, gather
from flatcake_transport.trace import Request, read_trace

TOKEN_BYTES = 131_072  # Llama-3.1-8B in bfloat16
HALF_THE_ROOM = Shaping(sessions=24, turns=8, max_tokens=200_000, block_tokens=256, dense_s=8.0)
REPLAY_NODE = Node(128 << 20, 1 << 30, Policy(), 1024)


@dataclass(frozen=True, slots=True)
class Row:
    """Hits in percent of all blocks asked for. `oracle`: of a cache of whole sessions that knows the future, where asked."""

    trace: str
    room: str
    sessions_only: float
    tails_first: float
    endless: float
    oracle: float | None
    files_before: int
    files: int
    dropped_before: int
    dropped: int


def row(name: str, room: str, traffic: Traffic, node: Node, oracle: float | None = None) -> Row:
    shares = share_counts(traffic)

    def run(node: Node) -> Outcome:
        return simulate(traffic, shares, node, Rates())

    before, now = run(replace(node, tails_first=False)), run(node)
    return Row(
        trace=name,
        room=room,
        sessions_only=round(100 * before.hit_share, 2),
        tails_first=round(100 * now.hit_share, 2),
        endless=round(100 * now.hit_share_max, 2),
        oracle=oracle,
        files_before=before.files,
        files=now.files,
        dropped_before=before.reclaimed["ssd"],
        dropped=now.reclaimed["ssd"],
    )


def of_replay(path: Path) -> Row:
    """The requests as `flatcake replay` has them."""
    workload = shape(read_trace(path), HALF_THE_ROOM)
    planned, block_tokens = workload.requests, workload.block_tokens
    replies: dict[str, int] = {}  # each request says the reply before it
    requests = []
    for one in reversed(planned):
        asked = one.asked
        output = replies.get(asked.session, 0)
        replies[asked.session] = asked.previous_reply_tokens or 0
        requests.append(
            Request(one.arrival_s, asked.session, asked.turn, asked.input_tokens, output, block_tokens, one.numbers)
        )
    requests.reverse()
    room_blocks = (REPLAY_NODE.memory_bytes + REPLAY_NODE.ssd_bytes) // (block_tokens * REPLAY_NODE.bytes_per_token)
    chains, sessions = [one.numbers for one in planned], [one.asked.session for one in planned]
    best = sum(oracle_blocks(chains, sessions, workload.different_blocks, room_blocks))
    oracle = round(100 * best / sum(map(len, chains)), 2)
    return row("replay", "1/2", gather(requests), REPLAY_NODE, oracle)


def of_trace(path: Path, shares: list[int]) -> Iterator[Row]:
    traffic = gather(read_trace(path))
    needed = traffic.unique_blocks * traffic.block_tokens * TOKEN_BYTES
    for share in shares:
        room = needed // share
        node = Node(room // 8, room - room // 8, Policy(), TOKEN_BYTES)
        yield row(path.name.removesuffix(".jsonl.gz"), f"1/{share}", traffic, node)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, help="files in the compact trace format")
    parser.add_argument("--shares", default="16,4,2", help="of the room that all blocks need: one in so many")
    parser.add_argument(
        "--replay", type=Path, help="claude_code_v8_heavy200k.jsonl.gz: the requests of docs/replay too"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    told = parser.parse_args()
    rows = [of_replay(told.replay)] if told.replay else []
    for path in told.traces:
        rows += of_trace(path, [int(share) for share in told.shares.split(",")])
    if told.json:
        print(json.dumps([asdict(one) for one in rows]))
        return
    table = Table(title="hit rate, % of blocks", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    names = (
        "trace",
        "room",
        "sessions only",
        "tails first",
        "no end",
        "oracle",
        "files before",
        "now",
        "dropped before",
        "now",
    )
    for name in names:
        table.add_column(name, justify="left" if name == "trace" else "right", no_wrap=True)
    for one in rows:
        cells = [one.sessions_only, one.tails_first, one.endless, one.oracle]
        shown = ["" if cell is None else f"{cell:.2f}" for cell in cells]
        counts = map(str, (one.files_before, one.files, one.dropped_before, one.dropped))
        table.add_row(one.trace, one.room, *shown, *counts)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
