"""Memory of another node, as its peers name it. Pure.

Who serves memory gives out a `RemoteMemory`; who has one may read it, and only within its size. UCX reads addresses and keys
without knowing how long they are, and a damaged one ends the process: so they travel as one sealed string, and what does not
match its checksum never reaches UCX.

Over TCP UCX compares nothing: words of a process that ended reach the one that listens at its port now. So each has a mark of
its own in its memory, and a connection is good for nothing before the mark was read through it (ucx_endpoint.py).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import xxhash

_MAGIC: Final = b"FCRM"
_VERSION: Final = 2
# Magic, version, sizes of worker address and key, base, size; then both, then XXH3-64 of all that.
_HEAD: Final = struct.Struct("<4sHHIQQ")
_SUM: Final = struct.Struct("<Q")
MARK_BYTES: Final = 16
_SERVER: Final = struct.Struct("<Q16sH")  # where the mark is, the mark, size of its key; then key and address


@dataclass(frozen=True, slots=True)
class Server:
    """A UCX worker that serves, and what tells it from every other one: `mark`, random, at address `mark_at` of its process."""

    address: bytes
    mark: bytes
    mark_at: int
    mark_rkey: bytes

    def encode(self) -> bytes:
        return _SERVER.pack(self.mark_at, self.mark, len(self.mark_rkey)) + self.mark_rkey + self.address


def decode_server(data: bytes) -> Server:
    """Raises: ValueError: too short. (Others are told from damaged ones by the seal.)"""
    if len(data) < _SERVER.size:
        raise ValueError(f"{len(data)} bytes name no server")
    mark_at, mark, rkey_bytes = _SERVER.unpack_from(data)
    end = _SERVER.size + rkey_bytes
    return Server(data[end:], mark, mark_at, data[_SERVER.size : end])


@dataclass(frozen=True, slots=True)
class RemoteMemory:
    """A registered region of one process.

    Attributes:
        worker: the `Server` that serves it, encoded; another one after each restart.
        rkey: the packed key of the registration.
        base: address of the first byte in that process.
        size_bytes: of the region.
    """

    worker: bytes
    rkey: bytes
    base: int
    size_bytes: int

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


def unseal_memory(sealed: bytes) -> RemoteMemory:
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
    return RemoteMemory(body[at : at + worker_bytes], body[at + worker_bytes :], base, size_bytes)
