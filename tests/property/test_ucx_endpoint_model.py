"""An endpoint over a UCX of our own, which completes, fails and stays silent as Hypothesis likes.

The law: a piece rests exactly once, and never while its request is open; nothing is posted before the mark of the server has
landed and is the right one, nor after a failure; and once UCX has completed everything the endpoint has ended and every key was
given back.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from ctypes import c_void_p
from functools import partial
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from flatcake_transport.errors import Unavailable
from flatcake_transport.movers import ucx_endpoint
from flatcake_transport.movers.ucx_endpoint import Counts, Endpoint, Order, Piece
from flatcake_transport.movers.ucx_lib import ERR_CANCELED, IN_PROGRESS, OnEndpointError
from flatcake_transport.remote import Server

PEER_TIMEOUT_S = 5.0
TOP = 1 << 64
MARK_AT = 4096
PEER = Server(b"peer", b"a mark of 16 byt", MARK_AT, b"mark's key")


class FakeUcp:
    """Requests are numbers; `open` has the status of each that was not freed yet. `mark`: what stands in the peer."""

    def __init__(self, mark: bytes = PEER.mark) -> None:
        self.mark = mark
        self.marks = 0
        self.open: dict[int, int] = {}
        self.made = 0
        self.rkeys = 0
        self.posted: list[tuple[int, int]] = []
        self.next_status = IN_PROGRESS
        self.closing: int | None = None
        self.closed = False

    def text(self, status: int) -> str:
        return f"status {status}"

    def check(self, status: int, what: str) -> None:
        if status:
            raise Unavailable(what)

    def _begin(self) -> Any:
        status, self.next_status = self.next_status, IN_PROGRESS
        if status != IN_PROGRESS:
            return TOP + status if status else None
        self.made += 1
        self.open[self.made] = IN_PROGRESS
        return self.made

    def ep_create(self, *_: Any) -> int:
        return 0

    def get(self, _endpoint: Any, local: int, size: int, remote: int, *_: Any) -> Any:
        assert not self.closed
        assert self.closing is None
        if remote == MARK_AT:
            self.marks += 1
            assert self.marks == 1, "one small get a connection"
            ctypes.memmove(local, self.mark, size)
        else:
            assert self.mark == PEER.mark, "posted to another server than was told of"
            self.posted.append((local, size))
        return self._begin()

    put = get

    def ep_flush(self, *_: Any) -> Any:
        assert not self.closed
        return self._begin()

    def rkey_unpack(self, _endpoint: Any, packed: bytes, _out: Any) -> int:
        if packed == b"bad":
            return -5
        self.rkeys += 1
        return 0

    def rkey_destroy(self, _key: Any) -> None:
        self.rkeys -= 1
        assert self.rkeys >= 0

    def ep_close(self, *_: Any) -> Any:
        assert not self.closed
        assert self.closing is None
        pointer = None if not self.open else self._begin()
        if pointer is None or pointer > self.made:  # also at once while requests are open, or with an error
            self.closed = True
        else:
            self.closing = pointer
        return pointer

    def request_status(self, request: int) -> int:
        return self.open[request]

    def request_free(self, request: int) -> None:
        assert self.open.pop(request) != IN_PROGRESS, "freed while it may touch memory"
        if request == self.closing:
            self.closed = True


def make(ucp: FakeUcp) -> Endpoint:
    return Endpoint(ucp, c_void_p(), 1, PEER.encode(), OnEndpointError(lambda *_: None), Counts())  # type: ignore[arg-type]


def counted(rested: Counter[int], at: int, _error: str) -> None:
    rested[at] += 1


STEP = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 4), st.sampled_from([1 << 20, 4 << 20, 40 << 20]), st.booleans()),
    st.tuples(st.just("complete"), st.integers(0, 20), st.sampled_from([0, -3])),
    st.tuples(st.just("next"), st.sampled_from([0, -25])),
    st.tuples(st.just("fail")),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("time"), st.floats(0.1, 4.0)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(STEP, max_size=40), st.sampled_from([PEER.mark] * 4 + [b"another's mark.."]))
def test_every_piece_rests_once_and_only_after_its_request(steps: list[tuple[Any, ...]], mark: bytes) -> None:
    ucp = FakeUcp(mark)
    endpoint, now_s = make(ucp), 0.0
    orders: list[Order] = []
    rested: Counter[int] = Counter()
    for step in steps:
        match step:
            case ("add", count, size, put):
                order = Order(count, partial(counted, rested, len(orders)))
                key = b"bad" if count == 4 and size == 1 << 20 and put else bytes([count])
                pieces = [Piece(order, i, size, 0, key, None, put) for i in range(count)]
                if not endpoint.failure:
                    endpoint.add(pieces)
                    orders.append(order)
            case ("complete", which, status):
                running = sorted(request for request, state in ucp.open.items() if state == IN_PROGRESS)
                if running and running[which % len(running)] != ucp.closing:
                    ucp.open[running[which % len(running)]] = status
            case ("next", status):
                ucp.next_status = status
            case ("fail",):
                endpoint.fail("told so")
            case ("cancel", which):
                if orders:
                    orders[which % len(orders)].cancelled = True
            case ("time", seconds):
                now_s += seconds
        endpoint.post(now_s)
        endpoint.reap(now_s)
        if endpoint.silent(now_s, PEER_TIMEOUT_S):
            endpoint.fail("silent")
        flying = sum(piece.size_bytes for _, piece in endpoint._flying)
        assert flying <= ucx_endpoint.FLYING_BYTES_MAX or len(endpoint._flying) == 1
        assert {request for request, _ in endpoint._flying} == set(ucp.open) - {ucp.closing}
        if any(piece.remote == MARK_AT for _, piece in endpoint._flying):
            assert len(endpoint._flying) == 1, "nothing else before the mark has landed"
        for at, order in enumerate(orders):
            open_pieces = [p for _, p in endpoint._flying if p.order is order]
            open_pieces += [p for p in endpoint._waiting if p.order is order]
            assert rested[at] == (not open_pieces)
            assert order._left == len(open_pieces)
    endpoint.fail("the end")
    assert not endpoint._waiting
    for request in ucp.open:
        ucp.open[request] = ERR_CANCELED
    endpoint.reap(now_s)
    assert endpoint.ended
    assert ucp.closed
    assert not ucp.open
    assert ucp.rkeys == 0
    assert all(rested[at] == 1 for at in range(len(orders)))


def test_one_whose_requests_ucx_never_completes_is_hung() -> None:
    ucp = FakeUcp()
    endpoint = make(ucp)
    endpoint.add([Piece(Order(1, lambda _: None), 0, 1, 0, b"key", None, False)])
    endpoint.post(0.0)
    assert not endpoint.hung(1e6, PEER_TIMEOUT_S), "it may be slow: whether it is silent is another question"
    endpoint.fail("told so")
    assert not endpoint.hung(1e6, PEER_TIMEOUT_S)
    assert not endpoint.hung(1e6 + PEER_TIMEOUT_S, PEER_TIMEOUT_S)
    assert endpoint.hung(1e6 + PEER_TIMEOUT_S + 2 * ucx_endpoint.HUNG_S, PEER_TIMEOUT_S)
    for request in ucp.open:
        ucp.open[request] = ERR_CANCELED
    endpoint.reap(1e6)
    assert not endpoint.hung(2e6, PEER_TIMEOUT_S)


def test_what_flies_is_asked_for_in_the_order_of_posting() -> None:
    """With hundreds flying each look would else ask for all; and what was posted later rests no earlier."""
    ucp, rested, asked = FakeUcp(), [], []
    endpoint = make(ucp)
    endpoint.post(0.0)
    (mark,) = ucp.open
    ucp.open[mark] = 0
    endpoint.reap(0.0)
    orders = [Order(1, lambda error, n=n: rested.append((n, bool(error)))) for n in range(3)]
    endpoint.add([Piece(order, n, 1, 0, b"key", None, False) for n, order in enumerate(orders)])
    endpoint.post(0.0)
    real = ucp.request_status
    ucp.request_status = lambda request: asked.append(request) or real(request)  # type: ignore[func-returns-value]
    first, second, third = ucp.open
    ucp.open[second], ucp.open[third] = -3, 0
    endpoint.reap(1.0)
    assert (asked, rested) == ([first], [])
    ucp.open[first] = 0
    endpoint.reap(2.0)
    assert asked == [first, first, second, third]
    assert rested == [(0, False), (1, True), (2, False)]
    endpoint.fail("the end")
