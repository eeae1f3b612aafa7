"""What a directory costs: memory of a real redis-server, its time a command, and what a thousand nodes would ask of it.

Two fillings: one node of --blocks blocks in sessions of --session-blocks, told as its publisher does; and a thousand nodes of 5 million
blocks, scaled down in anchors and in buckets alike, so that a bucket is as full as theirs would be. In the second,
ten nodes die and are swept, and lookups are probed: 64 anchors of one agent request (3,500 blocks of which none is local), against
as many PINGs through the same client. The paper figures are those counts and the server's own time of each command.
Needs redis-server or valkey-server. Run: python bench/directory.py
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
from _support import Report, arguments, say
from remote_lookup import redis_url

from flatcake_server.cluster.anchors import anchors_within, probes
from flatcake_server.cluster.cluster import LIST_TTLS
from flatcake_server.cluster.directory import BUCKETS, Holder
from flatcake_server.cluster.members import BEATS_A_TTL, Member
from flatcake_server.cluster.publisher import AUDIT_KEYS, AUDIT_S, BATCH_MAX, Batch, Publisher
from flatcake_server.cluster.redis_directory import RedisDirectory
from flatcake_server.config import NodeConfig

REQUEST_BLOCKS = 3500
ROUNDS = 50
NODES = 1000
DEAD = 10
BLOCKS_A_NODE = 5_000_000
NODE_TTL_S, SWEEP_S = (float(NodeConfig.model_fields[name].default) for name in ("node_ttl", "anchor_ttl"))

Keys = list[bytes]


class Measured:
    """A directory and the server's own account of it."""

    def __init__(self, url: str, name: str, buckets: int = BUCKETS) -> None:
        self.directory = RedisDirectory(url, name, timeout_s=10, buckets=buckets)

    async def client(self) -> Any:
        return await self.directory._connected()  # noqa: SLF001

    async def used_bytes(self) -> int:
        return int((await (await self.client()).info("memory"))["used_memory"])

    async def server_us(self, work: Awaitable[Any]) -> dict[str, tuple[int, float]]:
        """How often each command was called meanwhile, and microseconds a call."""
        client = await self.client()
        await client.config_resetstat()
        await work
        found = await client.info("commandstats")
        return {name[8:]: (int(each["calls"]), float(each["usec_per_call"])) for name, each in found.items()}

    async def ping(self, count: int) -> None:
        pipeline = (await self.client()).pipeline(transaction=False)
        for _ in range(count):
            pipeline.ping()
        await pipeline.execute()


def random_keys(rng: np.random.Generator, count: int) -> Keys:
    return [row.tobytes() for row in rng.integers(0, 256, (count, 16), np.uint8)]


def member(node: int) -> Member:
    return Member(node, secrets.token_bytes(16), f"10.1.{node >> 8}.{node & 255}:7450", "1.0.0", bytes(16))


async def median_ms(work: Callable[[], Awaitable[object]]) -> float:
    times = []
    for _ in range(ROUNDS):
        start_s = time.perf_counter()
        await work()
        times.append((time.perf_counter() - start_s) * 1e3)
    return float(np.median(times))


async def one_node(url: str, report: Report, blocks: int, anchors: int) -> None:
    measured = Measured(url, "one")
    publisher = Publisher(rate_max=1e9)
    publisher.add(random_keys(np.random.default_rng(1), anchors))
    before, start_s = await measured.used_bytes(), time.perf_counter()
    while (batch := publisher.take(time.monotonic())) is not None:
        await measured.directory.tell(member(1), batch)
        publisher.arrived()
    tell_s = time.perf_counter() - start_s
    used = await measured.used_bytes() - before
    report.add("one node: MB a million blocks", used / blocks, detail=f"{used / anchors:.0f} B an anchor")
    report.add("one node: anchors told a second", anchors / tell_s, detail=f"{anchors:,} in batches of {BATCH_MAX}")
    await (await measured.client()).flushall()
    await measured.directory.close()


