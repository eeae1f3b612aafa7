"""Memory of another node, as its peers name it. Pure.

Who serves memory gives out a `RemoteMemory`; who has one may read it, and only within its size. UCX reads addresses and keys
without knowing how long they are, and a damaged one ends the process: so they travel as one sealed string, and what does not
match its checksum never reaches UCX.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Final

import xxhash

_MAGIC: Final = b"FCRM"
_VERSION: Final = 1
# Magic, version, sizes of worker address and key, base, size; then both, then XXH3-64 of all that.
_HEAD: Final = struct.Struct("<4sHHIQQ")
_SUM: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class RemoteMemory:
    """A registered region of one process.

    Attributes:
        worker: address of the UCX worker that serves it; another one after each restart.
        rkey: the packed key of the registration.
        base: address of the first byte in that process.
        size_bytes: of the region.
        told_s: the monotonic time before its owner was asked for it, on this side. Whoever lost the worker later does not go
            there again with it: another process may listen at that port by then, and UCX compares nothing.
    """

    worker: bytes
    rkey: bytes
    base: int
    size_bytes: int
    told_s: float = field(default=float("inf"), compare=False)

    def sealed(self) -> bytes:
        """As one string for the wire; `unseal_memory` is its inverse."""
        head = _HEAD.pack(_MAGIC, _VERSION, len(self.worker), len(self.rkey), self.base, self.size_bytes)
        body = head + self.worker + self.rkey
        return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))

    def span(self, offset: int, size_bytes: int) -> RemoteSpan:
        return RemoteSpan(self, offset, size_bytes)


@dataclass(frozen=True, slots=True)
class RemoteSpan:
    """Bytes of another node's memory, `offset` counted from the region's first byte."""

    memory: RemoteMemory
    offset: int
    size_bytes: int


def unseal_memory(sealed: bytes, told_s: float = float("inf")) -> RemoteMemory:
    """Raises: ValueError: not what `sealed` made, or of another version."""
    body, tail = sealed[: -_SUM.size], sealed[-_SUM.size :]
    if len(body) < _HEAD.size or _SUM.unpack(tail)[0] != xxhash.xxh3_64_intdigest(body):
        raise ValueError(f"{len(sealed)} bytes are no remote memory: the checksum differs")
    magic, version, worker_bytes, rkey_bytes, base, size_bytes = _HEAD.unpack_from(body)
    if magic != _MAGIC or version != _VERSION:
        raise ValueError(f"remote memory of version {version}: this side knows {_VERSION}")
    at = _HEAD.size
    if len(body) != at + worker_bytes + rkey_bytes:
        raise ValueError("remote memory with a worker address or key of another size than it says")
    return RemoteMemory(body[at : at + worker_bytes], body[at + worker_bytes :], base, size_bytes, told_s)
