"""Lookups in a full index, and restarts with one: a real daemon with 1 M and 10 M blocks of sessions with 3,500 blocks.

The state is written with the journal's own interface, beside sparse session files of the right length, so that nothing
but the bytes of blocks is missing. The daemon is killed and started again, then asked over its unix socket for whole
sessions, each 175 turns of 20 blocks: every key is a hit, and a reply is 175 runs under a lease.

    bare stub      a call of a gRPC stub: request made beforehand, reply not looked at
    client.lookup  what an engine calls, until it holds the hit
    beside checks  the bare stub, while somebody runs `flatcake check` and lists sessions and spaces, over and over

Prints p50 and p99 beside what DESIGN asks for (1.5 and 5 ms), the daemon's own part of a lookup, bytes a block of index and process,
and seconds of restarts (1 M blocks: 2 s), from the start of the process to its first answer, Python's own start included.
Run: python bench/lookup.py
"""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from _support import GIB, Node, Report, arguments, disk_directory, say

import flatcake_client as fc
from flatcake_proto.v1 import store_pb2, store_pb2_grpc
from flatcake_server.journal import Journal
from flatcake_server.records import FileId, FileRecord, Generation, KeyArray, SegmentRecord, SessionNo, SessionRecord
from flatcake_server.rpc_admin import AdminClient
from flatcake_server.session import file_path
from flatcake_transport.address import Address, Medium
from flatcake_transport.footer import footer_bytes
from flatcake_transport.layout import segment_layout
from flatcake_transport.space import SpaceSpec

# Planes as small as can be: the address space of 10 M blocks may not be larger than the file system.
MODEL: dict[str, Any] = {"model": "bench-tiny", "dtype": "bfloat16", "block_tokens": 64, "plane_bytes": [256] * 4}
SPEC = SpaceSpec("bench-tiny", "bfloat16", 64, (256,) * 4)
TURN_BLOCKS = 20
TURNS = 175
SESSION_BLOCKS = TURNS * TURN_BLOCKS  # 3,500: a context of 224,000 tokens
JOURNAL_ROOM_BYTES = 60  # a block, generously: keys are 16
RESTARTS = 3
SCATTERED = 200


def session_keys(number: int) -> KeyArray:
    """Keys as uniform as those of SHA-256, the same for one number every time."""
    return np.random.default_rng(number).integers(0, 256, (SESSION_BLOCKS, 16), np.uint8)


class State:
    """What a node with so many sessions has on its disk."""

    def __init__(self, ssd_path: Path, sessions: int) -> None:
        ssd_path.mkdir(parents=True, exist_ok=True)
        self.sessions = sessions
        total = segment_layout(SPEC, TURN_BLOCKS).data_bytes + footer_bytes(SPEC, "session-000000", TURN_BLOCKS)
        self.file_bytes = TURNS * total
        journal = Journal(ssd_path / "journal")
        journal.load()
        try:
            for number in range(1, sessions + 1):
                self._session(ssd_path, journal, number, total)
        finally:
            journal.close()
        self.journal_path = ssd_path / "journal"

    def _session(self, ssd_path: Path, journal: Journal, number: int, total: int) -> None:
        name, keys = f"session-{number:06d}", session_keys(number)
        file = FileRecord(
            FileId(number), SessionNo(number), (number - 1) * self.file_bytes, self.file_bytes, self.file_bytes
        )
        segments = [
            SegmentRecord(
                generation=Generation(number * TURNS + turn),
                session_no=SessionNo(number),
                address=Address.of(Medium.SSD, 0, file.base + turn * total),
                total_bytes=total,
                turn=turn + 1,
                first_block=turn * TURN_BLOCKS,
                reason="long-context",
                keys=keys[turn * TURN_BLOCKS : (turn + 1) * TURN_BLOCKS],
                parent_key=keys[turn * TURN_BLOCKS - 1].tobytes() if turn else bytes(16),
                file_id=file.file_id,
                file_offset=turn * total,
            )
            for turn in range(TURNS)
        ]
        now_s = time.time()
        record = SessionRecord(SessionNo(number), name, SPEC.fingerprint, TURNS, now_s, now_s)
        path = file_path(ssd_path, file.file_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as sparse:
            sparse.truncate(self.file_bytes)
        journal.commit(record, file, segments, {SPEC.fingerprint: SPEC})

    def journal_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.journal_path.rglob("*") if file.is_file())


