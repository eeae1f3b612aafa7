"""What of a hit lies at another node, and how its bytes are brought from there: to a restore, one more place to read.

The owner's lease hangs on the lease of the lookup: the daemon here holds both for the client. It is renewed with one call and
counted from before the lookup was sent, so it ends here before it ends there. A node that dies, stops or lets the lease lapse
costs its blocks, and no other's: the restore reports the prefix before them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flatcake_client.lease import Lease
from flatcake_client.records import RemoteNode
from flatcake_client.restore import ReadTools
from flatcake_transport.address import Medium
from flatcake_transport.errors import Unavailable
from flatcake_transport.remote import RemoteMemory, RemoteSpan
from flatcake_transport.window import Readable


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """Another node's arena, to be read like a file."""

    memory: RemoteMemory

    def span(self, offset: int, size_bytes: int) -> RemoteSpan:
        return RemoteSpan(self.memory, offset, size_bytes)


class PeerArena:
    """The blocks of a hit in another node's memory (`restore.RemoteSource`)."""

    medium = Medium.MEMORY

    def __init__(
        self, node: RemoteNode, lease: Lease, tools: ReadTools, corrupt: Callable[[Sequence[int]], None]
    ) -> None:
        self.node_id = node.node_id
        self.lease = lease
        self.verify = node.verify
        self.tools = tools
        self.report_corrupt = corrupt
        self._memory = node.arena

    def files(self, timeout_s: float) -> Mapping[int, Readable]:  # noqa: ARG002 - nothing to wait for
        """The arena, as file 0. Raises: Unavailable: the node serves none."""
        if self._memory is None:
            raise Unavailable(f"node {self.node_id} serves no memory")
        return {0: PeerMemory(self._memory)}
