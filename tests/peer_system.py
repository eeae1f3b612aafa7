"""One check for every adapter of bench/peers/: through the seam of `flatcake replay`, in the peer's own environment."""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from flatcake_client.replay.system import Asked, Budget, Found, System, open_adapter

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
PLANES, PLANE_BYTES = 8, 32 << 10
BLOCK_BYTES = PLANES * PLANE_BYTES  # 256 KiB
SESSIONS, BLOCKS = 3, 160  # 40 MiB each: twice the memory in all
DEADLINE_S = 60.0


def check_peer(name: str, directory: Path) -> None:
    """What is stored comes back byte for byte, from memory and SSD, in order and at once; what is not is a miss; nothing stays."""
    pages = np.random.default_rng(0).integers(0, 256, (2 * SESSIONS * BLOCKS, PLANES, PLANE_BYTES), np.uint8)
    budget = Budget(64 * MIB, 1024 * MIB, directory, 64, PLANE_BYTES, PLANES, pages)
    before = children()
    system = open_adapter(ROOT / "bench" / "peers" / f"{name}.py", budget)
    try:
        asked = [make_asked(number) for number in range(SESSIONS)]
        assert system.lookup(asked[0]).blocks == 0
        for one in asked:
            kept = system.store(one, 0, pages, slots_of(one, first=0), DEADLINE_S)
            assert kept == BLOCKS, f"{name} kept {kept} of {BLOCKS} blocks of session {one.number}: {system.stats()}"
        system.settle(DEADLINE_S)
        for one in asked:
            check_restored(system, one, pages)
        with ThreadPoolExecutor(SESSIONS) as together:
            list(together.map(lambda one: check_restored(system, one, pages), asked))
        check_prefix(system, asked[0], pages)
        stats = system.stats()
        assert stats.bytes_read["ssd"] > 0, "no byte came from the SSD"
        assert (stats.lost_blocks, stats.dropped_blocks, stats.rejected_blocks) == (0, 0, 0)
    finally:
        system.close()
    assert [path for path in directory.rglob("*") if path.is_file()] == []
    assert children() <= before, "a process was left behind"


def check_restored(system: System, asked: Asked, pages: np.ndarray) -> None:
    source, target = slots_of(asked, first=0), slots_of(asked, first=SESSIONS * BLOCKS)
    pages[target] = 0
    found = system.lookup(asked)
    assert found.blocks == BLOCKS
    assert sum(found.bytes_by_medium.values()) == BLOCKS * BLOCK_BYTES
    assert system.restore(asked, found, pages, target, DEADLINE_S) == BLOCKS
    assert np.array_equal(pages[target], pages[source]), "other bytes came back than were stored"


def check_prefix(system: System, asked: Asked, pages: np.ndarray) -> None:
    """A chain that leaves a stored one is found up to there, and nothing is written behind it."""
    keys = asked.keys.copy()
    keys[BLOCKS // 2 :] ^= 0xFF
    other = Asked(9, "other", 1, keys, 64 * BLOCKS, None, np.ones(BLOCKS, np.int64))
    target = slots_of(asked, first=SESSIONS * BLOCKS)
    pages[target] = 7
    found: Found = system.lookup(other)
    assert found.blocks == BLOCKS // 2
    assert system.restore(other, found, pages, target, DEADLINE_S) == BLOCKS // 2
    assert (pages[target[BLOCKS // 2 :]] == 7).all()


def make_asked(number: int) -> Asked:
    keys = np.random.default_rng(100 + number).integers(0, 256, (BLOCKS, 16), np.uint8)
    return Asked(number, f"session-{number}", 1, keys, 64 * BLOCKS, None, np.ones(BLOCKS, np.int64))


def slots_of(asked: Asked, *, first: int) -> np.ndarray:
    """A range of its own a session, in no order."""
    order = np.random.default_rng(asked.number).permutation(BLOCKS)
    return (first + asked.number * BLOCKS + order).astype(np.int64)


def children() -> set[int]:
    """Processes whose parent we are."""
    found: set[int] = set()
    for thread in Path(f"/proc/{os.getpid()}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found |= set(map(int, (thread / "children").read_text().split()))
    return found
