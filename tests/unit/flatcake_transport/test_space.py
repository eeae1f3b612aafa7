from __future__ import annotations

import dataclasses
import hashlib
import json

import pytest

from flatcake_transport.space import PLANE_BYTES_MAX, SpaceSpec

SPEC = SpaceSpec("llama", "bfloat16", 64, (4096, 100), shards=2, weights="v1", layout="NHD")


def test_sizes() -> None:
    assert (SPEC.layers, SPEC.planes, SPEC.block_bytes) == (2, 4, 2 * 4196)


def test_json_round_trip_is_canonical() -> None:
    assert SpaceSpec.from_json(SPEC.to_json()) == SPEC
    assert SpaceSpec.from_json(SPEC.to_json()).to_json() == SPEC.to_json()
    assert json.loads(SPEC.to_json())["plane_bytes"] == [4096, 100]
    assert b" " not in SPEC.to_json()


def test_fingerprint_is_frozen() -> None:
    # Part of the format: keys of stored blocks derive from it, so it may never change.
    text = (
        b'{"block_tokens":64,"dtype":"bfloat16","layout":"NHD","model":"llama",'
        b'"plane_bytes":[4096,100],"shards":2,"weights":"v1"}'
    )
    assert SPEC.fingerprint == hashlib.sha256(b"flatcake/space/1\0" + text).digest()[:16]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"}, {"dtype": "float16"}, {"block_tokens": 65}, {"plane_bytes": (100, 4096)},
        {"plane_bytes": (4096, 100, 1)}, {"shards": 1}, {"weights": ""}, {"layout": "HND"},
    ],
)  # fmt: skip
def test_every_field_is_in_the_fingerprint(change: dict[str, object]) -> None:
    assert dataclasses.replace(SPEC, **change).fingerprint != SPEC.fingerprint


def test_a_name_cannot_move_between_fields() -> None:
    assert SpaceSpec("a", "b", 1, (1,), weights="c").fingerprint != SpaceSpec("a", "b", 1, (1,), layout="c").fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"model": ""}, {"dtype": ""}, {"block_tokens": 0}, {"block_tokens": (1 << 20) + 1}, {"shards": 0},
        {"shards": 1025}, {"plane_bytes": ()}, {"plane_bytes": (0,)}, {"plane_bytes": (PLANE_BYTES_MAX + 1,)},
        {"plane_bytes": (1,) * 4097}, {"weights": "é" * 2049}, {"plane_bytes": (5, -1)},
    ],
)  # fmt: skip
def test_out_of_range(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        dataclasses.replace(SPEC, **change)


def test_limits_are_accepted() -> None:
    spec = SpaceSpec("m", "d", 1 << 20, (PLANE_BYTES_MAX,) * 4096, shards=1024, weights="é" * 2048)
    assert (spec.layers, spec.planes) == (4096, 1024 * 4096)
    assert SpaceSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b"7", b"\xff", b'{"model":"m"}', SPEC.to_json()[:-1], SPEC.to_json()[:-1] + b',"x":1}']
)
def test_from_json_refuses(text: bytes) -> None:
    with pytest.raises(ValueError):
        SpaceSpec.from_json(text)


@pytest.mark.parametrize(
    ("name", "value"), [("model", 5), ("dtype", None), ("block_tokens", "64"), ("shards", 1.5), ("plane_bytes", ["1"])]
)
def test_from_json_refuses_wrong_types(name: str, value: object) -> None:
    fields = json.loads(SPEC.to_json())
    fields[name] = value
    with pytest.raises(ValueError):
        SpaceSpec.from_json(json.dumps(fields).encode())
