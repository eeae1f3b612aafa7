"""LMCache's chunks as FlatCake's blocks: what both of its modes share. No LMCache is imported here.

LMCache hands over single chunks (256 tokens by default), each named by a hash of its whole prefix, each in a buffer of its
own; FlatCake stores chains. A chunk is a block:

- One space for chunks of one model, dtype, shape and size. What else names a chunk (worker, object group, cache salt, tags) is
  in its key, through `keys_of_hashes`: ranks are stored and found apart, since LMCache batches them apart.
- One plane is up to 4 MiB of a chunk, not a layer: LMCache moves whole chunks, and a plane of all chunks of a batch is one long
  read.
- One batch is one turn: its missing chunks become one segment. Behind which chunk a batch follows is remembered (`Chains`):
  LMCache asks for the whole prompt before it stores what was missing, so the order in which it asked tells. The turn is then
  begun with that one predecessor in front, and the daemon appends to the session that ends there. Measured on 256 chunks of
  1 MiB (`bench/connector_lmcache.py`): batches of 32 are read back in 8 commands and were stored at 0.3 to 0.55 GB/s; each chunk by
  itself takes 256 commands and was stored at 0.06, the price of a file, an fsync and a journal entry a chunk.
- What was not remembered, or is no longer stored, costs nothing but a session of its own for that batch.
- Any set of chunks may be asked for. Past the second miss in a row the search goes on with doubled steps, within `LOOKUPS_MAX`
  questions; a chunk that is not reached is a miss.

Invariants: a buffer is touched only inside the call it was given to; a chunk is reported as loaded only if all its bytes are in place.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flatcake_client import Client, Hit, Space, Turn
from flatcake_client.keys import KEY_BYTES, KeyArray

PLANE_BYTES_MAX: Final = 4 << 20  # one read command
ALIGN_BYTES: Final = 4096
LOOKUPS_MAX: Final = 32  # questions a search, some 0.4 ms each: a prompt of holes costs no more than that
LINKS_MAX: Final = 1 << 16  # predecessors remembered: 16 M tokens of chunks, some 15 MB
SPACES_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class ChunkKind:
    """What chunks of one space have in common.

    Attributes:
        layout: shape of a chunk and what else decides the meaning of its bytes.
        chunk_bytes: of one chunk of one worker.
        chunk_tokens: for placement and statistics.
        weights: names them, as far as they are known.
    """

    model: str
    dtype: str
    layout: str
    chunk_bytes: int
    chunk_tokens: int
    weights: str = ""


@dataclass(frozen=True, slots=True)
class ChunkStats:
    """Counts since the start. Chunks asked to be stored are stored, were there before, or failed; loads alike."""

    lookups: int = 0
    lookups_failed: int = 0
    chunks_asked: int = 0
    chunks_found: int = 0
    chunks_loaded: int = 0
    chunks_load_failed: int = 0
    bytes_loaded: int = 0
    chunks_stored: int = 0
    chunks_there: int = 0
    chunks_store_failed: int = 0
    bytes_stored: int = 0
    turns_continued: int = 0  # appended behind their predecessor
    turns_apart: int = 0  # predecessor unknown
    chunks_declined: int = 0  # partial, compressed, or not in host memory
    tasks_refused: int = 0  # too many were waiting


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """`positions` in the caller's batch: chunks that were not stored before."""

    positions: NDArray[np.int64]
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class FoundRun:
    """Chunks that one hit holds: `positions` in the caller's batch, in the hit's order."""

    positions: NDArray[np.int64]
    hit: Hit


class Chains:
    """Behind which chunk each chunk follows, as far as it was seen. Bounded, least recently seen goes first. Thread-safe."""

    def __init__(self, links_max: int = LINKS_MAX) -> None:
        self._links_max = links_max
        self._lock = threading.Lock()
        self._parents: OrderedDict[bytes, bytes] = OrderedDict()
        self._tails: OrderedDict[bytes, bytes] = OrderedDict()

    def learn(self, chain: Sequence[bytes]) -> None:
        """Remember a chain that was asked for or stored, in its order."""
        with self._lock:
            for parent, child in itertools.pairwise(chain):
                self._parents[child] = parent
                self._parents.move_to_end(child)
            while len(self._parents) > self._links_max:
                self._parents.popitem(last=False)

    def stored(self, last: bytes, tail: bytes) -> None:
        """A batch was stored in one segment: whoever follows `last` continues the segment, which ends with `tail`."""
        if last == tail:
            return
        with self._lock:
            self._tails[last] = tail
            if len(self._tails) > self._links_max:
                self._tails.popitem(last=False)

    def before(self, chunk: bytes) -> bytes | None:
        """The chunk that a turn beginning with `chunk` is to continue."""
        with self._lock:
            parent = self._parents.get(chunk)
            return None if parent is None else self._tails.get(parent, parent)


