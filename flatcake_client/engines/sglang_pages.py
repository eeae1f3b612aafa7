"""Pages of one SGLang pool in one space: found, loaded and stored by their hashes. Knows nothing of SGLang's classes.

SGLang names a page by a hex hash chained over all pages before it, and asks for pages in batches of up to 128: `keys`, with
the hashes before them in `prefix` when it passes them. Hashes become block keys through one digest with the space.

- Finding needs no prefix: a chain is looked up from the batch's first page, which names all before it, so a batch is found
  even if the pages before it were reclaimed. Only where that falls short, and the prefix is known, the whole chain is asked
  for, since another node may hold it.
- Storing continues the chain when all of the prefix is stored and visible. Else the batch is a chain of its own: it can be
  found all the same, but has a file of its own and does not keep the pages before it from being reclaimed.
- Ranks of one tensor-parallel group must ask for the same turn. A rank's commit shows only when the last rank has committed,
  so before it continues a chain a rank waits, bounded, until its own last commit shows.
- Each call looks up, moves and releases: a lease that outlives its call would need somebody to end it, and SGLang ends
  nothing. Between finding and loading a page may go; then fewer pages come, as SGLang expects of a store.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flatcake_client import Client, Hit, Restore, Unavailable
from flatcake_client.engines.weights import Weights

VISIBLE_TIMEOUT_S: Final = 5.0  # other ranks write the same bytes at the same time; longer is a rank that failed
VISIBLE_POLL_S: Final = 0.005
UNSEEN_MAX: Final = 1024  # ranks are a few batches apart

Slots = NDArray[np.int64]


class PageStore:
    """Thread-safe."""

    def __init__(
        self,
        client: Client,
        planes: Sequence[Any],
        *,
        model: str,
        dtype: str,
        page_tokens: int,
        layout: str,
        weights: Weights,
        weights_name: str = "",
        shards: int = 1,
        shard: int = 0,
    ) -> None:
        """Args:
            planes: one array a plane, (pages, ...): what a page has in it. They live as long as this.
            weights: of the engine; while they change under its cache, all verbs raise Unavailable.

        Raises: ValueError: sizes that make no space.
        """
        self._weights = weights
        self.planes = list(planes)
        self.page_tokens = page_tokens
        sizes = [int(np.prod(plane.shape[1:])) * plane.dtype.itemsize for plane in self.planes]
        self.page_bytes = sum(sizes)
        self.space = client.open_space(
            model=model,
            dtype=dtype,
            block_tokens=page_tokens,
            plane_bytes=sizes,
            shards=shards,
            shard=shard,
            weights=weights_name,
            layout=layout,
        )
        self._lock = threading.Lock()
        # Last keys of commits that the other ranks have not made visible yet; the oldest are forgotten.
        self._unseen: OrderedDict[bytes, None] = OrderedDict()

    def find(self, prefix: Sequence[str], keys: Sequence[str], *, pin: bool) -> tuple[Hit, int]:
        """The hit that has most of these pages, and which of its blocks the first of them is. The caller releases it.

        Raises: Unavailable: the daemon could not be asked.
        """
        salt = self._weights.salt()
        hit = self.space.lookup(self._block_keys(keys, salt), pin=pin)
        if hit.failure is not None:
            raise hit.failure
        if not prefix or hit.blocks == len(keys):
            return hit, 0
        whole = self.space.lookup(self._block_keys([*prefix, *keys], salt), pin=pin)
        if whole.failure is None and whole.blocks - len(prefix) > hit.blocks:
            hit.release()
            return whole, len(prefix)
        whole.release()
        return hit, 0

    def count(self, prefix: Sequence[str], keys: Sequence[str]) -> int:
        """How many of these pages are stored, from the first on. Raises: Unavailable."""
        if not keys:
            return 0
        hit, first = self.find(prefix, keys, pin=False)
        return max(0, hit.blocks - first)

    def load(self, prefix: Sequence[str], keys: Sequence[str], slots: Slots) -> int:
        """Bring pages into these slots; how many came, from the first on. Nothing is written after it returned.

        Raises: FlatCakeError.
        """
        if not keys:
            return 0
        hit, first = self.find(prefix, keys, pin=True)
        with hit:
            if hit.blocks <= first:
                return 0
            with self.restore(hit, first, slots) as restore:
                return max(0, restore.wait() - first)

    def restore(self, hit: Hit, first: int, slots: Slots) -> Restore:
        """A restore of a hit's blocks from `first` on into these slots."""
        padded = np.concatenate([np.zeros(first, np.int64), slots])
        return hit.restore(self.planes, padded, first_block=first)

    def store(self, prefix: Sequence[str], keys: Sequence[str], slots: Slots, session: str | None = None) -> None:
        """Store pages from these slots, those that are not stored yet. Raises: FlatCakeError: it was not, or not all."""
        if not keys:
            return
        salt = self._weights.salt()
        block_keys, first = self._block_keys([*prefix, *keys], salt), len(prefix)
        context_tokens = len(block_keys) * self.page_tokens
        if first and not self._continues(block_keys[:first]):
            block_keys, first = block_keys[first:], 0
        with self.space.begin_turn(block_keys, session=session, context_tokens=context_tokens, salt=salt) as turn:
            wanted = range(turn.blocks.start - first, turn.blocks.stop - first)
            if len(turn.blocks) and wanted.start < 0:
                raise Unavailable("pages before this batch were reclaimed just now: it is stored another time")
            for layer, plane in enumerate(self.planes if len(turn.blocks) else ()):
                turn.write_layer(layer, plane, slots[wanted.start : wanted.stop])
            visible = turn.commit()
        if not visible:
            with self._lock:
                self._unseen[block_keys[-1].tobytes()] = None
                while len(self._unseen) > UNSEEN_MAX:
                    self._unseen.popitem(last=False)

    def _continues(self, prefix_keys: NDArray[np.uint8]) -> bool:
        """Whether all of a prefix is stored and visible. Raises: Unavailable."""
        last = prefix_keys[-1].tobytes()
        deadline_s = time.monotonic() + VISIBLE_TIMEOUT_S
        while True:
            hit = self.space.lookup(prefix_keys, pin=False)
            if hit.failure is not None:
                raise hit.failure
            with self._lock:
                mine = last in self._unseen
                if not mine or hit.blocks == len(prefix_keys):
                    self._unseen.pop(last, None)
                    return hit.blocks == len(prefix_keys)
                if time.monotonic() >= deadline_s:
                    self._unseen.pop(last, None)
                    raise Unavailable("the other ranks did not store the pages before this batch")
            time.sleep(VISIBLE_POLL_S)

    def _block_keys(self, hashes: Sequence[str], salt: bytes) -> NDArray[np.uint8]:
        return self.space.keys_of_hashes([page.encode() for page in hashes], salt)


