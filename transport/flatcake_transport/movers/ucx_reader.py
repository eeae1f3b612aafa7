"""The process that reads other nodes' memory for an engine, so that what ends it does not end the engine. Run by `ucx_link.py`.

It maps the windows that it is handed, as the engine does, and has UCX get into them: the engine scatters from there, and no byte
is copied once more. One thread, which sleeps in UCX or does what it is told. It ends with its socket; an error ends it as well,
and so does a peer that was not reached after the machine's routes have changed: UCX reads them once a process. What is under way to
other peers lands before.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Final

from flatcake_transport.errors import Unavailable
from flatcake_transport.movers.ucx_child import end_with_parent, map_shared, unmap_shared
from flatcake_transport.movers.ucx_endpoint import Order, Piece
from flatcake_transport.movers.ucx_lib import load_ucx
from flatcake_transport.movers.ucx_words import MESSAGE_BYTES_MAX, Kind, PieceOrder, Word, decode, encode_word
from flatcake_transport.movers.ucx_worker import Mapped, UcxWorker

_ONE_DESCRIPTOR: Final = socket.CMSG_SPACE(4)


@dataclass(frozen=True, slots=True, eq=False)
class _Window:
    address: int
    size_bytes: int
    mapped: Mapped | None  # None: not enough lockable memory; gets land in it all the same, slower


class Reader:
    """What the process knows: windows, and orders that have not come to rest."""

    def __init__(self, link: socket.socket, worker: UcxWorker, chunk_bytes: int) -> None:
        self._link, self._worker, self._chunk_bytes = link, worker, chunk_bytes
        self._windows: dict[int, _Window] = {}
        self._orders: dict[int, Order] = {}

    def serve(self) -> None:
        """Until the mover is gone, or UCX's routes are of no use any more and nothing is under way."""
        while self.take():
            self._worker.turn()
            if self._worker.outdated and not self._orders:
                return
            self._worker.sleep()

    def take(self) -> bool:
        """Do what was said. False: the mover is gone."""
        while True:
            try:
                message, control, _, _ = self._link.recvmsg(MESSAGE_BYTES_MAX, _ONE_DESCRIPTOR, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            if not message:
                return False
            word = decode(message)
            if isinstance(word, PieceOrder):
                self._begin(word)
            elif word.kind is Kind.WINDOW:
                self._map(word, int.from_bytes(control[0][2], sys.byteorder))
            elif word.kind is Kind.DROP:
                self._unmap(self._windows.pop(word.id))
            elif word.kind is Kind.CANCEL:
                if word.id in self._orders:
                    self._orders[word.id].cancelled = True
            else:
                self.say(Word(Kind.PONG))

    def say(self, word: Word) -> None:
        self._link.send(encode_word(word))

    def _map(self, word: Word, fd: int) -> None:
        address, mapped = map_shared(fd, word.number), None
        os.close(fd)
        with contextlib.suppress(Unavailable):
            mapped = self._worker.map(address, word.number)
        self._windows[word.id] = _Window(address, word.number, mapped)

    def _unmap(self, window: _Window) -> None:
        if window.mapped is not None:
            self._worker.unmap(window.mapped)
        unmap_shared(window.address, window.size_bytes)

    def _begin(self, told: PieceOrder) -> None:
        cut = [
            (window, at + step, min(self._chunk_bytes, size - step), remote + step)
            for window, at, size, remote in told.pieces
            for step in range(0, size, self._chunk_bytes)
        ]

        def rested(error: str) -> None:
            del self._orders[told.id]
            self.say(Word(Kind.RESTED, told.id, self._worker.counts.endpoints_failed, error))

        order = self._orders[told.id] = Order(len(cut) + told.put, rested)
        if self._worker.outdated:  # it ends when those before have landed
            rested("the machine's routes have changed")
            return
        pieces = []
        for window_id, at, size, remote in cut:
            window = self._windows[window_id]
            local, memh = window.address + at, window.mapped.handle if window.mapped else None
            pieces.append(Piece(order, local, size, remote, told.rkey, memh, told.put))
        if told.put:
            pieces.append(Piece(order, 0, 0, 0, b"", None, True))
        self._worker.send(told.worker, pieces)


def main(order: str) -> None:
    """`order`: descriptor of the link, the parent's process id, options, peer timeout, size of a get; as the parent wrote them."""
    descriptor, parent_id, options, peer_timeout_s, chunk_bytes = json.loads(order)
    end_with_parent(parent_id)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a ^C is the engine's, which may still want what it reads
    link = socket.socket(fileno=descriptor)
    try:
        library = load_ucx()
        worker = UcxWorker(library, options=options, peer_timeout_s=peer_timeout_s)
    except Unavailable as error:
        link.send(encode_word(Word(Kind.REFUSED, text=str(error))))
        return
    reader = Reader(link, worker, chunk_bytes)
    reader.say(Word(Kind.READY, number=os.getpid(), text=f"{'.'.join(map(str, library.version))}-{library.origin}"))
    worker.watch(descriptor)
    reader.serve()
    worker.close()
    if worker.outdated:
        print("a peer was not reached, and the routes have changed since UCX read them")  # noqa: T201 - for the mover's log


if __name__ == "__main__":
    main(sys.argv[1])
