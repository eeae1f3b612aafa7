"""Several real daemons that are one cluster, on loopback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import numpy as np
from daemon import Daemon
from wire import SPEC, Wire

from flatcake_transport.address import Address

KEYS_SEED = 7


def node(root: Path, number: int, **options: Any) -> Daemon:
    """One node of a cluster, its directory made; not started."""
    folder = root / f"node{number}"
    folder.mkdir(parents=True, exist_ok=True)
    told = {"node_id": number, "grpc_listen": "127.0.0.1:0", "node_ttl": "4s", "peer_timeout": "2s"}
    return Daemon(folder, **told | options)


def keys_of(count: int, seed: int = KEYS_SEED) -> bytes:
    """A chain, as far as daemons can tell."""
    return np.random.default_rng(seed).bytes(16 * count)


def store(daemon: Daemon, keys: bytes, session: str = "s") -> None:
    """What is missing of a chain, as an engine would, but for the bytes: nobody reads them here."""
    with Wire(daemon.endpoint) as wire, wire.handover():
        turn = wire.begin(keys, session=session)
        if turn.turn_id:
            assert wire.commit(turn).visible


def remote(wire: Wire, keys: bytes, **fields: Any) -> tuple[list[tuple[int, int]], Any]:
    """(node, blocks) of a lookup's runs, in order, those of one node added up; and the reply."""
    reply = wire.lookup(keys, remote=True, **fields)
    found: list[tuple[int, int]] = []
    for run in reply.runs:
        number = Address(run.segment).node
        if found and found[-1][0] == number:
            found[-1] = number, found[-1][1] + run.blocks
        else:
            found.append((number, run.blocks))
    return found, reply


def cluster_of(daemon: Daemon) -> dict[str, Any]:
    return dict(daemon.status()["cluster"])


def published(daemon: Daemon) -> None:
    """Wait until the directory has been told everything."""
    daemon.until(lambda status: status["cluster"]["anchors_pending"] == 0 and status["cluster"]["anchors_published"])


def knows(daemon: Daemon, nodes: int, links: int | None = None) -> None:
    """Wait until it knows so many nodes, itself included, and is linked to the others."""
    links = nodes - 1 if links is None else links
    daemon.until(lambda status: status["cluster"]["nodes"] == nodes and status["cluster"]["links"] >= links)


__all__ = ["SPEC", "Wire", "cluster_of", "grpc", "keys_of", "knows", "node", "published", "remote", "store"]
