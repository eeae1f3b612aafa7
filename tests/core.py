"""A node's core in this process, without its wire: real files, a journal in a dict, a clock of the test's.

What a client does (write the bytes it was given room for, read those it was told of) is done here by hand, so that a test
sees every byte a lookup leads to.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from flatcake_server import disk as disk_module
from flatcake_server.app import Node
from flatcake_server.config import NodeConfig
from flatcake_server.disk import Disk
from flatcake_server.journal import Journal
from flatcake_server.law import check_data, check_files, check_state
from flatcake_server.records import SegmentRecord, Suspect
from flatcake_server.session import DiskFull
from flatcake_server.turns import Part, Turn, TurnRequest
from flatcake_transport.checksum import granule_checksums
from flatcake_transport.errors import Overloaded, Unavailable
from flatcake_transport.footer import CHECKSUM_XXH3
from flatcake_transport.space import SpaceSpec

ONE = SpaceSpec("one", "u8", 16, (4096,))  # a page a block

BOOT_ID = b"one boot of many"
FAULTS = ("create", "write_footer", "truncate", "delete", "list", "journal")


class DictRecords:
    """A journal's records without a disk. They outlive the journals that are opened on them."""

    def __init__(self, trip: Any) -> None:
        self.records: dict[bytes, bytes] = {}
        self._trip = trip

    def scan(self, prefix: bytes) -> Iterable[tuple[bytes, bytes]]:
        return [(key, self.records[key]) for key in sorted(self.records) if key.startswith(prefix)]

    def write(self, puts: Sequence[tuple[bytes, bytes]], deletes: Sequence[bytes], *, sync: bool) -> None:
        self._trip("journal")
        self.records |= dict(puts)
        for key in deletes:
            self.records.pop(key, None)

    def close(self) -> None:
        pass


def suspect(segment: SegmentRecord) -> Suspect:
    return Suspect(segment.address, segment.generation)


def chain(spec: SpaceSpec, path: Sequence[int]) -> np.ndarray:
    """Keys of a context: one block an entry of the path, each key chained to the one before. (n, 16)."""
    key, keys = root(spec), []
    for step in path:
        key = sha256(key + bytes([step])).digest()[:16]
        keys.append(key)
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16)


def root(spec: SpaceSpec) -> bytes:
    return sha256(spec.fingerprint).digest()[:16]


