"""Words of the handover socket, where the daemon hands file descriptors to its local clients. Pure: bytes in, values out.

A SOCK_SEQPACKET unix socket keeps message borders, so a message is one struct and never needs a length:

    client                                          daemon
    Attach    magic, client_id, token           ->  Reply, no descriptors; then for as long as the connection lives
    Request   magic, verb, subject_id, start    ->  Reply, one descriptor for each of its file_ids

The connection is the client: when it ends, all that the client holds is given back. A lease or a turn may have more files
than one message can carry, so a reply has at most `FDS_MAX` and says `more`; the client asks again with `start` = how many
files it has. All integers are little-endian. Either side answers a message that it cannot read by closing the connection.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

# The kernel takes 253 descriptors a message (SCM_MAX_FD in include/net/scm.h); a round number below it, and even: a turn's come in pairs.
FDS_MAX: Final = 200
TOKEN_BYTES: Final = 16
TEXT_BYTES_MAX: Final = 1024

_ATTACH_MAGIC: Final = b"FCattch1"
_REQUEST_MAGIC: Final = b"FCreque2"
_REPLY_MAGIC: Final = b"FCreply1"

_ATTACH: Final = struct.Struct("<8sQ16s")
_REQUEST: Final = struct.Struct("<8sBxxxIQ")  # start before subject_id keeps both naturally aligned
_REPLY: Final = struct.Struct("<8sIIHBx")  # status, count, text bytes, more
_FILE: Final = struct.Struct("<QB")  # file id, direct

MESSAGE_BYTES_MAX: Final = _REPLY.size + FDS_MAX * _FILE.size + TEXT_BYTES_MAX


class Verb(IntEnum):
    ARENA = 1  # subject_id 0; one descriptor, file id 0
    LEASE = 2  # subject_id is the lease's; its session files, read-only
    REMOTE = 4  # subject_id is the lease's; files of another node on it that could be opened over NVMe-oF, read-only
    TURN = 3  # subject_id is the turn's; its session files, each twice: read-write, then read-only for later leases


class Status(IntEnum):
    OK = 0
    REFUSED = 1  # unknown client or wrong token: say Hello again
    GONE = 2  # the lease or turn has ended
    FAILED = 3  # a file could not be opened


@dataclass(frozen=True, slots=True)
class Attach:
    client_id: int
    token: bytes


@dataclass(frozen=True, slots=True)
class Request:
    verb: Verb
    subject_id: int = 0
    start: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """Descriptor i of the message belongs to `file_ids[i]`; `direct[i]` says that it was opened O_DIRECT.

    `text` says to people why a status is not OK; then no descriptors come.
    """

    status: Status = Status.OK
    file_ids: tuple[int, ...] = ()
    direct: tuple[bool, ...] = ()
    more: bool = False
    text: str = ""


def encode_attach(attach: Attach) -> bytes:
    """Raises: ValueError: the token has not 16 bytes."""
    if len(attach.token) != TOKEN_BYTES:
        raise ValueError(f"a token has {TOKEN_BYTES} bytes, not {len(attach.token)}")
    return _ATTACH.pack(_ATTACH_MAGIC, attach.client_id, attach.token)


def decode_attach(message: bytes) -> Attach:
    """Raises: ValueError: not an attach message of this version."""
    _check(message, _ATTACH, _ATTACH_MAGIC, "an attach message")
    _, client_id, token = _ATTACH.unpack(message)
    return Attach(client_id, token)


def encode_request(request: Request) -> bytes:
    return _REQUEST.pack(_REQUEST_MAGIC, request.verb, request.start, request.subject_id)


def decode_request(message: bytes) -> Request:
    """Raises: ValueError: not a request of this version, or an unknown verb."""
    _check(message, _REQUEST, _REQUEST_MAGIC, "a request")
    _, verb, start, subject_id = _REQUEST.unpack(message)
    return Request(Verb(verb), subject_id, start)


def encode_reply(reply: Reply) -> bytes:
    """Texts longer than 1 KiB are cut. Raises: ValueError: more than `FDS_MAX` files, or not one `direct` a file."""
    count = len(reply.file_ids)
    if count > FDS_MAX or len(reply.direct) != count:
        raise ValueError(
            f"a reply carries up to {FDS_MAX} files with one direct flag each: {count}, {len(reply.direct)}"
        )
    text = reply.text.encode()[:TEXT_BYTES_MAX]
    files = b"".join(map(_FILE.pack, reply.file_ids, reply.direct))
    return _REPLY.pack(_REPLY_MAGIC, reply.status, count, len(text), reply.more) + files + text


def decode_reply(message: bytes) -> Reply:
    """Raises: ValueError: not a reply of this version, or its sizes do not add up."""
    _check(message[: _REPLY.size], _REPLY, _REPLY_MAGIC, "a reply")
    _, status, count, text_bytes, more = _REPLY.unpack_from(message)
    text_start = _REPLY.size + count * _FILE.size
    if count > FDS_MAX or len(message) != text_start + text_bytes:
        raise ValueError(f"a reply of {len(message)} bytes cannot hold {count} files and {text_bytes} bytes of text")
    files = [_FILE.unpack_from(message, _REPLY.size + i * _FILE.size) for i in range(count)]
    return Reply(
        status=Status(status),
        file_ids=tuple(file_id for file_id, _ in files),
        direct=tuple(bool(direct) for _, direct in files),
        more=bool(more),
        text=message[text_start:].decode(errors="replace"),
    )


def _check(message: bytes, form: struct.Struct, magic: bytes, name: str) -> None:
    if len(message) != form.size or not message.startswith(magic):
        raise ValueError(f"not {name} of this version: {message[:16]!r}, {len(message)} bytes")
