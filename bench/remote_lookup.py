"""A lookup of one agent request that goes on at another node: two daemons and a real redis-server on loopback.

One node holds a session of --blocks blocks in turns of 20; the other is asked for it, with a bare stub. `local` is the same
request where it is stored, `miss` one that nobody holds (one round trip to the directory). No bytes of KV are moved. The limit
of a remote one is its two round trips made here by hand: the anchors' probe of the directory, and the owner's own answer to a client
of its own; they take turns.
Needs redis-server or valkey-server. Run: python bench/remote_lookup.py [--blocks 3500]
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from shutil import which
from typing import Any

import grpc
import numpy as np
from _support import Node, Report, arguments, say

from flatcake_proto.v1 import store_pb2, store_pb2_grpc
from flatcake_server.cluster.anchors import probes
from flatcake_server.cluster.redis_directory import RedisDirectory
from flatcake_transport.space import SpaceSpec

TURN_BLOCKS = 20
ROUNDS, CALLS = 6, 50  # they take turns; so many calls each time
SPEC = SpaceSpec("bench", "u8", 16, (4096,))
MODEL: dict[str, Any] = {"model": "bench", "dtype": "u8", "block_tokens": 16, "plane_bytes": (4096,), "shards": 1}


@contextlib.contextmanager
def redis_url(folder: Path) -> Iterator[str]:
    server = which("redis-server") or which("valkey-server")
    if server is None:
        raise SystemExit("no redis-server on this machine: nothing measured")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    with (folder / "redis.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            while b"eady to accept" not in (folder / "redis.log").read_bytes():
                time.sleep(0.05)
            yield f"redis://127.0.0.1:{port}"
        finally:
            process.kill()


class Asker:
    """A client of one daemon, without the client library."""

    def __init__(self, endpoint: str) -> None:
        options = [("grpc.max_receive_message_length", 64 << 20)]
        self._stub = store_pb2_grpc.StoreStub(grpc.insecure_channel(endpoint, options=options))
        me = self._stub.Hello(store_pb2.HelloRequest(protocol=1, client_name="bench"))
        self._who: dict[str, Any] = {"client_id": me.client_id, "incarnation": me.incarnation}
        self._stub.OpenSpace(store_pb2.OpenSpaceRequest(**self._who, fingerprint=SPEC.fingerprint, **MODEL))
        self._who["fingerprint"] = SPEC.fingerprint

    def store(self, keys: bytes) -> None:
        for end in range(16 * TURN_BLOCKS, len(keys) + 1, 16 * TURN_BLOCKS):
            request = store_pb2.BeginTurnRequest(**self._who, keys=keys[:end], root_key=bytes(16), session="s")
            turn = self._stub.BeginTurn(request)
            parts = [store_pb2.PartChecksums() for _ in turn.parts]
            who = {name: self._who[name] for name in ("client_id", "incarnation")}
            self._stub.CommitTurn(store_pb2.CommitTurnRequest(**who, turn_id=turn.turn_id, parts=parts))

    def lookups_ms(self, keys: bytes, blocks: int) -> list[float]:
        """Milliseconds of each; leases are given back between."""
        request = store_pb2.LookupRequest(**self._who, keys=keys, pin=True, remote=True)
        who = {name: self._who[name] for name in ("client_id", "incarnation")}
        times = []
        for _ in range(CALLS):
            begun_s = time.perf_counter()
            reply = self._stub.Lookup(request)
            times.append((time.perf_counter() - begun_s) * 1e3)
            assert sum(run.blocks for run in reply.runs) == blocks, "a lookup missed"
            self._stub.Release(store_pb2.ReleaseRequest(**who, lease_ids=[reply.lease_id]))
        return times


def probes_ms(url: str, keys: bytes) -> list[float]:
    """Milliseconds of each probe of the directory that a lookup of these keys makes."""
    anchors = [keys[16 * n - 16 : 16 * n] for n in probes(0, len(keys) // 16).tolist()]

    async def ask() -> list[float]:
        directory, times = RedisDirectory(url, "flatcake", timeout_s=10), []
        await directory.probe(anchors)
        for _ in range(CALLS):
            begun_s = time.perf_counter()
            await directory.probe(anchors)
            times.append((time.perf_counter() - begun_s) * 1e3)
        await directory.close()
        return times

    return asyncio.run(ask())


def main() -> None:
    options = arguments(__doc__, blocks=(3500, "of the request"))
    report = Report("a lookup that goes on at another node, loopback")
    keys, others = (np.random.default_rng(seed).bytes(16 * options.blocks) for seed in (1, 2))
    blocks = options.blocks // TURN_BLOCKS * TURN_BLOCKS
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        url = stack.enter_context(redis_url(Path(name)))
        nodes = []
        for number in (1, 2):
            (folder := Path(name) / str(number)).mkdir()
            told = {"node_id": number, "directory": "redis", "redis_url": url, "grpc_listen": "127.0.0.1:0"}
            nodes.append(stack.enter_context(Node(folder, ssd_bytes="1GiB", node_ttl="2s", **told)))
        one, two = Asker(nodes[0].endpoint), Asker(nodes[1].endpoint)
        say(f"storing {blocks} blocks")
        two.store(keys)
        while nodes[0].status()["cluster"]["links"] < 1 or nodes[1].status()["cluster"]["anchors_pending"]:
            time.sleep(0.05)
        asked = {
            "local": partial(two.lookups_ms, keys[: 16 * blocks], blocks),
            "remote": partial(one.lookups_ms, keys, blocks),
            "miss": partial(one.lookups_ms, others, 0),
            "the directory's trip by itself": partial(probes_ms, url, keys),
        }
        times: dict[str, list[float]] = {what: [] for what in asked}
        for round_ in range(1 + ROUNDS):
            for what, ask in asked.items():
                found = ask()
                times[what] += found if round_ else []  # the first is for warming up
        for what, all_ms in times.items():
            report.add(f"{what}, p50 ms", float(np.percentile(all_ms, 50)), detail=f"best {min(all_ms):.2f}")
            report.add(f"{what}, p99 ms", float(np.percentile(all_ms, 99)))
        limit = float(np.median(times["local"]) + np.median(times["the directory's trip by itself"]))
        report.add(
            "both trips by themselves / remote", limit / float(np.median(times["remote"])), detail=f"{limit:.2f} ms"
        )
        stats = nodes[0].status()["cluster"]
        trips = stats["directory_calls_total"]["probe"] + stats["peer_calls_total"]["find"]
        lookups = stats["remote_lookups_total"]
        report.add(
            "round trips a remote lookup at most", trips / lookups, 2, at_most=True, detail=f"{trips} for {lookups}"
        )
    report.show(as_json=options.json)


if __name__ == "__main__":
    main()
