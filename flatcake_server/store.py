"""The store of one node: lookup, reserve, commit, release. Everything a client can ask, as plain calls.

One event loop owns all of it; there are no locks but the ones that order blocking work on a session's files. What is
decided here is decided by the pure parts it holds (index, placement, extents, reclaim, leases); bytes are moved by clients.

    begin_turn   which blocks are missing, where they go, space for them     (nothing persisted, nothing visible)
    commit_turn  all shards have written: persist, publish                   (commit.py)
    lookup       the longest stored prefix, pinned by a lease
    client_gone  all that a client held goes back
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from flatcake_server.catalog import Catalog, Session
from flatcake_server.clients import Client, Clients, UnknownTurn
from flatcake_server.commit import Committer
from flatcake_server.disk import Disk
from flatcake_server.lease import LeaseTable
from flatcake_server.placement import Hints, Policy
from flatcake_server.records import FileId, KeyArray, SessionNo, Suspect
from flatcake_server.reserve import Numbers, Reserver
from flatcake_server.retire import Retirement
from flatcake_server.room import Room
from flatcake_server.segments import SegmentRun
from flatcake_server.spaces import Spaces
from flatcake_server.turns import Part, Turn, TurnRequest, plan_parts
from flatcake_server.uses import TELL_S, tell_uses
from flatcake_transport.address import MISSING, Medium
from flatcake_transport.errors import FlatCakeError, Overloaded, Unavailable
from flatcake_transport.space import Fingerprint, SpaceSpec

log = logging.getLogger(__name__)

# Looking for idle sessions walks all of them: often enough to be punctual, seldom enough to cost nothing.
TRIMS_A_PERIOD: Final = 10
TRIM_PAUSE_S_MAX: Final = 60.0
TURN_MAX: Final = (1 << 32) - 1  # what an engine may call a turn, and a footer has room for


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The longest stored prefix of a chain. `lease_id` 0: nothing is pinned."""

    runs: list[SegmentRun]
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class Bounds:
    spaces_max: int
    open_turns_max: int
    index_blocks_max: int
    sessions_max: int
    lease_ttl_s: float


