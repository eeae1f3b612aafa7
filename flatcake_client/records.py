"""What the daemon tells its clients: plain values, made from the wire by `rpc.py`. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from flatcake_transport.address import Address
from flatcake_transport.remote import RemoteMemory

COUNT_LIMIT: Final = 1 << 32  # of what the wire takes


@dataclass(frozen=True, slots=True)
class Welcome:
    """The daemon's Hello. A new incarnation is a new daemon: nothing held of the old one is known to it."""

    version: str
    incarnation: bytes
    node_id: int
    client_id: int
    token: bytes
    handover_path: str
    boot_id: bytes
    arena_bytes: int
    lease_ttl_s: float
    verify: str  # off, remote or all
    memory_checksums: bool = False  # peers verify what they read of this node's memory
    peers: bool = False  # lookups may go on at other nodes
    peer_timeout_s: float = 0.0  # a node that is silent for so long is gone


class Run(NamedTuple):
    """Consecutive stored blocks of one segment: `blocks` from `first_block` within the segment. `file_id` 0: in memory.

    A tuple: a lookup makes hundreds of them, and one costs a third of a frozen dataclass.
    """

    segment: Address
    segment_blocks: int
    first_block: int
    blocks: int
    segment_bytes: int
    file_id: int
    file_offset: int
    generation: int = 0  # of the segment: another one may come to stand there


@dataclass(frozen=True, slots=True)
class RemoteNode:
    """Another node that runs of a lookup lie at. Its lease is the owner's and hangs on the lookup's; 0: nothing is pinned.

    `arena` None: its memory cannot be read from here. `files`: it reads ranges of its session files for us; those
    `exported` can be read over NVMe-oF. `verify`: compare what is read with the checksums in the footers.
    """

    node_id: int
    lease_id: int
    lease_ttl_s: float
    arena: RemoteMemory | None
    verify: bool
    files: bool = False
    exported: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Found:
    """The longest stored prefix of a chain, in chain order. `lease_id` 0: nothing is pinned.

    Runs of other nodes come last; `nodes` are those nodes. `copy_blocks`: so much of the chain is worth a copy at this node.
    """

    runs: tuple[Run, ...]
    lease_id: int
    nodes: tuple[RemoteNode, ...] = ()
    copy_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """Space reserved for one segment of a turn: blocks `[first_block, first_block + blocks)` of the chain.

    `reason` says why the blocks go to the medium of `segment`. `file_id` 0: in memory.
    """

    segment: Address
    first_block: int
    blocks: int
    segment_bytes: int
    file_id: int
    file_offset: int
    reason: str

    @property
    def medium(self) -> str:
        return self.segment.medium.name.lower()


@dataclass(frozen=True, slots=True)
class Grant:
    """Leave to write a turn, in parts by position in the chain. `turn_id` 0: everything is stored already."""

    turn_id: int
    parts: tuple[Part, ...]
    session: str


@dataclass(frozen=True, slots=True)
class TurnHints:
    """What the engine knows before the turn is written. None: it does not."""

    context_tokens: int | None = None
    previous_reply_tokens: int | None = None
    share_counts: tuple[int, ...] | None = None
    turn: int | None = None
    copy: bool = False  # of what other nodes hold

    def __post_init__(self) -> None:
        """Raises: ValueError: one is no count."""
        for name in ("context_tokens", "previous_reply_tokens", "turn"):
            value = getattr(self, name)
            if value is not None and not (hasattr(value, "__index__") and 0 <= value < COUNT_LIMIT):
                raise ValueError(f"{name} is {value!r}: expected a whole number from 0 to {COUNT_LIMIT - 1}, or None")
        if self.share_counts and not 0 <= min(self.share_counts) <= max(self.share_counts) < COUNT_LIMIT:
            raise ValueError(
                f"share counts are 0 to {COUNT_LIMIT - 1}, not {min(self.share_counts)} to {max(self.share_counts)}"
            )
