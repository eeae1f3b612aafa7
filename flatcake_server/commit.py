"""Commit of a turn: persist, then publish.

    1  footer into the segment            a crash before 3 leaves bytes that no journal knows: the file is cut to what
    2  fdatasync of the session file      is committed at the next start
    3  one WriteBatch in the journal      the segment is committed: the next start adopts it
    4  published in the index             the segment is visible

Memory segments need 1 and 4 only. Turns of one session pass 1 to 3 one after the other, others side by side. A part whose
keys were all stored meanwhile is given back instead: one copy, and the writer succeeds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import numpy as np

from flatcake_server.arena import Arena
from flatcake_server.catalog import Catalog
from flatcake_server.disk import Disk
from flatcake_server.records import FileId, Generation, SegmentRecord
from flatcake_server.reserve import Numbers, Reserver
from flatcake_server.retire import Retirement
from flatcake_server.turns import Part, Turn
from flatcake_transport.address import MISSING
from flatcake_transport.errors import FlatCakeError, Overloaded, Unavailable
from flatcake_transport.footer import Footer, encode_footer


class Committer:
    """Belongs to the event loop."""

    def __init__(
        self,
        catalog: Catalog,
        arena: Arena,
        disks: dict[int, Disk],
        retirement: Retirement,
        reserver: Reserver,
        numbers: Numbers,
        *,
        sync: bool,
        wall_s: Callable[[], float],
    ) -> None:
        self._catalog = catalog
        self._arena = arena
        self._disks = disks
        self._retirement = retirement
        self._reserver = reserver
        self._numbers = numbers
        self._sync = sync
        self._wall_s = wall_s
        self.stored_blocks: Counter[str] = Counter()
        self.stored_bytes: Counter[str] = Counter()
        self.duplicate_blocks = 0

    async def finish(self, turn: Turn) -> None:
        """Make a fully written turn visible. Afterwards it holds nothing.

        Raises: Unavailable: a part could not be persisted and is not stored; the others are.
        """
        stored = [self._stored(part) for part in turn.parts]
        duplicates = [part for part, is_stored in zip(turn.parts, stored, strict=True) if is_stored]
        fresh = [part for part, is_stored in zip(turn.parts, stored, strict=True) if not is_stored]
        self.duplicate_blocks += sum(part.plan.blocks for part in duplicates)
        results = await asyncio.gather(*(self._store(turn, part) for part in fresh), return_exceptions=True)
        await self._reserver.give_back(duplicates + [part for part in fresh if part.open])
        chain = self._catalog.chain_of(turn.spec, turn.fingerprint, turn.keys)
        self._catalog.link(chain)
        self._catalog.use(chain, self._wall_s())
        for result in results:
            if isinstance(result, FlatCakeError):
                raise Unavailable(f"a part of the turn was not stored: {result}") from result
            if isinstance(result, BaseException):
                raise result

    def _stored(self, part: Part) -> bool:
        return not bool((self._catalog.present(part.keys) == np.uint64(MISSING)).any())

    async def _store(self, turn: Turn, part: Part) -> None:
        session = part.session
        generation = Generation(self._numbers.generation)
        self._numbers.generation += 1
        segment = SegmentRecord(
            generation=generation,
            session_no=session.session_no,
            address=part.address,
            total_bytes=part.total_bytes,
            turn=turn.turn_no,
            first_block=part.plan.first_block,
            reason=part.reason,
            keys=part.keys,
            parent_key=part.parent_key,
            file_id=part.file.file_id if part.file else FileId(0),
            file_offset=part.file_offset if part.file else 0,
        )
        footer = encode_footer(
            Footer(
                spec=session.spec,
                session=session.name,
                turn=turn.turn_no,
                generation=generation,
                file_id=segment.file_id,
                file_offset=part.file_offset,
                first_block=part.plan.first_block,
                parent_key=part.parent_key,
                keys=part.keys,
                algorithms=bytes(part.algorithms),
                checksums=part.checksums,
            )
        )
        if part.file is None:
            self._arena.write(part.address.offset + part.layout.data_bytes, footer)
            self._publish(turn, part, segment)
        else:
            async with session.lock:
                await self._persist(turn, part, segment, footer)
                self._publish(turn, part, segment)
        if not self._indexed(segment):
            # Somebody stored all of it while the disk was busy with ours, or the index refused its keys.
            refused = not self._stored(part)
            await self._retirement.discard(session, segment)
            if refused:
                raise Overloaded("the index has no room for keys like these")
            self.duplicate_blocks += segment.blocks

    async def _persist(self, turn: Turn, part: Part, segment: SegmentRecord, footer: bytes) -> None:
        session, file = part.session, part.file
        assert file is not None
        disk = self._disks[session.pool]
        if session.gone:
            raise Unavailable(f"SSD path {disk.path} went out of service under the turn: {disk.failure}")
        if file.sealed:
            # A sync failed after this was written: the kernel may have dropped it and call the next sync a success.
            raise Unavailable(f"session file {file.file_id:x} was sealed by a failed write under the turn")
        now_s = self._wall_s()
        session.last_used_s, before = now_s, (session.turns, file.written_bytes)
        session.turns = max(session.turns, turn.turn_no)
        file.written_bytes = max(file.written_bytes, segment.end_offset)
        records = (session.record(), file.record(session.session_no))
        try:
            await disk.run(
                disk.files.write_footer, file.file_id, part.file_offset + part.layout.data_bytes, footer, self._sync
            )
        except (Unavailable, Overloaded):
            session.turns, file.written_bytes = before
            await self._retirement.seal(session, file)
            raise
        try:
            await disk.run(disk.journal.commit, *records, [segment], {session.fingerprint: session.spec}, self._sync)
        except FlatCakeError as error:
            session.turns, file.written_bytes = before
            self._retirement.fail_disk(disk, f"its journal cannot be written: {error}")
            raise

    def _publish(self, turn: Turn, part: Part, segment: SegmentRecord) -> None:
        session = part.session
        if self._catalog.is_lost(session):
            raise Unavailable("the session was lost with its SSD path")
        part.open = False
        session.holds -= 1
        session.turns = max(session.turns, turn.turn_no)
        if part.file is not None:
            part.file.reserved_bytes -= part.total_bytes
            part.file.committed_bytes += part.total_bytes
            part.file.written_bytes = max(part.file.written_bytes, segment.end_offset)
        self._catalog.publish(session, segment)
        medium = segment.address.medium.name.lower()
        self.stored_blocks[f"{medium}/{segment.reason}"] += segment.blocks
        self.stored_bytes[medium] += segment.total_bytes

    def _indexed(self, segment: SegmentRecord) -> bool:
        """Is any of its blocks the one that stands in the index?"""
        session = self._catalog.sessions[segment.session_no]
        addresses = self._catalog.present(segment.keys)
        runs = self._catalog.runs(session.spec, session.fingerprint, addresses[addresses != np.uint64(MISSING)])
        return any(run.segment is segment for run in runs)