def start_s(node: Node) -> float:
    begun_s = time.perf_counter()
    node.start()
    return time.perf_counter() - begun_s


def restarts(node: Node, state: State, report: Report, millions: float, must_s: float | None) -> None:
    """Start on the state, then kill -9 and start again, several times: the best counts, the machine is shared."""
    first_s = start_s(node)
    again_s, inside_s = [], []
    for _ in range(RESTARTS - 1):
        node.stop(signal.SIGKILL)
        again_s.append(start_s(node))
        inside_s.append(node.status()["ready_s"])
    blocks = node.status()["index"]["blocks"]
    assert blocks == state.sessions * SESSION_BLOCKS, f"{blocks} blocks were adopted"
    report.add(
        f"restart, {millions:g} M blocks, s", min(again_s), must_s, at_most=True,
        detail=f"{min(inside_s):.2f} s without the start of Python; first start {first_s:.2f} s",
    )  # fmt: skip
    journal_bytes = state.journal_bytes()
    report.add(
        f"journal, {millions:g} M blocks, MB", journal_bytes / 1e6, detail=f"{journal_bytes / blocks:.1f} B a block"
    )


def memory(node: Node, idle_rss_bytes: int, report: Report, millions: float) -> None:
    index = node.status()["index"]
    rss_bytes = node.rss_bytes()
    detail = f"RSS of the daemon {rss_bytes / 1e6:.0f} MB, of an empty one {idle_rss_bytes / 1e6:.0f}"
    report.add(f"index, {millions:g} M blocks, B a block", index["bytes_per_block"], 50, at_most=True)
    report.add(f"RSS, {millions:g} M blocks, B a block", (rss_bytes - idle_rss_bytes) / index["blocks"], detail=detail)


def show_times(report: Report, name: str, seconds: list[float]) -> None:
    ms = np.array(seconds) * 1e3
    best = min(np.percentile(part, 50) for part in np.array_split(ms, 10))
    spread = f"{len(ms)} lookups of {SESSION_BLOCKS} keys; best tenth {best:.2f}, max {ms.max():.1f}"
    report.add(f"{name}, p50 ms", float(np.percentile(ms, 50)), 1.5, at_most=True, detail=spread)
    report.add(f"{name}, p99 ms", float(np.percentile(ms, 99)), 5, at_most=True)


def scattered_keys(number: int) -> KeyArray:
    """A chain such as no conversation makes: each of its turns lies in a session of its own."""
    return np.concatenate([session_keys(number + i)[:TURN_BLOCKS] for i in range(TURNS)])


def bare_lookups(endpoint: str, chains: Iterable[KeyArray]) -> list[float]:
    """Seconds of each call of a stub; leases are given back between."""
    with grpc.insecure_channel(endpoint, options=[("grpc.max_receive_message_length", 64 << 20)]) as channel:
        stub = store_pb2_grpc.StoreStub(channel)
        me = stub.Hello(store_pb2.HelloRequest(protocol=1, client_name="bench"))
        who: dict[str, Any] = {"client_id": me.client_id, "incarnation": me.incarnation}
        stub.OpenSpace(store_pb2.OpenSpaceRequest(**who, shards=1, fingerprint=SPEC.fingerprint, **MODEL))
        seconds = []
        for keys in chains:
            request = store_pb2.LookupRequest(**who, fingerprint=SPEC.fingerprint, keys=keys.tobytes(), pin=True)
            begun_s = time.perf_counter()
            reply = stub.Lookup(request)
            seconds.append(time.perf_counter() - begun_s)
            assert len(reply.runs) == TURNS, f"{len(reply.runs)} runs for {TURNS} turns"
            stub.Release(store_pb2.ReleaseRequest(**who, lease_ids=[reply.lease_id]))
    return seconds