async def thousand(url: str, report: Report, entries: int, share: float) -> None:
    """`share`: anchors a block."""
    scale = BLOCKS_A_NODE * share * NODES / entries
    measured = Measured(url, "many", buckets := int(BUCKETS / scale))
    directory, members = measured.directory, [member(node) for node in range(NODES)]
    rng = np.random.default_rng(2)
    told = []
    say(f"telling {entries:,} anchors of {NODES} nodes into {buckets:,} buckets")

    async def fill() -> None:
        for each in members:
            told.append(random_keys(rng, entries // NODES))
            await directory.tell(each, Batch(tuple(told[-1]), ()))

    async def beats(*, listing: bool) -> None:
        for each in members:
            await directory.beat(each, 600.0, b"", members=listing)  # none lapses meanwhile

    await beats(listing=False)
    beat_us, list_us = [(await measured.server_us(beats(listing=each)))["eval"][1] for each in (False, True)]
    before = await measured.used_bytes()
    put_us = (await measured.server_us(fill()))["zadd"][1]
    used = await measured.used_bytes() - before
    full_bytes = used / entries * BLOCKS_A_NODE * share * NODES
    report.add("1,000 nodes: B an anchor", used / entries, detail=f"{entries / buckets:.0f} in each bucket")
    report.add("1,000 nodes of 5 M blocks, on paper: GB", full_bytes / 1e9)
    asked = [told[i % NODES][0] for i in range(len(probes(0, REQUEST_BLOCKS)))]
    probe_us = (await measured.server_us(directory.probe(asked)))["zrangebylex"][1]
    probe_ms = await median_ms(lambda: directory.probe(asked))
    ping_ms = await median_ms(lambda: measured.ping(len(asked)))
    report.add(
        "a probe, p50 ms", probe_ms, detail=f"{len(asked)} anchors; {len(asked) * probe_us / 1e3:.2f} ms of the server"
    )
    report.add("PINGs as many / a probe", ping_ms / probe_ms, detail=f"{ping_ms:.2f} ms")
    dead = {Holder(each.node_id, each.incarnation[:4]) for each in members[:DEAD]}

    async def sweep() -> None:
        gone = 0
        for first in range(0, buckets, 64):
            found = await directory.sweep(range(first, min(first + 64, buckets)), lambda holders: dead & set(holders))
            gone += found
        assert gone == DEAD * (entries // NODES), "other entries went than those of the dead"

    start_s = time.perf_counter()
    swept = await measured.server_us(sweep())
    sweep_s = time.perf_counter() - start_s
    report.add(
        "a bucket swept, ms of its node", sweep_s / buckets * 1e3, detail=f"{swept['zrange'][1]:.0f} us of the server"
    )
    await directory.close()
    rates = {
        "beats": (NODES * BEATS_A_TTL / NODE_TTL_S, beat_us),
        "lists of members": (NODES / NODE_TTL_S / LIST_TTLS, list_us),
        "looks for anchors": (NODES * AUDIT_KEYS / AUDIT_S, probe_us),
        "buckets swept": (BUCKETS / SWEEP_S, swept["zrange"][1]),
    }
    on_paper(report, rates, put_us, share)


def on_paper(report: Report, rates: dict[str, tuple[float, float]], put_us: float, share: float) -> None:
    """Commands a second that a quiet cluster of a thousand asks for, and the part of one server's time that they take."""
    report.add("on paper: commands a second at rest", sum(rate for rate, _ in rates.values()))
    for name, (rate, us) in rates.items():
        report.add(f"  {name}", rate, detail=f"{us:.0f} us of the server each")
    busy = sum(rate * us for rate, us in rates.values()) / 1e6
    report.add("on paper: of one server's time", busy, detail="its own account of each command; not its sockets")
    told = BLOCKS_A_NODE * share * NODES
    report.add(
        "on paper: all told anew, s", told / 1e6 * put_us, detail=f"{told / 1e6:,.0f} M anchors, the server's time"
    )
    lists = NODES * NODES * len(member(1).encode())
    report.add(
        "on paper: a node comes or goes, MB of lists", lists / 1e6, detail=f"and once in {LIST_TTLS * NODE_TTL_S:.0f} s"
    )


async def measure(url: str, report: Report, blocks: int, session_blocks: int, entries: int) -> None:
    within = len(anchors_within(0, session_blocks))
    await one_node(url, report, blocks, within * (blocks // session_blocks))
    await thousand(url, report, entries, within / session_blocks)


def main() -> None:
    options = arguments(
        __doc__, blocks=(1_000_000, "of the one node"), session_blocks=(1000, "of each session"),
        entries=(300_000, "anchors of the thousand nodes together"),
    )  # fmt: skip
    report = Report("a directory in Redis")
    with tempfile.TemporaryDirectory() as folder, redis_url(Path(folder)) as url:
        asyncio.run(measure(url, report, options.blocks, options.session_blocks, options.entries))
    report.show(as_json=options.json)


if __name__ == "__main__":
    main()
