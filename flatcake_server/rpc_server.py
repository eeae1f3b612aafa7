"""Where gRPC listens: the unix socket, whose permissions say who may ask, and TCP, with TLS and the cluster's token if there are.

Two servers with the same services, since only calls over TCP are asked who they are. Each ends connections whose other side
answers no ping: a machine that vanished leaves no leases behind for longer than that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from flatcake_proto.v1 import admin_pb2, admin_pb2_grpc, peer_pb2, peer_pb2_grpc, store_pb2, store_pb2_grpc
from flatcake_server.rpc import StoreService
from flatcake_server.rpc_views import AdminService
from flatcake_server.sockets import owner_only
from flatcake_transport.endpoint import grpc_target
from flatcake_transport.errors import Unavailable

PING_S: Final = 10.0


class RpcServer:
    """With health and reflection. `peers`: the service for other nodes, on TCP only; `streams_max` of its calls never end."""

    def __init__(
        self,
        services: tuple[StoreService, AdminService],
        peers: peer_pb2_grpc.PeerServicer | None = None,
        *,
        message_bytes_max: int,
        rpcs_max: int,
        streams_max: int = 0,
        credentials: grpc.ServerCredentials | None = None,
        guards: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
    ) -> None:
        self._options = [
            ("grpc.max_receive_message_length", message_bytes_max),
            ("grpc.max_send_message_length", message_bytes_max),
            ("grpc.so_reuseport", 0),  # a second daemon on the same port must fail, not share it
        ]
        self._rpcs_max = rpcs_max
        self._streams_max = streams_max
        self._services = services
        self._peers = peers
        self._credentials = credentials
        self._guards = list(guards)
        self._health = HealthServicer()
        self._names = [
            file.services_by_name[name].full_name
            for file, name in ((store_pb2.DESCRIPTOR, "Store"), (admin_pb2.DESCRIPTOR, "Admin"))
        ]
        self._servers: list[Any] = []

    def _server(self, *, tcp: bool) -> Any:
        pings = [
            ("grpc.keepalive_time_ms", int(PING_S * 1000)),
            ("grpc.keepalive_timeout_ms", int(PING_S * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 200),
            ("grpc.http2.max_ping_strikes", 0),
        ]
        server = grpc.aio.server(
            options=self._options + (pings if tcp else []),
            maximum_concurrent_rpcs=self._rpcs_max + (self._streams_max if tcp else 0),
            interceptors=self._guards if tcp else [],
        )
        store_pb2_grpc.add_StoreServicer_to_server(self._services[0], server)
        admin_pb2_grpc.add_AdminServicer_to_server(self._services[1], server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = list(self._names)
        if tcp and self._peers is not None:
            peer_pb2_grpc.add_PeerServicer_to_server(self._peers, server)
            names.append(peer_pb2.DESCRIPTOR.services_by_name["Peer"].full_name)
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
        self._servers.append(server)
        return server

    async def start(self, socket_path: str, socket_mode: int, tcp: str | None) -> int:
        """Listen. `tcp` is `host:port`, brackets round IPv6; port 0 takes a free one. Returns the port, 0 without.

        Raises: Unavailable: an address cannot be taken.
        """
        port = 0
        unix = self._server(tcp=False)
        with owner_only():
            _listen(socket_path, lambda: unix.add_insecure_port(grpc_target(socket_path)), "choose another --socket")
        if tcp is not None:
            server = self._server(tcp=True)
            secure = self._credentials
            add = server.add_insecure_port if secure is None else lambda where: server.add_secure_port(where, secure)
            mend = "choose another --grpc-listen" + (", or mend the files of tls_*_file" if secure is not None else "")
            port = _listen(tcp, lambda: add(tcp), mend)
        for server in self._servers:
            await server.start()
        os.chmod(socket_path, socket_mode)  # noqa: PTH101
        await self.set_serving(serving=True)
        return port

    async def set_serving(self, *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        for server in reversed(self._servers):
            await server.stop(grace_s)


def _listen(where: str, add: Callable[[], int], mend: str) -> int:
    try:
        return add()
    except RuntimeError as error:
        said = str(error).partition("; set GRPC_VERBOSITY")[0]  # what went wrong is a line of gRPC's own before ours
        raise Unavailable(f"cannot listen on {where}: {said}: {mend}") from error