def client_lookups(endpoint: str, order: list[int]) -> list[float]:
    seconds = []
    with fc.connect(endpoint) as client:
        space = client.open_space(**MODEL)
        for number in order:
            keys = session_keys(number)
            begun_s = time.perf_counter()
            hit = space.lookup(keys)
            seconds.append(time.perf_counter() - begun_s)
            assert hit.blocks == SESSION_BLOCKS, f"{hit.blocks} of {SESSION_BLOCKS} blocks: {hit.failure}"
            hit.release()
    return seconds


@contextlib.contextmanager
def operator(node: Node, report: Report) -> Iterator[None]:
    """Somebody who checks the node and lists its sessions and spaces, over and over, while this lasts."""
    over, seconds = threading.Event(), []

    def ask() -> None:
        with AdminClient(node.endpoint, timeout_s=60.0) as admin:
            while not over.is_set():
                begun_s = time.perf_counter()
                document = [step.report for step in admin.check()][-1]
                assert document is not None
                assert document["ok"], document
                seconds.append(time.perf_counter() - begun_s)
                admin.sessions()
                admin.spaces()

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield
    finally:
        over.set()
        asking.join()
    report.add("a check beside lookups, s", min(seconds), detail=f"{len(seconds)} of them, one after the other")


def main() -> None:
    args = arguments(__doc__, thousands=(10_000, "blocks in the large index"), lookups=(2000, "of each way to ask"))
    report = Report("Lookups and restarts")
    with disk_directory(args.dir, JOURNAL_ROOM_BYTES * args.thousands * 1100) as directory:
        options = {"ssd_bytes": 32 * GIB, "memory_bytes": 64 << 20}
        (directory / "idle").mkdir()
        with Node(directory / "idle", **options) as node:
            idle_rss_bytes = node.rss_bytes()
        for thousands in dict.fromkeys((1000, args.thousands)):
            must_s = 2.0 if thousands == 1000 else None
            home = directory / str(thousands)
            sessions = -(-thousands * 1000 // SESSION_BLOCKS)
            say(f"making {sessions} sessions of {SESSION_BLOCKS} blocks")
            home.mkdir()
            state = State(home / "ssd", sessions)
            node = Node(home, **options)
            say("starting the daemon on it, killing it, starting it again")
            try:
                restarts(node, state, report, thousands / 1000, must_s)
                if thousands == args.thousands:
                    memory(node, idle_rss_bytes, report, thousands / 1000)
                    say("looking sessions up")
                    order = random.Random(0).choices(range(1, sessions + 1), k=args.lookups)
                    show_times(report, "bare stub", bare_lookups(node.endpoint, map(session_keys, order)))
                    show_times(report, "client.lookup", client_lookups(node.endpoint, order))
                    count, seconds = node.status()["rpc_seconds"]["lookup"]
                    report.add(
                        "in the daemon, mean ms", seconds / count * 1e3, detail="a lookup without gRPC's own work"
                    )
                    with operator(node, report):
                        beside = bare_lookups(node.endpoint, map(session_keys, order))
                    show_times(report, "bare stub beside checks", beside)
                    worst = map(scattered_keys, random.Random(1).choices(range(1, sessions - TURNS), k=SCATTERED))
                    worst_ms = np.percentile(bare_lookups(node.endpoint, worst), 50) * 1e3
                    report.add("bare stub, scattered, p50 ms", float(worst_ms), detail="each turn in another session")
            finally:
                node.close(signal.SIGKILL)
    report.show(as_json=args.json)


if __name__ == "__main__":
    main()
