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
