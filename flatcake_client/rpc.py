"""The wire, client side: proto <-> dataclass, status -> error. The only module of the client that knows gRPC.

Every call has a deadline and fails fast: a daemon that is not there is `Unavailable` at once, one that does not answer is
so at the deadline, and for a moment after that (`SILENCE_PAUSE_S`) without being asked again, so that a daemon that hangs
costs an engine one deadline a second and not one a request. Work that stands is not given up for another call's deadline:
what keeps a lease or commits a turn is sent all the same, and waits for its own.

    FAILED_PRECONDITION  Stale: the daemon is another one now; say Hello again
    NOT_FOUND            Unknown: this daemon knows no such space or turn
    INVALID_ARGUMENT     ValueError          RESOURCE_EXHAUSTED  Overloaded
    DATA_LOSS            Corrupt             anything else       Unavailable
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import grpc

from flatcake_client.keys import KeyArray
from flatcake_client.records import Found, Grant, Part, RemoteNode, Run, TurnHints, Welcome
from flatcake_proto.v1 import store_pb2, store_pb2_grpc
from flatcake_transport.access import Access, access_of
from flatcake_transport.address import Address, Medium
from flatcake_transport.endpoint import grpc_target
from flatcake_transport.errors import Corrupt, Overloaded, Unavailable
from flatcake_transport.reach import unreached
from flatcake_transport.remote import unseal_memory
from flatcake_transport.served import FileRange, StagedRanges
from flatcake_transport.space import SpaceSpec

log = logging.getLogger(__name__)

PROTOCOL: Final = 1
SILENCE_PAUSE_S: Final = 1.0
# A shorter deadline says more about the caller's hurry than about the daemon.
SILENCE_MIN_S: Final = 0.2

_OPTIONS: Final = (
    # 200,000 blocks, each a run of its own, are 8 MB of reply.
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.enable_http_proxy", 0),  # a daemon is never behind the proxy of the user's shell
    # A daemon that comes back is seen within half a second; gRPC would wait up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # gRPC also takes this for the time an attempt to connect may need: on a busy machine 100 ms were not enough. A socket
    # that nobody listens on fails at once all the same.
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),  # two clients in one process do not share a backoff
)

Reply = TypeVar("Reply")


class Stale(Unavailable):
    """The daemon does not know this client: it was restarted. Say Hello again."""


class Unknown(Unavailable):
    """The daemon knows the client but not the space or turn it names."""


class Unsent(Unavailable):
    """Refused here: the daemon was not asked."""


class Rpc:
    """The verbs of one daemon. Thread-safe. Verbs name the client by `welcome`, of the last Hello."""

    def __init__(self, endpoint: str, *, now_s: Callable[[], float] = time.monotonic) -> None:
        """Connects with the first call. Raises: ValueError: no endpoint gRPC could dial. Unavailable: no token or certificate."""
        self._target = grpc_target(endpoint)
        # Over TCP a daemon may want the cluster's token or a certificate: named by the variables that it reads itself.
        self._access = Access() if self._target.startswith("unix:") else access_of(os.environ)
        self._now_s = now_s
        self._silent_until_s = 0.0
        self._closed = False
        self._going: set[Any] = set()
        self._dial()

    def _dial(self) -> None:
        self._broken = False
        tls = self._access.tls
        self._channel = (
            grpc.insecure_channel(self._target, options=_OPTIONS)
            if tls is None
            else grpc.secure_channel(
                self._target, grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert), options=_OPTIONS
            )
        )
        self._stub = store_pb2_grpc.StoreStub(self._channel)

    def close(self) -> None:
        """Calls under way end as Unavailable. Twice is fine."""
        self._closed = True
        self._channel.close()

    def hello(self, name: str, timeout_s: float) -> Welcome:
        """Greet the daemon. After a broken connection on a new one: the old would wait before it tries again."""
        if self._broken and not self._closed:
            broken = self._channel
            self._dial()
            broken.close()
            if self._closed:  # meanwhile, and what was closed is the old one
                self._channel.close()
        request = store_pb2.HelloRequest(protocol=PROTOCOL, client_name=name)
        reply = self._call(self._stub.Hello, request, timeout_s)
        return Welcome(
            version=reply.version,
            incarnation=reply.incarnation,
            node_id=reply.node_id,
            client_id=reply.client_id,
            token=reply.token,
            handover_path=reply.handover_path,
            boot_id=reply.boot_id,
            arena_bytes=reply.arena_bytes,
            lease_ttl_s=reply.lease_ttl_ms / 1000,
            verify=reply.verify,
            memory_checksums=reply.memory_checksums,
            peers=reply.peers,
            peer_timeout_s=reply.peer_timeout_ms / 1000,
        )

    def open_space(self, welcome: Welcome, spec: SpaceSpec, timeout_s: float) -> None:
        request = store_pb2.OpenSpaceRequest(
            model=spec.model,
            dtype=spec.dtype,
            block_tokens=spec.block_tokens,
            plane_bytes=spec.plane_bytes,
            shards=spec.shards,
            weights=spec.weights,
            layout=spec.layout,
            fingerprint=spec.fingerprint,
        )
        self._ask(welcome, self._stub.OpenSpace, request, timeout_s)

    def lookup(
        self, welcome: Welcome, fingerprint: bytes, keys: KeyArray, *, pin: bool, remote: bool, timeout_s: float
    ) -> Found:
        """`remote`: this client can read what lies at other nodes."""
        request = store_pb2.LookupRequest(
            fingerprint=fingerprint,
            keys=keys.tobytes(),
            pin=pin,
            remote=remote,
        )
        reply = self._ask(welcome, self._stub.Lookup, request, timeout_s)
        self._check_incarnation(welcome, reply.incarnation)
        runs = tuple([_run(run) for run in reply.runs])
        nodes = tuple([_node(node) for node in reply.nodes])
        if nodes:  # what this client cannot read is no part of its hit
            far, near = {node.node_id: node for node in nodes}, welcome.node_id
            runs = tuple(
                itertools.takewhile(
                    lambda run: run.segment.node == near or _readable(run, far.get(run.segment.node)), runs
                )
            )
        return Found(runs, reply.lease_id, nodes, reply.copy_blocks)

    def renew(self, welcome: Welcome, lease_ids: Sequence[int], timeout_s: float) -> tuple[list[int], list[int]]:
        """Which of the leases live on, for another ttl from before this call; and of which also the part at another node."""
        request = store_pb2.RenewRequest(lease_ids=lease_ids)
        reply = self._ask(welcome, self._stub.Renew, request, timeout_s, stands=True)
        return list(reply.alive), list(reply.alive_remote)

    def release(self, welcome: Welcome, lease_ids: Sequence[int], timeout_s: float, wait_s: float) -> None:
        """Give leases back. Waits for the answer for `wait_s`; the call itself goes on for `timeout_s`, whoever waits.

        Raises: Unavailable: not heard yet, or it cannot be said.
        """
        request = store_pb2.ReleaseRequest(lease_ids=lease_ids)

        def call(request: store_pb2.ReleaseRequest, **options: Any) -> store_pb2.ReleaseReply:
            going: Any = self._stub.Release.future(request, **options)
            self._going.add(going)  # gRPC cancels a call that nobody has any more
            going.add_done_callback(self._going.discard)
            try:
                reply: store_pb2.ReleaseReply = going.result(timeout=wait_s)
            except (grpc.FutureTimeoutError, grpc.FutureCancelledError) as error:  # later, or the channel was closed
                raise Unavailable(f"the daemon did not answer in {wait_s:.3g} s; it may yet") from error
            return reply

        self._ask(welcome, call, request, timeout_s)

    def begin_turn(
        self,
        welcome: Welcome,
        fingerprint: bytes,
        shard: int,
        keys: KeyArray,
        root_key: bytes,
        session: str,
        hints: TurnHints,
        request_id: int,
        timeout_s: float,
    ) -> Grant:
        """`request_id`: names the call to `abort_unheard`, where its answer is lost."""
        request = store_pb2.BeginTurnRequest(
            fingerprint=fingerprint,
            shard=shard,
            session=session,
            keys=keys.tobytes(),
            context_tokens=hints.context_tokens,
            previous_reply_tokens=hints.previous_reply_tokens,
            share_counts=hints.share_counts or (),
            turn=hints.turn,
            root_key=root_key,
            request_id=request_id,
            copy=hints.copy,
        )
        reply = self._ask(welcome, self._stub.BeginTurn, request, timeout_s)
        self._check_incarnation(welcome, reply.incarnation)
        return Grant(reply.turn_id, tuple(_part(part) for part in reply.parts), reply.session)

    def commit_turn(
        self, welcome: Welcome, turn_id: int, shard: int, sums: Sequence[tuple[int, bytes]], timeout_s: float
    ) -> bool:
        """`sums`: (algorithm, u64 little-endian checksums) a part. True: all shards have committed, the turn is visible."""
        request = store_pb2.CommitTurnRequest(
            turn_id=turn_id,
            shard=shard,
            parts=[store_pb2.PartChecksums(algorithm=algorithm, checksums=data) for algorithm, data in sums],
        )
        return self._ask(welcome, self._stub.CommitTurn, request, timeout_s, stands=True).visible

    def abort_turn(self, welcome: Welcome, turn_id: int, shard: int, failure: str, timeout_s: float) -> None:
        """`failure`: not empty when a write failed; the daemon then seals the files."""
        request = store_pb2.AbortTurnRequest(
            turn_id=turn_id,
            shard=shard,
            failure=failure,
        )
        self._ask(welcome, self._stub.AbortTurn, request, timeout_s)

    def abort_unheard(self, welcome: Welcome, request_id: int, timeout_s: float) -> None:
        """Have the turn given back that a call of `begin_turn` began, if it did."""
        request = store_pb2.AbortTurnRequest(request_id=request_id)
        self._ask(welcome, self._stub.AbortTurn, request, timeout_s)

    def report_corrupt(self, welcome: Welcome, runs: Sequence[Run], timeout_s: float) -> None:
        """Of the segments of these runs."""
        suspects = [store_pb2.Suspect(segment=run.segment, generation=run.generation) for run in runs]
        request = store_pb2.ReportCorruptRequest(segments=suspects)
        self._ask(welcome, self._stub.ReportCorrupt, request, timeout_s)

    def stage(
        self, welcome: Welcome, lease_id: int, node_id: int, ranges: Sequence[FileRange], timeout_s: float
    ) -> StagedRanges:
        """Have another node read ranges of files of the lease into memory that we then get."""
        request = store_pb2.StageRequest(
            lease_id=lease_id,
            node_id=node_id,
            ranges=[
                store_pb2.FileRange(file_id=each.file_id, offset=each.offset, size_bytes=each.size_bytes)
                for each in ranges
            ],
        )
        reply = self._ask(welcome, self._stub.Stage, request, timeout_s)
        return StagedRanges(unseal_memory(reply.memory), reply.offset, reply.staged_id, reply.ttl_ms / 1000)

    def unstage(
        self, welcome: Welcome, lease_id: int, node_id: int, staged_ids: Sequence[int], timeout_s: float
    ) -> None:
        request = store_pb2.UnstageRequest(
            lease_id=lease_id,
            node_id=node_id,
            staged_ids=staged_ids,
        )
        self._ask(welcome, self._stub.Unstage, request, timeout_s)

    def _check_incarnation(self, welcome: Welcome, incarnation: bytes) -> None:
        if incarnation != welcome.incarnation:
            raise Stale("another daemon answered than the one that was greeted")

    def _ask(
        self, welcome: Welcome, verb: Callable[..., Reply], request: Any, timeout_s: float, *, stands: bool = False
    ) -> Reply:
        """As the client that was greeted so. `stands`: as for `_call`."""
        request.client_id, request.incarnation = welcome.client_id, welcome.incarnation
        return self._call(verb, request, timeout_s, stands=stands)

    def _call(self, verb: Callable[..., Reply], request: Any, timeout_s: float, *, stands: bool = False) -> Reply:
        """`stands`: it is about work that is done already, and is sent also to a daemon that did not answer lately."""
        if timeout_s <= 0:
            raise Unsent("no time was left to ask the daemon")
        if self._now_s() < self._silent_until_s and not stands:
            raise Unsent(f"the daemon did not answer lately; it is asked again within {SILENCE_PAUSE_S:g} s")
        try:
            reply = verb(request, timeout=timeout_s, metadata=self._access.metadata)
        except grpc.RpcError as error:
            raise self._translated(error, timeout_s) from error
        except ValueError as error:  # how gRPC says that the channel was closed
            raise Unavailable(f"the client is closed: {error}") from error
        self._silent_until_s = 0.0
        return reply

    def _translated(self, error: grpc.RpcError, timeout_s: float) -> Exception:
        code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
        text = (error.details() if isinstance(error, grpc.Call) else None) or str(error)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            if timeout_s >= SILENCE_MIN_S:
                self._silent_until_s = self._now_s() + SILENCE_PAUSE_S
            return Unavailable(f"the daemon did not answer in {timeout_s:.3g} s")
        if code is grpc.StatusCode.UNAVAILABLE:
            self._broken = True
            text = unreached(self._target) or text
        kinds: dict[grpc.StatusCode, type[Exception]] = {
            grpc.StatusCode.FAILED_PRECONDITION: Stale,
            grpc.StatusCode.NOT_FOUND: Unknown,
            grpc.StatusCode.INVALID_ARGUMENT: ValueError,
            grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
            grpc.StatusCode.DATA_LOSS: Corrupt,
        }
        return kinds.get(code, Unavailable)(text)


def _run(run: store_pb2.Run) -> Run:
    return Run(
        Address(run.segment),
        run.segment_blocks,
        run.first_block,
        run.blocks,
        run.segment_bytes,
        run.file_id,
        run.file_offset,
        run.generation,
    )


def _node(node: store_pb2.RemoteNode) -> RemoteNode:
    try:
        arena = unseal_memory(node.fabric.arena) if node.fabric.arena else None
    except ValueError as error:  # another version of the words: a miss, and not an end of the engine
        log.warning("the memory of node %d cannot be read: %s", node.node_id, error)
        arena = None
    return RemoteNode(
        node.node_id,
        node.lease_id,
        node.lease_ttl_ms / 1000,
        arena,
        node.verify,
        node.fabric.files,
        frozenset(node.exported_files),
    )


def _readable(run: Run, node: RemoteNode | None) -> bool:
    """Whether the run of another node is where it can be read from here, and within its bytes."""
    if node is None:
        return False
    if run.segment.medium is Medium.MEMORY:
        return node.arena is not None and run.segment.offset + run.segment_bytes <= node.arena.size_bytes
    return node.files or run.file_id in node.exported


def _part(part: store_pb2.Part) -> Part:
    return Part(
        Address(part.segment),
        part.first_block,
        part.blocks,
        part.segment_bytes,
        part.file_id,
        part.file_offset,
        part.reason,
    )
