"""Builds a node and runs it: the only place that constructs. Everything else is handed what it needs.

Start: take the SSD paths (a second daemon is refused here), read their journals, adopt, map the arena, listen. The arena is
faulted in behind; the node serves long before. In a cluster it then takes its number and meets its peers. Stop (SIGTERM, SIGINT): leave the cluster, refuse new turns, wait for open ones up to
`drain_timeout`, close the wire, then the disks. A kill at any moment is as good as a stop for what was committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from aiohttp import web

from flatcake_server.adopt import take_over
from flatcake_server.arena import Arena
from flatcake_server.catalog import Catalog
from flatcake_server.clients import Clients
from flatcake_server.cluster.build import advertised, build_cluster, load_node_secrets
from flatcake_server.cluster.cluster import Cluster
from flatcake_server.commit import Committer
from flatcake_server.config import NodeConfig
from flatcake_server.disk import Disk
from flatcake_server.extents import ExtentAllocator
from flatcake_server.handover import Handover
from flatcake_server.index import BlockIndex
from flatcake_server.lease import LeaseTable
from flatcake_server.placement import Policy
from flatcake_server.reserve import Numbers, Reserver
from flatcake_server.retire import Retirement
from flatcake_server.room import Room
from flatcake_server.rpc import Identity, StoreService, Timings
from flatcake_server.rpc_server import RpcServer
from flatcake_server.rpc_views import AdminService, Views
from flatcake_server.session import number_of_now
from flatcake_server.sizing import SizingPolicy
from flatcake_server.sockets import take_socket
from flatcake_server.store import Bounds, Store
from flatcake_server.uses import tell_uses
from flatcake_server.views import Reports
from flatcake_server.web import start_web, web_app
from flatcake_transport.address import OFFSET_LIMIT, Medium
from flatcake_transport.errors import FlatCakeError, Overloaded, Unavailable
from flatcake_transport.units import Listen, approximate_size, parse_listen

log = logging.getLogger(__name__)

# Ten times the lease: a client that can move no bytes and says nothing is no client.
SILENCE_LEASES = 10
TICK_S = 1.0
CLOSE_TIMEOUT_S = 5.0
CANNOT_NOW = 3  # the exit code of every command that could not do what it was told


class Node:
    """One node, built from its configuration. `start` and `stop` belong to one event loop."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self._started_s = time.monotonic()
        self.memory = ExtentAllocator(config.memory_bytes)
        self.ssd_range = ExtentAllocator(OFFSET_LIMIT, next_fit=True)
        self.disks = {
            pool: Disk(path, pool, config.ssd_path_bytes, config.disk_queue_max)
            for pool, path in enumerate(config.ssd_paths, 1)
        }
        self.catalog = Catalog(BlockIndex(config.index_blocks_max, seed=secrets.randbits(63)))
        # Paths that served apart, in turn or on other nodes, name no two files alike and can serve together.
        self.numbers = Numbers(file_id=number_of_now())
        self.leases = LeaseTable(config.lease_ttl, config.leases_max)
        self.retirement = Retirement(self.catalog, self.memory, self.ssd_range, self.leases, self.disks)
        self.room = Room(
            self.catalog,
            self.memory,
            self.disks,
            self.retirement,
            {
                Medium.MEMORY: (config.memory_high_watermark, config.memory_low_watermark),
                Medium.SSD: (config.ssd_high_watermark, config.ssd_low_watermark),
            },
        )
        self.identity = Identity(
            version=metadata.version("flatcake"),
            incarnation=secrets.token_bytes(16),
            node_id=config.node_id,
            handover_path=str(config.handover_path),
            boot_id=Path("/proc/sys/kernel/random/boot_id").read_bytes().strip(),
            arena_bytes=config.memory_bytes,
            lease_ttl_s=config.lease_ttl,
            verify=config.verify,
            cluster_fingerprint=config.cluster.fingerprint,
            memory_checksums=config.verify == "all" or (config.verify == "remote" and config.directory != "none"),
            peers=config.directory != "none",
            peer_timeout_s=config.peer_timeout,
        )
        self.cluster: Cluster | None = None  # None: a node by itself
        self.timings = Timings()
        self._undo = contextlib.AsyncExitStack()  # of what has been taken, the last first
        self._rested = True
        self._web: web.AppRunner | None = None
        self._ticker: asyncio.Task[None] | None = None
        self.grpc_port = 0
        self.http: Listen | None = None  # where the page really is, if port 0 was asked for

    def build_store(self) -> None:
        """The store and what it stands on: all but the wire."""
        config = self.config
        try:
            self.arena = Arena(config.memory_bytes, config.huge_pages)
        except OSError as error:
            raise Unavailable(
                f"no memory of {approximate_size(config.memory_bytes)}: {error.strerror}: lower memory_bytes"
            ) from error
        self._undo.callback(self.arena.close)
        self._undo.push_async_callback(self._close_disks)
        self._undo.push_async_callback(self._close_web)
        self._undo.push_async_callback(self._drain)
        reserver = Reserver(
            self.catalog,
            self.memory,
            self.ssd_range,
            self.disks,
            self.room,
            self.retirement,
            self.numbers,
            node_id=config.node_id,
            sessions_max=config.sessions_max,
            sizing=SizingPolicy(),
            copy_bytes_max=int(config.copy_memory_share * config.memory_bytes) if config.copy_after_hits else 0,
            wall_s=time.time,
            now_s=time.monotonic,
        )
        committer = Committer(
            self.catalog,
            self.arena,
            self.disks,
            self.retirement,
            reserver,
            self.numbers,
            sync=config.sync_commits,
            wall_s=time.time,
        )
        self.store = Store(
            self.catalog,
            Clients(config.clients_max, SILENCE_LEASES * config.lease_ttl),
            self.leases,
            reserver,
            committer,
            self.room,
            self.retirement,
            self.disks,
            self.numbers,
            Policy(config.agent_context_tokens, config.short_reply_tokens),
            Bounds(
                config.spaces_max, config.open_turns_max, config.index_blocks_max, config.sessions_max, config.lease_ttl
            ),
        )

    def _build_wire(self) -> None:
        config = self.config
        mode = int(config.socket_mode, 8)
        self.handover = Handover(self.store, self.arena, config.handover_path, mode, config.clients_max)
        self._undo.push_async_callback(self.handover.close)
        self._undo.push_async_callback(self._close_wire)
        secrets_ = load_node_secrets(config)
        self.cluster = cluster = build_cluster(config, self.store, self.arena, self.identity, secrets_, self.timings)
        if cluster is not None:
            self._undo.push_async_callback(cluster.stop)  # first of all: no peer comes any more
            self.handover.exported_files = cluster.remote.exported_files
        self.reports = Reports(
            self.store,
            self.arena,
            self.memory,
            self.ssd_range,
            self.handover,
            self.identity,
            self.timings,
            self._started_s,
            cluster.stats if cluster is not None else None,
        )
        views = Views(
            status=self.reports.stats,
            spaces=self.reports.spaces,
            nodes=self.reports.nodes,
            sessions=self.reports.sessions,
            session=self.reports.session,
            drop=self.reports.drop,
            check=self.reports.check,
        )
        self.rpc = RpcServer(
            (
                StoreService(self.store, self.identity, self.timings, cluster.remote if cluster is not None else None),
                AdminService(views, self.timings, config.message_bytes_max),
            ),
            cluster.service if cluster is not None else None,
            message_bytes_max=config.message_bytes_max,
            rpcs_max=config.rpcs_max,
            streams_max=config.clients_max if cluster is not None else 0,
            credentials=secrets_.server(),
            guards=secrets_.guards(lambda: self.timings.add("refused", 0.0)),
        )

    async def start(self) -> None:
        """Serve. Raises: Unavailable, Overloaded, Corrupt: it cannot, and what to do; everything taken is let go."""
        try:
            take_socket(self.config.socket)
            self.build_store()
            self._build_wire()
            await self.adopt()
            await self._fit_bounds()
            self.handover.start()
            tcp = parse_listen(self.config.grpc_listen)
            mode = int(self.config.socket_mode, 8)
            self.grpc_port = await self.rpc.start(str(self.config.socket), mode, str(tcp) if tcp else None)
            http = parse_listen(self.config.http_listen)
            if http is not None:
                application = web_app(self.reports.stats, self.healthy)
                self._web, self.http = await start_web(application, http)
            if self.cluster is not None:
                await self.cluster.start(advertised(self.config, self.grpc_port))
        except BaseException as error:
            try:
                await self.stop()
            except Exception:  # why it could not start is what to tell
                log.exception("something could not be let go of")
            if isinstance(error, OSError):
                raise Unavailable(f"cannot start: {error}") from error
            raise
        self._ticker = asyncio.ensure_future(self._tick())
        self.reports.ready_s = time.monotonic() - self._started_s
        self.arena.start_prefault()
        log.info(
            "node %d serves %d blocks of %d sessions at %s after %.2f s",
            self.config.node_id,
            len(self.catalog.index),
            len(self.catalog),
            self.config.socket,
            self.reports.ready_s,
        )

    async def adopt(self) -> None:
        """Open the SSD paths and take over what is on them. Raises: as `start`."""
        sessions = await take_over([*self.disks.values()], self.ssd_range, self.config.node_id, self.numbers)
        blocks = sum(session.blocks for session in sessions)
        if blocks > self.config.index_blocks_max:  # made smaller since the last start: `_fit_bounds` drops the rest
            self.catalog.index = BlockIndex(blocks, seed=secrets.randbits(63))
        by_use = sorted(sessions, key=lambda session: session.last_used_s)
        await asyncio.to_thread(self.catalog.load, by_use)  # seconds at 10 million blocks, and a signal is to be heard

    async def _fit_bounds(self) -> None:
        """Bounds made smaller since the last start hold from the first request on."""
        stored, sessions, blocks_max = len(self.catalog.index), len(self.catalog), self.config.index_blocks_max
        await self.room.for_blocks(0, blocks_max)
        if len(self.catalog) < sessions:
            left = stored - len(self.catalog.index), sessions - len(self.catalog)
            log.warning(
                "%d blocks were stored, index_blocks_max is %d: dropped %d, of %d sessions, least recently used",
                stored,
                blocks_max,
                *left,
            )
        for disk in self.disks.values():
            try:
                if not disk.failure:
                    await self.room.on_path(disk, 0)
            except Overloaded as error:
                log.warning("%s holds more than its quota and nothing can go: %s", disk.path, error)

    def healthy(self) -> str:
        """Empty, or why this node cannot serve."""
        if self.store.draining:
            return "stopping"
        if self.disks and all(disk.failure for disk in self.disks.values()):
            return "every SSD path is out of service"
        return ""

    async def _tick(self) -> None:
        """Every second, whether the last tick has ended or not: a disk that hangs holds up its own work only."""
        while True:
            await asyncio.sleep(TICK_S)
            self.retirement.background.spawn(self._tick_once())

    async def _tick_once(self) -> None:
        try:
            await self.store.tick(self.config.session_trim_after)
        except FlatCakeError as error:
            log.warning("housekeeping: %s", error)
        except Exception as error:  # noqa: BLE001 - the next one comes
            self.retirement.background.unforeseen("housekeeping is done later", error)

    async def stop(self) -> bool:
        """Drain and let everything go. Twice is fine; also after a start that failed half way, wherever it failed.

        Returns:
            False where a disk hangs: its threads will not end, and the process must be ended under them.
        """
        if hasattr(self, "store"):
            self.store.draining = True
        await self._undo.aclose()
        return self._rested

    async def _close_wire(self) -> None:
        """Wait for open turns, then answer nobody any more."""
        if not hasattr(self, "rpc"):
            return
        await self.rpc.set_serving(serving=False)
        deadline_s = time.monotonic() + self.config.drain_timeout
        while self.store.turns and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
        await self.rpc.stop(0.5)
        if self._ticker is not None:
            self._ticker.cancel()

    async def _drain(self) -> None:
        self._rested = await _in_time(self._rest(), self.config.drain_timeout)

    async def _rest(self) -> None:
        await self.retirement.drain()
        try:
            await tell_uses(self.catalog, self.disks)
        except FlatCakeError as error:
            log.warning("when sessions were used last is not written down: %s", error)

    async def _close_web(self) -> None:
        if self._web is not None:
            await self._web.cleanup()
            self._web = None

    async def _close_disks(self) -> None:
        threads = ThreadPoolExecutor(1 + len(self.disks), "flatcake-close")  # so that none waits for one that hangs
        await asyncio.gather(*(self._close_disk(disk, threads) for disk in self.disks.values()))
        threads.shutdown(wait=False)

    async def _close_disk(self, disk: Disk, threads: ThreadPoolExecutor) -> None:
        closing = asyncio.get_running_loop().run_in_executor(threads, disk.close)
        if not await _in_time(closing, CLOSE_TIMEOUT_S):
            self._rested = False
            log.error("SSD path %s does not end what it does; it is left as it is, as a kill would", disk.path)


