"""The price of pre-allocation: bytes reserved in session files / bytes written, on real request traces. Pure simulation.

Every request stores the blocks of its prompt that are not stored yet, all on SSD, in files of its session sized by
flatcake_server.sizing; a session idle for --session-trim-after gives its tail back, one that opens a further file at once.
With --ssd-bytes sessions are reclaimed by flatcake_server.reclaim, so that what is idle and trimmed does not grow forever.

    all            the integral of reserved over that of written, first to last request
    active         the same of sessions not yet trimmed alone: what headroom costs where it is
    end            at the last request
    files          of a session: mean, then percentiles

Run: python bench/reserved.py TRACE.jsonl.gz ... [--json]
"""

from __future__ import annotations

import argparse
import heapq
import json
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from flatcake_server.reclaim import ReclaimOrder, reclaim_need
from flatcake_server.sizing import SizingPolicy, file_bytes
from flatcake_transport.footer import footer_bytes
from flatcake_transport.layout import segment_layout
from flatcake_transport.space import SpaceSpec
from flatcake_transport.trace import Ids, Request, read_trace

TOKEN_BYTES = 131_072  # Llama-3.1-8B in bfloat16: 32 layers x 8 KV heads x 128 x K and V x 2 bytes
LAYERS = 32
WATERMARKS = (0.95, 0.90)  # high and low, of --ssd-bytes
RATIO_MAX = 1.25  # DESIGN section 1
SSD = 1


@dataclass(slots=True)
class Session:
    number: int
    created_bytes: list[int] = field(default_factory=list)  # of its files
    sealed_bytes: int = 0  # in files before the last one; nothing of them is free
    last_bytes: int = 0  # size of the last file now
    tail: int = 0  # bytes written in the last file
    used_s: float = 0.0
    segments: int = 0
    trimmed: bool = True

    @property
    def reserved_bytes(self) -> int:
        return self.sealed_bytes + self.last_bytes

    @property
    def written_bytes(self) -> int:
        return self.sealed_bytes + self.tail


@dataclass(frozen=True, slots=True)
class Result:
    trace: str
    requests: int
    sessions: int
    written_gib: float  # in all
    ratio_time_weighted: float
    ratio_active: float
    ratio_at_end: float
    files_mean: float  # a session
    files_p90: int
    files_p99: int
    files_max: int
    segments_mean: float
    files_a_segment: float
    reclaimed: int


class Node:
    """One SSD path: which session holds each block, and what its files take."""

    def __init__(self, policy: SizingPolicy, trim_after_s: float, ssd_bytes: int) -> None:
        self.policy = policy
        self.trim_after_s = trim_after_s
        self.ssd_bytes = ssd_bytes  # 0: no end
        self.owner: NDArray[np.int32] = np.zeros(1 << 20, np.int32)  # by block id; 0: not stored
        self.blocks_of: dict[int, list[Ids]] = {}
        self.sessions: dict[str, Session] = {}
        self.by_number: dict[int, str] = {}
        self.order = ReclaimOrder()
        self.reserved_bytes = self.written_bytes = 0
        self.active_reserved_bytes = self.active_written_bytes = 0
        self.written_ever_bytes = self.next_number = self.reclaimed = 0
        self.now_s: float | None = None
        self.integrals = np.zeros(4)
        self.trims: list[tuple[float, int]] = []
        self.gone: list[Session] = []

    def advance(self, now_s: float) -> None:
        """Let time pass, and trim who has been idle for long."""
        while self.trims and self.trims[0][0] <= now_s:
            due_s, number = heapq.heappop(self.trims)
            session = self.sessions.get(self.by_number.get(number, ""))
            if session is None or session.trimmed or session.used_s + self.trim_after_s > due_s:
                continue
            self._integrate(due_s)
            self._count(session, -1)
            session.last_bytes, session.trimmed = session.tail, True
            self._count(session, 1)
        self._integrate(now_s)

    def store(self, request: Request) -> None:
        ids = request.ids
        if len(ids) and ids.max() >= len(self.owner):
            self.owner = np.concatenate([self.owner, np.zeros(max(len(self.owner), int(ids.max())), np.int32)])
        holders = self.owner[ids]
        missing = np.flatnonzero(holders == 0)
        session = self._session(request.session)
        chain = [int(number) for number in dict.fromkeys(holders[holders > 0].tolist()) if number != session.number]
        if len(missing):
            for parent in chain:
                self.order.depend(session.number, parent)
            self._count(session, -1)
            session.trimmed = False
            for run in np.split(missing, np.flatnonzero(np.diff(missing) > 1) + 1):
                self._append(session, segment_bytes(request.block_tokens, len(run)))
            self._count(session, 1)
            self.owner[ids[missing]] = session.number
            self.blocks_of[session.number].append(ids[missing])
            self.order.set_bytes(session.number, SSD, session.reserved_bytes)
        self.order.touch([*chain, session.number])
        for number in (*chain, session.number):
            used = self.sessions[self.by_number[number]]
            used.used_s = self.now_s or 0.0
            heapq.heappush(self.trims, (used.used_s + self.trim_after_s, number))
        self._reclaim(session.number)

    def _session(self, name: str) -> Session:
        if name not in self.sessions:
            self.next_number += 1
            self.sessions[name] = Session(self.next_number)
            self.by_number[self.next_number] = name
            self.blocks_of[self.next_number] = []
            self.order.add(self.next_number)
        return self.sessions[name]

    def _append(self, session: Session, need_bytes: int) -> None:
        if session.tail + need_bytes > session.last_bytes:
            previous = session.created_bytes[-1] if session.created_bytes else 0
            size = file_bytes(need_bytes, session.written_bytes, previous, self.policy)
            session.sealed_bytes += session.tail
            session.created_bytes.append(size)
            session.last_bytes, session.tail = size, 0
        session.tail += need_bytes
        session.segments += 1
        self.written_ever_bytes += need_bytes

    def _reclaim(self, busy: int) -> None:
        need = reclaim_need(self.reserved_bytes, 0, self.ssd_bytes, *WATERMARKS) if self.ssd_bytes else 0
        for number in self.order.victims(SSD, need, lambda session: session == busy):
            session = self.sessions.pop(self.by_number.pop(number))
            self._count(session, -1)
            for ids in self.blocks_of.pop(number):
                self.owner[ids] = 0
            self.order.remove(number)
            self.gone.append(session)
            self.reclaimed += 1

    def _count(self, session: Session, sign: int) -> None:
        self.reserved_bytes += sign * session.reserved_bytes
        self.written_bytes += sign * session.written_bytes
        if not session.trimmed:
            self.active_reserved_bytes += sign * session.reserved_bytes
            self.active_written_bytes += sign * session.written_bytes

    def _integrate(self, now_s: float) -> None:
        if self.now_s is not None:
            held = (self.reserved_bytes, self.written_bytes, self.active_reserved_bytes, self.active_written_bytes)
            self.integrals += np.array(held, float) * (now_s - self.now_s)
        self.now_s = now_s


