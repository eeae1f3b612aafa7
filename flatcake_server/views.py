"""What operators see of the store: its stats, spaces and sessions, as values. Reads state, changes none."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict
from heapq import heappush, heappushpop
from pathlib import Path
from typing import Any

from flatcake_server.arena import Arena
from flatcake_server.catalog import MEMORY_POOL, Session
from flatcake_server.disk import Disk
from flatcake_server.extents import ExtentAllocator
from flatcake_server.handover import Handover
from flatcake_server.law import FINDINGS_MAX, Progress, check_data, check_files, check_living
from flatcake_server.pace import Pace
from flatcake_server.records import SessionNo
from flatcake_server.rpc import Identity, Timings
from flatcake_server.stats import ClusterStats, Counters, IndexStats, PoolStats, StoreStats
from flatcake_server.store import Store
from flatcake_transport.space import Fingerprint

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Reports:
    """Everything an operator may ask of a running daemon. Belongs to the event loop."""

    def __init__(
        self,
        store: Store,
        arena: Arena,
        memory: ExtentAllocator,
        ssd_range: ExtentAllocator,
        handover: Handover,
        identity: Identity,
        timings: Timings,
        started_s: float,
        cluster: Callable[[], ClusterStats] | None = None,
    ) -> None:
        self._store = store
        self._arena = arena
        self._memory = memory
        self._ssd_range = ssd_range
        self._handover = handover
        self._identity = identity
        self._timings = timings
        self._started_s = started_s  # monotonic
        self._cluster = cluster
        self.ready_s = 0.0

    def stats(self) -> StoreStats:
        store, index, leases = self._store, self._store.catalog.index.stats(), self._store.leases.stats()
        uptime_s = time.monotonic() - self._started_s
        return StoreStats(
            version=self._identity.version,
            incarnation=self._identity.incarnation.hex(),
            node_id=self._identity.node_id,
            started_s=time.time() - uptime_s,
            uptime_s=uptime_s,
            ready_s=self.ready_s,
            rss_bytes=_rss_bytes(),
            spaces=len(store.spaces),
            sessions=len(store.catalog),
            segments=len(store.catalog.segments),
            clients=len(store.clients),
            leases=leases.leases,
            pinned_sessions=leases.pinned_sessions,
            open_turns=len(store.turns),
            index=IndexStats(index.blocks, index.bytes, index.bytes_per_block),
            pools=(self._memory_pool(), *(self._disk_pool(disk) for disk in store.disks.values())),
            counters=self._counters(),
            rpc_seconds=dict(self._timings.by_verb),
            cluster=self._cluster() if self._cluster is not None else None,
        )

    def _memory_pool(self) -> PoolStats:
        catalog = self._store.catalog
        committed = catalog.order.bytes_of(MEMORY_POOL)
        releasing = self._store.retirement.limbo_bytes
        return PoolStats(
            name="memory",
            medium="memory",
            quota_bytes=self._memory.size_bytes,
            committed_bytes=committed,
            reserved_bytes=self._memory.used_bytes - committed - releasing,
            releasing_bytes=releasing,
            free_bytes=self._memory.free_bytes,
            largest_free_bytes=self._memory.largest_free_bytes,
            sessions=catalog.order.sessions_in(MEMORY_POOL),
            segments=catalog.segments_in[MEMORY_POOL],
            blocks=catalog.blocks_in[MEMORY_POOL],
            written_bytes=committed,
            huge_pages=self._arena.huge_pages,
        )

    def _disk_pool(self, disk: Disk) -> PoolStats:
        catalog = self._store.catalog
        committed = catalog.order.bytes_of(disk.pool)
        return PoolStats(
            name=str(disk.path),
            medium="ssd",
            quota_bytes=disk.quota_bytes,
            committed_bytes=committed,
            reserved_bytes=disk.used_bytes - disk.releasing_bytes - committed,
            releasing_bytes=disk.releasing_bytes,
            free_bytes=disk.free_bytes,
            largest_free_bytes=disk.free_bytes,
            sessions=catalog.order.sessions_in(disk.pool),
            segments=catalog.segments_in[disk.pool],
            blocks=catalog.blocks_in[disk.pool],
            files=disk.files_count,
            written_bytes=committed,
            direct=not disk.failure and disk.files.direct,
            full=disk.full,
            failure=disk.failure,
        )

    def _counters(self) -> Counters:
        counts, retired = self._store.counts, self._store.retirement
        names = {MEMORY_POOL: "memory"} | {disk.pool: str(disk.path) for disk in self._store.disks.values()}
        committer = self._store.committer
        return Counters(
            lookups_total=counts["lookups"],
            lookup_blocks_total=counts["lookup_blocks"],
            hit_blocks_total={medium: counts[f"hit_blocks/{medium}"] for medium in ("memory", "ssd")},
            hit_bytes_total={medium: counts[f"hit_bytes/{medium}"] for medium in ("memory", "ssd")},
            turns_begun_total=counts["turns_begun"],
            turns_committed_total=counts["turns_committed"],
            turns_aborted_total=counts["turns_aborted"],
            turns_refused_total=counts["turns_refused"],
            stored_blocks_total=dict(committer.stored_blocks),
            stored_bytes_total=dict(committer.stored_bytes),
            duplicate_blocks_total=committer.duplicate_blocks,
            sessions_reclaimed_total={names[pool]: n for pool, n in self._store.room.reclaimed.items()},
            sessions_dropped_total=counts["sessions_dropped"],
            files_trimmed_total=retired.counts["trimmed"],
            files_sealed_total=retired.counts["sealed"],
            files_unopened_total=counts["files_unopened"],
            corrupt_segments_total=counts["corrupt_segments"],
            disk_failures_total=retired.counts["disk_failures"],
            unforeseen_total=retired.counts["unforeseen"],
            clients_lost_total=counts["clients_lost"],
            descriptors_handed_total=self._handover.handed_total,
        )

    def nodes(self) -> list[dict[str, Any]]:
        """The nodes of the cluster, this one first; of a node by itself none."""
        return [asdict(row) for row in self._cluster().members] if self._cluster is not None else []

    async def spaces(self) -> list[dict[str, Any]]:
        spaces = self._store.spaces.all()
        sessions: Counter[Fingerprint] = Counter()
        blocks: Counter[Fingerprint] = Counter()
        async for session in self._sessions():
            spaces[session.fingerprint] = session.spec
            sessions[session.fingerprint] += 1
            blocks[session.fingerprint] += session.blocks
        return [
            asdict(spec)
            | {
                "fingerprint": fingerprint.hex(),
                "block_bytes": spec.block_bytes,
                "sessions": sessions[fingerprint],
                "blocks": blocks[fingerprint],
                "open": fingerprint in self._store.spaces,
            }
            for fingerprint, spec in spaces.items()
        ]

    async def sessions(self, fingerprint: Fingerprint | None, limit: int) -> list[dict[str, Any]]:
        """Most recently used first."""
        newest: list[tuple[int, SessionNo]] = []  # a heap: the oldest of them first
        order, pace = self._store.catalog.order, Pace()
        async for session in self._sessions():
            if fingerprint in (None, session.fingerprint):
                entry = order.stamp(session.session_no), session.session_no
                if len(newest) < limit:
                    heappush(newest, entry)
                else:
                    heappushpop(newest, entry)
        rows = []
        for _, session_no in sorted(newest, reverse=True):
            if (known := self._store.catalog.sessions.get(session_no)) is not None:
                rows.append(self._row(known))
            await pace.rest()
        return rows

    async def session(self, name: str) -> dict[str, Any]:
        """One session with its segments. Raises: ValueError: no session has that name."""
        named = await self._named(name)
        if not named:
            raise ValueError(f"no session is named {name!r}: see `flatcake sessions list`")
        row = self._row(named[0])
        row["segments"] = [
            {
                "address": str(segment.address),
                "turn": segment.turn,
                "first_block": segment.first_block,
                "blocks": segment.blocks,
                "bytes": segment.total_bytes,
                "reason": segment.reason,
            }
            for segment in named[0].segments
        ]
        row["other_spaces"] = [session.spec.model for session in named[1:]]
        return row

    async def drop(self, names: Sequence[str]) -> dict[str, Any]:
        """Drop whole sessions by name; what is being read or written, or needed by others, stays, and is said."""
        report: dict[str, Any] = {"dropped": [], "busy": [], "needed": [], "unknown": []}
        for name in names:
            named = await self._named(name)
            if not named:
                report["unknown"].append(name)
            for session in named:
                if self._store.retirement.busy(session.session_no):
                    report["busy"].append(name)
                elif self._store.catalog.order.dependents(session.session_no):
                    report["needed"].append(name)
                else:
                    await self._store.retirement.drop(session)
                    self._store.counts["sessions_dropped"] += 1
                    report["dropped"].append(name)
        return report

    async def check(self, data: bool, progress: Progress) -> dict[str, Any]:
        """The law on the living store; with `data`, every byte of it is read and compared with its checksum."""
        findings = await check_living(self._store, self._memory, self._ssd_range) + await check_files(self._store)
        if data:
            findings += await check_data(self._store, self._arena, progress)
        stats = self.stats()
        more = len(findings) - FINDINGS_MAX
        return {
            "ok": not findings,
            "findings": findings[:FINDINGS_MAX] + ([f"{more} more findings are not listed"] if more > 0 else []),
            "sessions": stats.sessions,
            "segments": stats.segments,
            "blocks": stats.index.blocks,
            "pools": [asdict(pool) for pool in stats.pools],
        }

    async def _sessions(self) -> AsyncIterator[Session]:
        """All that were there at the start and still are, a slice of them at a time: there may be a million."""
        pace = Pace()
        for session in list(self._store.catalog.sessions.values()):
            if not session.gone:
                yield session
            await pace.rest()

    async def _named(self, name: str) -> list[Session]:
        return [session async for session in self._sessions() if session.name == name]

    def _row(self, session: Session) -> dict[str, Any]:
        disk = self._store.disks.get(session.pool)
        return {
            "name": session.name,
            "model": session.spec.model,
            "fingerprint": session.fingerprint.hex(),
            "turns": session.turns,
            "segments": len(session.segments),
            "blocks": session.blocks,
            "tokens": session.blocks * session.spec.block_tokens,
            "memory_bytes": session.memory_bytes,
            "ssd_bytes": sum(file.committed_bytes for file in session.files),
            "reserved_bytes": session.file_bytes,
            "files": len(session.files),
            "path": str(disk.path) if disk else "",
            "created_s": session.created_s,
            "last_used_s": session.last_used_s,
            "readers": self._store.leases.pins(session.session_no),
            "writers": session.holds,
        }


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
