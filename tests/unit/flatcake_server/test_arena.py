from __future__ import annotations

import mmap
import os

import pytest

from flatcake_server import arena as arena_module
from flatcake_server.arena import Arena
from flatcake_transport.errors import Unavailable

SIZE = 4 << 20


def test_a_mapping_outlives_the_arena_and_nobody_can_shrink_it():
    arena = Arena(SIZE)
    fd = os.dup(arena.fd)
    view = mmap.mmap(fd, SIZE)
    arena.write(4096, b"block")
    arena.close()
    arena.close()
    assert view[4096:4101] == b"block"
    with pytest.raises(OSError):
        os.ftruncate(fd, 0)
    view.close()
    os.close(fd)


def test_bytes_outside_are_refused():
    arena = Arena(SIZE)
    with pytest.raises(ValueError, match="outside"):
        arena.write(SIZE - 2, b"abc")
    with pytest.raises(ValueError, match="outside"):
        arena.read(-1, 1)
    arena.close()


def test_prefault_reaches_every_page_and_a_stop_ends_it(monkeypatch):
    monkeypatch.setattr(arena_module, "free_memory_bytes", lambda: 1 << 40)
    arena = Arena(SIZE)
    arena.start_prefault()
    arena._prefaulter.join(10)
    assert arena.prefaulted_bytes + arena.prefault_failures * arena_module.PREFAULT_CHUNK_BYTES >= SIZE
    arena.close()


def test_prefault_leaves_the_last_memory_of_the_machine_to_others(monkeypatch, caplog):
    left = iter((1 << 30, 1 << 29))
    monkeypatch.setattr(arena_module, "free_memory_bytes", lambda: next(left))
    monkeypatch.setattr(arena_module, "PREFAULT_CHUNK_BYTES", SIZE // 4)
    arena = Arena(SIZE, "off")
    arena.start_prefault()
    arena._prefaulter.join(10)
    assert not arena._prefaulter.is_alive()
    assert arena.prefaulted_bytes <= SIZE // 4
    assert "lower memory_bytes" in caplog.text
    arena.close()


def test_huge_pages_are_taken_when_free_and_missed_when_not(monkeypatch):
    monkeypatch.setattr(arena_module, "free_huge_pages_bytes", lambda: 0)
    plain = Arena(SIZE)
    assert not plain.huge_pages
    plain.close()
    with pytest.raises(Unavailable, match=r"vm.nr_hugepages"):
        Arena(SIZE, "on")
    # The count said that pages are free, but somebody was faster: normal ones do.
    monkeypatch.setattr(arena_module, "free_huge_pages_bytes", lambda: 1 << 40)
    real, asked = arena_module._map_memfd, []

    def refuse_huge(size_bytes, *, huge):
        asked.append(huge)
        if huge:
            raise OSError(12, "Cannot allocate memory")
        return real(size_bytes, huge=False)

    monkeypatch.setattr(arena_module, "_map_memfd", refuse_huge)
    raced = Arena(SIZE)
    assert (asked, raced.huge_pages) == ([True, False], False)
    raced.close()