class Store:
    """Belongs to the event loop. `now_s` is a monotonic clock, `wall_s` the one people read."""

    def __init__(
        self,
        catalog: Catalog,
        clients: Clients,
        leases: LeaseTable,
        reserver: Reserver,
        committer: Committer,
        room: Room,
        retirement: Retirement,
        disks: dict[int, Disk],
        numbers: Numbers,
        policy: Policy,
        bounds: Bounds,
        *,
        now_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.catalog = catalog
        self.clients = clients
        self.leases = leases
        self.reserver = reserver
        self.committer = committer
        self.room = room
        self.retirement = retirement
        self.disks = disks
        self.spaces = Spaces(bounds.spaces_max)
        self.turns: dict[int, Turn] = {}
        self.counts: Counter[str] = Counter()
        self.peer_counts: Counter[str] = Counter()  # of lookups by other nodes: their engines count them as hits there
        self.draining = False
        self._numbers = numbers
        self._policy = policy
        self._bounds = bounds
        self._now_s = now_s
        self._wall_s = wall_s
        self._reserved_blocks = 0
        self._next_trim_s = self._next_tell_s = 0.0
        self._files_of_lease: dict[int, dict[FileId, Disk]] = {}

    # -- clients ---------------------------------------------------------------------------------------------------

    def hello(self, name: str) -> Client:
        return self.clients.hello(name, self._now_s())

    def client(self, client_id: int) -> Client:
        return self.clients.get(client_id, self._now_s())

    async def client_gone(self, client_id: int) -> None:
        """A client's connection ended: give back its leases and the turns it was writing. Unknown ones are fine."""
        self.clients.remove(client_id)
        released = self.leases.release_client(client_id)
        mine = [turn for turn in self.turns.values() if client_id in turn.writers.values()]
        if released or mine:
            self.counts["clients_lost"] += 1
        # Side by side: one on a path that hangs keeps none.
        await asyncio.gather(*(self._writer_gone(turn, client_id) for turn in mine))

    async def _writer_gone(self, turn: Turn, client_id: int) -> None:
        for shard in [shard for shard, writer in turn.writers.items() if writer == client_id]:
            await self._fail_shard(turn, shard, "its writer went away")

    # -- reading ---------------------------------------------------------------------------------------------------

    def lookup(
        self,
        client_id: int,
        fingerprint: Fingerprint,
        keys: KeyArray,
        *,
        pin: bool,
        counts: Counter[str] | None = None,
    ) -> Found:
        """The longest stored prefix of a chain; pinned, its sessions stay until the lease ends. `counts`: default its own.

        Raises: UnknownSpace. Overloaded: as many leases as there may be.
        """
        spec = self.spaces.spec(fingerprint)
        runs = self.catalog.prefix(spec, fingerprint, keys)
        counts = self.counts if counts is None else counts
        counts["lookups"] += 1
        counts["lookup_blocks"] += len(keys)
        if not runs:
            return Found([])
        chain = self.catalog.chain(runs)
        self.catalog.use(chain, self._wall_s())
        on_files: dict[FileId, SessionNo] = {}
        blocks = file_blocks = 0
        for segment, _, count in runs:  # hundreds in a long session: nothing is asked here that can be asked once
            blocks += count
            if segment.file_id:
                file_blocks += count
                on_files[segment.file_id] = segment.session_no
        for medium, found in ((Medium.MEMORY, blocks - file_blocks), (Medium.SSD, file_blocks)):
            if found:
                counts[f"hit_blocks/{medium.name.lower()}"] += found
                counts[f"hit_bytes/{medium.name.lower()}"] += found * spec.block_bytes
        if not pin:
            return Found(runs)
        lease = self.leases.grant(client_id, [session.session_no for session in chain], self._now_s())
        self._files_of_lease[lease.lease_id] = {
            file_id: self.disks[self.catalog.sessions[session_no].pool] for file_id, session_no in on_files.items()
        }
        return Found(runs, lease.lease_id)

    def renew(self, client_id: int, lease_ids: Sequence[int]) -> list[int]:
        return self.leases.renew(client_id, lease_ids, self._now_s())

    def release(self, client_id: int, lease_ids: Sequence[int]) -> None:
        self.leases.release(client_id, lease_ids)
        for lease_id in lease_ids:
            if self.leases.get(lease_id) is None:
                self._files_of_lease.pop(lease_id, None)

    def files_of_lease(self, client_id: int, lease_id: int) -> dict[FileId, Disk]:
        """The session files a lease covers. Raises: LookupError: it has ended, or is another's."""
        lease = self.leases.get(lease_id)
        if lease is None or lease.client_id != client_id:
            raise LookupError(f"lease {lease_id} has ended")
        return self._files_of_lease.get(lease_id, {})

    async def unopened(self, lease_id: int, file_id: FileId, error: FlatCakeError) -> None:
        """A file of a lease could not be opened: its blocks cannot be read under this lease, all others can.

        Where it is gone they are misses from now on, so that they are stored again.
        """
        self.counts["files_unopened"] += 1
        log.warning("session file %x could not be opened for a reader: %s", file_id, error)
        disk = self._files_of_lease.get(lease_id, {}).pop(file_id, None)
        if disk is None or disk.failure or not await disk.run(disk.files.is_gone, file_id):
            return
        lease = self.leases.get(lease_id)
        sessions = [self.catalog.sessions.get(SessionNo(no)) for no in lease.sessions] if lease else []
        lost = [s for session in sessions if session is not None for s in session.segments if s.file_id == file_id]
        await self.report_corrupt([Suspect(segment.address, segment.generation) for segment in lost])

    # -- writing ---------------------------------------------------------------------------------------------------

    async def begin_turn(self, client_id: int, fingerprint: Fingerprint, request: TurnRequest) -> Turn | None:
        """Reserve space for what a chain lacks. None: all of it is stored.

        Raises:
            UnknownSpace, ValueError: the request makes no sense.
            Overloaded: no room, or too many turns. Unavailable: the disk failed, or the daemon is stopping.
        """
        spec = self.spaces.spec(fingerprint)
        if request.shard >= spec.shards:
            raise ValueError(f"shard {request.shard} of a space with {spec.shards}")
        if request.share_counts is not None and len(request.share_counts) != len(request.keys):
            raise ValueError(
                f"{len(request.share_counts)} share counts for {len(request.keys)} keys: one a key, or none"
            )
        if self.draining:
            raise Unavailable("the daemon is stopping")
        digest = hashlib.sha256(request.keys.tobytes() + bytes([request.copy])).digest()
        join_key = (fingerprint, request.session, digest)
        try:
            turn = self._joinable(join_key, request.shard) if spec.shards > 1 else None
            if turn is not None:
                return await self._join(turn, request, client_id)
            missing = self.catalog.present(request.keys) == np.uint64(MISSING)
            if not missing.any():
                self.catalog.use(self.catalog.chain_of(spec, fingerprint, request.keys), self._wall_s())
                return None
            return await self._begin(client_id, spec, fingerprint, request, missing, join_key)
        except FlatCakeError:
            self.counts["turns_refused"] += 1
            raise

    def _joinable(self, join_key: tuple[Fingerprint, str, bytes], shard: int) -> Turn | None:
        for turn in self.turns.values():
            if turn.join_key == join_key and shard not in turn.joined and not turn.failed:
                return turn
        return None

    async def _join(self, turn: Turn, request: TurnRequest, client_id: int) -> Turn:
        shard = request.shard
        turn.joined.add(shard)
        turn.writers[shard], turn.requests[shard] = client_id, request.request_id
        await turn.ready.wait()
        if turn.failed or turn.turn_id not in self.turns:
            turn.writers.pop(shard, None)
            await self._end_if_unwritten(turn)
            raise Overloaded(f"the turn of the other shards failed: {turn.failure}")
        return turn

    async def _begin(
        self,
        client_id: int,
        spec: SpaceSpec,
        fingerprint: Fingerprint,
        request: TurnRequest,
        missing: np.ndarray[tuple[int], np.dtype[np.bool_]],
        join_key: tuple[Fingerprint, str, bytes],
    ) -> Turn:
        blocks = int(np.count_nonzero(missing))
        holds = self.catalog.chain_of(spec, fingerprint, request.keys)
        for held in holds:
            held.holds += 1  # what the turn continues is not what makes room for it
        try:
            await self._make_table_room(client_id, blocks, displace=not request.copy)
            begun = self._joinable(join_key, request.shard) if spec.shards > 1 else None
            if begun is not None:  # by another shard, while room was made for both
                await self._join(begun, request, client_id)
            else:
                session = self.reserver.session_of_turn(spec, fingerprint, request, int(np.argmax(missing)))
        except BaseException:
            await self._let_go(holds)
            raise
        if begun is not None:
            await self._let_go(holds)
            return begun
        session.holds += 1
        holds.append(session)
        turn_no = request.turn or min(session.turns + 1, TURN_MAX)
        context_tokens = request.context_tokens or len(request.keys) * spec.block_tokens
        hints = Hints(turn_no, context_tokens, request.previous_reply_tokens, request.share_counts, request.copy)
        plans = plan_parts(missing, hints, self._policy)
        turn = Turn(
            self._numbers.turn_id, spec, fingerprint, session, turn_no, request.keys, [], holds, join_key,
            writers={request.shard: client_id}, requests={request.shard: request.request_id}, joined={request.shard},
            blocks_reserved=blocks,
        )  # fmt: skip
        self._numbers.turn_id += 1
        self.turns[turn.turn_id] = turn  # counted and joinable from here on, though its parts are still coming
        self._reserved_blocks += blocks
        try:
            for plan in plans:
                turn.parts.append(await self.reserver.reserve(session, plan, request.keys, request.root_key))
        except FlatCakeError as error:
            if not turn.parts:
                turn.failed, turn.failure = True, str(error)
                await self._end(turn, turn.parts)
                raise
            log.info(
                "turn %d of %s stores %d of %d parts: %s", turn_no, session.name, len(turn.parts), len(plans), error
            )
        except BaseException:
            turn.failed = True
            await self._end(turn, turn.parts)
            raise
        finally:
            turn.ready.set()
        if client_id not in turn.writers.values():  # the client went away while a file was made for it
            await self._end_if_unwritten(turn)
            raise UnknownTurn("the client went away")
        self.counts["turns_begun"] += 1
        return turn

    async def _let_go(self, holds: list[Session]) -> None:
        for held in holds:
            held.holds -= 1
        for held in holds:  # what the turn continued may have been quarantined meanwhile
            await self.retirement.settle(held)

    async def _make_table_room(self, client_id: int, blocks: int, *, displace: bool) -> None:
        """Have a place in the tables for one more turn with so many blocks. Raises: Overloaded."""
        bounds, index = self._bounds, self.catalog.index
        if displace:
            await self.room.for_session(bounds.sessions_max)
            await self.room.for_blocks(self._reserved_blocks + blocks, bounds.index_blocks_max)
        self.client(client_id)  # while room was made it may have gone, and with it whoever would end this turn
        if len(self.turns) >= bounds.open_turns_max:
            raise Overloaded(f"{len(self.turns)} turns are being written, open_turns_max is reached")
        if len(index) + self._reserved_blocks + blocks > bounds.index_blocks_max:
            raise Overloaded(f"{len(index)} blocks are stored, index_blocks_max is reached")

    def turn(self, client_id: int, turn_id: int, shard: int | None = None) -> Turn:
        """A turn this client writes. Raises: UnknownTurn."""
        turn = self.turns.get(turn_id)
        writes = turn is not None and (
            client_id in turn.writers.values() if shard is None else turn.writers.get(shard) == client_id
        )
        if turn is None or not writes:
            raise UnknownTurn(f"turn {turn_id} is not being written by this client: finished, aborted or lost")
        return turn

    async def commit_turn(self, client_id: int, turn_id: int, shard: int, sums: list[tuple[int, bytes]]) -> bool:
        """A shard has written its planes. True: all have, and the turn is visible.

        Raises: UnknownTurn, ValueError. Unavailable: another shard failed, or it could not be persisted.
        """
        turn = self.turn(client_id, turn_id, shard)
        turn.set_checksums(shard, sums)
        del turn.writers[shard]
        turn.committed.add(shard)
        if turn.failed:
            await self._end_if_unwritten(turn)
            raise Unavailable(f"another shard of the turn failed: {turn.failure}")
        if len(turn.committed) < turn.spec.shards:
            return False
        # The caller may give up waiting; what all shards have written is finished all the same.
        await asyncio.shield(self._finish(turn))
        return True

    async def _finish(self, turn: Turn) -> None:
        try:
            await self.committer.finish(turn)
            self.counts["turns_committed"] += 1
        except BaseException:
            self.counts["turns_aborted"] += 1
            raise
        finally:
            await self._end(turn, [])

    async def abort_turn(self, client_id: int, turn_id: int, shard: int, failure: str) -> None:
        """A shard will not write on. `failure`: a write failed, so the files it wrote to are sealed. Raises: UnknownTurn."""
        turn = self.turn(client_id, turn_id, shard)
        if failure:
            for part in turn.parts:
                if part.file is not None:
                    async with part.session.lock:
                        await self.retirement.seal(part.session, part.file)
        await self._fail_shard(turn, shard, failure or "aborted by its writer")

    async def abort_unheard(self, client_id: int, request_id: int) -> None:
        """A client did not hear what became of a `begin_turn`: a turn that it began is given back. None is fine."""
        for turn in list(self.turns.values()):
            for shard in [shard for shard, writer in turn.writers.items() if writer == client_id]:
                if turn.requests.get(shard) == request_id:
                    await self._fail_shard(turn, shard, "its writer did not hear of it")

    async def _fail_shard(self, turn: Turn, shard: int, failure: str) -> None:
        turn.writers.pop(shard, None)
        if not turn.failed:
            turn.failed, turn.failure = True, failure
            self.counts["turns_aborted"] += 1
        await self._end_if_unwritten(turn)

    async def _end_if_unwritten(self, turn: Turn) -> None:
        if not turn.writers and turn.ready.is_set() and turn.turn_id in self.turns:
            await self._end(turn, turn.parts)

    async def _end(self, turn: Turn, unwritten: list[Part]) -> None:
        """Take a turn out of the table and give back what it holds."""
        self.turns.pop(turn.turn_id, None)
        self._reserved_blocks -= turn.blocks_reserved
        for held in turn.holds:
            held.holds -= 1
        await self.reserver.give_back(unwritten)
        for held in turn.holds:  # what the turn continued may have been quarantined meanwhile
            await self.retirement.settle(held)

    async def report_corrupt(self, suspects: Sequence[Suspect]) -> None:
        """Quarantine segments whose bytes differ from their checksums: misses from now on, also after a restart."""
        for suspect in suspects:
            segment = self.catalog.suspected(suspect)
            if segment is None:
                continue
            session = self.catalog.sessions[segment.session_no]
            log.error(
                "segment %s of session %s is corrupt: %d blocks are lost", segment.address, session.name, segment.blocks
            )
            self.counts["corrupt_segments"] += 1
            await self.retirement.discard(session, segment)

    # -- time ------------------------------------------------------------------------------------------------------

    async def tick(self, trim_after_s: float) -> None:
        """Once a second: what ends by the clock."""
        now_s = self._now_s()
        self.leases.expire(now_s)
        for lease_id in [lease_id for lease_id in self._files_of_lease if self.leases.get(lease_id) is None]:
            del self._files_of_lease[lease_id]
        for client in self.clients.silent(now_s):
            await self.client_gone(client.client_id)
        for turn in list(self.turns.values()):
            # Shards that committed wait for the others; when those never come, nobody writes and nobody will.
            if not turn.writers and len(turn.joined) < turn.spec.shards and turn.ready.is_set():
                turn.waited_s += 1
                if turn.waited_s > self._bounds.lease_ttl_s:
                    await self._fail_shard(turn, -1, "a shard never came")
        self.room.tick()
        await self.retirement.tick()
        if now_s >= self._next_trim_s:
            self._next_trim_s = now_s + min(trim_after_s / TRIMS_A_PERIOD, TRIM_PAUSE_S_MAX)
            await self.retirement.trim_idle(self._wall_s() - trim_after_s)
        if now_s >= self._next_tell_s:
            self._next_tell_s = now_s + TELL_S
            await tell_uses(self.catalog, self.disks)
