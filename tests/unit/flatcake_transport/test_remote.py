from __future__ import annotations

import pytest

from flatcake_transport.remote import RemoteMemory, Server, decode_server, unseal_memory

MEMORY = RemoteMemory(b"worker address", b"key", 0x7F00_0000_0000, 1 << 40)


def test_a_seal_keeps_all() -> None:
    assert unseal_memory(MEMORY.sealed()) == MEMORY
    assert unseal_memory(RemoteMemory(b"", b"", 0, 0).sealed()) == RemoteMemory(b"", b"", 0, 0)


def test_a_server_keeps_all() -> None:
    server = Server(b"worker address", b"sixteen bytes ..", 0x4643_0000_0000, b"key")
    assert decode_server(server.encode()) == server
    with pytest.raises(ValueError, match="no server"):
        decode_server(b"worker address")


@pytest.mark.parametrize("at", range(len(MEMORY.sealed())))
def test_no_flipped_bit_reaches_ucx(at: int) -> None:
    sealed = bytearray(MEMORY.sealed())
    sealed[at] ^= 1 << at % 8
    with pytest.raises(ValueError):
        unseal_memory(bytes(sealed))


def test_nor_do_cut_or_lengthened_ones() -> None:
    sealed = MEMORY.sealed()
    for other in (b"", sealed[:-1], sealed[1:], sealed + b"\0", sealed[:8], b"x" * 7):
        with pytest.raises(ValueError):
            unseal_memory(other)
