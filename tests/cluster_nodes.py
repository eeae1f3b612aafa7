"""Nodes that meet, in this process: a static directory unless told otherwise."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import Wire, remote
from ports import free_port
from waiting import pause

from flatcake_server.app import Node
from flatcake_server.cluster.members import Member
from flatcake_server.config import NodeConfig


@dataclass
class Running:
    node: Node
    address: str

    @property
    def endpoint(self) -> str:
        return f"unix://{self.node.config.socket}"

    @property
    def cluster(self) -> Any:
        return self.node.cluster

    def member(self) -> Member:
        return self.cluster.membership.me


def config_of(
    root: Path, number: int, port: int, peers: list[int], host: str = "127.0.0.1", **options: Any
) -> NodeConfig:
    folder = root / str(number)
    folder.mkdir(exist_ok=True)
    told: dict[str, Any] = {
        "socket": folder / "s",
        "memory_bytes": 1 << 20,
        "huge_pages": "off",
        "grpc_listen": f"{host}:{port}",
        "http_listen": "off",
        "directory": "static",
        "peers": tuple(f"{host}:{other}" for other in peers),
        "node_ttl": 3.0,
        "peer_timeout": 10.0,  # of a busy machine: an answer that is late would be a miss
        "node_id": number,
        "drain_timeout": 0.1,
    }
    return NodeConfig(**told | options)


@contextlib.asynccontextmanager
async def nodes(root: Path, count: int = 2, *, disks: bool = False, **options: Any) -> AsyncIterator[list[Running]]:
    """`disks`: each has an SSD path of its own."""
    ports = [free_port() for _ in range(count)]
    running: list[Running] = []
    try:
        for number, port in enumerate(ports, 1):
            if disks:
                (root / f"ssd{number}").mkdir()
                options |= {"ssd_paths": (root / f"ssd{number}",), "ssd_bytes": 64 << 20}
            node = Node(config_of(root, number, port, ports, **options))
            await node.start()
            running.append(Running(node, f"{options.get('host', '127.0.0.1')}:{port}"))
        for each in running:
            await meet(each, count)
        yield running
    finally:
        for each in reversed(running):
            await each.node.stop()


async def soon(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.to_thread(pause, 0.01)


async def meet(running: Running, count: int) -> None:
    cluster = running.cluster
    await soon(lambda: cluster.stats().nodes == count and len(cluster.peers) == count - 1)


async def found(running: Running, keys: bytes, **fields: Any) -> list[tuple[int, int]]:
    def ask() -> list[tuple[int, int]]:
        with Wire(running.endpoint) as wire:
            return remote(wire, keys, **fields)[0]

    return await asyncio.to_thread(ask)


def run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work, 60))
