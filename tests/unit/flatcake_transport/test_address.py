from __future__ import annotations

import pytest

from flatcake_transport.address import MISSING, NODES_MAX, OFFSET_LIMIT, Address, Medium


def test_bits_are_where_design_says() -> None:
    assert int(Address.of(Medium.SSD, 7, 0x1A2B000)) == 1 << 60 | 7 << 48 | 0x1A2B000
    assert int(Address.of(Medium.MEMORY, 0, 0)) == 0


def test_reads_as_in_design() -> None:
    address = Address.of(Medium.SSD, 7, 0x1A2B000)
    assert str(address) == "ssd@7+0x1a2b000"
    assert repr(address) == "Address(ssd@7+0x1a2b000)"
    assert str(Address.of(Medium.MEMORY, 4095, 0)) == "memory@4095+0x0"


@pytest.mark.parametrize("medium", range(2, 16))
def test_reserved_media_are_refused(medium: int) -> None:
    with pytest.raises(ValueError, match="reserved medium"):
        Address(medium << 60)


@pytest.mark.parametrize("value", [-1, 1 << 64])
def test_only_64_bits(value: int) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        Address(value)


def test_missing_is_no_address() -> None:
    with pytest.raises(ValueError, match="reserved"):
        Address(MISSING)


@pytest.mark.parametrize(("node", "offset"), [(-1, 0), (NODES_MAX, 0), (0, -1), (0, OFFSET_LIMIT)])
def test_fields_out_of_range(node: int, offset: int) -> None:
    with pytest.raises(ValueError):
        Address.of(Medium.SSD, node, offset)


def test_adding_stays_on_the_medium_and_node() -> None:
    last = Address.of(Medium.SSD, 3, OFFSET_LIMIT - 2)
    assert last + 1 == Address.of(Medium.SSD, 3, OFFSET_LIMIT - 1)
    assert isinstance(last + 1, Address)
    with pytest.raises(ValueError):
        last + 2


@pytest.mark.parametrize(
    "text", ["", "ssd", "ssd@1", "ssd@x+0x0", "disk@1+0x0", "ssd@1+0x0+0x1", "ssd@4096+0x0", "ssd@1+-0x1"]
)
def test_parse_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="no address"):
        Address.parse(text)
