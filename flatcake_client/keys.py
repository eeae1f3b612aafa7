"""Token ids -> chained block keys. Pure.

    root  = sha256(fingerprint + salt)[:16]
    key_i = sha256(key_{i-1} + token ids of block i, u32 little-endian each + extra_i)[:16],  key_{-1} = root

Key i names the whole prefix up to and with block i, so equal keys mean equal context, in every process and on every
machine: nothing here depends on Python's `hash`, on word size or on the integer type of the ids. Only full blocks have
keys. Both inputs of a digest that could run into each other have fixed lengths before them (16 bytes of parent,
`4 * block_tokens` of ids), so no two different inputs are ever the same bytes.

The chain is sequential, so one hashlib call a block is the floor; all else is vectorised.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flatcake_transport.space import Fingerprint

KEY_BYTES: Final = 16
TOKEN_LIMIT: Final = 1 << 32

KeyArray = NDArray[np.uint8]  # (n, 16)


def root_key(fingerprint: Fingerprint, salt: bytes) -> bytes:
    """The parent of a chain's first key. `salt` separates tenants, adapters (LoRA) and whatever else must not share.

    Raises: ValueError: the salt is not bytes; `bytes(n)` would be n zeros, and none at all for tenant 0.
    """
    if not isinstance(salt, bytes | bytearray | memoryview):
        raise ValueError(f"a salt is bytes, not {type(salt).__name__}: encode it")  # noqa: TRY004 - a caller's bug is ValueError
    return hashlib.sha256(fingerprint + salt).digest()[:KEY_BYTES]


def chain_keys(tokens: Any, block_tokens: int, root: bytes, extra: bytes | Sequence[bytes] | None = None) -> KeyArray:
    """Keys of the full blocks of a token sequence, (n, 16) uint8, first block first.

    Args:
        tokens: 1-d integers of any width: list, numpy array or torch tensor, each in 0 .. 2**32-1.
        block_tokens: tokens a block; what remains at the end has no key.
        root: of `root_key`.
        extra: identity that token ids lack, e.g. the hash of an image they stand for: the same for every block, or one
            entry a full block.

    Raises:
        ValueError: tokens are no 1-d integers in range, or `extra` has not one entry a block.
    """
    ids = token_array(tokens)
    blocks = len(ids) // block_tokens
    step = 4 * block_tokens
    data = memoryview(ids[: blocks * block_tokens].tobytes())
    sha256, parent, keys = hashlib.sha256, root, []
    for start, more in zip(range(0, blocks * step, step), _extras(extra, blocks), strict=True):
        parent = sha256(b"".join((parent, data[start : start + step], more))).digest()[:KEY_BYTES]
        keys.append(parent)
    return np.frombuffer(b"".join(keys), np.uint8).reshape(blocks, KEY_BYTES)


def foreign_keys(hashes: Sequence[bytes], root: bytes) -> KeyArray:
    """Keys from an engine's own chained hashes: each is passed through one digest with the space and the salt.

    Args:
        hashes: one a block, any length; each must name the whole prefix up to its block.

    Raises:
        ValueError: an entry is not bytes: Python's `hash` differs between processes and is never taken.
    """
    for value in hashes:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise ValueError(  # noqa: TRY004 - a caller's bug is ValueError
                f"a block hash is bytes, not {type(value).__name__}: integers of hash() differ by process"
            )
    # The tag keeps these apart from the keys of `chain_keys`, whose digests begin with a parent key.
    seed = hashlib.sha256(b"flatcake/foreign/1\0" + root)
    keys = []
    for value in hashes:
        digest = seed.copy()
        digest.update(value)
        keys.append(digest.digest()[:KEY_BYTES])
    return np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), KEY_BYTES)


def token_array(tokens: Any) -> NDArray[np.uint32]:
    """Token ids as 1-d little-endian u32. Raises: ValueError: not 1-d, not integers, or one does not fit."""
    ids = host_integers(tokens, "token ids")
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= TOKEN_LIMIT):
        raise ValueError(f"token ids are 0 to {TOKEN_LIMIT - 1}, not {ids.min()} to {ids.max()}")
    return ids.astype("<u4")


def host_integers(values: Any, name: str) -> NDArray[Any]:
    """A list, numpy array or torch tensor (on any device) as 1-d numpy integers, not copied where it need not be.

    Raises: ValueError: not 1-d, or not integers.
    """
    # A tensor comes to the host by its own method, so torch need not be imported to take one.
    to_host = getattr(values, "cpu", None)
    try:
        array = np.asarray(to_host() if callable(to_host) else values)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{name} are 1-d integers: {error}") from error
    if array.ndim == 1 and not array.size:
        return array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{name} are 1-d integers, not {array.ndim}-d {array.dtype}")
    return array


def check_keys(keys: Any) -> KeyArray:
    """Keys as the wire wants them. Raises: ValueError: not (n, 16) uint8."""
    if not isinstance(keys, np.ndarray) or keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != KEY_BYTES:
        what = f"{keys.dtype} {keys.shape}" if isinstance(keys, np.ndarray) else type(keys).__name__
        raise ValueError(f"keys are a numpy array (n, {KEY_BYTES}) uint8, as space.keys gives them, not {what}")
    return np.ascontiguousarray(keys)


def _extras(extra: bytes | Sequence[bytes] | None, blocks: int) -> Sequence[bytes]:
    if extra is None:
        return [b""] * blocks
    if isinstance(extra, bytes | bytearray | memoryview):
        return [bytes(extra)] * blocks
    if len(extra) != blocks:
        raise ValueError(f"extra has {len(extra)} entries: expected one a full block, {blocks}")
    return extra
