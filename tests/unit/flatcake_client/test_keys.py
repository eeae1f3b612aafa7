from __future__ import annotations

import hashlib
import subprocess
import sys

import numpy as np
import pytest
import torch

from flatcake_client.keys import chain_keys, check_keys, foreign_keys, root_key
from flatcake_transport.space import Fingerprint

ROOT = root_key(Fingerprint(bytes(range(16))), b"salt")


def test_the_rule_written_out():
    parent = hashlib.sha256(bytes(range(16)) + b"salt").digest()[:16]
    expected = []
    for block in ([1, 2], [3, 1 << 31], [70000, 4]):
        parent = hashlib.sha256(parent + b"".join(token.to_bytes(4, "little") for token in block)).digest()[:16]
        expected.append(parent)
    keys = chain_keys([1, 2, 3, 1 << 31, 70000, 4, 99], 2, ROOT)
    assert keys.shape == (3, 16)
    assert keys.dtype == np.uint8
    assert [key.tobytes() for key in keys] == expected


@pytest.mark.parametrize(
    "tokens",
    [
        [5, 6, 7, 8],
        (5, 6, 7, 8),
        range(5, 9),
        np.asarray([5, 6, 7, 8], np.int8),
        np.asarray([5, 6, 7, 8], np.uint64),
        np.asarray([5, 6, 7, 8], ">i4"),
        np.asarray([5, 0, 6, 0, 7, 0, 8, 0])[::2],
        torch.tensor([5, 6, 7, 8], dtype=torch.int32),
        torch.tensor([5, 6, 7, 8]),
        torch.tensor([[5, 1], [6, 1], [7, 1], [8, 1]])[:, 0],
    ],
    ids=["list", "tuple", "range", "i1", "u8", "big endian", "strided", "torch i4", "torch i8", "torch strided"],
)
def test_any_integers_give_the_same_keys(tokens):
    assert np.array_equal(chain_keys(tokens, 2, ROOT), chain_keys([5, 6, 7, 8], 2, ROOT))


@pytest.mark.parametrize(
    "tokens",
    [
        [-1, 2],
        [1 << 32, 2],
        [1 << 70, 2],
        [1.0, 2.0],
        np.asarray([[1, 2]]),
        [True, False],
        ["a", "b"],
        [[1], [2, 3]],
        None,
        torch.tensor([0.5, 1.0]),
        torch.tensor([1.0], dtype=torch.bfloat16),
    ],
    ids=["negative", "33 bits", "71 bits", "floats", "2-d", "bools", "text", "ragged", "none", "float tensor", "bf16"],
)
def test_what_is_no_token(tokens):
    with pytest.raises(ValueError, match="token ids"):
        chain_keys(tokens, 2, ROOT)


@pytest.mark.parametrize("tokens", [[], [1], np.zeros(0, np.int64), torch.tensor([], dtype=torch.int64)])
def test_less_than_a_block_has_no_key(tokens):
    assert chain_keys(tokens, 2, ROOT).shape == (0, 16)


def test_everything_that_matters_is_in_the_key():
    base = chain_keys([1, 2, 3, 4], 2, ROOT)
    others = [
        chain_keys([9, 2, 3, 4], 2, ROOT),
        chain_keys([1, 2, 3, 4], 2, root_key(Fingerprint(bytes(16)), b"salt")),
        chain_keys([1, 2, 3, 4], 2, root_key(Fingerprint(bytes(range(16))), b"")),
        chain_keys([1, 2, 3, 4], 2, ROOT, b"image"),
        foreign_keys([b"1", b"2"], ROOT),
    ]
    every = np.concatenate([base, *others])
    assert len(np.unique(every, axis=0)) == len(every), "two different blocks have one key"
    late = chain_keys([1, 2, 3, 9], 2, ROOT)
    assert np.array_equal(late[0], base[0])
    assert not np.array_equal(late[1], base[1])


def test_extra_of_each_block():
    base = chain_keys([1, 2, 3, 4], 2, ROOT)
    mixed = chain_keys([1, 2, 3, 4, 5], 2, ROOT, [b"", b"image"])
    assert np.array_equal(mixed[0], base[0])
    assert not np.array_equal(mixed[1], base[1])
    with pytest.raises(ValueError, match="expected one a full block, 2"):
        chain_keys([1, 2, 3, 4], 2, ROOT, [b"image"])


def test_foreign_hashes():
    keys = foreign_keys([b"", b"x" * 4096, b"x"], ROOT)
    assert keys.shape == (3, 16)
    assert not np.array_equal(keys, foreign_keys([b"", b"x" * 4096, b"x"], root_key(Fingerprint(bytes(16)), b"")))
    with pytest.raises(ValueError, match="differ by process"):
        foreign_keys([hash("x")], ROOT)  # type: ignore[list-item]


def test_other_processes_give_the_same_keys():
    code = (
        "from flatcake_client.keys import chain_keys, root_key\n"
        "print(chain_keys(range(100), 7, root_key(bytes(range(16)), b'salt'))[-1].tobytes().hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True, text=True
        ).stdout.strip()
        for seed in ("0", "123")
    }
    assert outputs == {chain_keys(range(100), 7, ROOT)[-1].tobytes().hex()}


def test_checked_keys_are_contiguous():
    wide = np.zeros((4, 32), np.uint8)
    assert check_keys(wide[:, :16]).flags.c_contiguous


@pytest.mark.parametrize("salt", ["tenant", 0, 7, None, [1]])
def test_a_salt_is_bytes(salt):
    """Tenant 0 would share with who has no salt."""
    with pytest.raises(ValueError, match="encode it"):
        root_key(Fingerprint(bytes(16)), salt)
