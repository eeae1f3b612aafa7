"""What a directory costs: memory of a real redis-server per million blocks, and the rates of telling and probing.

Sessions of --session-blocks blocks, as a node's publisher tells them; then probes of one agent request (3,500 blocks of which
none is local). Last, what a cluster of a thousand such nodes would ask of one server, on paper from these figures.
Needs redis-server or valkey-server. Run: python bench/directory.py [--blocks 1000000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from flatcake_server.cluster.anchors import anchors_within, probes
from flatcake_server.cluster.members import BEATS_A_TTL, Member
from flatcake_server.cluster.publisher import REFRESHES_A_TTL, Publisher
from flatcake_server.cluster.redis_directory import RedisDirectory
from flatcake_server.config import NodeConfig

REQUEST_BLOCKS = 3500
ROUNDS = 50
NODES = 1000
BLOCKS_A_NODE = 5_000_000


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def used_bytes(directory: RedisDirectory) -> int:
    client = await directory._connected()  # noqa: SLF001
    return int((await client.info("memory"))["used_memory"])


async def bytes_of(directory: RedisDirectory, keys: list[bytes]) -> float:
    """Of one anchor, by the server's own account."""
    client = await directory._connected()  # noqa: SLF001
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.memory_usage(directory._anchor(key))  # noqa: SLF001
    return float(np.mean(await pipeline.execute()))


async def measure(url: str, blocks: int, session_blocks: int) -> dict[str, float]:
    defaults = {name: NodeConfig.model_fields[name].default for name in ("anchor_ttl", "node_ttl")}
    directory = RedisDirectory(url, "bench", timeout_s=10, anchor_ttl_s=float(defaults["anchor_ttl"]))
    me = Member(1, secrets.token_bytes(16), "127.0.0.1:1")
    within = anchors_within(0, session_blocks)
    anchors = len(within) * (blocks // session_blocks)
    rng = np.random.default_rng(1)
    publisher = Publisher(3600, rate_max=1e9)
    keys = [row.tobytes() for row in rng.integers(0, 256, (anchors, 16), np.uint8)]
    publisher.add(keys)
    before = await used_bytes(directory)
    start_s = time.perf_counter()
    while (batch := publisher.take(time.monotonic())) is not None:
        await directory.tell(me, batch)
        publisher.arrived(time.monotonic())
    tell_s = time.perf_counter() - start_s
    memory = await used_bytes(directory) - before
    some = keys[: min(1000, anchors)]
    alone = await bytes_of(directory, some)
    publisher = Publisher(3600, rate_max=1e9)
    publisher.add(some)
    while (batch := publisher.take(time.monotonic())) is not None:
        await directory.tell(Member(2, secrets.token_bytes(16), "127.0.0.1:1"), batch)
        publisher.arrived(time.monotonic())
    together = await bytes_of(directory, some)
    asked = [keys[i % anchors] for i in range(len(probes(0, REQUEST_BLOCKS)))]
    times_ms = []
    for _ in range(ROUNDS):
        start_s = time.perf_counter()
        await directory.probe(asked)
        times_ms.append((time.perf_counter() - start_s) * 1e3)
    await directory.close()
    millions = blocks / 1e6
    refreshes = anchors / blocks * BLOCKS_A_NODE / (float(defaults["anchor_ttl"]) / REFRESHES_A_TTL)
    return {
        "anchors_per_million_blocks": anchors / millions,
        "directory_bytes_per_million_blocks": memory / millions,
        "bytes_an_anchor": memory / anchors,
        "bytes_a_further_holder": together - alone,
        "told_per_s": anchors / tell_s,
        "probes_a_request": len(asked),
        "probe_ms_p50": float(np.median(times_ms)),
        "paper_nodes": NODES,
        "paper_blocks_a_node": BLOCKS_A_NODE,
        "paper_directory_bytes": memory / millions * BLOCKS_A_NODE / 1e6 * NODES,
        "paper_refreshes_per_s": refreshes * NODES,
        "paper_beats_per_s": NODES * BEATS_A_TTL / float(defaults["node_ttl"]),
        "paper_lists_bytes_per_s": NODES * NODES * len(me.encode()) / float(defaults["node_ttl"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--session-blocks", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    server = shutil.which("redis-server") or shutil.which("valkey-server")
    if server is None:
        Console().print("no redis-server on this machine: nothing measured")
        return
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        with (Path(folder) / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
            try:
                while not re.search(rb"[Rr]eady to accept", (Path(folder) / "log").read_bytes()):
                    time.sleep(0.05)
                found = asyncio.run(measure(f"redis://127.0.0.1:{port}", options.blocks, options.session_blocks))
            finally:
                process.kill()
    if options.json:
        print(json.dumps(found, indent=2))
        return
    table = Table(title=f"directory, {options.blocks:,} blocks in sessions of {options.session_blocks:,}")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in found.items():
        table.add_row(name.replace("_", " "), f"{value:,.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
