"""What a directory does for a node, whichever it is. Its words are hints: the owner of a block decides.

Every verb is one round trip, raises `Unavailable` when there is no answer within the deadline it was made with, and never
retries by itself: who waits for it is a lookup, or a loop that comes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

from flatcake_server.cluster.members import Beat, Member
from flatcake_server.cluster.publisher import Batch

# Entries of many anchors lie together in one bucket: by itself each would take ten times the memory. With a thousand nodes of 5
# million blocks there are 79 in each, in the compact form that Redis keeps up to 128.
BUCKETS: Final = 1 << 22
TAG_BYTES: Final = 4  # of an incarnation: what an entry says of its writer's start. A chance hit costs one round trip


class Holder(NamedTuple):
    """An entry of an anchor: valid while the member of that id has an incarnation that begins with `tag`."""

    node_id: int
    tag: bytes


class Directory(Protocol):
    async def beat(self, me: Member, ttl_s: float, takeover: bytes, *, members: bool) -> Beat:
        """Take or keep the id for `ttl_s`, also from the incarnation `takeover`; with all members if asked, or if changed."""
        ...

    async def leave(self, me: Member) -> None:
        """Give the id back, if it is ours."""
        ...

    async def tell(self, me: Member, batch: Batch) -> None:
        """Publish and withdraw anchors."""
        ...

    async def probe(self, keys: Sequence[bytes], *, peer_time_s: float) -> list[list[Holder]]:
        """Who holds each anchor. `peer_time_s`: a node that is asked for it and takes longer holds nothing."""
        ...

    async def sweep(self, buckets: range, dead: Callable[[Iterable[Holder]], set[Holder]]) -> int:
        """Take the entries of dead writers out of some of the `BUCKETS`. How many there were. This one is two round trips."""
        ...

    async def close(self) -> None: ...
