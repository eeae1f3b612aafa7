"""The loop of the process that reads, with a worker that does what the test says."""

from __future__ import annotations

import os
import socket
import threading
from types import SimpleNamespace

import pytest
from waiting import until

from flatcake_transport.movers.ucx_reader import Reader
from flatcake_transport.movers.ucx_words import Kind, PieceOrder, Word, decode, encode_order, encode_word

PEER, GONE = b"peer", b"gone"


class Worker:
    """Gets rest when the test says so; whose peer is gone fails, and the routes have changed."""

    def __init__(self) -> None:
        self.counts = SimpleNamespace(endpoints_failed=0)
        self.outdated = False
        self.pieces = {}
        self._landed: list[bytes] = []

    def map(self, address, size_bytes):
        return None

    def send(self, server, pieces):
        self.pieces[server] = pieces

    def land(self, server):
        self._landed.append(server)

    def turn(self):
        if GONE in self.pieces:
            self.outdated = True
            self._rest(GONE, "the peer is gone")
        while self._landed:
            self._rest(self._landed.pop(), "")

    def _rest(self, server, error):
        for piece in self.pieces.pop(server):
            piece.order.rest_piece(error)

    def sleep(self):
        threading.Event().wait(0.001)


@pytest.fixture
def mover():
    """Our end of the link, the worker, and the thread in which the loop runs."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(30)
    worker = Worker()
    loop = threading.Thread(target=Reader(theirs, worker, 4096).serve, daemon=True)
    window = os.memfd_create("window")
    os.truncate(window, 1 << 16)
    socket.send_fds(ours, [encode_word(Word(Kind.WINDOW, 1, 1 << 16))], [window])
    os.close(window)
    loop.start()
    yield ours, worker, loop
    ours.close()
    loop.join(30)
    theirs.close()


def order(link: socket.socket, order_id: int, server: bytes) -> None:
    link.send(encode_order(PieceOrder(order_id, server, b"key", False, [(1, 0, 4096, 0)])))


def rested(link: socket.socket) -> tuple[int, str]:
    word = decode(link.recv(1 << 16))
    assert isinstance(word, Word)
    assert word.kind is Kind.RESTED
    return word.id, word.text


def test_it_ends_for_changed_routes_when_what_is_under_way_has_landed(mover) -> None:
    link, worker, loop = mover
    order(link, 1, PEER)
    until(lambda: PEER in worker.pieces)
    order(link, 2, GONE)
    assert rested(link) == (2, "the peer is gone")
    order(link, 3, b"another peer")
    assert rested(link) == (3, "the machine's routes have changed")
    assert loop.is_alive()
    worker.land(PEER)
    assert rested(link) == (1, "")
    loop.join(30)
    assert not loop.is_alive()
