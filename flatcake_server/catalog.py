"""What the node holds at this moment: sessions, their segments and files, and the index over them. No I/O, no clock.

A block is visible exactly when its key is in the index; `publish` and `unpublish` are the only two places where that
changes, each within one step of the event loop, so a lookup sees a segment whole or not at all. Of equal keys the
first published stands. A session's place in the order of reclaim follows its use and that of the sessions forked from it.

The sessions of a path that failed are lost at once: nothing here answers with them any more. What they had is then taken out of the
tables a few segments at a time (`unload`), since they may be most of what there is. A key that is stored again meanwhile takes
the place of the lost one.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flatcake_server.index import KEY_BYTES, BlockIndex
from flatcake_server.placement import Reason
from flatcake_server.reclaim import ReclaimOrder, tails_of
from flatcake_server.records import FileId, FileRecord, KeyArray, SegmentRecord, SessionNo, SessionRecord, Suspect
from flatcake_server.segments import SegmentMap, SegmentRun
from flatcake_transport.address import MISSING, AddressArray, Medium
from flatcake_transport.errors import Overloaded
from flatcake_transport.layout import align_up
from flatcake_transport.space import Fingerprint, SpaceSpec

MEMORY_POOL = 0  # pools 1.. are the SSD paths
ENTRIES_MAX = 4  # sessions a chain is followed into: a shared head, a fork or two, its own
UNLOADED_AT_ONCE: Final = 8  # segments, in a step of `unload`


@dataclass(slots=True, eq=False)
class SessionFile:
    """A pre-allocated file as the loop sees it: `[0, tail)` is taken, of it `reserved_bytes` by turns under way."""

    file_id: FileId
    base: int
    size_bytes: int
    created_bytes: int  # its size before any trim
    tail: int = 0
    written_bytes: int = 0  # end of its last committed segment
    committed_bytes: int = 0  # sum of its committed segments
    reserved_bytes: int = 0
    sealed: bool = False
    uncut: bool = False  # it could not be trimmed, and is not asked again

    @property
    def keep_bytes(self) -> int:
        """What a trim leaves of it."""
        return align_up(self.tail)

    def record(self, session_no: SessionNo) -> FileRecord:
        return FileRecord(self.file_id, session_no, self.base, self.size_bytes, self.written_bytes, self.sealed)


@dataclass(slots=True, eq=False)
class Session:
    """One session. `holds` counts turns under way in it or on top of it; `lock` orders what happens to its files."""

    session_no: SessionNo
    name: str
    spec: SpaceSpec
    fingerprint: Fingerprint
    pool: int  # of the SSD path its files are on; MEMORY_POOL while it has none
    created_s: float
    last_used_s: float
    turns: int = 0
    shared: bool = False
    tail_key: bytes = b""
    files: list[SessionFile] = field(default_factory=list)
    segments: list[SegmentRecord] = field(default_factory=list)
    holds: int = 0
    gone: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def record(self) -> SessionRecord:
        return SessionRecord(self.session_no, self.name, self.fingerprint, self.turns, self.created_s, self.last_used_s)

    @property
    def file_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def tail_bytes(self) -> int:
        """What a trim gives back: pre-allocated and taken by nobody. Files before the last were cut when it came."""
        last = self.files[-1] if self.files else None
        return 0 if last is None or last.uncut else last.size_bytes - last.keep_bytes

    @property
    def memory_bytes(self) -> int:
        return sum(s.total_bytes for s in self.segments if s.address.medium is Medium.MEMORY)

    @property
    def blocks(self) -> int:
        return sum(segment.blocks for segment in self.segments)


class Catalog:
    """Sessions, segments, index and reclaim order, kept equal to each other. Belongs to the event loop."""

    def __init__(self, index: BlockIndex) -> None:
        self.index = index
        self.segments = SegmentMap()
        self.order = ReclaimOrder()
        self.sessions: dict[SessionNo, Session] = {}
        self.used: set[SessionNo] = set()  # since the journals were told last (uses.py)
        self.segments_in: Counter[int] = Counter()  # by pool
        self.blocks_in: Counter[int] = Counter()
        self.copied_bytes = 0  # of segments that are copies of other nodes' blocks
        self.watch: Callable[[Iterable[SegmentRecord], bool], None] | None = None  # told what was (un)published
        self._watchers: list[set[SessionNo]] = []
        self._lost_pools: set[int] = set()
        self._by_name: dict[tuple[Fingerprint, str], Session] = {}
        # Older sessions of a name, of a path that was out of service while the name went on elsewhere.
        self._namesakes: dict[tuple[Fingerprint, str], list[Session]] = {}

    def __len__(self) -> int:
        return len(self.sessions)

    def find(self, fingerprint: Fingerprint, name: str) -> Session | None:
        key = fingerprint, name
        if key not in self._by_name:
            return None
        named = (self._by_name[key], *reversed(self._namesakes.get(key, ())))
        return next((session for session in named if not self.is_lost(session)), None)

    def add(self, session: Session) -> None:
        """Of two sessions with one name, the later added is found by it."""
        key = session.fingerprint, session.name
        self.sessions[session.session_no] = session
        if key in self._by_name:
            self._namesakes.setdefault(key, []).append(self._by_name[key])
        self._by_name[key] = session
        self.order.add(session.session_no)
        self._note(session)

    def forget(self, session: Session) -> None:
        """Take a session without visible segments out of the tables."""
        session.gone = True
        self.sessions.pop(session.session_no, None)
        key = session.fingerprint, session.name
        older = self._namesakes.get(key, [])
        if session in older:
            older.remove(session)
        elif older:
            self._by_name[key] = older.pop()
        else:
            del self._by_name[key]
        if not older:
            self._namesakes.pop(key, None)
        self.order.remove(session.session_no)
        self._note(session)

    def load(self, sessions: list[Session]) -> None:
        """Take over sessions with their segments at the start, all at once; least recently used first.

        Of equal keys the one committed first stands, as it did before the restart.
        """
        for session in sessions:
            self.add(session)
            committed = sum(file.committed_bytes for file in session.files)
            self.order.add_bytes(session.session_no, session.pool, committed)
            self.count_tail(session)
            self.segments_in[session.pool] += len(session.segments)
            self.blocks_in[session.pool] += session.blocks
        segments = sorted((s for session in sessions for s in session.segments), key=lambda s: s.generation)
        self.segments.load(segments)
        if not segments:
            return
        self.index.insert(*self._blocks_of(segments))
        self._link_all(segments)

    def _blocks_of(self, segments: Sequence[SegmentRecord]) -> tuple[KeyArray, AddressArray]:
        """Keys and addresses of all blocks of segments, at least one."""
        counts = np.array([segment.blocks for segment in segments])
        bases = np.array([segment.address for segment in segments], np.uint64)
        steps = np.array([self.sessions[s.session_no].spec.plane_bytes[0] for s in segments], np.uint64)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        addresses = np.repeat(bases, counts) + within.astype(np.uint64) * np.repeat(steps, counts)
        return np.concatenate([segment.keys for segment in segments]), addresses

    def _link_all(self, segments: list[SegmentRecord]) -> None:
        """Find which session each segment's parent lives in."""
        parents = np.frombuffer(b"".join(segment.parent_key for segment in segments), np.uint8).reshape(-1, 16)
        addresses = self.present(parents).tolist()
        for segment, address in zip(segments, addresses, strict=True):
            if address != MISSING:
                parent = self.segments.at(address).session_no
                if parent != segment.session_no:
                    self.order.depend(segment.session_no, parent)

    def publish(self, session: Session, segment: SegmentRecord) -> int:
        """Make a committed segment visible. Returns how many of its keys are new; the others stay where they were.

        0 also where the index takes none of them (keys made to meet in one of its tables): the caller discards it.
        """
        spec = session.spec
        self.segments.add(segment)
        session.segments.append(segment)
        session.tail_key = segment.keys[-1].tobytes()
        steps = np.arange(segment.blocks, dtype=np.uint64) * np.uint64(spec.plane_bytes[0])
        try:
            self._give_way(segment.keys)
            inserted = int(np.count_nonzero(self.index.insert(segment.keys, np.uint64(segment.address) + steps)))
        except Overloaded:
            inserted = 0
        self._count(session, segment, 1)
        if self.watch is not None:
            self.watch([segment], True)
        return inserted

    def unpublish(self, *segments: SegmentRecord) -> None:
        """Make segments invisible. Their bytes are as taken as before: the caller frees them, or does not."""
        if not segments:
            return
        self.index.remove(*self._blocks_of(segments))
        for segment in segments:
            session = self.sessions[segment.session_no]
            self.segments.remove(segment)
            session.segments.remove(segment)
            self._count(session, segment, -1)
        if self.watch is not None:
            self.watch(segments, False)

    def lose(self, pool: int) -> None:
        """A path failed: from here on none of its sessions is found. `unload` takes them out."""
        self._lost_pools.add(pool)

    def is_lost(self, session: Session) -> bool:
        """Whether it has gone, or is about to."""
        return session.gone or session.pool in self._lost_pools

    def unload(self, pool: int) -> Iterator[tuple[SegmentRecord, ...]]:
        """`unpublish` all that is lost with a pool; what each step did. Others may change anything between steps."""
        # From the end: the table is an array, and what stands behind moves up. What is in memory comes last.
        left = list(self.segments)
        while left:
            some, left[-UNLOADED_AT_ONCE:] = left[-UNLOADED_AT_ONCE:], []
            here = [segment for segment in some if self.segments.get(segment.address) is segment]
            lost = tuple(segment for segment in here if self.sessions[segment.session_no].pool == pool)
            self.unpublish(*lost)
            yield lost

    def emptied(self, pool: int) -> None:
        """Nothing of a lost pool is here any more."""
        self._lost_pools.discard(pool)

    def count_tail(self, session: Session) -> None:
        """To be called when what is taken of a session's last file has changed, or its size."""
        self._note(session)
        if session.pool != MEMORY_POOL and not session.gone:
            self.order.set_bytes(session.session_no, tails_of(session.pool), session.tail_bytes)

    def _count(self, session: Session, segment: SegmentRecord, sign: int) -> None:
        self._note(session)
        pool = MEMORY_POOL if segment.address.medium is Medium.MEMORY else session.pool
        self.order.add_bytes(session.session_no, pool, sign * segment.total_bytes)
        self.copied_bytes += sign * segment.total_bytes * (segment.reason == Reason.COPIED)
        self.segments_in[pool] += sign
        self.blocks_in[pool] += sign * segment.blocks

    def suspected(self, suspect: Suspect) -> SegmentRecord | None:
        """The segment that is meant, if it is still there."""
        segment = self.segments.get(suspect.address)
        return segment if segment is not None and segment.generation == suspect.generation else None

    @contextmanager
    def watched(self) -> Iterator[set[SessionNo]]:
        """Numbers of the sessions that change meanwhile: come, go, or have other segments or files."""
        changed: set[SessionNo] = set()
        self._watchers.append(changed)
        try:
            yield changed
        finally:
            self._watchers = [one for one in self._watchers if one is not changed]

    def _note(self, session: Session) -> None:
        for changed in self._watchers:
            changed.add(session.session_no)

    def present(self, keys: KeyArray) -> AddressArray:
        """Address of each key, `MISSING` where it is not stored."""
        addresses = self.index.lookup(keys)
        for _, lost in self._lost(addresses):
            addresses[lost] = MISSING
        return addresses

    def _lost(self, addresses: AddressArray) -> Iterator[tuple[Session, NDArray[np.intp]]]:
        """Which of the addresses are of lost sessions. A loop over segments, not over blocks."""
        order = np.argsort(addresses) if self._lost_pools else np.empty(0, np.intp)
        ordered, at = addresses[order], 0
        while at < len(ordered) and ordered[at] != np.uint64(MISSING):
            segment = self.segments.at(int(ordered[at]))
            end = int(np.searchsorted(ordered, np.uint64(segment.address + segment.total_bytes)))
            session = self.sessions[segment.session_no]
            if self.is_lost(session):
                yield session, order[at:end]
            at = end

    def _give_way(self, keys: KeyArray) -> None:
        """Have none of these keys stand for lost blocks."""
        if self._lost_pools:
            addresses = self.index.lookup(keys)
            for session, lost in self._lost(addresses):
                self.index.remove(keys[lost], addresses[lost])
                self._note(session)

    def prefix(self, spec: SpaceSpec, fingerprint: Fingerprint, keys: KeyArray) -> list[SegmentRun]:
        """The runs of the longest stored prefix of a chain.

        A conversation lies in its session's segments one after the other. So a key is looked up where the chain enters a
        session, and from there on compared with what stands behind it: a third of the time of looking 3,500 up. A chain
        that jumps about, as one of many small memory segments after a reclaim does, has the rest of it looked up at once.
        """
        runs: list[SegmentRun] = []
        at = 0
        for _ in range(ENTRIES_MAX):
            address = int(self.index.lookup(keys[at : at + 1])[0]) if at < len(keys) else MISSING
            if address == MISSING:
                return runs
            segment = self.segments.at(address)
            session = self.sessions[segment.session_no]
            if session.fingerprint != fingerprint or self.is_lost(session):
                return runs
            first = (address - segment.address) // spec.plane_bytes[0]
            followed = _follow(session.segments, segment, first, keys[at:])
            runs += followed
            at += sum(run.blocks for run in followed)
        return runs + self.runs(spec, fingerprint, self.index.prefix(keys[at:]))

    def runs(self, spec: SpaceSpec, fingerprint: Fingerprint, addresses: AddressArray) -> list[SegmentRun]:
        """The runs of a chain's stored prefix. Ends before a lost block, or one of another space: a caller mixed up its keys."""
        runs = self.segments.resolve(addresses, spec.plane_bytes[0])
        for at, run in enumerate(runs):
            session = self.sessions[run.segment.session_no]
            if session.fingerprint != fingerprint or self.is_lost(session):
                return runs[:at]
        return runs

    def chain(self, runs: Iterable[SegmentRun]) -> list[Session]:
        """The sessions that hold a chain, each once, head first."""
        numbers = dict.fromkeys(run.segment.session_no for run in runs)
        return [self.sessions[number] for number in numbers]

    def use(self, chain: list[Session], now_s: float) -> None:
        """A chain was read or written: its sessions are the last to be reclaimed, the deeper before the shallower."""
        numbers = [session.session_no for session in chain]
        for session in chain:
            session.last_used_s = now_s
        self.used.update(numbers)
        self.order.touch(numbers)

    def link(self, chain: list[Session]) -> None:
        """Remember that each session of a chain needs the one before it."""
        for parent, child in itertools.pairwise(chain):
            self.order.depend(child.session_no, parent.session_no)

    def chain_of(self, spec: SpaceSpec, fingerprint: Fingerprint, keys: KeyArray) -> list[Session]:
        """The sessions that hold the stored blocks of a chain, holes skipped."""
        addresses = self.present(keys)
        return self.chain(self.runs(spec, fingerprint, addresses[addresses != np.uint64(MISSING)]))

    def session_for(self, fingerprint: Fingerprint, parent_key: bytes) -> Session | None:
        """The session whose last block is `parent_key`: new blocks after it continue that session. Never a shared one."""
        address = int(self.index.lookup(np.frombuffer(parent_key, np.uint8).reshape(1, 16))[0])
        if address == MISSING:
            return None
        session = self.sessions[self.segments.at(address).session_no]
        continues = session.tail_key == parent_key and not session.shared and session.fingerprint == fingerprint
        return session if continues and not self.is_lost(session) else None


def _follow(
    segments: list[SegmentRecord], segment: SegmentRecord, first_block: int, keys: KeyArray
) -> list[SegmentRun]:
    """The runs of a chain that begins at a block of a session's segment, as far as it goes on there in order.

    Whole segments are compared as bytes, without numpy; only the one where the chain ends or leaves is looked at closely.
    """
    chain, at, runs = keys.tobytes(), 0, []
    for here in itertools.islice(segments, segments.index(segment), None):
        own = here.keys[first_block:].tobytes()
        blocks = len(own) // KEY_BYTES
        if not chain.startswith(own, at * KEY_BYTES):
            asked = keys[at : at + blocks]
            differs = (here.keys[first_block : first_block + len(asked)] != asked).any(axis=1)
            blocks = int(differs.argmax()) if differs.any() else len(asked)
            if blocks:
                runs.append(SegmentRun(here, first_block, blocks))
            return runs
        runs.append(SegmentRun(here, first_block, blocks))
        at += blocks
        first_block = 0
    return runs
