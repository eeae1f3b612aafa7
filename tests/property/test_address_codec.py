from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatcake_transport.address import Address, Medium

FIELDS = st.tuples(
    st.sampled_from(list(Medium)),
    st.one_of(st.integers(0, 4095), st.sampled_from([0, 1, 4095])),
    st.one_of(st.integers(0, (1 << 48) - 1), st.sampled_from([0, 1, (1 << 48) - 1])),
)


@given(FIELDS)
def test_round_trip(fields: tuple[Medium, int, int]) -> None:
    address = Address.of(*fields)
    assert (address.medium, address.node, address.offset) == fields
    assert Address.parse(str(address)) == address
    assert Address(int(address)) == address


@given(FIELDS, FIELDS)
def test_distinct_fields_give_distinct_addresses(one: tuple[Medium, int, int], other: tuple[Medium, int, int]) -> None:
    assert (Address.of(*one) == Address.of(*other)) == (one == other)


@given(st.integers(0, (1 << 64) - 1))
def test_any_64_bits_are_an_address_or_refused(value: int) -> None:
    if value >> 60 > 1:
        with pytest.raises(ValueError):
            Address(value)
    else:
        address = Address(value)
        assert Address.of(address.medium, address.node, address.offset) == value


@given(st.text(max_size=20))
def test_parse_takes_only_what_str_gives_or_refuses(text: str) -> None:
    try:
        address = Address.parse(text)
    except ValueError:
        return
    assert str(Address.parse(str(address))) == str(address)
