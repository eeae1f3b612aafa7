"""What this node asks of others: one link a node, made when it is first needed, lost with its stream.

A link is good for one incarnation at one address. A reply from another incarnation, the end of the stream, or a member that is
listed with another incarnation or address ends it, and no reply is taken in that comes through it later: whoever attaches names
the leases it holds there, and all others end. A peer that failed is not asked again for a moment, so a dead one costs one lookup
its time and not every one.

Every verb is one round trip within its deadline and raises `Unavailable`, or `Overloaded` where the peer says so. Greeting and attaching are two more, once a link.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc

from flatcake_proto.v1 import peer_pb2, peer_pb2_grpc, store_pb2
from flatcake_server.cluster.credentials import Secrets
from flatcake_server.cluster.members import Member
from flatcake_server.cluster.peer_service import PROTOCOL
from flatcake_server.cluster.proof import NONCE_BYTES, Handshake
from flatcake_server.tasks import end
from flatcake_transport.endpoint import grpc_target
from flatcake_transport.errors import FlatCakeError, Overloaded, Unavailable

log = logging.getLogger(__name__)

# A peer that failed is left alone: for longer each time, so that a dead one costs a lookup in so many.
PAUSE_S_MIN: Final = 1.0
PAUSE_S_MAX: Final = 10.0
HURRY_S: Final = 0.2  # a shorter deadline says more about the caller's hurry than about who was asked
BEATS_A_TIMEOUT: Final = 3  # two may be late


@dataclass(slots=True, eq=False)
class Link:
    """An attachment to one incarnation of a node."""

    member: Member
    stub: Any
    peer_id: int
    life: Any  # the stream
    watcher: asyncio.Task[None] | None = None


class Peers:
    """Belongs to the event loop. `held`: the leases of a member's that are still in use here."""

    def __init__(
        self,
        me: Member,
        cluster: str,
        secrets_: Secrets,
        timeout_s: float,
        message_bytes_max: int,
        *,
        held: Callable[[Member], Sequence[int]],
        now_s: Callable[[], float],
        unforeseen: Callable[[str, BaseException], None],
    ) -> None:
        self._me = me
        self._cluster = cluster
        self._secrets = secrets_
        self._timeout_s = timeout_s
        self._held = held
        self._now_s = now_s
        self._unforeseen = unforeseen
        # Channels are let go of, never closed by word: `grpc.aio.Channel.close` looks through the stacks of all tasks, and after
        # that the servers of this process answered no call any more (grpcio 1.76). The last reference ends the connection.
        self._options = [
            ("grpc.max_receive_message_length", message_bytes_max),
            ("grpc.max_send_message_length", message_bytes_max),
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        self._links: dict[int, Link] = {}
        self._linking: dict[int, asyncio.Task[Link]] = {}
        self._pauses: dict[int, tuple[Member, float, float]] = {}  # until when, and how long
        self._watchers: set[asyncio.Task[None]] = set()
        self._closed = False
        self.calls: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._links)

    def linked(self, member: Member) -> bool:
        link = self._links.get(member.node_id)
        return link is not None and link.member == member

    def usable(self, member: Member) -> bool:
        """Not one that failed a moment ago."""
        paused = self._pauses.get(member.node_id)
        return paused is None or paused[0] != member or self._now_s() >= paused[1]

    def keep(self, members: Iterable[Member]) -> None:
        """Who is there now: links to others, or to earlier incarnations of these, end."""
        known = {member.node_id: member for member in members}
        for node_id, link in list(self._links.items()):
            if known.get(node_id) != link.member:
                self._drop(link)
        for node_id in [node_id for node_id in self._pauses if node_id not in known]:
            del self._pauses[node_id]

    async def greet(self, address: str) -> peer_pb2.GreetReply:
        """Who is at an address. Raises: Unavailable: nobody, not in time, or without the cluster's token."""
        reply, _ = await self._greet(peer_pb2_grpc.PeerStub(self._channel(address)), self._timeout_s)
        return reply

    async def find(
        self, member: Member, space: bytes, keys: bytes, *, pin: bool, timeout_s: float, nvme_host: str = ""
    ) -> peer_pb2.FindReply:
        """The runs of the longest prefix of a chain that the member holds, and how its bytes are reached."""
        link = await self._link(member)
        request = peer_pb2.FindRequest(peer_id=link.peer_id, space=space, keys=keys, pin=pin, nvme_host=nvme_host)
        found: peer_pb2.FindReply = await self._ask(link, "find", link.stub.Find, request, timeout_s)
        return found

    async def probe(self, member: Member, keys: Sequence[bytes], timeout_s: float) -> bytes:
        """One byte a key: 1 where it is stored there."""
        link = await self._link(member)
        request = peer_pb2.ProbeRequest(peer_id=link.peer_id, keys=b"".join(keys))
        return bytes((await self._ask(link, "probe", link.stub.Probe, request, timeout_s)).held)

    async def prolong(
        self, node_id: int, incarnation: bytes, lease_ids: Sequence[int], *, timeout_s: float
    ) -> list[int]:
        """Which of the leases live on."""
        link = self._standing(node_id, incarnation)
        request = peer_pb2.ProlongRequest(peer_id=link.peer_id, lease_ids=lease_ids)
        return list((await self._ask(link, "prolong", link.stub.Prolong, request, timeout_s)).alive)

    async def give_back(self, node_id: int, incarnation: bytes, lease_ids: Sequence[int]) -> None:
        link = self._standing(node_id, incarnation)
        request = peer_pb2.GiveBackRequest(peer_id=link.peer_id, lease_ids=lease_ids)
        try:
            await self._ask(link, "give_back", link.stub.GiveBack, request, self._timeout_s)
        except FlatCakeError:
            self._drop(link)  # it hears of it when we attach again
            raise

    async def stage(
        self, node_id: int, incarnation: bytes, lease_id: int, ranges: Sequence[store_pb2.FileRange], timeout_s: float
    ) -> store_pb2.StageReply:
        """Have ranges of files of the lease read there. Raises: Overloaded: no room there in time. Unavailable."""
        link = self._standing(node_id, incarnation)
        request = peer_pb2.StageFilesRequest(peer_id=link.peer_id, lease_id=lease_id, ranges=ranges)
        reply: peer_pb2.StageFilesReply = await self._ask(link, "stage", link.stub.StageFiles, request, timeout_s)
        return reply.staged

    async def unstage(self, node_id: int, incarnation: bytes, staged_ids: Sequence[int]) -> None:
        link = self._standing(node_id, incarnation)
        request = peer_pb2.UnstageFilesRequest(peer_id=link.peer_id, staged_ids=staged_ids)
        await self._ask(link, "unstage", link.stub.UnstageFiles, request, self._timeout_s)

    async def doubt(self, member: Member, segments: Sequence[store_pb2.Suspect]) -> None:
        """Bytes that were read of these segments differ from their checksums."""
        link = self._standing(member.node_id, member.incarnation)
        request = peer_pb2.DoubtRequest(peer_id=link.peer_id, segments=segments)
        await self._ask(link, "doubt", link.stub.Doubt, request, self._timeout_s)

    async def attach(self, member: Member) -> None:
        """Have a link before it is needed."""
        await self._link(member)

    async def close(self) -> None:
        """End all links, and make none any more. Twice is fine."""
        self._closed = True
        await end(self._linking.values())
        for link in list(self._links.values()):
            self._drop(link)
        await end(self._watchers)

    # -- links -----------------------------------------------------------------------------------------------------

    def _channel(self, address: str) -> grpc.aio.Channel:
        return self._secrets.channel(grpc_target(address), self._options)

    def _standing(self, node_id: int, incarnation: bytes) -> Link:
        link = self._links.get(node_id)
        if link is None or link.member.incarnation != incarnation:
            raise Unavailable(f"node {node_id} is another one now")
        return link

    async def _link(self, member: Member) -> Link:
        link = self._links.get(member.node_id)
        if link is not None and link.member == member:
            return link
        if self._closed:
            raise Unavailable("this node is leaving")
        task = self._linking.get(member.node_id)
        if task is None:
            task = asyncio.ensure_future(self._attach(member))
            self._linking[member.node_id] = task
            task.add_done_callback(lambda _: self._linking.pop(member.node_id, None))
        link = await asyncio.shield(task)  # others wait for the same one
        if link.member != member:
            raise Unavailable(f"node {member.node_id} is another one now")
        return link

    async def _attach(self, member: Member) -> Link:
        if (old := self._links.get(member.node_id)) is not None:
            self._drop(old)
        stub = peer_pb2_grpc.PeerStub(self._channel(member.address))
        try:
            attached, life, named = await self._enter(stub, member)
        except Unavailable:
            self._pause(member)
            raise
        link = Link(member, stub, attached.peer_id, life)
        self._links[member.node_id] = link
        self._pauses.pop(member.node_id, None)
        link.watcher = asyncio.ensure_future(self._watch(link))
        self._watchers.add(link.watcher)
        link.watcher.add_done_callback(self._watchers.discard)
        if ended := set(named).difference(self._held(member)):  # given back while we attached
            await self.give_back(member.node_id, member.incarnation, list(ended))
        return link

    async def _enter(self, stub: Any, member: Member) -> tuple[peer_pb2.Attached, Any, Sequence[int]]:
        """Greet and attach, each proving itself to the other; also which leases were named as held."""
        reply, shake = await self._greet(stub, self._timeout_s)
        if reply.incarnation != member.incarnation:
            raise Unavailable(f"another node than {member.node_id} answers at {member.address}")
        self.calls["attach"] += 1
        named = self._held(member)
        request = peer_pb2.AttachRequest(
            nonce=shake.server_nonce,
            proof=shake.proof(self._secrets.token, "asker"),
            beat_ms=int(self._timeout_s * 1000 / BEATS_A_TIMEOUT),
            lease_ids=named,
            node_id=shake.asker_node,
            incarnation=shake.asker,
            asker_nonce=shake.asker_nonce,
        )
        life = stub.Attach(request)
        try:
            attached = await asyncio.wait_for(life.read(), self._timeout_s)
        except (grpc.RpcError, TimeoutError) as error:
            raise Unavailable(f"node {member.node_id} does not let us attach: {_said(error)}") from error
        if not isinstance(attached, peer_pb2.Attached) or attached.incarnation != member.incarnation:
            raise Unavailable(f"node {member.node_id} ended the attachment")
        return attached, life, named

    async def _greet(self, stub: Any, timeout_s: float) -> tuple[peer_pb2.GreetReply, Handshake]:
        me, nonce = self._me, secrets.token_bytes(NONCE_BYTES)
        request = peer_pb2.GreetRequest(
            protocol=PROTOCOL,
            version=me.version,
            cluster=self._cluster,
            cluster_fingerprint=me.fingerprint,
            node_id=me.node_id,
            incarnation=me.incarnation,
            nonce=nonce,
        )
        self.calls["greet"] += 1
        try:
            reply = await stub.Greet(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise Unavailable(f"a peer cannot be greeted: {_said(error)}") from error
        shake = Handshake(me.incarnation, me.node_id, nonce, reply.incarnation, reply.node_id, reply.nonce)
        if not shake.proves(self._secrets.token, "server", reply.proof):
            raise Unavailable(f"node {reply.node_id} does not know the cluster's token")
        return reply, shake

    async def _watch(self, link: Link) -> None:
        """Until its stream ends or is silent: then nothing that the peer lent us can be renewed before we attach again."""
        try:
            while isinstance(await asyncio.wait_for(link.life.read(), self._timeout_s), peer_pb2.Attached):
                pass
        except TimeoutError:
            self._pause(link.member)
        except grpc.RpcError as error:
            log.debug("the stream of node %d ended: %s", link.member.node_id, _said(error))
        except Exception as error:  # noqa: BLE001 - the edge of a task that nobody waits for
            self._unforeseen(f"the stream of node {link.member.node_id} ended", error)
        log.info("the link to node %d ended", link.member.node_id)
        self._drop(link)

    async def _ask(
        self, link: Link, verb: str, call: Callable[..., Awaitable[Any]], request: Any, timeout_s: float
    ) -> Any:
        self.calls[verb] += 1
        try:
            reply = await call(request, timeout=timeout_s)
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.aio.AioRpcError) else None
            if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise Overloaded(f"node {link.member.node_id} is busy: {_said(error)}") from error
            hurried = code is grpc.StatusCode.DEADLINE_EXCEEDED and timeout_s < HURRY_S
            well = code is grpc.StatusCode.ABORTED  # that one thing cannot be had
            if not well and not hurried and self._links.get(link.member.node_id) is link:
                self._pause(link.member)
            if code is grpc.StatusCode.UNAUTHENTICATED:  # it gave us up
                self._drop(link)
            raise Unavailable(f"node {link.member.node_id} does not answer: {_said(error)}") from error
        if reply.incarnation != link.member.incarnation:
            self._drop(link)
            raise Unavailable(f"node {link.member.node_id} is another one now")
        if self._links.get(link.member.node_id) is not link:  # what it lends us by this, it may take back meanwhile
            raise Unavailable(f"the link to node {link.member.node_id} ended")
        self._pauses.pop(link.member.node_id, None)
        return reply

    def _pause(self, member: Member) -> None:
        before = self._pauses.get(member.node_id)
        pause_s = min(PAUSE_S_MAX, 2 * before[2]) if before is not None and before[0] == member else PAUSE_S_MIN
        self._pauses[member.node_id] = member, self._now_s() + pause_s, pause_s

    def _drop(self, link: Link) -> None:
        if self._links.get(link.member.node_id) is not link:
            return
        del self._links[link.member.node_id]
        link.life.cancel()
        if link.watcher is not None:
            link.watcher.cancel()


def _said(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name.lower()}: {error.details()}"
    return str(error) or type(error).__name__
