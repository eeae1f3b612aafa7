"""A cluster made of a node's configuration; the one place that reads its options."""

from __future__ import annotations

import socket
from functools import partial

from flatcake_server.arena import Arena
from flatcake_server.cluster.cluster import Cluster, ClusterOptions, Nvme
from flatcake_server.cluster.credentials import Secrets, load_secrets
from flatcake_server.cluster.exporter import Exporter
from flatcake_server.cluster.fabric import Fabric
from flatcake_server.cluster.importer import Importer
from flatcake_server.cluster.members import Member
from flatcake_server.cluster.nvme_host import NvmeHost
from flatcake_server.cluster.nvmet import NvmeTarget, host_nqn, parse_port, subsystem_nqn
from flatcake_server.config import NodeConfig
from flatcake_server.law import differs
from flatcake_server.rpc import Identity, Timings
from flatcake_server.store import Store
from flatcake_transport.served import STAGED_BYTES_MAX
from flatcake_transport.units import Listen, parse_listen

_EVERY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104


def load_node_secrets(config: NodeConfig) -> Secrets:
    """Raises: Unavailable: a file cannot be read, or by too many."""
    return load_secrets(config.cluster_token_file, config.tls_cert_file, config.tls_key_file, config.tls_ca_file)


def build_cluster(
    config: NodeConfig, store: Store, arena: Arena, identity: Identity, secrets: Secrets, timings: Timings
) -> Cluster | None:
    """None: this node is by itself. Raises: Unavailable: redis is not installed."""
    if config.directory == "none":
        return None
    me = Member(
        node_id=config.node_id,
        incarnation=identity.incarnation,
        address="",
        version=identity.version,
        fingerprint=identity.cluster_fingerprint,
    )
    options = ClusterOptions(
        directory=config.directory,
        name=config.cluster_name,
        peers=config.peers,
        redis_url=config.redis_url,
        node_ttl_s=config.node_ttl,
        anchor_ttl_s=config.anchor_ttl,
        publish_rate_max=config.publish_rate_max,
        peer_timeout_s=config.peer_timeout,
        lease_ttl_s=config.lease_ttl,
        leases_max=config.leases_max,
        message_bytes_max=config.message_bytes_max,
        verify=config.verify != "off",
        copy_after_hits=config.copy_after_hits,
    )
    bounce_bytes = config.ucx_bounce_bytes // STAGED_BYTES_MAX * STAGED_BYTES_MAX if config.ssd_paths else 0
    fabric = Fabric(parse_listen(config.ucx_listen), arena, config.peer_timeout, bounce_bytes)
    return Cluster(store, me, options, secrets, fabric, _nvme(config, store), partial(differs, store, arena), timings)


def _nvme(config: NodeConfig, store: Store) -> Nvme:
    port = parse_port(config.nvmeof)
    if port is None:
        return Nvme()
    name = config.cluster_name
    hosts = [host_nqn(name, host) for host in config.nvmeof_allowed_hosts]
    target = NvmeTarget(subsystem_nqn(name, config.node_id), [port], hosts)
    mine = host_nqn(name, config.node_id)
    importer = Importer(NvmeHost(mine))
    return Nvme(Exporter(store, target, hosts) if config.ssd_paths else None, importer, mine, config.nvmeof)


def advertised(config: NodeConfig, port: int) -> str:
    """host:port at which peers reach this node. `port`: where it really listens."""
    if config.advertise:
        return config.advertise
    listen = parse_listen(config.grpc_listen)
    assert listen is not None
    return str(Listen(socket.gethostname() if listen.host in _EVERY_ADDRESS else listen.host, port))
