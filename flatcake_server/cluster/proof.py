"""Who knows the cluster's token, without saying it. Pure.

Both sides of a connection between nodes prove it over both nonces and both identities (HMAC-SHA-256), so a proof is good for one
connection and one direction, and what is overheard is worth nothing for another. (What clients show is in transport's access.)
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import Final

NONCE_BYTES: Final = 16
NUMBER_BYTES: Final = 8  # of a nonce; the others are of the daemon's start
TOKEN_BYTES_MIN: Final = 16


@dataclass(frozen=True, slots=True)
class Handshake:
    """One connection: the node that asks and the node that serves."""

    asker: bytes  # incarnation
    asker_node: int
    asker_nonce: bytes
    server: bytes  # incarnation
    server_node: int
    server_nonce: bytes

    def proof(self, token: bytes, side: str) -> bytes:
        """`side` is "asker" or "server": who proves."""
        parts = [side.encode(), self.asker, b"%d" % self.asker_node, self.asker_nonce]
        parts += [self.server, b"%d" % self.server_node, self.server_nonce]
        text = b"flatcake/peer/1" + b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        return hmac.digest(token, text, hashlib.sha256)

    def proves(self, token: bytes, side: str, proof: bytes) -> bool:
        return hmac.compare_digest(self.proof(token, side), proof)


class Nonces:
    """What a daemon gives out to whoever greets it; each is good for one attachment.

    Nothing is kept of those given out, so strangers may greet as often as they like: a nonce is a number of this start's, and of
    an asker only a newer one is taken than the last. So one that was overheard is worth nothing, nor one that comes late.

    Args:
        start: random bytes that no other start has.
    """

    def __init__(self, start: bytes) -> None:
        if len(start) != NONCE_BYTES - NUMBER_BYTES:
            raise ValueError(f"{len(start)} bytes for a start: expected {NONCE_BYTES - NUMBER_BYTES}")
        self._start = start
        self._given = 0
        self._taken: dict[bytes, int] = {}
        self._forgotten = 0

    def give(self) -> bytes:
        self._given += 1
        return self._start + self._given.to_bytes(NUMBER_BYTES, "little")

    def take(self, asker: bytes, nonce: bytes) -> bool:
        """Whether it is good for this asker, which has proved itself: it is not once more."""
        number = int.from_bytes(nonce[len(self._start) :], "little")
        last = self._taken.get(asker, self._forgotten)
        if len(nonce) != NONCE_BYTES or not nonce.startswith(self._start) or not last < number <= self._given:
            return False
        self._taken[asker] = number
        return True

    def forget(self, asker: bytes) -> None:
        """It is gone; what it was given is not taken of anybody any more, nor anything older."""
        self._forgotten = max(self._forgotten, self._taken.pop(asker, 0))