@cache
def segment_bytes(block_tokens: int, blocks: int) -> int:
    spec = SpaceSpec("llama-3.1-8b", "bfloat16", block_tokens, (block_tokens * TOKEN_BYTES // LAYERS,) * LAYERS)
    return segment_layout(spec, blocks).data_bytes + footer_bytes(spec, "session-0000", blocks)


def simulate(path: Path, policy: SizingPolicy, trim_after_s: float, ssd_bytes: int) -> Result:
    node = Node(policy, trim_after_s, ssd_bytes)
    requests = 0
    for request in read_trace(path):
        node.advance(request.arrival_s)
        node.store(request)
        requests += 1
    sessions = [*node.gone, *node.sessions.values()]
    files = np.array([len(session.created_bytes) for session in sessions if session.created_bytes])
    segments = np.array([session.segments for session in sessions if session.created_bytes])
    reserved, written, active_reserved, active_written = node.integrals.tolist()
    return Result(
        trace=path.name.removesuffix(".jsonl.gz"),
        requests=requests,
        sessions=len(files),
        written_gib=round(node.written_ever_bytes / 2**30, 1),
        ratio_time_weighted=round(reserved / written, 4),
        ratio_active=round(active_reserved / active_written, 4),
        ratio_at_end=round(node.reserved_bytes / node.written_bytes, 4),
        files_mean=round(float(files.mean()), 2),
        files_p90=int(np.quantile(files, 0.9)),
        files_p99=int(np.quantile(files, 0.99)),
        files_max=int(files.max()),
        segments_mean=round(float(segments.mean()), 2),
        files_a_segment=round(float(files.sum() / segments.sum()), 3),
        reclaimed=node.reclaimed,
    )


def arguments() -> argparse.Namespace:
    default = SizingPolicy()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, help="files in the compact trace format")
    parser.add_argument("--headroom-share", type=float, default=default.headroom_share)
    parser.add_argument("--growth-share", type=float, default=default.growth_share)
    parser.add_argument(
        "--session-trim-after", type=float, default=600.0, help="seconds (default 600, as the daemon's)"
    )
    parser.add_argument("--ssd-bytes", type=int, default=0, help="quota of the path (default 0: no end, no reclaim)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if not args.traces:
        Console(stderr=True).print("bench/reserved.py: no trace given, nothing measured: see --help", markup=False)
        return
    policy = SizingPolicy(args.headroom_share, args.growth_share)
    results = [simulate(path, policy, args.session_trim_after, args.ssd_bytes) for path in args.traces]
    if args.json:
        print(json.dumps({"policy": asdict(policy), "ratio_max": RATIO_MAX, "traces": [asdict(r) for r in results]}))
        return
    knobs = f"headroom {policy.headroom_share}, growth {policy.growth_share}"
    title = f"reserved / written (at most {RATIO_MAX}), files a session; {knobs}"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    names = "trace", "all", "active", "end", "files", "p99", "max", "GiB", "dropped"
    for name in names:
        table.add_column(name, justify="left" if name == "trace" else "right", no_wrap=True)
    for r in results:
        style = None if max(r.ratio_time_weighted, r.ratio_at_end) <= RATIO_MAX else "red"
        shares = (r.ratio_time_weighted, r.ratio_active, r.ratio_at_end, r.files_mean)
        counts = (r.files_p99, r.files_max, round(r.written_gib), r.reclaimed)
        table.add_row(r.trace, *(f"{share:.2f}" for share in shares), *map(str, counts), style=style)
    Console().print(table)


if __name__ == "__main__":
    main()