class ChunkStore:
    """Chunks of one process in one daemon. Thread-safe; the caller closes the client."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._spaces: OrderedDict[ChunkKind, Space] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self.chains = Chains()

    def search(
        self,
        kind: ChunkKind,
        chunks: Sequence[bytes],
        lanes: Sequence[Hashable] = (),
        *,
        pin: bool,
        deadline_s: float,
        prefix_only: bool = False,
    ) -> Iterator[FoundRun]:
        """Find which chunks are stored, in any order; a run a hit. The caller releases each hit before it takes the next, or later.

        Args:
            chunks: what names each, and its whole prefix, apart from what is in `kind`.
            lanes: one a chunk: those of one lane follow each other in one context. Empty: all do.
            deadline_s: on the monotonic clock; past it the rest are misses.
            prefix_only: end at the first miss.
        """
        order, starts = _by_lane(lanes, len(chunks))
        ordered = [chunks[position] for position in order]
        self._learn(ordered, starts)
        space = self.space(kind)
        keys = space.keys_of_hashes(ordered)
        self.count(chunks_asked=len(keys))
        at = misses = 0
        for _ in range(LOOKUPS_MAX):
            left_s = deadline_s - time.monotonic()
            if at >= len(keys) or left_s <= 0:
                return
            hit = space.lookup(keys[at:], pin, timeout_s=min(left_s, self._client.timeout_s))
            self.count(lookups=1, lookups_failed=int(hit.failure is not None), chunks_found=hit.blocks)
            if hit.blocks:
                yield FoundRun(order[at : at + hit.blocks], hit)
            if hit.failure is not None or prefix_only:
                return
            misses = 1 if hit.blocks else misses + 1
            missing = at + hit.blocks
            lane_end = starts[np.searchsorted(starts, missing, "right")] if missing < len(keys) else len(keys)
            at = min(missing + (1 << max(0, misses - 2)), int(lane_end))

    def bring(self, kind: ChunkKind, run: FoundRun, addresses: Sequence[int], *, deadline_s: float) -> int:
        """Bring the first chunks of a run into host buffers, and release its hit. How many are in place, from the first on.

        Args:
            addresses: of one buffer of `kind.chunk_bytes` a chunk, the caller's until this returns and not touched after.
        """
        with run.hit as hit:
            target, slots = pages(addresses, kind.chunk_bytes)
            left_s = max(0.0, deadline_s - time.monotonic())
            with hit.restore(target, slots, timeout_s=left_s) as restore:
                usable = restore.wait()
        failed = len(addresses) - usable
        self.count(chunks_loaded=usable, chunks_load_failed=failed, bytes_loaded=usable * kind.chunk_bytes)
        return usable

    def store(
        self,
        kind: ChunkKind,
        chunks: Sequence[bytes],
        addresses: Sequence[int],
        lanes: Sequence[Hashable] = (),
        *,
        deadline_s: float,
    ) -> Stored:
        """Store those chunks of a batch that are not stored yet, as one turn.

        Args:
            addresses: as in `bring`; the buffers are only read.

        Raises:
            FlatCakeError: nothing was stored. ValueError: a chunk is named twice, or the chunks are too large.
        """
        order, starts = _by_lane(lanes, len(chunks))
        ordered = [chunks[position] for position in order]
        self._learn(ordered, starts)
        source, slots = pages(addresses, kind.chunk_bytes)
        try:
            with self._begin(self.space(kind), ordered, deadline_s) as (turn, first):
                mine = slots[order][turn.blocks.start - first : turn.blocks.stop - first]
                for plane, rows in enumerate(source):
                    turn.write_layer(plane, rows, mine, timeout_s=max(0.0, deadline_s - time.monotonic()))
                turn.commit(timeout_s=deadline_s - time.monotonic())
                stored = [
                    order[part.first_block - first : part.first_block + part.blocks - first] for part in turn.parts
                ]
        except BaseException:
            self.count(chunks_store_failed=len(chunks))
            raise
        for end in starts[1:]:
            self.chains.stored(ordered[int(end) - 1], ordered[-1])
        fresh = np.concatenate([order[:0], *stored])
        size_bytes = len(fresh) * kind.chunk_bytes
        self.count(chunks_stored=len(fresh), chunks_there=len(chunks) - len(fresh), bytes_stored=size_bytes)
        return Stored(fresh, size_bytes)

    @contextlib.contextmanager
    def _begin(self, space: Space, ordered: Sequence[bytes], deadline_s: float) -> Iterator[tuple[Turn, int]]:
        """The turn, and where the batch begins in its chain: behind its predecessor, if that is known and still stored."""
        keys = space.keys_of_hashes(ordered)
        before = self.chains.before(ordered[0])
        if before is not None and before not in ordered:
            chain: KeyArray = np.concatenate([space.keys_of_hashes([before]), keys])
            with space.begin_turn(chain, timeout_s=self._asking_s(deadline_s)) as turn:
                if not turn.blocks or turn.blocks.start > 0:
                    self.count(turns_continued=1)
                    yield turn, 1
                    return
        with space.begin_turn(keys, timeout_s=self._asking_s(deadline_s)) as turn:
            self.count(turns_apart=1)
            yield turn, 0

    def _asking_s(self, deadline_s: float) -> float:
        return min(self._client.timeout_s, deadline_s - time.monotonic())

    def _learn(self, ordered: Sequence[bytes], starts: NDArray[np.int64]) -> None:
        for first, end in itertools.pairwise(starts.tolist()):
            self.chains.learn(ordered[first:end])

    def space(self, kind: ChunkKind) -> Space:
        """Raises: ValueError: chunks that no space can have."""
        with self._lock:
            if kind in self._spaces:
                self._spaces.move_to_end(kind)
                return self._spaces[kind]
        space = self._client.open_space(
            model=kind.model,
            dtype=kind.dtype,
            block_tokens=kind.chunk_tokens,
            plane_bytes=planes_of(kind.chunk_bytes),
            weights=kind.weights,
            layout=f"lmcache/1 {kind.layout}",
        )
        with self._lock:
            self._spaces[kind] = space
            if len(self._spaces) > SPACES_MAX:
                self._spaces.popitem(last=False)
        return space

    def ping(self, kind: ChunkKind) -> bool:
        """Whether the daemon answers."""
        key = np.zeros((1, KEY_BYTES), np.uint8)
        return self.space(kind).lookup(key, pin=False).failure is None

    def count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def stats(self) -> ChunkStats:
        with self._lock:
            return ChunkStats(**self._counts)


def planes_of(chunk_bytes: int) -> tuple[int, ...]:
    """A chunk cut into planes of at most 4 MiB, on 4 KiB: together exactly the chunk. Raises: ValueError: no bytes."""
    if chunk_bytes < 1:
        raise ValueError(f"a chunk of {chunk_bytes} bytes")
    count = -(-chunk_bytes // PLANE_BYTES_MAX)
    step = -(-chunk_bytes // count // ALIGN_BYTES) * ALIGN_BYTES
    return tuple([min(step, chunk_bytes - at) for at in range(0, chunk_bytes, step)])


class _At:
    """Host memory by its address, for numpy: an array interface, since ctypes keeps a type for each size for ever."""

    def __init__(self, address: int, shape: tuple[int, int], stride_bytes: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "strides": (stride_bytes, 1),
            "typestr": "|u1",
            "version": 3,
        }


def pages(addresses: Sequence[int], chunk_bytes: int) -> tuple[list[NDArray[np.uint8]], NDArray[np.int64]]:
    """Buffers anywhere in host memory as slots of one paged array a plane, without a copy; `slots[i]` is buffer i.

    The slots' stride is the greatest common divisor of the distances, so buffers cut one after the other from a pool are
    consecutive slots. Slots that no buffer has may overlap and are never touched; nor are they mapped, maybe.
    """
    base = min(addresses)
    distances = [address - base for address in addresses]
    stride = math.gcd(*distances) or chunk_bytes
    slots = np.array(distances, np.int64) // stride
    count = int(slots.max()) + 1
    rows, offset = [], 0
    for plane_bytes in planes_of(chunk_bytes):
        rows.append(np.asarray(_At(base + offset, (count, plane_bytes), stride)))
        offset += plane_bytes
    return rows, slots


def _by_lane(lanes: Sequence[Hashable], count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions with each lane's together, lanes and chunks in the order they came; and where each lane begins, and the end."""
    numbers: dict[Hashable, int] = {}
    of = np.array([numbers.setdefault(lane, len(numbers)) for lane in lanes] or [0] * count, np.int64)
    order = np.argsort(of, kind="stable")
    return order, np.searchsorted(of[order], np.arange(max(1, len(numbers)) + 1))
