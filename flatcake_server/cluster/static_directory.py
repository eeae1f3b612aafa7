"""A directory that is nowhere: a list of peers, each asked directly. For a handful of nodes.

A beat greets all of them at once; those that answer are the members, and one that answers with our own number has it. A probe
asks all members at once which anchors they hold, in the one round trip that another directory would take; so
nothing is published, and the answer is never stale. What it costs grows with the number of nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from flatcake_server.cluster.directory import TAG_BYTES, Holder
from flatcake_server.cluster.members import Beat, Member, Membership, Verdict
from flatcake_server.cluster.peers import Peers
from flatcake_server.cluster.publisher import Batch
from flatcake_transport.errors import FlatCakeError

ANSWER_SHARE: Final = 0.9  # of the time: it is seen that the peer was silent


class StaticDirectory:
    """Belongs to the event loop."""

    def __init__(self, addresses: Sequence[str], peers: Peers, membership: Membership) -> None:
        self._addresses = list(dict.fromkeys(addresses))
        self._peers = peers
        self._membership = membership
        self._joined = False

    async def beat(self, me: Member, ttl_s: float, takeover: bytes, *, members: bool) -> Beat:  # noqa: ARG002
        found = await asyncio.gather(*(self._who(address) for address in self._addresses))
        others = tuple(member for member in found if member is not None and member.incarnation != me.incarnation)
        for member in others:
            if member.node_id == me.node_id and member.incarnation != takeover:
                return Beat(Verdict.TAKEN, member, others)
        verdict = Verdict.RENEWED if self._joined else Verdict.FRESH
        self._joined = True
        return Beat(verdict, None, others)

    async def _who(self, address: str) -> Member | None:
        try:
            reply = await self._peers.greet(address)
        except FlatCakeError:
            return None
        return Member(reply.node_id, reply.incarnation, address, reply.version, reply.cluster_fingerprint)

    async def leave(self, me: Member) -> None:
        """Nobody keeps a record."""

    async def tell(self, me: Member, batch: Batch) -> None:
        """Nobody wants to know."""

    async def probe(self, keys: Sequence[bytes], *, peer_time_s: float) -> list[list[Holder]]:
        members = [member for member in self._membership.known.values() if self._peers.usable(member)]
        answers = await asyncio.gather(*(self._held(member, keys, peer_time_s) for member in members))
        holders: list[list[Holder]] = [[] for _ in keys]
        for member, held in zip(members, answers, strict=True):
            for at, has in enumerate(held[: len(keys)]):
                if has:
                    holders[at].append(Holder(member.node_id, member.incarnation[:TAG_BYTES]))
        return holders

    async def _held(self, member: Member, keys: Sequence[bytes], time_s: float) -> bytes:
        """One byte a key. A slow one holds nothing, and is left alone for a moment: the others' answers are not lost with its."""
        try:
            async with asyncio.timeout(time_s):  # being linked included
                return await self._peers.probe(member, keys, ANSWER_SHARE * time_s)
        except (FlatCakeError, TimeoutError):
            return b""

    async def sweep(self, buckets: range, dead: Callable[[Iterable[Holder]], set[Holder]]) -> int:  # noqa: ARG002
        """What is asked of a node itself is never stale."""
        return 0

    async def close(self) -> None:
        """Its links are those of `peers`."""