def host_planes(pool: Any) -> list[NDArray[np.uint8]]:
    """A host pool's memory as planes, (pages, bytes) each, by the pool's own formulas for zero copy, in its own layout.

    A plane is what the pool keeps together of a page: K of one layer (layer first), K of all layers (page first), ...
    The arrays are views: whoever uses them keeps the pool.

    Raises:
        ValueError: it has no memory of its own, or its pages do not lie in equal steps.
    """
    page_tokens = page_tokens_of(pool)
    pages = int(pool.size) // page_tokens
    first, sizes = _addresses(pool, 0, page_tokens)
    second, _ = _addresses(pool, min(1, pages - 1), page_tokens)
    last, _ = _addresses(pool, pages - 1, page_tokens)
    planes = []
    for start, after, end, size in zip(first, second, last, sizes, strict=True):
        step = after - start if pages > 1 else size
        if step < size or start + step * (pages - 1) != end:
            raise ValueError(f"pages of {type(pool).__name__} ({pool.layout}) do not lie in equal steps")
        memory = memoryview((ctypes.c_uint8 * (step * (pages - 1) + size)).from_address(start))
        planes.append(np.ndarray((pages, size), np.uint8, memory, strides=(step, 1)))
    return planes


def page_tokens_of(pool: Any) -> int:
    """Rows of a pool's indices that make a page."""
    return int(getattr(pool, "page_size", 1) or 1)


def page_slots(indices: Any, page_tokens: int, pages: int) -> Slots:
    """The pages that an engine's row indices name, `page_tokens` rows each.

    Raises: ValueError: not so many rows, or a page that does not begin on its border.
    """
    rows = np.asarray(indices.cpu() if hasattr(indices, "cpu") else indices, np.int64).reshape(-1)
    if len(rows) != pages * page_tokens:
        raise ValueError(f"{len(rows)} indices for {pages} pages of {page_tokens}")
    starts = rows[::page_tokens]
    if (starts % page_tokens).any():
        raise ValueError("a page does not begin on a border of pages")
    return np.ascontiguousarray(starts // page_tokens)


def _addresses(pool: Any, page: int, page_tokens: int) -> tuple[list[int], list[int]]:
    import torch

    meta = pool.get_page_buffer_meta(torch.arange(page * page_tokens, (page + 1) * page_tokens))
    if not meta or not meta[0]:
        raise ValueError(f"{type(pool).__name__} has no memory of its own that pages could be stored from")
    return [int(address) for address in meta[0]], [int(size) for size in meta[1]]
