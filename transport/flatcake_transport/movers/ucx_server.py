"""The process that serves memory to peers. Run by `ucx_process.py`; see there why it runs alone.

A peer that was told a `RemoteMemory` reads it without another word. Exposed memory stays mapped until the end: over TCP it is
UCX in this process that reads it for the peer, and a late get of memory that is gone would end the process.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Mapping

from flatcake_transport.errors import Unavailable
from flatcake_transport.movers.ucx_child import map_shared
from flatcake_transport.movers.ucx_lib import load_ucx
from flatcake_transport.movers.ucx_process import STARTED
from flatcake_transport.movers.ucx_worker import READABLE, WRITABLE, UcxWorker
from flatcake_transport.remote import RemoteMemory


def expose(worker: UcxWorker, address: int, size_bytes: int, *, writable: bool = False) -> RemoteMemory:
    """Register memory for peers to read, until the worker is closed; it stays mapped for so long.

    Args:
        writable: peers may also put. Where a card checks that, it refuses puts otherwise; over TCP nobody does.

    Raises: Unavailable: it cannot be registered (locked memory, most often).
    """
    mapped = worker.map(address, size_bytes, protection=WRITABLE if writable else READABLE)
    return RemoteMemory(worker.server().encode(), mapped.rkey, address, size_bytes)


def serve(worker: UcxWorker, descriptor: int) -> bytes:
    """Answer peers until something comes from `descriptor`. Returns: what came; nothing: its other end was closed."""
    worker.watch(descriptor)
    spoken = select.poll()
    spoken.register(descriptor, select.POLLIN)
    while not spoken.poll(0):
        worker.turn()
        worker.sleep()
    return os.read(descriptor, 4096)


def _refuse_deaf(worker: UcxWorker, options: Mapping[str, str]) -> None:
    """Raises: Unavailable: UCX goes over none of the devices that we chose, and would say nothing of it."""
    chosen = set(filter(None, options.get("NET_DEVICES", "").split(",")))
    if not chosen or {"UCX_NET_DEVICES", "UCX_TLS"} & os.environ.keys():  # then it is the user's choice
        return
    if chosen.isdisjoint(each.partition("/")[2] for each in worker.transports()):
        raise Unavailable(f"UCX goes over none of {', '.join(sorted(chosen))}: flatcake doctor says over what it does")


def main(order: str) -> None:
    """`order`: regions, options and peer timeout, as the parent wrote them. It ends with its standard input."""
    regions, options, peer_timeout_s = json.loads(order)
    # Of every device: not of those that containers make, which have the same addresses on all machines.
    chosen = "NET_DEVICES" in options
    worker = UcxWorker(load_ucx(), options=options, peer_timeout_s=peer_timeout_s, bridges=chosen)
    _refuse_deaf(worker, options)
    sealed = []
    for fd, size_bytes in regions:
        try:
            memory = expose(worker, map_shared(fd, size_bytes, writable=False, populate=False), size_bytes)
        except Unavailable:  # a card that registers no read-only memory
            memory = expose(worker, map_shared(fd, size_bytes, populate=False), size_bytes)
        sealed.append(memory.sealed().hex())
    print(STARTED.decode() + " ".join(sealed), flush=True)  # noqa: T201 - the line that the parent waits for
    serve(worker, sys.stdin.fileno())
    worker.close()


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except Unavailable as error:  # the parent passes it on to an operator
        sys.exit(str(error))