def pattern(keys: np.ndarray, plane: int, plane_bytes: int) -> np.ndarray:
    """(n, plane_bytes): bytes that no other block and no other plane has."""
    return np.tile(keys ^ np.uint8(plane + 1), -(-plane_bytes // 16))[:, :plane_bytes]


class Yield:
    """Let everything else that is ready go first."""

    def __await__(self) -> Iterator[None]:
        yield


class Core:
    """One node. Its disks' work is done on the loop, so that the same steps always give the same store. `crash` and `start` again on the same directories; `fail` breaks one operation to come."""

    def __init__(self, root_path: Path, *, paths: int = 1, ssd_bytes: int = 1 << 20, **options: Any) -> None:
        self.now_s = 1000.0
        self.faults: Counter[str] = Counter()
        self.tripped = 0
        self._turns = 0
        ssd_paths = [root_path / f"ssd{n}" for n in range(paths)]
        self._records = {path / "journal": DictRecords(self._trip) for path in ssd_paths}
        for path in ssd_paths:
            path.mkdir(parents=True)
        config = NodeConfig(
            socket=root_path / "sock", ssd_paths=tuple(ssd_paths), sync_commits=False, ssd_bytes=1 << 40, lease_ttl=10
        )
        # Smaller than an operator may choose, so that bounds are met after a few turns.
        self.config = config.model_copy(update={"ssd_bytes": paths * ssd_bytes, "memory_bytes": 1 << 20} | options)
        self.loop = asyncio.new_event_loop()
        self.start()

    def start(self) -> None:
        self.node = self.loop.run_until_complete(self._start())
        self.store = self.node.store
        self.clients = [self.greet() for _ in range(3)]

    def greet(self) -> int:
        """A new client, with the connection that is its life line."""
        client = self.store.hello("test")
        return self.store.clients.attach(client.client_id, client.token, self.now_s).client_id

    async def _start(self) -> Node:
        node = Node(self.config)
        node.build_store()
        for owner in (node.store, node.store.reserver, node.store.committer):
            owner._wall_s = lambda: self.now_s
        for owner in (node.store, node.store.reserver):
            owner._now_s = lambda: self.now_s
        real, disk_module.Journal = disk_module.Journal, self._journal  # type: ignore[assignment,misc]
        try:
            await node.adopt()
        finally:
            disk_module.Journal = real  # type: ignore[misc]
        for disk in node.disks.values():
            disk.run = disk.read = self._on_the_loop(disk)  # type: ignore[method-assign]
            for name in FAULTS[:-1]:
                setattr(disk.files, name, self._breakable(name, getattr(disk.files, name)))
        return node

    def records(self, pool: int) -> DictRecords:
        """What the journal of a path holds."""
        return self._records[self.node.disks[pool].path / "journal"]

    def _on_the_loop(self, disk: Disk) -> Any:
        async def run(work: Any, *arguments: Any) -> Any:
            if disk.failure:
                raise Unavailable(f"out of service: {disk.failure}")
            self._turns += 1
            for _ in range(self._turns * 7919 % 5):  # some work takes longer than other
                await Yield()
            return work(*arguments)

        return run

    def _journal(self, path: Path) -> Journal:
        return Journal(path, records=self._records[path], boot_id=BOOT_ID)

    def _breakable(self, name: str, work: Any) -> Any:
        def run(*arguments: Any) -> Any:
            self._trip(name)
            return work(*arguments)

        return run

    def _trip(self, name: str) -> None:
        if self.faults[name]:
            self.faults[name] -= 1
            self.tripped += 1
            kinds = [DiskFull] * self.faults["full"] + [Overloaded] * self.faults["short"] if name == "create" else []
            raise next(iter(kinds), Unavailable)(f"the test broke {name}")

    def fail(self, name: str) -> None:
        """The next call of an operation of the disk fails."""
        self.faults[name] += 1

    async def lose(self, pool: int) -> None:
        """A path fails for good."""
        self.node.retirement.fail_disk(self.node.disks[pool], "EIO")

    def crash(self) -> None:
        """What is in memory is gone."""
        self.faults.clear()
        for disk in self.node.disks.values():
            disk.close()
        self.node.arena.close()

    def restart(self) -> None:
        self.crash()
        self.start()

    def close(self) -> None:
        self.crash()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    def run(self, *work: Any) -> list[Any]:
        """Do things side by side; what each gave, or the error it raised."""

        async def together() -> list[Any]:
            results = await asyncio.gather(*work, return_exceptions=True)
            await asyncio.gather(*self.node.retirement.unloading)
            await self.node.retirement.drain()
            return results

        return self.loop.run_until_complete(together())

    def do(self, work: Any) -> Any:
        """Do one thing. Raises: what it raises."""
        result = self.run(work)[0]
        if isinstance(result, BaseException):
            raise result
        return result

    # -- what a client does ----------------------------------------------------------------------------------------

    def open(self, spec: SpaceSpec) -> SpaceSpec:
        self.store.spaces.open(spec, spec.fingerprint)
        return spec

    async def begin(
        self, spec: SpaceSpec, path: Sequence[int], *, client: int = 0, shard: int = 0, session: str = "s", **hints: Any
    ) -> Turn | None:
        request = TurnRequest(shard, session, chain(spec, path), root(spec), **hints)
        return await self.store.begin_turn(self.clients[client], spec.fingerprint, request)

    def write(self, turn: Turn, shard: int = 0) -> list[tuple[int, bytes]]:
        """Write a shard's planes of all parts; the checksums."""
        sums = []
        for part in turn.parts:
            layout, layers, found = part.layout, turn.spec.layers, []
            for plane in range(shard * layers, (shard + 1) * layers):
                data = pattern(part.keys, plane, int(layout.plane_bytes[plane])).tobytes()
                self._put(part, layout.chunk(plane, 0), data)
                found.append(granule_checksums(np.frombuffer(data, np.uint8), layout.granule_bytes(plane), 1))
            sums.append((CHECKSUM_XXH3, np.concatenate(found).astype("<u8").tobytes()))
        return sums

    def _put(self, part: Part, offset: int, data: bytes) -> None:
        if part.file is None:
            self.node.arena.write(part.address.offset + offset, data)
            return
        files = self.node.disks[part.session.pool].files
        fd = os.open(files.path_of(part.file.file_id), os.O_WRONLY)
        os.pwrite(fd, data, part.file_offset + offset)
        os.close(fd)

    async def commit(self, turn: Turn, shard: int = 0, client: int = 0) -> bool:
        sums = self.write(turn, shard)
        return await self.store.commit_turn(self.clients[client], turn.turn_id, shard, sums)

    async def abort(self, turn: Turn, shard: int = 0, client: int = 0, failure: str = "") -> None:
        await self.store.abort_turn(self.clients[client], turn.turn_id, shard, failure)

    def put(self, spec: SpaceSpec, path: Sequence[int], **options: Any) -> Turn | None:
        """A whole turn of a space with one shard."""
        turn = self.do(self.begin(spec, path, **options))
        if turn is not None:
            self.do(self.commit(turn, client=options.get("client", 0)))
        return turn

    def hit(self, spec: SpaceSpec, path: Sequence[int], *, client: int = 0, pin: bool = False) -> tuple[int, int]:
        """Blocks that a lookup leads to, each compared byte by byte; and the lease."""
        keys = chain(spec, path)
        found = self.store.lookup(self.clients[client], spec.fingerprint, keys, pin=pin)
        at = 0
        for run in found.runs:
            segment = run.segment
            layout = self.store.catalog.sessions[segment.session_no].spec
            assert layout == spec, "a block of another space"
            for plane, plane_bytes in enumerate(spec.plane_bytes * spec.shards):
                data = self._read(run, plane, plane_bytes)
                expected = pattern(keys[at : at + run.blocks], plane, plane_bytes)
                assert np.array_equal(data, expected), f"{segment.address}: other bytes than were written"
            at += run.blocks
        return at, found.lease_id

    def _read(self, run: Any, plane: int, plane_bytes: int) -> np.ndarray:
        from flatcake_transport.layout import segment_layout

        segment = run.segment
        session = self.store.catalog.sessions[segment.session_no]
        offset = segment_layout(session.spec, segment.blocks).chunk(plane, run.first_block)
        size = run.blocks * plane_bytes
        if not segment.file_id:
            data = bytes(self.node.arena.read(segment.address.offset + offset, size))
        else:
            with self.node.disks[session.pool].files.path_of(segment.file_id).open("rb") as file:
                file.seek(segment.file_offset + offset)
                data = file.read(size)
        return np.frombuffer(data, np.uint8).reshape(run.blocks, plane_bytes)

    # -- judges ----------------------------------------------------------------------------------------------------

    def check(self, *, data: bool = False) -> None:
        """The law, and the quota as the file system counts. Raises: AssertionError."""
        node = self.node
        assert check_state(self.store, node.memory, node.ssd_range) == []
        assert self.do(check_files(self.store)) == []
        if data:
            assert self.do(check_data(self.store, node.arena, lambda _done, _total: None)) == []
        for disk in node.disks.values():
            assert self.taken_bytes(disk.path) <= disk.quota_bytes, f"{disk.path} takes more than its quota"

    def taken_bytes(self, path: Path) -> int:
        return sum(file.stat().st_blocks * 512 for file in (path / "sessions").rglob("*.kv"))

    def check_rest(self) -> None:
        """With no turn under way nothing is held, and no session is there for nothing. Raises: AssertionError."""
        assert self.store._reserved_blocks == 0
        for session in self.store.catalog.sessions.values():
            assert session.holds == 0, f"session {session.name} is held by nobody"
            assert session.segments, f"session {session.name} holds nothing"
