"""A connection to one peer and the gets and puts on it. Belongs to the thread of its worker; nothing here is locked.

    waiting --post--> flying --UCX says so--> landed, or failed

Invariants:
- A piece has landed or failed only when UCX has completed its request. Until then UCX, or the network card, may write the
  memory, and the piece holds it: also when the peer is dead, the deadline is past and nobody waits any more.
- An endpoint that failed posts nothing more: its waiting pieces fail at once; it is closed by force, which makes UCX complete
  the flying ones (a queue pair in its error state flushes; a reply that comes late finds no request and is dropped); its keys
  are given back after the last of them. Then it is `ended`, and the next get makes another one.
- The first get on it is of the server's mark, and nothing else is posted before that has landed and is the one we were told: else
  another process is there than the one that the words are of, and the endpoint fails.
- A peer that answers nothing for `peer_timeout_s` while something is flying has failed. The kernel of a stopped process goes on
  answering for it, so UCX's own keepalive does not see it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from ctypes import addressof, byref, c_char_p, c_void_p, cast, create_string_buffer
from dataclasses import dataclass
from typing import Any, Final

from flatcake_transport.errors import Unavailable
from flatcake_transport.movers.ucx_lib import FLAGS, IN_PROGRESS, EndpointParams, RequestParams, Ucp, status_of
from flatcake_transport.remote import decode_server

CHUNK_BYTES: Final = 4 << 20  # 1 ms at 4 GB/s: often enough to see that a peer is alive, and a request costs some 10 us
FLYING_BYTES_MAX: Final = 64 << 20  # on one endpoint; 2.5 ms of a link of 25 GB/s, ten times its round trip
HUNG_S: Final = 1.0  # beyond the timeout: a busy machine
RKEYS_MAX: Final = 64  # kept of one peer: its arena and its staging windows


class Order:
    """Gets or puts that rest together: once `rested` is called, with what failed, none of them touches memory any more."""

    __slots__ = ("_error", "_left", "_rested", "cancelled")

    def __init__(self, pieces: int, rested: Callable[[str], None]) -> None:
        self._left = pieces
        self._rested = rested
        self._error = ""
        self.cancelled = False  # no further piece is begun; those flying land

    def rest_piece(self, error: str = "") -> None:
        self._error = self._error or error
        self._left -= 1
        if not self._left:
            self._rested(self._error)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What one request moves. `size_bytes` 0: a flush of the puts before it."""

    order: Order
    local: int
    size_bytes: int
    remote: int
    rkey: bytes
    memh: int | None
    put: bool


@dataclass(slots=True)
class Counts:
    """Of one worker. Written by its thread."""

    commands: int = 0
    bytes_moved: int = 0
    failures: int = 0
    endpoints_made: int = 0
    endpoints_failed: int = 0


