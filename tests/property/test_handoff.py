"""The handover codec: every message survives the trip, and nothing else is read as one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatcake_transport.handoff import (
    FDS_MAX,
    MESSAGE_BYTES_MAX,
    Attach,
    Reply,
    Request,
    Status,
    Verb,
    decode_attach,
    decode_reply,
    decode_request,
    encode_attach,
    encode_reply,
    encode_request,
)

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
ATTACHES = st.builds(Attach, U64, st.binary(min_size=16, max_size=16))
REQUESTS = st.builds(Request, st.sampled_from(Verb), U64, U32)


@st.composite
def replies(draw: st.DrawFn) -> Reply:
    files = draw(st.lists(st.tuples(U64, st.booleans()), max_size=FDS_MAX))
    return Reply(
        status=draw(st.sampled_from(Status)),
        file_ids=tuple(file_id for file_id, _ in files),
        direct=tuple(direct for _, direct in files),
        more=draw(st.booleans()),
        text=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=50)),
    )


@given(ATTACHES)
def test_attach_survives(attach: Attach) -> None:
    assert decode_attach(encode_attach(attach)) == attach


@given(REQUESTS)
def test_request_survives(request: Request) -> None:
    assert decode_request(encode_request(request)) == request


@given(replies())
def test_reply_survives_and_fits_the_receive_buffer(reply: Reply) -> None:
    message = encode_reply(reply)
    assert decode_reply(message) == reply
    assert len(message) <= MESSAGE_BYTES_MAX


@given(st.one_of(ATTACHES.map(encode_attach), REQUESTS.map(encode_request), replies().map(encode_reply)), st.data())
def test_a_message_cut_or_grown_is_refused(message: bytes, data: st.DataObject) -> None:
    cut = message[: data.draw(st.integers(0, len(message) - 1))]
    for decode in (decode_attach, decode_request, decode_reply):
        for wrong in (cut, message + b"\0"):
            with pytest.raises(ValueError):
                decode(wrong)


def test_one_kind_is_never_read_as_another() -> None:
    attach = encode_attach(Attach(1, bytes(16)))
    request = encode_request(Request(Verb.LEASE, 7, 200))
    with pytest.raises(ValueError, match="not a request"):
        decode_request(attach)
    with pytest.raises(ValueError, match="not an attach"):
        decode_attach(request)
    with pytest.raises(ValueError, match="not a reply"):
        decode_reply(request)


def test_bounds_are_met_exactly() -> None:
    full = Reply(file_ids=tuple(range(FDS_MAX)), direct=(True,) * FDS_MAX, text="x" * 5000)
    assert len(encode_reply(full)) == MESSAGE_BYTES_MAX
    with pytest.raises(ValueError, match="up to 200 files"):
        encode_reply(Reply(file_ids=tuple(range(FDS_MAX + 1)), direct=(True,) * (FDS_MAX + 1)))
    with pytest.raises(ValueError, match="16 bytes"):
        encode_attach(Attach(1, b"short"))
    with pytest.raises(ValueError):
        decode_request(encode_request(Request(Verb.ARENA)).replace(b"\x01", b"\x09", 1))
