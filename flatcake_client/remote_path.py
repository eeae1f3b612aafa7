"""Another node's memory in a restore: read as a file is, where the file is that node's arena.

    arena there --one-sided get--> window half --check--> slots        one half is scattered while the other fills

So everything that `file_path.py` keeps to holds here: long reads in layer order, nothing in the engine's memory but by our own
copy from a window, a half trusted only when the lease was alive after its gets had landed, checksums compared where the
node says so. A window goes back to its pool only when no get touches it any more, also when the peer is dead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from flatcake_client.lease import Lease
from flatcake_client.restore import ReadTools
from flatcake_transport.address import Medium
from flatcake_transport.remote import RemoteMemory
from flatcake_transport.window import Readable


class RemoteArena:
    """One node's memory, for one hit: a `restore.RemoteSource`.

    Args:
        node_id: whose runs come from there.
        memory: its arena, as the node's daemon gave it out with the lease.
        lease: at that node; it hangs on the hit's.
        tools: of `Tools.remote`.
        verify: compare with the checksums in the footers.
        report: tells that node of segments that differ from them.
    """

    medium = Medium.MEMORY

    def __init__(
        self,
        node_id: int,
        memory: RemoteMemory,
        lease: Lease,
        tools: ReadTools,
        *,
        verify: bool,
        report: Callable[[Sequence[int]], None],
    ) -> None:
        self.node_id = node_id
        self.lease = lease
        self.tools = tools
        self.verify = verify
        self._memory = memory
        self._report = report

    def files(self, timeout_s: float) -> Mapping[int, Readable]:
        """The arena under the file id that memory runs have; nothing to wait for."""
        del timeout_s
        return {0: self._memory}

    def report_corrupt(self, segments: Sequence[int]) -> None:
        self._report(segments)
