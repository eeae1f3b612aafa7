"""Session files of another node, as that node serves them: ranges are asked for, read there, and fetched from its memory. Pure.

    stage      the owner reads ranges, one behind the other, into memory that it serves     (bounded; its own disk, its own words)
    get        one-sided, from there
    unstage    that memory is used for others

What was staged stands for `ttl_s`, counted from before the owner was asked: bytes that landed later may be of another range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from flatcake_transport.remote import RemoteMemory

# Staged at once: large enough for a disk, small enough that a few dozen slots are no memory to speak of.
STAGED_BYTES_MAX: Final = 4 << 20
RANGES_MAX: Final = 256  # of one staging


@dataclass(frozen=True, slots=True)
class FileRange:
    """`offset` and `size_bytes` are whole 4 KiB."""

    file_id: int
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StagedRanges:
    """The ranges that were asked for lie one behind the other from `offset` of `memory`."""

    memory: RemoteMemory
    offset: int
    staged_id: int
    ttl_s: float


class RangeServer(Protocol):
    """One node's files, for one lease. Thread-safe. Calls are round trips."""

    @property
    def node_id(self) -> int: ...

    def stage(self, ranges: Sequence[FileRange], timeout_s: float) -> StagedRanges:
        """At most `RANGES_MAX` ranges of `STAGED_BYTES_MAX` bytes in all.

        Raises: Overloaded: no room there in time. Unavailable: the lease has ended, a range cannot be read, no answer.
        """
        ...

    def unstage(self, staged_ids: Sequence[int]) -> None:
        """Nothing is raised: what is not given back by word is so by time."""
        ...


@dataclass(frozen=True, slots=True)
class ServedFile:
    """A file of that node: a `window.Readable`."""

    server: RangeServer
    file_id: int

    def span(self, offset: int, size_bytes: int) -> ServedSpan:
        return ServedSpan(self.server, self.file_id, offset, size_bytes)


@dataclass(frozen=True, slots=True)
class ServedSpan:
    """Bytes of a served file."""

    server: RangeServer
    file_id: int
    offset: int
    size_bytes: int
