"""Secrets of a node on TCP: the cluster's token and TLS, from files; and who is let in.

Nodes prove the token to each other (proof.py). Every other call over TCP brings the proof of a call in its metadata. The unix
socket needs neither: its permissions say who may open it. With TLS, both sides show a certificate that the CA signed.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc

from flatcake_server.cluster.proof import TOKEN_BYTES_MIN
from flatcake_transport.access import CALL_METADATA, Tls, call_proof, read_secret, read_tls
from flatcake_transport.errors import Unavailable

_GUARDED: Final = ("/flatcake.v1.Store/", "/flatcake.v1.Admin/")


@dataclass(frozen=True, slots=True)
class Secrets:
    """`token` empty: none is asked for. `tls` None: plain TCP."""

    token: bytes = b""
    tls: Tls | None = None

    def server(self) -> grpc.ServerCredentials | None:
        if self.tls is None:
            return None
        return grpc.ssl_server_credentials(
            [(self.tls.key, self.tls.cert)], root_certificates=self.tls.ca, require_client_auth=True
        )

    def channel(self, target: str, options: Sequence[tuple[str, int]]) -> grpc.aio.Channel:
        if self.tls is None:
            return grpc.aio.insecure_channel(target, options=options)
        return grpc.aio.secure_channel(
            target, grpc.ssl_channel_credentials(self.tls.ca, self.tls.key, self.tls.cert), options=options
        )

    def guards(self, refused: Callable[[], None]) -> list[grpc.aio.ServerInterceptor[Any, Any]]:
        """`refused` is called for each call that is turned away."""
        return [_CallProof(self.token, refused)] if self.token else []


def load_secrets(token_file: str, cert_file: str, key_file: str, ca_file: str) -> Secrets:
    """Empty names: not used. Raises: Unavailable: a file cannot be read or is of no use, or others could read the token."""
    token = b""
    if token_file:
        token = read_secret(token_file).strip()
        if len(token) < TOKEN_BYTES_MIN:
            raise Unavailable(
                f"cluster_token_file {token_file} holds {len(token)} bytes: write at least {TOKEN_BYTES_MIN}, "
                "e.g. with openssl rand -hex 32"
            )
    tls = read_tls(cert_file, key_file, ca_file) if cert_file else None
    for name in (token_file, key_file):
        if name and os.stat(name).st_mode & 0o077:  # noqa: PTH116
            raise Unavailable(f"{name} can be read by others than its owner: chmod 600 {name}")
    return Secrets(token, tls)


class _CallProof(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Turns away calls of clients and operators without the token's proof. Health and the peer service have their own ways."""

    def __init__(self, token: bytes, refused: Callable[[], None]) -> None:
        self._wanted = call_proof(token).encode()

        async def refuse(_: Any, context: Any) -> None:
            refused()
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "this node wants the cluster's token over TCP: set FLATCAKE_CLUSTER_TOKEN_FILE",
            )

        self._refusal = grpc.unary_unary_rpc_method_handler(refuse)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        shown = dict(details.invocation_metadata or ()).get(CALL_METADATA, "")
        shown = shown if isinstance(shown, bytes) else str(shown).encode()
        if str(details.method).startswith(_GUARDED) and not hmac.compare_digest(shown, self._wanted):
            return self._refusal
        return await continuation(details)
