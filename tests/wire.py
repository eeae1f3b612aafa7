"""The daemon's wire without our client: what any program could send. Refusals come back as (status code, text)."""

from __future__ import annotations

import socket
from typing import Any, Self

import grpc
import numpy as np

from flatcake_proto.v1 import store_pb2, store_pb2_grpc
from flatcake_transport.handoff import Attach, Request, encode_attach, encode_request
from flatcake_transport.space import SpaceSpec

MESSAGE_BYTES_MAX = 64 << 20
SPEC = SpaceSpec("wire", "u8", 16, (4096,))


class Refused(Exception):
    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(code, text)
        self.code, self.text = code, text


class Wire:
    """One greeted client. `call("Lookup", keys=...)` fills in client and incarnation unless they are given."""

    def __init__(self, target: str) -> None:
        limits = [
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ]
        self.channel = grpc.insecure_channel(target, options=[*limits, ("grpc.enable_http_proxy", 0)])
        self.stub = store_pb2_grpc.StoreStub(self.channel)
        self.welcome = self.raw("Hello", protocol=1, client_name="wire")
        self.open(SPEC)

    def raw(self, verb: str, **fields: Any) -> Any:
        try:
            return getattr(self.stub, verb)(getattr(store_pb2, f"{verb}Request")(**fields), timeout=20)
        except grpc.RpcError as error:
            raise Refused(error.code(), error.details()) from error

    def call(self, verb: str, **fields: Any) -> Any:
        known = {"client_id": self.welcome.client_id, "incarnation": self.welcome.incarnation}
        return self.raw(verb, **known | fields)

    def open(self, spec: SpaceSpec, **fields: Any) -> Any:
        told = {name: getattr(spec, name) for name in ("model", "dtype", "block_tokens", "plane_bytes", "shards")}
        return self.call("OpenSpace", **{**told, "fingerprint": spec.fingerprint} | fields)

    def lookup(self, keys: bytes, **fields: Any) -> Any:
        return self.call("Lookup", **{"fingerprint": SPEC.fingerprint, "keys": keys, "pin": True} | fields)

    def begin(self, keys: bytes, **fields: Any) -> Any:
        told = {"fingerprint": SPEC.fingerprint, "keys": keys, "root_key": bytes(16), "session": "wire"}
        return self.call("BeginTurn", **told | fields)

    def commit(self, turn: Any, **fields: Any) -> Any:
        parts = [store_pb2.PartChecksums() for _ in turn.parts]
        return self.call("CommitTurn", **{"turn_id": turn.turn_id, "parts": parts} | fields)

    def handover(self, *, token: bytes | None = None, attach: bool = True) -> socket.socket:
        """A connection to the handover socket, attached as this client."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(20)
        connection.connect(self.welcome.handover_path)
        if attach:
            connection.send(encode_attach(Attach(self.welcome.client_id, token or self.welcome.token)))
        return connection

    def close(self) -> None:
        self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def some_keys(seed: int, count: int) -> bytes:
    return np.random.default_rng(seed).bytes(16 * count)


def ask(connection: socket.socket, *request: Any) -> bytes:
    """The reply's bytes; its descriptors are dropped."""
    connection.send(encode_request(Request(*request)))
    return connection.recv(1 << 16)
