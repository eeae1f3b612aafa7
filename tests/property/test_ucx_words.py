"""What mover and process say to each other survives the trip, fits a message, and nothing else is read as such."""

from __future__ import annotations

import contextlib
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatcake_transport.movers.ucx_words import (
    MESSAGE_BYTES_MAX,
    PIECES_MAX,
    Kind,
    PieceOrder,
    Word,
    decode,
    encode_order,
    encode_word,
)

U64 = st.integers(0, 2**64 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)
WORDS = st.builds(Word, st.sampled_from([kind for kind in Kind if kind is not Kind.ORDER]), U64, U64, TEXT)
BYTES = st.binary(max_size=300)
PIECES = st.lists(st.tuples(U64, U64, U64, U64), max_size=20)
ORDERS = st.builds(PieceOrder, U64, BYTES, BYTES, st.booleans(), PIECES)


@given(WORDS)
def test_words_survive(word: Word) -> None:
    assert decode(encode_word(word)) == word


@given(ORDERS)
def test_orders_survive(order: PieceOrder) -> None:
    decoded = decode(encode_order(order))
    assert isinstance(decoded, PieceOrder)
    assert astuple(decoded) == astuple(order)


def test_an_order_of_as_many_pieces_as_may_be_fits() -> None:
    order = PieceOrder(1, bytes(4096), bytes(4096), False, [(1, 2, 3, 4)] * PIECES_MAX)
    assert len(encode_order(order)) <= MESSAGE_BYTES_MAX
    with pytest.raises(ValueError, match="pieces"):
        encode_order(PieceOrder(1, b"", b"", False, [(1, 2, 3, 4)] * (PIECES_MAX + 1)))


@given(st.one_of(WORDS.map(encode_word), ORDERS.map(encode_order)), st.data())
def test_a_cut_message_is_none_or_another(message: bytes, data: st.DataObject) -> None:
    cut = message[: data.draw(st.integers(0, len(message) - 1))]
    with contextlib.suppress(ValueError):
        word = decode(cut)
        assert isinstance(word, Word), "an order says how long it is"
        assert word.kind is decode(message).kind  # type: ignore[union-attr]
