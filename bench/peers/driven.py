"""One system in a process and an environment of its own, told over its standard input what to restore: bench/peers_restore.py.

    python -P bench/peers/driven.py NAME DIRECTORY SESSION_BYTES READERS MEMORY_BYTES

A line {"do": what} is answered with a line: seconds, bytes, and by which medium the system said that they come. Sessions are
stored through the seam of `flatcake replay`, then as much again as twice the memory, so that they lie on the SSD; the page cache
is dropped before each restore, outside the time; what came is compared with what was stored, outside the time as well.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from flatcake_client.replay.system import Asked, Budget, Pages, Slots, System, open_adapter

PLANES, PLANE_BYTES = 32, 128 << 10
BLOCK_BYTES = PLANES * PLANE_BYTES  # 4 MiB: an 8B model's 64 tokens at a quarter of its width
BLOCK_TOKENS = 64
MEMORY_PART = 0.2  # of the memory: a session that is restored from there
FILL_PARTS = 8  # a filling session is so small a part of the memory
STORE_TIMEOUT_S, RESTORE_TIMEOUT_S, SETTLE_TIMEOUT_S = 300.0, 120.0, 60.0


class Driven:
    """A system, the engine's pages, and the sessions in them: one of all blocks, and the same bytes as one for each reader."""

    def __init__(self, name: str, directory: Path, session_bytes: int, readers: int, memory_bytes: int) -> None:
        blocks = session_bytes // BLOCK_BYTES // readers * readers
        self._blocks, self._readers, self._directory = blocks, readers, directory
        self._pages: Pages = np.ones((2 * blocks, PLANES, PLANE_BYTES), np.uint8)
        self._fill_pages()
        ssd_bytes = 4 * session_bytes + 8 * memory_bytes
        budget = Budget(memory_bytes, ssd_bytes, directory, BLOCK_TOKENS, PLANE_BYTES, PLANES, self._pages)
        self._system = open_by_name(name, budget)
        self._from = np.random.default_rng(1).permutation(blocks).astype(np.int64)
        self._to: Slots = blocks + np.random.default_rng(2).permutation(blocks).astype(np.int64)
        self._one = asked(0, blocks)
        self._each = [asked(1 + i, blocks // readers) for i in range(readers)]
        self._small = asked(10_000, max(1, int(memory_bytes * MEMORY_PART) // BLOCK_BYTES), conversations=2)
        self.store_s = self._timed(lambda: self._store(self._one, self._from))
        for i, one in enumerate(self._each):
            self._store(one, self._part(self._from, i))
        fill_blocks = max(1, memory_bytes // FILL_PARTS // BLOCK_BYTES)
        for i in range(2 * FILL_PARTS):
            self._store(asked(20_000 + i, fill_blocks), self._from)
        self._system.settle(SETTLE_TIMEOUT_S)
        self._store(self._small, self._from)

    def _fill_pages(self) -> None:
        """Bytes that say which block they are, and that no disk could leave out or make up."""
        noise = np.random.default_rng(0).integers(0, 256, BLOCK_BYTES + 8 * self._blocks, np.uint8)
        for i in range(self._blocks):
            self._pages[i] = noise[8 * i : 8 * i + BLOCK_BYTES].reshape(PLANES, PLANE_BYTES)

    def _part(self, slots: Slots, reader: int) -> Slots:
        size = self._blocks // self._readers
        return slots[reader * size : (reader + 1) * size]

    def _store(self, one: Asked, slots: Slots) -> None:
        kept = self._system.store(one, 0, self._pages, slots[: len(one.keys)], STORE_TIMEOUT_S)
        if kept != len(one.keys):
            raise ValueError(f"kept {kept} of {len(one.keys)} blocks: {self._system.stats()}")

    def do(self, what: str) -> dict[str, Any]:
        """`one`: all as one session. `in_turn`, `at_once`: as one a reader. `memory`: what is small. `copy`: a memcpy of as much."""
        if what == "copy":
            return self._copy()
        every = {"one": [self._one], "memory": [self._small]}.get(what, self._each)
        sources = [self._from] if len(every) == 1 else [self._part(self._from, i) for i in range(self._readers)]
        targets = [self._to] if len(every) == 1 else [self._part(self._to, i) for i in range(self._readers)]
        self._pages[self._blocks :] = 0
        if what != "memory":
            drop_page_cache(self._directory)
        threads = self._readers if what == "at_once" else 1
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda _: None, range(threads)))  # its threads are there
            start_s = time.perf_counter()
            media = list(pool.map(self._restore, every, targets))
            seconds = time.perf_counter() - start_s
        blocks = sum(len(one.keys) for one in every)
        for one, source, target in zip(every, sources, targets, strict=True):
            count = len(one.keys)
            if not np.array_equal(self._pages[target[:count]], self._pages[source[:count]]):
                raise ValueError("other bytes came back than were stored")
        return {"s": seconds, "bytes": blocks * BLOCK_BYTES, "media": dict(sum(media, Counter()))}

    def _restore(self, one: Asked, target: Slots) -> Counter[str]:
        """Lookup and restore, as an engine pays for both."""
        found = self._system.lookup(one)
        came = self._system.restore(one, found, self._pages, target[: found.blocks], RESTORE_TIMEOUT_S)
        if came != len(one.keys):
            raise ValueError(
                f"{came} of {len(one.keys)} blocks came, {found.blocks} were found: {self._system.stats()}"
            )
        return Counter(found.bytes_by_medium)

    def _copy(self) -> dict[str, Any]:
        count = len(self._small.keys)
        source, target = self._pages[:count], self._pages[self._blocks : self._blocks + count]
        seconds = self._timed(lambda: np.copyto(target, source))
        return {"s": seconds, "bytes": count * BLOCK_BYTES, "media": {}}

    def _timed(self, work: Any) -> float:
        start_s = time.perf_counter()
        work()
        return time.perf_counter() - start_s

    def told(self) -> Mapping[str, Any]:
        return {"settings": dict(self._system.settings), "store_gb_s": self._blocks * BLOCK_BYTES / self.store_s / 1e9}

    def close(self) -> None:
        self._system.close()


def open_by_name(name: str, budget: Budget) -> System:
    if name == "flatcake":
        from flatcake_client.replay.systems import FlatCakeOptions, FlatCakeSystem

        return FlatCakeSystem(budget, FlatCakeOptions())
    return open_adapter(Path(__file__).parent / f"{name}.py", budget)


def asked(number: int, blocks: int, *, conversations: int = 1) -> Asked:
    """A first turn that nobody else asks for, or a prompt that many do."""
    keys = np.random.default_rng(number).integers(0, 256, (blocks, 16), np.uint8)
    shared = np.full(blocks, conversations, np.int64)
    return Asked(number, f"session-{number}", 1, keys, blocks * BLOCK_TOKENS, None, shared)


def drop_page_cache(directory: Path) -> None:
    """Of our own files; needs no root. What is read with O_DIRECT is not there anyway."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def answer(out: TextIO, reply: Mapping[str, Any]) -> None:
    print(json.dumps(reply, default=str), file=out, flush=True)


def main(arguments: Sequence[str]) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is none of our answers
    name, directory, *numbers = arguments
    driven = Driven(name, Path(directory), *(int(number) for number in numbers))
    try:
        answer(out, driven.told())
        for line in sys.stdin:
            answer(out, driven.do(json.loads(line)["do"]))
    finally:
        driven.close()


if __name__ == "__main__":
    main(sys.argv[1:])
