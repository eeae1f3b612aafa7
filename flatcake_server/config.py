"""What a node is told: `flatcake.toml`, `FLATCAKE_*` over it, flags over both.

`NodeConfig` is local to a node. `ClusterConfig` is what all nodes that share blocks must agree on; its fingerprint is in
the hello, so two nodes that differ refuse each other instead of misreading bytes. Both are frozen: a running daemon's
configuration never changes.

Each option is declared once, here, with its unit, its reason and its default; the flags of `flatcake serve` and
`deploy/flatcake.toml` are made from this declaration. What is wrong is refused at
start, in one line that says what to do; nothing is ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from flatcake_server.config_checks import (
    one_line,
    refuse_bad_cluster,
    refuse_bad_paths,
    unknown_option,
)
from flatcake_transport.address import NODES_MAX, OFFSET_LIMIT
from flatcake_transport.endpoint import socket_candidates
from flatcake_transport.layout import ALIGN_BYTES, GRANULE_BYTES_MIN
from flatcake_transport.served import STAGED_BYTES_MAX
from flatcake_transport.units import (
    format_size,
    parse_duration,
    parse_listen,
    parse_size,
)

ENVIRONMENT_PREFIX: Final = "FLATCAKE_"
SYSTEM_CONFIG: Final = Path("/etc/flatcake/flatcake.toml")
HANDOVER_SUFFIX: Final = ".fds"  # the socket that hands out file descriptors stands beside the one for gRPC
# sun_path has 108 bytes with its terminating zero; the longer of the two sockets must fit.
SOCKET_BYTES_MAX: Final = 107 - len(HANDOVER_SUFFIX)
MEMORY_BYTES_MIN: Final = 1 << 20
SSD_BYTES_MIN: Final = 16 << 20

# Read by the client and by `flatcake` itself, so they are no options of the node.
_OTHER_VARIABLES: Final = {
    "FLATCAKE_ENDPOINT",
    "FLATCAKE_CONFIG",
    "FLATCAKE_UCX_LIB",  # which libucp
    "FLATCAKE_PEER_LMCACHE",  # how bench/peers drives LMCache
    "FLATCAKE_PEER_MOONCAKE",  # and Mooncake
}
# Kubernetes puts these into every pod beside a Service whose name starts with "flatcake".
_SERVICE_LINK: Final = re.compile(r"FLATCAKE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)\w*)?)")


class ConfigError(ValueError):
    """The configuration is wrong. The message is one line and says what to do."""


def _words(value: object) -> object:
    """A list as people write it in a variable or a flag: "a,b"."""
    if isinstance(value, str):
        return tuple(word.strip() for word in value.split(",") if word.strip())
    return value


def _whole_pages(size_bytes: int) -> int:
    return size_bytes // ALIGN_BYTES * ALIGN_BYTES


def _address(value: object) -> object:
    if isinstance(value, str):
        parse_listen(value)
    return value


Size = Annotated[int, BeforeValidator(parse_size), AfterValidator(_whole_pages)]
Duration = Annotated[float, BeforeValidator(parse_duration)]
Address = Annotated[str, BeforeValidator(_address)]
Paths = Annotated[tuple[Path, ...], BeforeValidator(_words)]
Words = Annotated[tuple[str, ...], BeforeValidator(_words)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Bound = Annotated[int, Field(ge=1, le=1 << 36)]  # what the index can address


class ClusterConfig(BaseModel):
    """What nodes must agree on to read each other's blocks. Not options: a release fixes them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = 1  # of segments, footers and messages between nodes
    key: str = "sha256/16, parent + tokens u32le + extra"
    address: str = "medium:4 node:12 offset:48"
    align_bytes: int = ALIGN_BYTES
    granule_bytes_min: int = GRANULE_BYTES_MIN

    @property
    def fingerprint(self) -> bytes:
        """16 bytes; equal configurations give equal ones on every machine and Python version."""
        text = json.dumps(self.model_dump(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(b"flatcake/cluster/1\0" + text.encode()).digest()[:16]


class NodeConfig(BaseModel):
    """One node. Sizes are bytes in whole pages, durations seconds, watermarks fractions of the quota."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, str_strip_whitespace=True)

    socket: Path = Field(
        default_factory=lambda: default_socket(os.environ),
        description="Unix socket for local engines and operators; descriptors are handed out beside it, at <socket>.fds. "
        "Default: /run/flatcake/flatcake.sock, or under $XDG_RUNTIME_DIR where /run/flatcake cannot be written.",
    )
    socket_mode: str = Field(
        "0660",
        pattern=r"^0?[0-7]{3}$",
        description="Octal permissions of the sockets. Who may connect may read every block: keep others out.",
    )
    grpc_listen: Address = Field(
        "127.0.0.1:7450",
        description='host:port for gRPC, e.g. [::]:7450 for IPv4 and IPv6, or "off". '
        "Without TLS and token for nobody but this machine: loopback. Peers need an address they can reach.",
    )
    http_listen: Address = Field(
        "127.0.0.1:7451",
        description='host:port for /metrics, /healthz, /status and the web page, or "off". Read only.',
    )
    memory_bytes: Size = Field(
        1 << 30,
        ge=MEMORY_BYTES_MIN,
        le=OFFSET_LIMIT,
        description="Size of the memory arena; taken when the daemon starts, never more. Agents' short turns live here.",
    )
    huge_pages: Literal["auto", "on", "off"] = Field(
        "auto",
        description="auto: reserved huge pages (hugetlbfs) when enough are free, else transparent ones; on: refuse to "
        "start without reserved ones; off: never reserved ones. They make mapping and registering the arena cheaper.",
    )
    ssd_paths: Paths = Field(
        (),
        description="Directories for session files, one a disk; a path that fails costs its own sessions only. "
        "Each must exist and belong to this daemon alone. Empty: a node of memory only.",
    )
    ssd_bytes: Size = Field(
        8 << 30,
        ge=SSD_BYTES_MIN,
        le=OFFSET_LIMIT,
        description="Hard quota over all ssd_paths together, split evenly between them. Holds at every instant.",
    )
    memory_high_watermark: Fraction = Field(
        0.95, description="Fraction of memory_bytes above which least recently used sessions are dropped."
    )
    memory_low_watermark: Fraction = Field(
        0.90, description="Fraction of memory_bytes at which dropping stops: the distance makes it rare and batched."
    )
    ssd_high_watermark: Fraction = Field(
        0.95, description="Fraction of a path's quota above which least recently used sessions are dropped."
    )
    ssd_low_watermark: Fraction = Field(0.90, description="Fraction of a path's quota at which dropping stops.")
    session_trim_after: Duration = Field(
        600.0,
        gt=0,
        description="A session idle for so long gives back the unused tail of its file; its next turn opens another.",
    )
    agent_context_tokens: int = Field(
        32768,
        ge=0,
        description="Tokens of context above which a turn goes to SSD: a long context is worth one long read, and few "
        "of them would fill the memory.",
    )
    short_reply_tokens: int = Field(
        512,
        ge=0,
        description="Tokens of the previous reply up to which a turn of a short context stays in memory: a short "
        "exchange, whose next turn comes soon.",
    )
    lease_ttl: Duration = Field(
        30.0,
        ge=1,
        le=3600,
        description="A reader without progress for so long loses its lease: blocks of a stuck engine can be reclaimed.",
    )
    verify: Literal["off", "remote", "all"] = Field(
        "remote",
        description="Which reads clients check against checksums: none, those from other nodes, or all. What is stored under "
        '"off" has none, so a rebuild of a lost journal forgets it.',
    )
    sync_commits: bool = Field(
        True,
        description="true: a turn's bytes are on the disk before it counts as stored, so after a power cut what was stored until some "
        "seconds before is there. false: commits do not wait for the disk's cache, and after a power cut what was stored since "
        "the machine started is forgotten. A crash of the daemon costs nothing either way.",
    )
    clients_max: Bound = Field(1024, description="Engine processes and peers connected at once.")
    spaces_max: Bound = Field(
        1024,
        description="Spaces (a model in one layout) known at once; beyond it the one used least recently is opened again.",
    )
    sessions_max: Bound = Field(
        1_000_000, description="Sessions stored at once; about 1 KiB of the daemon's memory each."
    )
    index_blocks_max: Bound = Field(
        20_000_000,
        description="Blocks stored at once; some 100 B of memory each. Made smaller, the next start drops sessions used "
        "least recently.",
    )
    leases_max: Bound = Field(65_536, description="Leases of readers alive at once.")
    open_turns_max: Bound = Field(4096, description="Turns being written at once.")
    disk_queue_max: Bound = Field(
        1024, description="Operations waiting for one SSD path; beyond it writes are refused."
    )
    rpcs_max: Bound = Field(1024, description="gRPC calls being served at once; beyond it calls are refused.")
    message_bytes_max: Size = Field(
        16 << 20,
        ge=1 << 20,
        le=1 << 30,
        description="Largest gRPC message: 16 bytes a key, so a million blocks a request.",
    )
    drain_timeout: Duration = Field(
        10.0,
        description="How long a stopping daemon waits for open turns to commit. Past it they are aborted.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="One event a line, on stderr.")
    node_id: int = Field(0, ge=0, lt=NODES_MAX, description="Number of this node in its cluster; in every address.")
    directory: Literal["none", "static", "redis"] = Field(
        "none",
        description="How nodes find each other and their prefixes. none: one node; static: the peers named below are asked "
        "directly, for a handful of nodes; redis: Redis or Valkey, also as a Redis Cluster.",
    )
    cluster_name: str = Field(
        "flatcake",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="Nodes of one name share blocks; clusters of different names may share one Redis.",
    )
    advertise: str = Field(
        "",
        description="host:port at which peers reach this node's gRPC. Empty: grpc_listen, with this machine's name where that "
        "is every address.",
    )
    peers: Words = Field((), description="gRPC addresses (host:port) of the other nodes, for directory static.")
    redis_url: str = Field(
        "",
        description="redis://, rediss:// or unix:// URL of Redis or Valkey, for directory redis; of a Redis Cluster some of its "
        "servers, separated by commas.",
    )
    node_ttl: Duration = Field(
        10.0,
        ge=1,
        le=600,
        description="A node that the directory has not heard of for so long is gone, and its number free. It is heard of three "
        "times as often.",
    )
    anchor_ttl: Duration = Field(
        3600.0,
        ge=10,
        description="What a dead node published is out of the directory after twice this time at most; out of all answers at once. "
        "The nodes sweep it together; longer: fewer commands. A handful of nodes takes its time, some hours.",
    )
    publish_rate_max: Bound = Field(
        5000, description="Anchors (one for 16 blocks) a node tells the directory a second."
    )
    copy_after_hits: int = Field(
        0,
        ge=0,
        description="Lookups that find the same prefix at other nodes before it is copied into this node's memory: by the client "
        "that restores it, from where it was restored to. 0: never. Helps engines that do not store what they restored.",
    )
    copy_memory_share: Fraction = Field(
        0.25,
        description="Fraction of memory_bytes that such copies may take. They take free memory only, and are reclaimed as all else.",
    )
    peer_timeout: Duration = Field(
        2.0,
        gt=0,
        le=60,
        description="A peer or directory silent for so long is a miss. A lookup spends at most half of its own time on them.",
    )
    cluster_token_file: str = Field(
        "",
        description="File with a secret of 16 bytes or more that all nodes share, readable by its owner only. Nodes prove it to "
        "each other without sending it; clients over TCP need it too. Empty: no token.",
    )
    tls_cert_file: str = Field(
        "", description="PEM certificate of this node, for TCP. With key and CA: TLS in both directions. Empty: no TLS."
    )
    tls_key_file: str = Field("", description="PEM private key of tls_cert_file.")
    tls_ca_file: str = Field("", description="PEM certificates of who may sign a node's or client's certificate.")
    ucx_listen: str = Field(
        "off",
        description="host:port (or device:port) at which peers read this node's memory over UCX, e.g. 10.0.0.7:7452; port 0 takes "
        'any. The seven ports behind it may be used too. "off": peers find what is here and cannot read it. Over TCP UCX asks '
        "for no proof: only trusted nodes may reach these ports (docs/security.md).",
    )
    ucx_bounce_bytes: Size = Field(
        64 << 20,
        ge=STAGED_BYTES_MAX,
        le=OFFSET_LIMIT,
        description="Memory into which ranges of session files are read for peers, 4 MiB at a time, where they cannot read over "
        "NVMe-oF. Taken only if ucx_listen serves; more lets more peers read at once, each waits for a disk and two round trips.",
    )
    nvmeof: str = Field(
        "off",
        description="tcp://ADDRESS:4420 or rdma://ADDRESS:4420, this node's: session files are exported there to peers for as long "
        "as they lease them, and those of peers are read the same way; whatever fails goes through UCX. Needs root, nvmet, "
        'nvme-cli and a file system with O_DIRECT. "off": UCX only.',
    )
    nvmeof_allowed_hosts: Words = Field(
        (),
        description="Numbers of the nodes (or host NQNs) that may read over NVMe-oF. The kernel asks for no proof of an NQN: only "
        "trusted machines may reach that port.",
    )

    @property
    def cluster(self) -> ClusterConfig:
        return ClusterConfig()

    @property
    def handover_path(self) -> Path:
        """The unix socket that hands out file descriptors."""
        return self.socket.with_name(self.socket.name + HANDOVER_SUFFIX)

    @property
    def ssd_path_bytes(self) -> int:
        """Quota of each SSD path: an even share of `ssd_bytes`, whole pages. 0 without paths."""
        return _whole_pages(self.ssd_bytes // len(self.ssd_paths)) if self.ssd_paths else 0

    @model_validator(mode="after")
    def _agree(self) -> Self:
        for medium in ("memory", "ssd"):
            low, high = (getattr(self, f"{medium}_{end}_watermark") for end in ("low", "high"))
            if low >= high:
                raise ValueError(
                    f"{medium}_low_watermark is {low} and {medium}_high_watermark {high}: set the low one below the high one"
                )
        if self.ssd_paths and self.ssd_path_bytes < SSD_BYTES_MIN:
            raise ValueError(
                f"ssd_bytes gives each of {len(self.ssd_paths)} ssd_paths {format_size(self.ssd_path_bytes)}: "
                f"give at least {format_size(SSD_BYTES_MIN)} a path"
            )
        refuse_bad_paths(self.socket, self.ssd_paths, SOCKET_BYTES_MAX)
        refuse_bad_cluster(self)
        return self


def default_socket(environ: Mapping[str, str]) -> Path:
    """The first candidate whose directory can be written, or made by this user."""
    system, private = socket_candidates(environ, os.getuid())
    folder = system.parent
    return system if os.access(folder if folder.exists() else folder.parent, os.W_OK | os.X_OK) else private


def load_config(
    file: Path | None = None, environ: Mapping[str, str] | None = None, flags: Mapping[str, object] | None = None
) -> NodeConfig:
    """Join the three sources and check the result.

    Args:
        file: a TOML file; None reads none. See `find_config`.
        environ: variables, usually `os.environ`; only `FLATCAKE_*` are looked at.
        flags: option -> value or text; None as a value means that the flag was not given. Relative paths start here,
            in the working directory; in the other sources they are refused.

    Raises:
        ConfigError: one line, all mistakes of a source in it.
    """
    chosen: dict[str, object] = {}
    sources = {
        str(file): _from_file(file) if file else {},
        "environment": _from_environment(environ or {}),
        "flags": _from_flags(flags or {}),
    }
    for source, values in sources.items():
        for name in values:
            if name not in NodeConfig.model_fields:
                raise ConfigError(f"{source}: {unknown_option(name, NodeConfig.model_fields)}")
        chosen |= values
    try:
        return NodeConfig.model_validate(chosen)
    except ValidationError as error:
        raise ConfigError(one_line(error, reader_of)) from error


def find_config(option: Path | None, environ: Mapping[str, str]) -> Path | None:
    """The file to read: as told, by `$FLATCAKE_CONFIG`, or `flatcake.toml` here or in /etc/flatcake where there is one."""
    told = option or (Path(environ["FLATCAKE_CONFIG"]) if environ.get("FLATCAKE_CONFIG") else None)
    return told or next((path for path in (Path("flatcake.toml"), SYSTEM_CONFIG) if path.is_file()), None)


def _from_file(file: Path) -> dict[str, object]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}: give a readable file with --config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}: mend the TOML (text and sizes stand in quotes)") from error


def _from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    return {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): text
        for name, text in environ.items()
        if name.startswith(ENVIRONMENT_PREFIX) and name not in _OTHER_VARIABLES and not _SERVICE_LINK.fullmatch(name)
    }


def _from_flags(flags: Mapping[str, object]) -> dict[str, object]:
    given = {name: value for name, value in flags.items() if value is not None}
    for name in ("socket", "ssd_paths"):
        if name in given:
            words = _words(given[name]) if name == "ssd_paths" else (given[name],)
            paths = tuple(Path(str(word)).absolute() for word in words if str(word))  # type: ignore[attr-defined]
            given[name] = paths if name == "ssd_paths" else paths[0] if paths else given[name]
    return given


def reader_of(name: str) -> object:
    """What reads an option's text: its sort."""
    metadata = NodeConfig.model_fields[name].metadata if name in NodeConfig.model_fields else ()
    return next((item.func for item in metadata if isinstance(item, BeforeValidator)), None)
