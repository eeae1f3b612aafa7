"""Sizes, durations and addresses as people write them. Pure.

A size is bytes: a number alone, decimal units (kB MB GB TB, or k M G T), or binary ones (KiB MiB GiB TiB, or Ki Mi Gi
Ti), in any case. So "4gb" is 4 * 1000**3 and "4GiB" is 4 * 1024**3. A duration is seconds: a number alone, or us ms s
min h d, also joined: "1h30m". Every error says what was expected, with an example.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")
_DURATION_PART: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")
_SIZE_UNITS: Final = {
    "": 1,
    "b": 1,
    **{f"{letter}{end}": 1000**n for n, letter in enumerate("kmgt", 1) for end in ("", "b")},
    **{f"{letter}{end}": 1024**n for n, letter in enumerate("kmgt", 1) for end in ("i", "ib")},
}
_DURATION_UNITS: Final = {
    "us": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    **dict.fromkeys(("", "s", "sec", "second", "seconds"), Decimal(1)),
    **dict.fromkeys(("m", "min", "minute", "minutes"), Decimal(60)),
    **dict.fromkeys(("h", "hour", "hours"), Decimal(3600)),
    **dict.fromkeys(("d", "day", "days"), Decimal(86400)),
}
PORT_MAX: Final = 65535


@dataclass(frozen=True, slots=True)
class Listen:
    """Where a server listens. `host` has no brackets; port 0 lets the kernel choose."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        """Only this machine reaches it."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_size(value: object) -> int:
    """Bytes. Raises: ValueError: not a size, or not a whole number of bytes."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ValueError(f"{value} is negative: write a size like 4GiB")
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _SIZE_UNITS:
        raise ValueError(f"{value!r} is no size: write bytes, or a number with a unit, like 512MiB, 4GiB or 4GB")
    size_bytes = Decimal(match[1]) * _SIZE_UNITS[match[2].lower()]
    if size_bytes != size_bytes.to_integral_value():
        raise ValueError(f"{value!r} is no whole number of bytes: write a size like 1536MiB")
    return int(size_bytes)


def parse_duration(value: object) -> float:
    """Seconds. Raises: ValueError: not a duration."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not 0 <= value < float("inf"):
            raise ValueError(f"{value} is no duration: write one like 30s or 5m")
        return float(value)
    text = value if isinstance(value, str) else ""
    seconds, position, joined = Decimal(0), 0, False
    while match := _DURATION_PART.match(text, position):
        unit = _DURATION_UNITS.get(match[2].lower())
        # A number without its unit is seconds only where it stands alone: "1h30" could be either.
        if unit is None or (match[2] == "" and (joined or match.end() != len(text))):
            break
        seconds, position, joined = seconds + Decimal(match[1]) * unit, match.end(), True
    if not joined or position != len(text):
        raise ValueError(f"{value!r} is no duration: write seconds, or a number with a unit, like 500ms, 30s, 5m or 1h")
    return float(seconds)


def parse_listen(value: str) -> Listen | None:
    """`host:port`, `[IPv6]:port`, or "off", which is None. Raises: ValueError: anything else."""
    if value == "off":
        return None
    host, colon, port = value.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    if ":" in bare and not bracketed:
        raise ValueError(f"{value!r}: an IPv6 address stands in brackets, like [::]:7450")
    wrong_port = not (port.isascii() and port.isdigit() and int(port) <= PORT_MAX)
    if not colon or not bare or wrong_port or (bracketed and ":" not in bare) or re.search(r"[\s/\[\]]", bare):
        raise ValueError(f'{value!r} is no address: write host:port like 127.0.0.1:7450 or [::]:7450, or "off"')
    return Listen(bare, int(port))


def format_size(size_bytes: int) -> str:
    """Exact, and the shortest that `parse_size` reads back: 4GiB, 1536MiB, 1000."""
    for n, letter in reversed(list(enumerate("KMGT", 1))):
        if size_bytes and size_bytes % 1024**n == 0:
            return f"{size_bytes // 1024**n}{letter}iB"
    return str(size_bytes)


def format_duration(seconds: float) -> str:
    """What `parse_duration` reads back: 10m, 30s, 500ms."""
    exact = Decimal(repr(seconds))
    for unit, size in (("h", 3600), ("m", 60), ("s", 1)):
        if exact and exact % size == 0:
            return f"{int(exact) // size}{unit}"
    return f"{(exact * 1000).normalize():f}ms" if exact else "0s"


def approximate_size(size_bytes: float) -> str:
    """For people, three digits: 1.21 GiB."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1000:
            return f"{size:.3g} {unit}" if unit != "B" else f"{int(size)} B"
        size /= 1024
    return f"{size:.3g} TiB"
