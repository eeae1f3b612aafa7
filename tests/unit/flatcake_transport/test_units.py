from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatcake_transport.units import (
    Listen,
    approximate_size,
    format_duration,
    format_size,
    parse_duration,
    parse_listen,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        (4096, 4096),
        ("4GiB", 4 << 30),
        ("4gb", 4 * 1000**3),
        ("4 GB", 4 * 1000**3),
        ("4G", 4 * 1000**3),
        ("4Gi", 4 << 30),
        ("1.5kib", 1536),
        ("2TiB", 2 << 40),
        ("10b", 10),
    ],
)
def test_sizes(text, size_bytes):
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "4 apples", "4PiB", "-1", -1, "1e9", "0.3b", 1.5, None, True, "4GiBs", "1 2"]
)
def test_what_is_no_size_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match=r"MiB|GiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30),
        (30, 30),
        (0.5, 0.5),
        ("30s", 30),
        ("5m", 300),
        ("10min", 600),
        ("1h30m", 5400),
        ("250ms", 0.25),
        ("2 d", 172800),
    ],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "s", "5 parsecs", "1h30", "5 30s", "-5s", -1, None, False, "5m x", float("inf"), float("nan")]
)
def test_what_is_no_duration_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="30s"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "listen"),
    [
        ("127.0.0.1:7450", Listen("127.0.0.1", 7450)),
        ("[::]:7450", Listen("::", 7450)),
        ("localhost:0", Listen("localhost", 0)),
        ("off", None),
    ],
)
def test_addresses(text, listen):
    assert parse_listen(text) == listen
    assert listen is None or str(listen) == text


@pytest.mark.parametrize(
    "text", ["", ":7450", "host", "host:", "host:x", "host:65536", "::1:7450", "[host]:1", "a b:1", "http://h:1", "h:¹"]
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ValueError, match="7450"):
        parse_listen(text)


@given(st.integers(0, 1 << 50) | st.integers(0, 4096).map(lambda n: n << 20))
def test_a_formatted_size_reads_back_exactly(size_bytes):
    assert parse_size(format_size(size_bytes)) == size_bytes


@given(st.integers(0, 10**9).map(lambda ms: ms / 1000) | st.integers(0, 1000).map(lambda m: m * 60.0))
def test_a_formatted_duration_reads_back_exactly(seconds):
    assert parse_duration(format_duration(seconds)) == seconds


def test_sizes_for_people_have_three_digits():
    assert [approximate_size(n) for n in (0, 999, 1000, 1 << 20, 1300 << 20, 5 << 40)] == [
        "0 B",
        "999 B",
        "0.977 KiB",
        "1 MiB",
        "1.27 GiB",
        "5 TiB",
    ]
