"""FC-GVA: the 64-bit address of a block. Pure.

    medium:4 | node:12 | offset:48

An address never changes while its block lives. Medium 0 is memory (offset into the node's arena), 1 is SSD (offset into
the node's SSD address range, in which each session file owns one extent). The other fourteen are reserved: they are
refused wherever an address enters. `MISSING` uses the last of them, so it can never name a block.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

NODE_BITS: Final = 12
OFFSET_BITS: Final = 48
NODES_MAX: Final = 1 << NODE_BITS  # 4096
OFFSET_LIMIT: Final = 1 << OFFSET_BITS  # 256 TiB a medium and node
MISSING: Final = (1 << 64) - 1  # what the index answers for an unknown key

AddressArray = NDArray[np.uint64]


class Medium(IntEnum):
    MEMORY = 0
    SSD = 1


_MEDIA: Final = tuple(Medium)
_RESERVED: Final = len(_MEDIA) << (NODE_BITS + OFFSET_BITS)  # from here on the medium is a reserved one


class Address(int):
    """An address as one integer that prints itself: `ssd@7+0x1a2b000`."""

    __slots__ = ()

    def __new__(cls, value: int) -> Self:
        """Raises: ValueError: not 64 bits, or the medium is reserved."""
        if 0 <= value < _RESERVED:  # one test on the way that hundreds of runs of a reply take
            return int.__new__(cls, value)
        if not 0 <= value < 1 << 64:
            raise ValueError(f"address {value:#x} does not fit 64 bits")
        raise ValueError(f"address {value:#x} names reserved medium {value >> 60}: only 0 (memory) and 1 (ssd) exist")

    @classmethod
    def of(cls, medium: Medium, node: int, offset: int) -> Address:
        """Raises: ValueError: node not in 0..4095, or offset not in 0..2**48-1."""
        if not 0 <= node < NODES_MAX:
            raise ValueError(f"node {node} is not in 0..{NODES_MAX - 1}")
        if not 0 <= offset < OFFSET_LIMIT:
            raise ValueError(f"offset {offset:#x} does not fit {OFFSET_BITS} bits")
        return cls(int(medium) << (NODE_BITS + OFFSET_BITS) | node << OFFSET_BITS | offset)

    @classmethod
    def parse(cls, text: str) -> Address:
        """The inverse of `str(address)`. Raises: ValueError: not of the form medium@node+0xoffset."""
        try:
            medium, rest = text.split("@")
            node, offset = rest.split("+")
            return cls.of(Medium[medium.upper()], int(node), int(offset, 16))
        except (KeyError, ValueError) as error:
            raise ValueError(f"{text!r} is no address: expected e.g. ssd@7+0x1a2b000") from error

    @property
    def medium(self) -> Medium:
        return _MEDIA[self >> (NODE_BITS + OFFSET_BITS)]

    @property
    def node(self) -> int:
        return self >> OFFSET_BITS & NODES_MAX - 1

    @property
    def offset(self) -> int:
        return self & OFFSET_LIMIT - 1

    def __add__(self, step_bytes: int) -> Address:
        return Address.of(self.medium, self.node, self.offset + step_bytes)

    def __str__(self) -> str:
        return f"{self.medium.name.lower()}@{self.node}+{self.offset:#x}"

    def __repr__(self) -> str:
        return f"Address({self})"
