"""A space: one model in one layout. Pure.

Everything that changes the meaning of a block's bytes is in the spec, so it is in the fingerprint, so any difference is a
miss and never a wrong hit. LoRA, cache salt and multimodal identity come in through the block keys instead.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Final, NewType

Fingerprint = NewType("Fingerprint", bytes)  # 16 bytes

FINGERPRINT_BYTES: Final = 16
LAYERS_MAX: Final = 4096
SHARDS_MAX: Final = 1024
NAME_BYTES_MAX: Final = 4096
# A block is at most 1 GiB a plane: beyond that a size is a mistake of units.
PLANE_BYTES_MAX: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class SpaceSpec:
    """What a space is. `plane_bytes[l]` is what one block has in layer l of one tensor-parallel shard; sizes may differ.

    Raises: ValueError: a field of a wrong type, an empty model or dtype, block_tokens or shards below 1, no planes, a plane of 0 bytes.
    """

    model: str
    dtype: str
    block_tokens: int
    plane_bytes: tuple[int, ...]
    shards: int = 1
    weights: str = ""
    layout: str = ""

    def __post_init__(self) -> None:
        self._check_types()
        if not 1 <= self.block_tokens <= 1 << 20:
            raise ValueError(f"block_tokens is {self.block_tokens}: expected 1 to {1 << 20}")
        if not 1 <= self.shards <= SHARDS_MAX:
            raise ValueError(f"shards is {self.shards}: expected 1 to {SHARDS_MAX}")
        if not 1 <= len(self.plane_bytes) <= LAYERS_MAX:
            raise ValueError(
                f"plane_bytes has {len(self.plane_bytes)} entries: expected one a layer, 1 to {LAYERS_MAX}"
            )
        for layer, size_bytes in enumerate(self.plane_bytes):
            if not 1 <= size_bytes <= PLANE_BYTES_MAX:
                raise ValueError(f"plane_bytes[{layer}] is {size_bytes}: expected 1 to {PLANE_BYTES_MAX} bytes")

    def _check_types(self) -> None:
        """Specs are also read from disk and wire: a wrong type is no spec, never a crash later."""
        for name in ("model", "dtype", "weights", "layout"):
            value = getattr(self, name)
            if not isinstance(value, str) or len(value.encode()) > NAME_BYTES_MAX:
                raise ValueError(f"the {name} of a space is text of at most {NAME_BYTES_MAX} bytes, not {value!r:.80}")
            if not value and name in ("model", "dtype"):
                raise ValueError(f"a space needs a {name}")
        for number in (self.block_tokens, self.shards, *self.plane_bytes):
            if type(number) is not int:
                raise ValueError(f"sizes and counts of a space are integers, not {number!r}")

    @property
    def layers(self) -> int:
        return len(self.plane_bytes)

    @property
    def planes(self) -> int:
        return self.shards * len(self.plane_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all planes of all shards, without alignment."""
        return self.shards * sum(self.plane_bytes)

    def to_json(self) -> bytes:
        """Canonical: equal specs give equal bytes, in every process and Python version."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes) -> SpaceSpec:
        """Raises: ValueError: not what `to_json` wrote."""
        try:
            fields = json.loads(text)
            fields["plane_bytes"] = tuple(fields["plane_bytes"])
            return cls(**fields)
        except (TypeError, KeyError, UnicodeDecodeError) as error:
            raise ValueError(f"not a space spec: {text[:80]!r}") from error

    @property
    def fingerprint(self) -> Fingerprint:
        return _fingerprint(self)


@functools.lru_cache(maxsize=256)  # every lookup sends it
def _fingerprint(spec: SpaceSpec) -> Fingerprint:
    return Fingerprint(hashlib.sha256(b"flatcake/space/1\0" + spec.to_json()).digest()[:FINGERPRINT_BYTES])
