"""check_mover: what every mover does. The witness reads and writes with plain Python, never with the code under test."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatcake_transport.errors import Unavailable
from flatcake_transport.mover import FileSpan, MemorySpan, Move, Mover, PagedSpan, Region
from flatcake_transport.remote import RemoteMemory, RemoteSpan

PAGE = 4096


@dataclass
class Setting:
    """How to make a mover, and where its memory is: `to` brings host bytes there, `back` brings them to the host."""

    make: Callable[[], Mover]
    to: Callable[[np.ndarray], Any]
    back: Callable[[Any], np.ndarray]


def random_bytes(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def aligned(data: np.ndarray) -> np.ndarray:
    """The same bytes on a page border, as O_DIRECT wants them."""
    room = np.zeros(len(data) + PAGE, np.uint8)
    start = -room.ctypes.data % PAGE
    room[start : start + len(data)] = data
    return room[start : start + len(data)]


def check_mover(
    setting: Setting, path: Path | None, expose: Callable[[np.ndarray], tuple[np.ndarray, RemoteMemory]] | None = None
) -> None:
    """All that holds for every mover.

    `path`: a directory for those that move files. `expose`: serves bytes to a mover of remote memory; where they can
    be seen, and how they are named. Neither: those within memory.
    """
    check_life(setting)
    if expose is not None:
        check_remote(setting, expose)
    elif path is None:
        check_memory(setting)
        check_paged(setting)
    else:
        check_files(setting, path)
        check_short_file(setting, path)


def check_life(setting: Setting) -> None:
    mover = setting.make()
    nothing = mover.submit([])
    nothing.wait(0)
    assert nothing.done()
    before = mover.stats()
    assert (before.moves, before.commands, before.bytes_moved, before.failures) == (0, 0, 0, 0)
    assert before.path
    host = random_bytes(0, PAGE)
    mover.register(Region(host.ctypes.data, PAGE, "cpu", host))
    mover.close()
    mover.close()
    with pytest.raises(Unavailable, match="closed"):
        mover.submit([])


def check_memory(setting: Setting) -> None:
    mover = setting.make()
    sizes = [0, 1, 7, PAGE, 100_003, 3 << 20]
    sources = [random_bytes(i, size) for i, size in enumerate(sizes)]
    targets = [setting.to(np.zeros(size, np.uint8)) for size in sizes]
    for source, target in zip(sources, targets, strict=True):
        assert len(target) == len(source)
    transfer = mover.submit(
        [Move(MemorySpan(setting.to(s)), MemorySpan(t)) for s, t in zip(sources, targets, strict=True)]
    )
    transfer.wait(30)
    transfer.wait()
    assert transfer.done()
    for source, target in zip(sources, targets, strict=True):
        assert np.array_equal(setting.back(target), source)
    stats = mover.stats()
    assert (stats.moves, stats.bytes_moved, stats.failures) == (len(sizes), sum(sizes), 0)
    a, b = setting.to(np.zeros(8, np.uint8)), setting.to(np.zeros(9, np.uint8))
    with pytest.raises(ValueError, match="8 bytes"):
        mover.submit([Move(MemorySpan(a), MemorySpan(b))])
    with pytest.raises(ValueError):
        mover.submit([Move(FileSpan(0, 0, 8), MemorySpan(a))])
    mover.close()


def check_paged(setting: Setting) -> None:
    mover = setting.make()
    for plane_bytes, blocks, slots_count in ((64, 5, 9), (4096, 100, 130), (12_345, 7, 7), (1 << 20, 6, 8), (1, 3, 3)):
        for order in ("shuffled", "consecutive"):
            slots = np.random.default_rng(1).permutation(slots_count)[:blocks]
            if order == "consecutive":
                slots = np.arange(slots_count - blocks, slots_count)
            data = random_bytes(plane_bytes, blocks * plane_bytes)
            background = random_bytes(2, slots_count * plane_bytes).reshape(slots_count, plane_bytes)
            pages = setting.to(background.copy())
            mover.submit([Move(MemorySpan(setting.to(data)), PagedSpan(pages, slots, plane_bytes))]).wait(30)
            expected = background.copy()
            for i, slot in enumerate(slots.tolist()):
                expected[slot] = data[i * plane_bytes : (i + 1) * plane_bytes]
            assert np.array_equal(setting.back(pages), expected), "only the named slots, each with its own block"
            back = setting.to(np.zeros(len(data), np.uint8))
            mover.submit([Move(PagedSpan(pages, slots, plane_bytes), MemorySpan(back))]).wait(30)
            assert np.array_equal(setting.back(back), data)
    pages, data = setting.to(np.zeros((4, 8), np.uint8)), setting.to(np.zeros(16, np.uint8))
    for slots, plane_bytes in (([0, 4], 8), ([-1, 0], 8), ([1, 1], 8), ([2, 0, 2], 8), ([0, 1], 7), ([0], 8)):
        with pytest.raises(ValueError):
            mover.submit([Move(MemorySpan(data), PagedSpan(pages, np.array(slots), plane_bytes))])
    assert not setting.back(pages).any(), "a refused move moves nothing"
    with pytest.raises(ValueError):
        mover.submit([Move(PagedSpan(pages, np.array([0]), 8), PagedSpan(pages, np.array([1]), 8))])
    empty = np.zeros(0, np.int64)
    mover.submit([Move(MemorySpan(setting.to(np.zeros(0, np.uint8))), PagedSpan(pages, empty, 8))]).wait(30)
    mover.close()


def check_files(setting: Setting, path: Path) -> None:
    mover = setting.make()
    content = random_bytes(3, 5 << 20)
    name = path / "check-mover"
    name.write_bytes(content.tobytes())
    fd = os.open(name, os.O_RDWR)
    spans = [(0, PAGE), (PAGE, 3 << 20), (8192, 1), (12_345, 54_321), ((5 << 20) - 1, 1)]
    targets = [setting.to(aligned(np.zeros(size, np.uint8))) for _, size in spans]
    moves = [Move(FileSpan(fd, at, size), MemorySpan(t)) for (at, size), t in zip(spans, targets, strict=True)]
    check_at_once(mover, moves)
    for (at, size), target in zip(spans, targets, strict=True):
        assert np.array_equal(setting.back(target), content[at : at + size])
    written = random_bytes(4, 2 << 20)
    mover.submit([Move(MemorySpan(setting.to(aligned(written))), FileSpan(fd, 7 * PAGE, len(written)))]).wait(30)
    expected = content.copy()
    expected[7 * PAGE : 7 * PAGE + len(written)] = written
    assert name.read_bytes() == expected.tobytes(), "the bytes around a write stay as they were"
    memory = setting.to(aligned(np.zeros(PAGE, np.uint8)))
    with pytest.raises(ValueError):
        mover.submit([Move(FileSpan(fd, 0, PAGE + 1), MemorySpan(memory))])
    with pytest.raises(ValueError):
        mover.submit([Move(FileSpan(fd, 100, PAGE, direct=True), MemorySpan(memory))])
    with pytest.raises(ValueError):
        mover.submit([Move(MemorySpan(memory), MemorySpan(memory))])
    with pytest.raises(ValueError):
        mover.submit([Move(FileSpan(fd, 0, PAGE), PagedSpan(np.zeros((1, PAGE)), np.array([0]), PAGE))])
    os.close(fd)
    mover.close()


def check_short_file(setting: Setting, path: Path) -> None:
    """Less than asked for is an error, never a success; the moves beside it come to rest."""
    mover = setting.make()
    name = path / "check-short"
    name.write_bytes(random_bytes(5, 3 * PAGE + 100).tobytes())
    fd = os.open(name, os.O_RDWR)
    for at, size in ((0, 4 * PAGE), (3 * PAGE, PAGE), (8 * PAGE, PAGE)):
        transfer = mover.submit(
            [Move(FileSpan(fd, at, size), MemorySpan(setting.to(aligned(np.zeros(size, np.uint8)))))]
        )
        with pytest.raises(Unavailable):
            transfer.wait(30)
        assert transfer.done()
        with pytest.raises(Unavailable):
            transfer.wait()
    assert mover.stats().failures == 3
    os.close(fd)
    transfer = mover.submit([Move(FileSpan(fd, 0, PAGE), MemorySpan(setting.to(aligned(np.zeros(PAGE, np.uint8)))))])
    with pytest.raises(Unavailable):
        transfer.wait(30)
    mover.close()


def check_at_once(mover: Mover, moves: list[Move]) -> None:
    """The first moves of a mover, from a thread each: all land, and are counted."""
    threads = [threading.Thread(target=lambda m=m: mover.submit([m]).wait(30)) for m in moves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = mover.stats()
    assert (stats.moves, stats.bytes_moved, stats.failures) == (len(moves), sum(m.source.size_bytes for m in moves), 0)


def check_remote(setting: Setting, expose: Callable[[np.ndarray], tuple[np.ndarray, RemoteMemory]]) -> None:
    mover = setting.make()
    content, memory = expose(random_bytes(6, 9 << 20))
    spans = [(0, 9 << 20), (0, 0), (7, 1), (12_345, 54_321), ((4 << 20) - 1, 2), ((9 << 20) - 1, 1), (PAGE, 8 << 20)]
    targets = [setting.to(np.zeros(size, np.uint8)) for _, size in spans]
    moves = [Move(RemoteSpan(memory, at, size), MemorySpan(t)) for (at, size), t in zip(spans, targets, strict=True)]
    check_at_once(mover, moves)
    for (at, size), target in zip(spans, targets, strict=True):
        assert np.array_equal(setting.back(target), content[at : at + size])
    half = setting.to(np.zeros(3 << 20, np.uint8))  # into registered memory, and beside it nothing changes
    mover.register(Region(address_of(half), len(half), "cpu", half))
    mover.submit([Move(RemoteSpan(memory, 5, 1 << 20), MemorySpan(half[1 << 20 : 2 << 20]))]).wait(30)
    assert np.array_equal(setting.back(half)[1 << 20 : 2 << 20], content[5 : (1 << 20) + 5])
    assert not setting.back(half)[: 1 << 20].any()
    assert not setting.back(half)[2 << 20 :].any()
    written, before = random_bytes(7, 5 << 20), content.copy()
    mover.submit([Move(MemorySpan(setting.to(written)), RemoteSpan(memory, 100, len(written)))]).wait(30)
    before[100 : 100 + len(written)] = written
    assert np.array_equal(content, before), "a put is in the peer's memory when it rests, and nowhere else"
    check_remote_refusals(setting, mover, memory)
    mover.close()


def check_remote_refusals(setting: Setting, mover: Mover, memory: RemoteMemory) -> None:
    page = MemorySpan(setting.to(np.zeros(PAGE, np.uint8)))
    for move in (
        Move(RemoteSpan(memory, 0, PAGE + 1), page),
        Move(RemoteSpan(memory, -1, PAGE), page),
        Move(RemoteSpan(memory, memory.size_bytes - PAGE + 1, PAGE), page),
        Move(RemoteSpan(memory, 0, PAGE), RemoteSpan(memory, PAGE, PAGE)),
        Move(page, page),
        Move(RemoteSpan(memory, 0, PAGE), PagedSpan(np.zeros((1, PAGE)), np.array([0]), PAGE)),
        Move(FileSpan(0, 0, PAGE), page),
    ):
        with pytest.raises(ValueError):
            mover.submit([move])
    frozen = np.zeros(PAGE, np.uint8)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="writable"):
        mover.submit([Move(RemoteSpan(memory, 0, PAGE), MemorySpan(frozen))])


def address_of(array: Any) -> int:
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr())