class Endpoint:
    """See above. `name` tells the error callback which endpoint it is."""

    def __init__(self, ucp: Ucp, worker: c_void_p, name: int, server: bytes, on_error: Any, counts: Counts) -> None:
        """Raises: Unavailable: UCX has no way to that server's address, or it is none."""
        try:
            told = decode_server(server)
        except ValueError as error:
            raise Unavailable(str(error)) from error
        params = EndpointParams(
            field_mask=FLAGS["UCP_EP_PARAM_FIELD_REMOTE_ADDRESS"]
            | FLAGS["UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE"]
            | FLAGS["UCP_EP_PARAM_FIELD_ERR_HANDLER"],
            address=cast(c_char_p(told.address), c_void_p),
            err_mode=FLAGS["UCP_ERR_HANDLING_MODE_PEER"],
            err_handler_cb=on_error,
            err_handler_arg=name,
        )
        self._ucp = ucp
        self._handle = c_void_p()
        ucp.check(ucp.ep_create(worker, params, byref(self._handle)), "connecting to a peer")
        self.server = server
        self._counts = counts
        self._waiting: deque[Piece] = deque()
        self._flying: deque[tuple[int, Piece]] = deque()
        self._flying_bytes = 0
        self._rkeys: OrderedDict[bytes, c_void_p] = OrderedDict()
        self._moved_s = 0.0  # when a piece last landed, or the first one flew
        self._failed_s: float | None = None  # when it was first seen to have failed
        self._closing: int | None = None  # the request that closes it
        self._closed = False
        self.failure = ""
        self._mark, self._read_mark = told.mark, create_string_buffer(len(told.mark))
        self.proved = False
        order = Order(1, self._compare)
        self.add([Piece(order, addressof(self._read_mark), len(told.mark), told.mark_at, told.mark_rkey, None, False)])
        counts.endpoints_made += 1

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._flying

    @property
    def ended(self) -> bool:
        return self._closed and not self._flying

    def _compare(self, error: str) -> None:
        """The get of the mark rests."""
        self.proved = not error and self._read_mark.raw == self._mark
        if not self.proved:
            self.fail(error or "another process is there than the one that was told of")

    def add(self, pieces: list[Piece]) -> None:
        self._waiting.extend(pieces)

    def post(self, now_s: float) -> None:
        """Let fly what may."""
        while self._waiting and not self.failure:
            piece = self._waiting[0]
            if self._flying and (not self.proved or self._flying_bytes + piece.size_bytes > FLYING_BYTES_MAX):
                return
            self._waiting.popleft()
            if piece.order.cancelled:
                piece.order.rest_piece("cancelled")
                continue
            if not self._flying:
                self._moved_s = now_s
            try:
                pointer = self._start(piece)
            except Unavailable as error:
                self._rest(piece, str(error))
                self.fail(str(error))
                return
            status = status_of(pointer)
            self._counts.commands += 1
            if status == IN_PROGRESS:
                self._flying.append((pointer, piece))
                self._flying_bytes += piece.size_bytes
            else:
                self._rest(piece, "" if not status else f"UCX: {self._ucp.text(status)}")

    def _start(self, piece: Piece) -> int:
        ucp = self._ucp
        if not piece.size_bytes:
            return ucp.ep_flush(self._handle, RequestParams())
        params = RequestParams(
            op_attr_mask=FLAGS["UCP_OP_ATTR_FIELD_MEMORY_TYPE"], memory_type=FLAGS["UCS_MEMORY_TYPE_HOST"]
        )
        if piece.memh is not None:
            params.op_attr_mask |= FLAGS["UCP_OP_ATTR_FIELD_MEMH"]
            params.memh = piece.memh
        move = ucp.put if piece.put else ucp.get
        return move(self._handle, piece.local, piece.size_bytes, piece.remote, self._rkey(piece.rkey), params)

    def _rkey(self, packed: bytes) -> c_void_p:
        handle = self._rkeys.get(packed)
        if handle is None:
            if len(self._rkeys) >= RKEYS_MAX and not self._flying:
                self._ucp.rkey_destroy(self._rkeys.popitem(last=False)[1])
            handle = c_void_p()
            self._ucp.check(self._ucp.rkey_unpack(self._handle, packed, byref(handle)), "a peer's key")
            self._rkeys[packed] = handle
        self._rkeys.move_to_end(packed)
        return handle

    def reap(self, now_s: float) -> None:
        """Take in what UCX has completed, in the order of posting: not each that flies is asked each time."""
        ucp = self._ucp
        while self._flying and (status := ucp.request_status(self._flying[0][0])) != IN_PROGRESS:
            request, piece = self._flying.popleft()
            ucp.request_free(request)
            self._flying_bytes -= piece.size_bytes
            self._moved_s = now_s
            self._rest(piece, "" if not status else self.failure or f"UCX: {ucp.text(status)}")
        if self._closing is not None and ucp.request_status(self._closing) != IN_PROGRESS:
            ucp.request_free(self._closing)
            self._closing, self._closed = None, True
        if self.ended:
            self._drop_rkeys()

    def _rest(self, piece: Piece, error: str) -> None:
        if error:
            self._counts.failures += 1
        else:
            self._counts.bytes_moved += piece.size_bytes
        piece.order.rest_piece(error)

    def silent(self, now_s: float, peer_timeout_s: float) -> bool:
        """Something flies, and nothing has landed for `peer_timeout_s`."""
        return bool(self._flying) and not self.failure and now_s - self._moved_s > peer_timeout_s

    def due_s(self, peer_timeout_s: float) -> float | None:
        """When it will be silent, unless something lands."""
        return self._moved_s + peer_timeout_s if self._flying and not self.failure else None

    def hung(self, now_s: float, peer_timeout_s: float) -> bool:
        """It has failed, and for one more timeout UCX has not completed what it was told to cancel: it never will."""
        if not self.failure or self.ended:
            return False
        self._failed_s = self._failed_s or now_s
        return now_s - self._failed_s > peer_timeout_s + HUNG_S

    def fail(self, reason: str) -> None:
        """Post no more, and close by force. `reason` is what waiters read. Twice is fine."""
        if self.failure:
            return
        self.failure = reason
        self._counts.endpoints_failed += 1
        while self._waiting:
            self._rest(self._waiting.popleft(), reason)
        params = RequestParams(op_attr_mask=FLAGS["UCP_OP_ATTR_FIELD_FLAGS"], flags=FLAGS["UCP_EP_CLOSE_FLAG_FORCE"])
        pointer = self._ucp.ep_close(self._handle, params)
        if status_of(pointer) == IN_PROGRESS:
            self._closing = pointer
        else:
            self._closed = True
        if self.ended:
            self._drop_rkeys()

    def abandon(self) -> None:
        """The worker is gone, and with it all that could touch memory: what still flew will never be reported."""
        for _, piece in self._flying:
            self._rest(piece, self.failure or "the worker was closed")
        self._flying.clear()
        self._flying_bytes = 0

    def _drop_rkeys(self) -> None:
        while self._rkeys:
            self._ucp.rkey_destroy(self._rkeys.popitem()[1])
