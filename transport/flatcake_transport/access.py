"""What a client or an operator shows a daemon over TCP: proof of the cluster's token, and TLS. From the variables that a daemon reads, too.

The unix socket needs neither. The token itself is never sent: who overhears the proof of a call, where there is no TLS, could ask
as a client, but cannot join the cluster as a node.
"""

from __future__ import annotations

import hashlib
import hmac
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flatcake_transport.errors import Unavailable

CALL_METADATA: Final = "flatcake-call-proof"
TOKEN_VARIABLE: Final = "FLATCAKE_CLUSTER_TOKEN_FILE"  # noqa: S105
TLS_VARIABLES: Final = ("FLATCAKE_TLS_CERT_FILE", "FLATCAKE_TLS_KEY_FILE", "FLATCAKE_TLS_CA_FILE")


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM texts: a certificate, its key, and who may sign the other side's."""

    cert: bytes
    key: bytes
    ca: bytes


@dataclass(frozen=True, slots=True)
class Access:
    """`token` empty: none is shown. `tls` None: plain TCP."""

    token: bytes = b""
    tls: Tls | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call over TCP."""
        return ((CALL_METADATA, call_proof(self.token)),) if self.token else ()


def call_proof(token: bytes) -> str:
    return hmac.digest(token, b"flatcake/call/1", hashlib.sha256).hex()


def access_of(environ: Mapping[str, str]) -> Access:
    """Raises: Unavailable: a file that a variable names cannot be read, or only some of TLS is named."""
    token_file = environ.get(TOKEN_VARIABLE, "")
    names = [environ.get(name, "") for name in TLS_VARIABLES]
    if any(names) and not all(names):
        raise Unavailable(f"TLS needs all of {', '.join(TLS_VARIABLES)}")
    token = read_secret(token_file).strip() if token_file else b""
    return Access(token, read_tls(*names) if all(names) else None)


def read_tls(cert: str, key: str, ca: str) -> Tls:
    """Raises: Unavailable: a file cannot be read, or is not what it should be; gRPC would not say which, or why."""
    tls = Tls(*map(read_secret, (cert, key, ca)))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for name, what in ((cert, "this node's certificate"), (ca, "the CA's certificate")):
        try:
            context.load_verify_locations(cafile=name)
        except ssl.SSLError as error:
            raise Unavailable(f"{name} holds no certificate in PEM: write {what} there") from error
    try:
        context.load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise Unavailable(f"{key} is not the key of {cert}: give the two that were made together") from error
        raise Unavailable(
            f"{key} holds no private key in PEM without a password: write the key of {cert} there"
        ) from error
    return tls


def read_secret(name: str) -> bytes:
    """Raises: Unavailable: it cannot be read."""
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise Unavailable(f"{name} cannot be read: {error.strerror}: give a file this user can read") from error
