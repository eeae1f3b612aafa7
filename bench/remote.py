"""Another node's memory and SSD, restored through the whole path: two daemons and a real redis-server on loopback, a client of each.

`restore` is lookup, two round trips, one-sided gets, checksums as the daemons ask for them and the scatter into slots; `get` is
`UcxMover` on as many bytes from a process that serves them, in pieces of 4 MiB into one buffer; `socket` is `sendall` and `recv_into`.
SSD is compared with a restore of the same session by a client at its owner. They take turns; bests are compared. What a remote
lookup takes by itself: bench/remote_lookup.py.
Needs redis-server or valkey-server, and UCX. Run: python bench/remote.py [--mib 256]
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from _session import BLOCK_BYTES, Pages, open_space, restore, same, session_keys, write_session
from _support import MIB, Compared, Node, Report, arguments, say, take_turns, timed_s
from remote_lookup import redis_url
from ucx import PlainSocket, get_s

import flatcake_client as fc
from flatcake_transport.movers.ucx import UcxMover
from flatcake_transport.movers.ucx_process import UcxProcess
from flatcake_transport.window import aligned_buffer

PIECE = 4 * MIB


def raw_get(stack: contextlib.ExitStack, size: int) -> partial[float]:
    """A get of as many bytes, from memory that was touched into a window that was."""
    fd = os.memfd_create("bench-remote")
    stack.callback(os.close, fd)
    os.ftruncate(fd, size)
    np.frombuffer(mmap.mmap(fd, size), np.uint8)[:] = 7
    process, mover = UcxProcess([(fd, size)]), UcxMover()
    stack.callback(process.close)
    stack.callback(mover.close)
    return partial(get_s, mover, process.memories()[0], mover.window(size), PIECE, warm_up=0)


@contextlib.contextmanager
def two_nodes(memory_bytes: int, **options: object) -> Iterator[tuple[Node, Node]]:
    """Nodes 1 and 2 of one cluster, linked, which serve their memory over loopback."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        url = stack.enter_context(redis_url(Path(name)))
        nodes = []
        for number in (1, 2):
            (folder := Path(name) / str(number)).mkdir()
            told = {
                "node_id": number,
                "directory": "redis",
                "redis_url": url,
                "grpc_listen": "127.0.0.1:0",
                "node_ttl": "2s",
            }
            told |= {"ucx_listen": "127.0.0.1:0", "memory_bytes": memory_bytes, "ssd_bytes": "1GiB"}
            nodes.append(stack.enter_context(Node(folder, **told | options)))
        yield nodes[0], nodes[1]


def settled(nodes: tuple[Node, Node]) -> None:
    """Return when the first knows what the second holds."""
    while nodes[0].status()["cluster"]["links"] < 1 or nodes[1].status()["cluster"]["anchors_pending"]:
        time.sleep(0.05)


def main() -> None:
    args = arguments(__doc__, mib=(256, "restored at once"), rounds=(5, "turns of each"))
    blocks = args.mib * MIB // BLOCK_BYTES
    report = Report("a restore of what another node holds, loopback")
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(two_nodes(2 * blocks * BLOCK_BYTES))
        here, there = (stack.enter_context(fc.connect(node.endpoint, timeout_s=10)) for node in nodes)
        near, far = open_space(here), open_space(there)
        say(f"storing {blocks} blocks at node 2")
        written, pages = Pages(blocks), Pages(blocks, seed=1)
        written.fill(1)
        keys, on_ssd = (session_keys(far, seed, blocks) for seed in (1, 2))
        write_session(far, keys, "memory", written, [blocks], share_counts=[2] * blocks)
        write_session(far, on_ssd, "ssd", written, [blocks])
        settled(nodes)
        target = aligned_buffer(blocks * BLOCK_BYTES)
        get, plain = raw_get(stack, len(target)), PlainSocket(len(target))
        for chain in (keys, on_ssd):
            pages.clear()
            restore(near, chain, pages)
            assert same(written, pages), "other bytes came back"
        bring = lambda space, chain, _: timed_s(partial(restore, space, chain, pages))  # noqa: E731
        ours, gets, sockets, remote_ssd, local_ssd = take_turns(
            args.rounds,
            partial(bring, near, keys),
            lambda _: get(),
            partial(plain.receive_s, target),
            partial(bring, near, on_ssd),
            partial(bring, far, on_ssd),
        )
        for name, limit_s, ours_s in (
            (f"memory: restore / UCX get, {args.mib} MiB", gets, ours),
            ("memory: restore / plain socket", sockets, ours),
            ("SSD through UCX: restore / by the owner's own client", local_ssd, remote_ssd),
        ):
            compared = Compared.of(pages.size_bytes, limit_s, ours_s)
            report.add(name, compared.ratio, detail=compared)
        plain.close()
    report.show(as_json=args.json)


if __name__ == "__main__":
    main()