async def _in_time(work: Awaitable[object], timeout_s: float) -> bool:
    """Whether the work ended within the time; else it goes on by itself."""
    _, hanging = await asyncio.wait({asyncio.ensure_future(work)}, timeout=timeout_s)
    return not hanging


async def run(config: NodeConfig) -> int:
    node, others = Node(config), set(threading.enumerate())
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    # A start makes a few objects a segment, and all of them stay: looking through them for garbage, then and ever after,
    # takes a third of a start with 10 M blocks, and later a tenth of a second out of somebody's lookup.
    gc.disable()
    starting, told, code = asyncio.ensure_future(node.start()), asyncio.ensure_future(stopping.wait()), 0
    try:
        await asyncio.wait({starting, told}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            gc.enable()
            gc.freeze()
            await told
        log.info("stopping")
    except FlatCakeError as error:
        log.error("%s", error)
        code = CANNOT_NOW
    finally:
        gc.enable()
    starting.cancel()  # once: it lets go of what it has
    await asyncio.gather(starting, return_exceptions=True)
    rested = await node.stop()
    if not rested or await loop.run_in_executor(None, _hanging, others):
        logging.shutdown()
        os._exit(CANNOT_NOW)  # the interpreter would wait for the threads that hang
    return code


def _hanging(others: set[threading.Thread]) -> bool:
    """Whether threads of ours do not end by themselves now that all was closed: in a disk, or a kernel's target, that hangs."""
    new = set(threading.enumerate()) - others
    ours = [each for each in new if each.name.startswith("flatcake-") and not each.daemon]
    deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
    for thread in ours:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return any(thread.is_alive() for thread in ours)


def serve(config: NodeConfig) -> int:
    """Run a node until SIGTERM or SIGINT. Returns the exit code."""
    _raise_limits()
    if sys.platform == "linux":
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run(config))
    return asyncio.run(run(config))


def _raise_limits() -> None:
    """Each session in use is an open file, and may be a large one: as many and as large as this user may have."""
    import resource

    for number in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE):
        with contextlib.suppress(ValueError, OSError):
            _, hard = resource.getrlimit(number)
            resource.setrlimit(number, (hard, hard))
