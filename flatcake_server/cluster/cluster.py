"""A node among others: keeps its number, tells the directory what it holds, and serves and asks peers.

Start: the node already serves its engines; then it takes its number. A number that somebody has who answers is refused, and
so is the start; a directory that does not answer is not: the node goes on by itself and joins when it can. Stop: leave
first, so that no peer comes any more.

Losing the directory loses nothing: local service goes on, remote lookups miss at once, and when a beat is answered again by a
directory that does not know us, everything is published anew.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final

from flatcake_server.cluster.borrowed import Loans
from flatcake_server.cluster.credentials import Secrets
from flatcake_server.cluster.directory import Directory
from flatcake_server.cluster.doubts import Doubts
from flatcake_server.cluster.exporter import Exporter
from flatcake_server.cluster.fabric import Fabric
from flatcake_server.cluster.hot import HotPrefixes
from flatcake_server.cluster.importer import Importer
from flatcake_server.cluster.members import Member, Membership, State, Verdict
from flatcake_server.cluster.peer_service import PeerService
from flatcake_server.cluster.peers import Peers
from flatcake_server.cluster.publisher import Publisher
from flatcake_server.cluster.remote import RemoteLookup
from flatcake_server.cluster.serving import COUNTS, FileServer
from flatcake_server.cluster.static_directory import StaticDirectory
from flatcake_server.cluster.sweeper import Sweeper
from flatcake_server.cluster.telling import Telling
from flatcake_server.rpc import Timings
from flatcake_server.stats import ClusterStats, NodeRow
from flatcake_server.store import Store
from flatcake_server.tasks import Background
from flatcake_transport.errors import FlatCakeError, Unavailable
from flatcake_transport.units import parse_listen

log = logging.getLogger(__name__)

JOIN_TRIES: Final = 3  # at the start: take the number, or ask who has it and take it over
SWEEP_S: Final = 1.0
LIST_TTLS: Final = 10  # a list that changed comes by itself; this often also one that seems not to have
DEAD_TTLS: Final = 2  # a node that is in no list for so many node_ttl is swept from the directory
DIRECTORY_CALLS: Final = ("beat", "tell", "probe", "audit", "sweep")
EAGER_LINKS_MAX: Final = 32  # in a small cluster everybody is linked before the first lookup needs it


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """From the configuration; see there."""

    directory: str
    name: str
    peers: tuple[str, ...]
    redis_url: str
    node_ttl_s: float
    anchor_ttl_s: float
    publish_rate_max: float
    peer_timeout_s: float
    lease_ttl_s: float
    leases_max: int
    message_bytes_max: int
    verify: bool
    copy_after_hits: int


@dataclass(frozen=True, slots=True, eq=False)
class Nvme:
    """The two ends of NVMe-oF here, where it is configured. `host`: our NQN as a reader; `address`: where we are reached."""

    exporter: Exporter | None = None
    importer: Importer | None = None
    host: str = ""
    address: str = ""


class Cluster:
    """Belongs to the event loop. Made before the wire, started after it."""

    def __init__(
        self, store: Store, me: Member, options: ClusterOptions, secrets: Secrets, fabric: Fabric,
        nvme: Nvme, differs: Callable[[int], Awaitable[bool]], timings: Timings,
    ) -> None:  # fmt: skip
        """`differs`: whether the bytes of a segment here are other ones than its footer says."""
        self._store = store
        self._fabric = fabric
        self._nvme = nvme
        self._importer = nvme.importer
        self._options = options
        self._now_s = time.monotonic
        self._background = Background(store.retirement.counts)
        self.counts: Counter[str] = Counter()
        self.membership = Membership(me, options.node_ttl_s)
        self._loans = Loans(options.leases_max)
        self.peers = Peers(
            me, options.name, secrets, options.peer_timeout_s, options.message_bytes_max,
            held=lambda owner: self._loans.of_node(owner.node_id, owner.incarnation), now_s=self._now_s,
            unforeseen=self._background.unforeseen,
        )  # fmt: skip
        self.directory: Directory = self._directory()
        self.telling: Telling | None = None
        if options.directory == "redis":
            self.telling = Telling(
                store.catalog, self.membership, self.directory, Publisher(options.publish_rate_max),
                Sweeper(options.anchor_ttl_s, DEAD_TTLS * options.node_ttl_s), self.counts, self._now_s,
                self._background.unforeseen,
            )  # fmt: skip
        self._doubts = Doubts(store, differs, self.counts)
        self.service = PeerService(
            store, me, options.name, secrets, fabric.words, options.lease_ttl_s, timings, refused=self._refusal,
            doubted=self._doubts.add,
        )  # fmt: skip
        self.remote = RemoteLookup(
            store, self.membership, self.directory, self.peers, self._loans, self.counts, options.peer_timeout_s,
            options.verify, self._now_s, self._background.spawn, nvme.host, nvme.importer,
            HotPrefixes(options.copy_after_hits) if options.copy_after_hits else None,
        )  # fmt: skip
        self._listed_s = float("-inf")
        self._refused = ""
        self._silent = False

    def _directory(self) -> Directory:
        options = self._options
        if options.directory == "static":
            return StaticDirectory(options.peers, self.peers, self.membership)
        try:
            from flatcake_server.cluster.redis_directory import RedisDirectory
        except ImportError as error:
            raise Unavailable("directory redis needs the redis package: pip install 'flatcake[cluster]'") from error
        return RedisDirectory(options.redis_url, options.name, timeout_s=options.peer_timeout_s)

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self, address: str) -> None:
        """Take the number and begin. `address`: where peers reach us.

        Raises: Unavailable: a living node has the number.
        """
        # First: what a killed daemon left exported is withdrawn with it.
        exporter = self.service.exporter = self._nvme.exporter
        if exporter is not None:
            await exporter.start()
            if not exporter.failure:
                self._fabric.nvme = exporter.nqn, self._nvme.address
        await self._fabric.start()
        if self._fabric.bounce is not None:
            self.service.files = FileServer(self._store, self._fabric.bounce, self._fabric.bounced)
        self.membership.me = replace(self.membership.me, address=address)
        for _ in range(JOIN_TRIES):
            await self._beat()
            if self._refused:
                raise Unavailable(self._refused)
            if not self.membership.takeover:
                break
        state = self.membership.state(self._now_s())
        log.log(
            logging.INFO if state is State.JOINED else logging.WARNING,
            "node %d of cluster %s at %s is %s (directory %s)",
            self.membership.me.node_id, self._options.name, address, state.value, self._options.directory,
        )  # fmt: skip
        self._background.spawn(self._beats())
        self._background.spawn(self._sweeps())
        if self.telling is not None:
            for loop in (self.telling.publishes_stored, self.telling.publishes, self.telling.sweeps):
                self._background.spawn(loop())

    async def stop(self) -> None:
        """Leave, and let all links go. Twice is fine."""
        joined = self.membership.state(self._now_s()) is State.JOINED
        self.membership.leave()
        if self.telling is not None:
            self.telling.close()
        self.service.close()
        await self._background.end()
        if joined:
            try:
                await self.directory.leave(self.membership.me)
            except FlatCakeError as error:  # it will see us gone when the number lapses
                log.info("left without a word: %s", error)
        await self.peers.close()
        await self.directory.close()
        await self._doubts.close()
        if self._importer is not None:
            await self._importer.close()
        if self.service.exporter is not None:
            await self.service.exporter.stop()
        files, self.service.files = self.service.files, None
        if files is not None:
            await files.close()
        await self._fabric.close()

    # -- membership ------------------------------------------------------------------------------------------------

    async def _beats(self) -> None:
        while True:
            await asyncio.sleep(self.membership.wait_s(self._now_s()))
            try:
                await self._beat()
            except Exception as error:  # noqa: BLE001 - the next one comes
                self._background.unforeseen("a beat failed", error)
                self.membership.failed(self._now_s(), random.random())  # noqa: S311

    async def _beat(self) -> None:
        membership, asked_s = self.membership, self._now_s()
        listing = asked_s >= self._listed_s + LIST_TTLS * membership.ttl_s
        self.counts["directory/beat"] += 1
        try:
            beat = await self.directory.beat(membership.me, membership.ttl_s, membership.takeover, members=listing)
        except FlatCakeError as error:
            membership.failed(self._now_s(), random.random())  # noqa: S311
            self.counts["directory_failures"] += 1
            if not self._silent:
                log.warning("no directory: local service goes on, remote lookups miss: %s", error)
            self._silent = True
            return
        if self._silent:
            log.info("the directory answers again")
        self._silent = False
        if beat.members is not None:
            self._listed_s = asked_s
        again = membership.answered(beat, asked_s)
        if self.telling is not None:
            self.telling.beaten(beat, again=again)
        self._meet()
        self._refused = ""
        if beat.verdict is Verdict.TAKEN and beat.holder is not None:
            await self._ask_holder(beat.holder)

    def _meet(self) -> None:
        """Let go of who left, and in a small cluster be linked to all: also to those whose link ended meanwhile."""
        known = self.membership.known
        self.peers.keep(known.values())
        for member in known.values() if len(known) <= EAGER_LINKS_MAX else ():
            if self.peers.usable(member) and not self.peers.linked(member):
                self._background.spawn(self._link(member))

    async def _link(self, member: Member) -> None:
        try:
            await self.peers.attach(member)
        except FlatCakeError as error:
            log.info("node %d at %s cannot be linked: %s", member.node_id, member.address, error)

    async def _ask_holder(self, holder: Member) -> None:
        """Somebody has our number: does that incarnation live?"""
        node_id, name = self.membership.me.node_id, self._options.name
        where = parse_listen(holder.address) if holder.address else None
        try:
            if where is not None:
                async with asyncio.timeout(self._options.peer_timeout_s):
                    _, writer = await asyncio.open_connection(where.host, where.port)
                    writer.close()
                reply = await self.peers.greet(holder.address)
                if reply.incarnation == holder.incarnation:
                    self._refused = (
                        f"node {node_id} of cluster {name} is at {holder.address} already, and it answers: give this node "
                        "another --node-id, or stop that one"
                    )
                    log.error("%s", self._refused)
                    return
                self.membership.holder_is_dead(holder.incarnation)
        except ConnectionRefusedError:
            self.membership.holder_is_dead(holder.incarnation)
        except (FlatCakeError, OSError, TimeoutError) as error:
            log.warning("whether node %d at %s lives cannot be told: %s", node_id, holder.address, error)

    def _refusal(self) -> str:
        """Why no peer is served now, or nothing. One that is cut off serves on: only its number may be another's."""
        if self.membership.state(self._now_s()) is State.LEFT:
            return "this node is leaving"
        if self.membership.holder is not None:
            return self._refused or f"node {self.membership.me.node_id} is another one now"
        return ""

    async def _sweeps(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                self.remote.sweep()
                self.service.sweep()
            except Exception as error:  # noqa: BLE001 - the next one comes
                self._background.unforeseen("a sweep of leases failed", error)

    # -- what operators see ------------------------------------------------------------------------------------------

    def stats(self) -> ClusterStats:
        counts, peer_counts = self.counts, self._store.peer_counts
        told = self.telling.publisher.stats() if self.telling is not None else None
        return ClusterStats(
            directory=self._options.directory,
            state=self.membership.state(self._now_s()).value,
            refusal=self._refused,
            nodes=1 + len(self.membership.known),
            links=len(self.peers),
            attached=self.service.attached,
            loans=len(self._loans),
            anchors_published=told.published if told else 0,
            anchors_pending=told.pending if told else 0,
            anchors_published_total=told.published_total if told else 0,
            anchors_withdrawn_total=told.withdrawn_total if told else 0,
            anchors_missing_total=told.missing_total if told else 0,
            entries_swept_total=counts["entries_swept"],
            remote_lookups_total=counts["remote_lookups"],
            remote_hits_total=counts["remote_hits"],
            remote_misses_total=counts["remote_misses"],
            remote_failures_total=counts["remote_failures"],
            remote_blocks_total=counts["remote_blocks"],
            stale_hints_total=counts["stale_hints"],
            directory_failures_total=counts["directory_failures"],
            strangers_total=self.service.counts["strangers"],
            peer_lookups_total=peer_counts["lookups"],
            peer_hit_blocks_total={medium: peer_counts[f"hit_blocks/{medium}"] for medium in ("memory", "ssd")},
            directory_calls_total={verb: counts[f"directory/{verb}"] for verb in DIRECTORY_CALLS},
            peer_calls_total=dict(self.peers.calls),
            files_served=self._files_served(),
            nvmeof=self._nvmeof(),
            nvmeof_failure=self._nvmeof_failure(),
            staged=len(self.service.files) if self.service.files is not None else 0,
            doubts_told_total=counts["doubts_told"],
            doubts_total=counts["doubts"],
            doubts_refuted_total=counts["doubts_refuted"],
            copies_told_total=counts["copies_told"],
            copies_refused_total=self._store.reserver.copies_refused,
            copied_bytes=self._store.catalog.copied_bytes,
            members=self._rows(),
        )

    def _files_served(self) -> dict[str, int]:
        counted = self.service.files.counts if self.service.files is not None else Counter[str]()
        return {name: counted[name] for name in COUNTS}

    def _nvmeof(self) -> dict[str, int]:
        exporter, importer = self._nvme.exporter, self._importer
        made = exporter.counts if exporter is not None else Counter[str]()
        read = importer.counts if importer is not None else Counter[str]()
        return {
            "exports": made["exports"],
            "withdrawals": made["withdrawals"],
            "stuck": made["stuck"],
            "refused": made["refused"],
            "export_failures": made["failures"],
            "opened": read["opened"],
            "open_failures": read["failures"],
        }

    def _nvmeof_failure(self) -> str:
        ends = (self._nvme.exporter, self._importer)
        return next((end.failure for end in ends if end is not None and end.failure), "")

    def _rows(self) -> tuple[NodeRow, ...]:
        membership = self.membership
        copied_bytes = self._store.catalog.copied_bytes
        rows = [_row(membership.me, "this node", membership.state(self._now_s()).value, copied_bytes=copied_bytes)]
        for _, member in sorted(membership.known.items()):
            link = "linked" if self.peers.linked(member) else "known" if self.peers.usable(member) else "silent"
            found_blocks = self.counts[f"found_at/{member.node_id}"]
            rows.append(_row(member, link, State.JOINED.value, found_blocks=found_blocks))
        return tuple(rows)


def _row(member: Member, link: str, state: str, *, found_blocks: int = 0, copied_bytes: int = 0) -> NodeRow:
    return NodeRow(
        member.node_id,
        state,
        link,
        member.address,
        member.version,
        member.incarnation.hex(),
        found_blocks,
        copied_bytes,
    )
