"""What a `UcxMover` and the process that reads for it say to each other. Pure: values to bytes and back.

A SOCK_SEQPACKET pair of sockets keeps message borders; the first byte says which message it is.

    mover                                              process
                                                   <-  Ready, or Refused: no UCX here, or it does not start
    Window   id, size, one descriptor              ->  maps it and registers it
    Drop     id; nothing is moving there           ->
    Order    id, a peer, a key, arrays of pieces   ->  Rested: id, error; once nothing of it touches memory any more
    Cancel   id                                    ->
    Ping                                           ->  Pong

Both ends are of one version: one starts the other.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

PIECES_MAX: Final = 1024  # of one order
MESSAGE_BYTES_MAX: Final = 64 << 10
TEXT_BYTES_MAX: Final = 1024

Place = tuple[int, int, int, int]  # in which window, from where, how much, its address at the peer

_NUMBERS: Final = struct.Struct("<B7xQQ")  # kind, number, id
_PLACE: Final = struct.Struct("<4Q")
_ORDER: Final = struct.Struct("<BBHHHQ")  # kind, put, bytes of worker and key, pieces, id


class Kind(IntEnum):
    READY = 1
    REFUSED = 2
    WINDOW = 3
    DROP = 4
    ORDER = 5
    RESTED = 6
    CANCEL = 7
    PING = 8
    PONG = 9


@dataclass(frozen=True, slots=True)
class Word:
    """Any message but an order.

    `number`: of Ready the process id, of Window its size, of Rested how many peers that process has lost by then.
    """

    kind: Kind
    id: int = 0
    number: int = 0
    text: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class PieceOrder:
    """Gets, or puts, between windows and one region of one peer; `worker` and `rkey` as in `RemoteMemory`."""

    id: int
    worker: bytes
    rkey: bytes
    put: bool
    pieces: Sequence[Place]


def encode_word(word: Word) -> bytes:
    """Texts longer than 1 KiB are cut."""
    return _NUMBERS.pack(word.kind, word.number, word.id) + word.text.encode()[:TEXT_BYTES_MAX]


def encode_order(order: PieceOrder) -> bytes:
    """Raises: ValueError: more pieces, or a longer address and key, than a message takes."""
    head = _ORDER.pack(Kind.ORDER, order.put, len(order.worker), len(order.rkey), len(order.pieces), order.id)
    message = b"".join((head, order.worker, order.rkey, *(_PLACE.pack(*piece) for piece in order.pieces)))
    if len(order.pieces) > PIECES_MAX or len(message) > MESSAGE_BYTES_MAX:
        raise ValueError(f"an order of {len(order.pieces)} pieces and {len(message)} bytes")
    return message


def decode(message: bytes) -> Word | PieceOrder:
    """Raises: ValueError: no message of ours."""
    if message[:1] != bytes((Kind.ORDER,)):
        return _word(message)
    if len(message) < _ORDER.size:
        raise ValueError(f"an order of {len(message)} bytes")
    _, put, worker_bytes, rkey_bytes, count, order_id = _ORDER.unpack_from(message)
    key_at = _ORDER.size + worker_bytes
    at = key_at + rkey_bytes
    if len(message) != at + count * _PLACE.size:
        raise ValueError(f"an order of {len(message)} bytes cannot hold {count} pieces")
    pieces = list(_PLACE.iter_unpack(message[at:]))
    return PieceOrder(order_id, message[_ORDER.size : key_at], message[key_at:at], bool(put), pieces)


def _word(message: bytes) -> Word:
    if len(message) < _NUMBERS.size:
        raise ValueError(f"a message of {len(message)} bytes")
    kind, number, word_id = _NUMBERS.unpack_from(message)
    return Word(Kind(kind), word_id, number, message[_NUMBERS.size :].decode(errors="replace"))
