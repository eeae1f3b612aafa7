"""The operator's side of the wire: asks a running daemon and gets its documents, as parsed JSON.

Synchronous, for the command line. Each call has a deadline; gRPC's codes become the three errors, or `ValueError` where the
request itself was wrong (an unknown session).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import grpc

from flatcake_proto.v1 import admin_pb2, admin_pb2_grpc
from flatcake_transport.access import Access, access_of
from flatcake_transport.endpoint import grpc_target
from flatcake_transport.errors import Corrupt, Overloaded, Unavailable
from flatcake_transport.reach import unreached

# A list of a million sessions is some 300 MB of JSON; a node has at most a few thousand worth listing.
_REPLY_BYTES_MAX: Final = 512 << 20
_CHECK_TIMEOUT_S: Final = 24 * 3600.0  # reads all data of a node at most once
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", _REPLY_BYTES_MAX),
    ("grpc.enable_http_proxy", 0),  # a daemon is never behind the proxy of the user's shell
)
_CALLERS_BUG: Final = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED)

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CheckStep:
    """`report` comes once, with the last step."""

    done: int
    total: int
    report: Document | None = None


class AdminClient:
    """One connection to a daemon's Admin service. Not thread-safe; a context manager.

    Every method raises:
        Unavailable: nobody answers at the endpoint, or not in time, or it wants a token or certificate that was not shown.
        Overloaded: the daemon is at a bound.
        ValueError: the daemon knows no such thing.
    """

    def __init__(self, endpoint: str, *, timeout_s: float = 10.0) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._target = grpc_target(endpoint)
        access = Access() if self._target.startswith("unix:") else access_of(os.environ)
        self._mend = _mend(self._target, access)
        self._channel = _channel(self._target, access)
        self._metadata = access.metadata
        self._stub = admin_pb2_grpc.AdminStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def status(self) -> Document:
        """`dataclasses.asdict` of the daemon's StoreStats."""
        return dict(self._json(self._stub.Status, admin_pb2.StatusRequest()))

    def spaces(self) -> list[Document]:
        return list(self._json(self._stub.ListSpaces, admin_pb2.ListSpacesRequest()))

    def nodes(self) -> list[Document]:
        """The node asked first, then those it knows."""
        return list(self._json(self._stub.ListNodes, admin_pb2.ListNodesRequest()))

    def sessions(self, *, fingerprint: bytes = b"", limit: int = 0) -> list[Document]:
        """Most recently used first; empty fingerprint: of all spaces; limit 0: as many as the daemon likes to list."""
        request = admin_pb2.ListSessionsRequest(fingerprint=fingerprint, limit=limit)
        return list(self._json(self._stub.ListSessions, request))

    def session(self, name: str) -> Document:
        return dict(self._json(self._stub.ShowSession, admin_pb2.ShowSessionRequest(session=name)))

    def drop(self, names: Sequence[str]) -> Document:
        """Drops whole sessions. What others depend on, or somebody reads, stays; the reply says so."""
        return dict(self._json(self._stub.DropSessions, admin_pb2.DropSessionsRequest(sessions=names)))

    def check(self, *, data: bool = False) -> Iterator[CheckStep]:
        """The law on the living daemon, step by step; `data` also reads every byte and compares checksums."""
        try:
            for step in self._stub.Check(
                admin_pb2.CheckRequest(data=data), timeout=_CHECK_TIMEOUT_S, metadata=self._metadata
            ):
                yield CheckStep(step.done, step.total, json.loads(step.json) if step.json else None)
        except grpc.RpcError as error:
            raise self._translated(error) from error

    def _json(self, call: Callable[..., admin_pb2.JsonReply], request: object) -> Any:
        try:
            return json.loads(call(request, timeout=self._timeout_s, metadata=self._metadata).json)
        except grpc.RpcError as error:
            raise self._translated(error) from error

    def _translated(self, error: grpc.RpcError) -> Exception:
        code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
        said = (error.details() if isinstance(error, grpc.Call) else None) or str(code)
        if code in _CALLERS_BUG:
            return ValueError(said)
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Overloaded(said)
        if code is grpc.StatusCode.DATA_LOSS:
            return Corrupt(said)
        if code is grpc.StatusCode.UNAVAILABLE:
            return Unavailable(unreached(self._target) or f"no daemon answers at {self._endpoint}: {self._mend}")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return Unavailable(
                f"the daemon at {self._endpoint} did not answer within {self._timeout_s:g} s: try again later"
            )
        return Unavailable(f"the daemon at {self._endpoint} failed: {said}")


def _mend(target: str, access: Access) -> str:
    """What to do where nobody answers. Over TCP that may be TLS: gRPC says the same of both."""
    start = "start one with `flatcake serve`, or name its socket with --endpoint or FLATCAKE_ENDPOINT"
    if target.startswith("unix:"):
        return start
    if access.tls is None:
        return f"{start}; if it has TLS, set FLATCAKE_TLS_CERT_FILE, FLATCAKE_TLS_KEY_FILE and FLATCAKE_TLS_CA_FILE"
    return f"{start}; or TLS fails: it must have TLS, and its certificate name this address and be of the same CA"


def _channel(target: str, access: Access) -> grpc.Channel:
    if access.tls is None:
        return grpc.insecure_channel(target, options=_OPTIONS)
    tls = access.tls
    return grpc.secure_channel(target, grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert), options=_OPTIONS)
