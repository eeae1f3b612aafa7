"""A node's membership: the lease on its id, and whom it knows. Pure: the clock is an argument.

A node id is leased from the directory for `ttl_s`, by the directory's clock, under an incarnation that each start of a daemon
draws anew. The node itself counts from before it asked, on its own monotonic clock, so it always believes in its
lease shorter than the directory does, however wrong anybody's wall clock is.

    OUTSIDE    never joined: the directory did not answer yet
    JOINED     the id is ours until `ttl_s` after the last beat that was answered
    CUT_OFF    it was ours; the directory has not answered for a ttl: peers may think us dead, somebody may have the id
    REFUSED    somebody else has the id: nothing is published, no peer is served, local service goes on
    LEFT       given back

A beat that finds no record of ours, though we had joined, says that the directory lost its data or that we had
expired: everything has to be published again. A newcomer that finds the id taken asks the holder's address whether that
incarnation lives; it takes the id over from one that is dead, and gives way to one that answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

INCARNATION_BYTES: Final = 16
BEATS_A_TTL: Final = 3  # two may be lost
RETRY_S_MIN: Final = 0.2
RETRY_S_MAX: Final = 5.0


@dataclass(frozen=True, slots=True)
class Member:
    """What every node may know of one. Where its bytes are is told by itself, to peers it has authenticated."""

    node_id: int
    incarnation: bytes
    address: str  # of gRPC, host:port
    version: str = ""
    fingerprint: bytes = b""  # of the cluster configuration

    def encode(self) -> bytes:
        words = {"node": self.node_id, "address": self.address, "version": self.version}
        return self.incarnation + json.dumps(words | {"fingerprint": self.fingerprint.hex()}).encode()


def decode_member(data: bytes) -> Member | None:
    """None: written by something else than a node of this format."""
    try:
        words = json.loads(data[INCARNATION_BYTES:])
        return Member(
            int(words["node"]),
            data[:INCARNATION_BYTES],
            str(words["address"]),
            str(words["version"]),
            bytes.fromhex(words["fingerprint"]),
        )
    except (ValueError, KeyError, TypeError):
        return None


class State(Enum):
    OUTSIDE = "outside"
    JOINED = "joined"
    CUT_OFF = "cut off"
    REFUSED = "refused"
    LEFT = "left"


class Verdict(Enum):
    """What the directory says to a beat."""

    RENEWED = "renewed"
    FRESH = "fresh"  # granted; there was no record of this incarnation
    TAKEN = "taken"


@dataclass(frozen=True, slots=True)
class Beat:
    """The directory's answer. `members` None: as when it was last asked."""

    verdict: Verdict
    holder: Member | None = None  # with TAKEN
    members: tuple[Member, ...] | None = None


@dataclass(slots=True)
class Membership:
    """One node's view. Belongs to the event loop. `now_s` and `asked_s` are of one monotonic clock."""

    me: Member
    ttl_s: float
    known: dict[int, Member] = field(default_factory=dict)  # the others, by id
    holder: Member | None = None  # who has our id, when it is not us
    takeover: bytes = b""  # the incarnation whose death was established: the next beat may replace it
    beats_failed: int = 0
    _expires_s: float = float("-inf")
    _next_s: float = float("-inf")
    _joined: bool = False
    _left: bool = False

    def state(self, now_s: float) -> State:
        if self._left:
            return State.LEFT
        if self.holder is not None:
            return State.REFUSED
        if now_s < self._expires_s:
            return State.JOINED
        return State.CUT_OFF if self._joined else State.OUTSIDE

    def wait_s(self, now_s: float) -> float:
        """How long until the next beat is due."""
        return max(0.0, self._next_s - now_s)

    def answered(self, beat: Beat, asked_s: float) -> bool:
        """Take in an answer to what was asked at `asked_s`. True: all anchors must be published (again)."""
        if self._left:
            return False
        self.beats_failed = 0
        self._next_s = asked_s + self.ttl_s / BEATS_A_TTL
        if beat.members is not None:
            self.know(beat.members)
        if beat.verdict is Verdict.TAKEN:
            self.holder = beat.holder
            self._expires_s = float("-inf")
            return False
        self.holder, self.takeover = None, b""
        self._expires_s = max(self._expires_s, asked_s + self.ttl_s)
        self._joined = True
        return beat.verdict is Verdict.FRESH

    def failed(self, now_s: float, jitter: float) -> None:
        """No answer came. `jitter` in [0, 1): nodes that lost their directory together do not come back together."""
        self.beats_failed += 1
        backoff_s: float = min(RETRY_S_MAX, RETRY_S_MIN * 2.0 ** min(self.beats_failed - 1, 16))
        self._next_s = now_s + backoff_s * (0.5 + jitter / 2)

    def holder_is_dead(self, incarnation: bytes) -> None:
        """The address of who has our id was asked, and that incarnation is not there: the next beat takes over."""
        if self.holder is not None and self.holder.incarnation == incarnation:
            self.takeover = incarnation
            self._next_s = float("-inf")

    def know(self, members: Iterable[Member]) -> None:
        """All members there are; those of another cluster configuration do not count."""
        self.known = {
            member.node_id: member
            for member in members
            if member.node_id != self.me.node_id and member.fingerprint == self.me.fingerprint
        }

    def live(self, node_id: int, tag: bytes) -> Member | None:
        """The member if it is there and its incarnation begins with `tag`."""
        member = self.known.get(node_id)
        return member if member is not None and member.incarnation.startswith(tag) else None

    def leave(self) -> None:
        self._left = True
        self._expires_s = float("-inf")
