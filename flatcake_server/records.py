"""What the daemon remembers of spaces, sessions, files and segments: plain values, shared by store and journal. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, NewType

import numpy as np
from numpy.typing import NDArray

from flatcake_transport.address import Address
from flatcake_transport.space import Fingerprint

KeyArray = NDArray[np.uint8]  # (n, 16)
SessionNo = NewType("SessionNo", int)  # names a session in this store, never reused
FileId = NewType("FileId", int)  # names a session file in this store, never reused
Generation = NewType("Generation", int)  # commit number: names a segment, grows with time, never reused


@dataclass(frozen=True, slots=True)
class SessionRecord:
    session_no: SessionNo
    name: str
    fingerprint: Fingerprint
    turns: int
    created_s: float  # wall clock, for people
    last_used_s: float  # wall clock of the last commit; the start order of reclaim after a restart


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One pre-allocated file. Owns `[base, base + size_bytes)` of the node's SSD address range.

    Committed segments fill it from 0 to `written_bytes`; a sealed file is read and never appended to.
    """

    file_id: FileId
    session_no: SessionNo
    base: int
    size_bytes: int
    written_bytes: int = 0
    sealed: bool = False


class Suspect(NamedTuple):
    """A segment that a reader found corrupt, as it was looked up: another one may stand at that address by now."""

    address: int
    generation: int


@dataclass(frozen=True, slots=True, eq=False)
class SegmentRecord:
    """One committed segment. On SSD `address.offset == file.base + file_offset`; in memory `file_id` is 0.

    `first_block` is the position of its first block in the key chain (0 is the first block of a context).
    """

    generation: Generation
    session_no: SessionNo
    address: Address
    total_bytes: int
    turn: int
    first_block: int
    reason: str  # of its placement
    keys: KeyArray
    parent_key: bytes  # 16 bytes: the key before keys[0] in its chain; of the first block, the root key
    file_id: FileId = FileId(0)
    file_offset: int = 0

    @property
    def blocks(self) -> int:
        return len(self.keys)

    @property
    def end_offset(self) -> int:
        return self.file_offset + self.total_bytes
