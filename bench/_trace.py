"""Request traces in the compact format: gzip, one JSON object a line, sorted by arrival.

`hash_delta` is [keep, start, length, start, length, ...]: the first `keep` block ids of the session's previous request,
then runs of consecutive ids. An id means one block after exactly one prefix, so equal ids mean equal prefixes.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    arrival_s: float
    session: str
    turn: int  # from 1
    input_tokens: int
    output_tokens: int
    block_tokens: int
    ids: Ids  # of the prompt's blocks, in order


def read_trace(path: Path) -> Iterator[Request]:
    """Raises: ValueError: a line without block ids (the trace holds lengths only)."""
    previous: dict[str, Ids] = {}
    with gzip.open(path, "rt") as lines:
        for line in lines:
            fields = json.loads(line)
            if "hash_delta" not in fields:
                raise ValueError(f"{path} has no block ids")
            keep, *runs = fields["hash_delta"]
            kept = previous.get(fields["session"], np.empty(0, np.int64))[:keep]
            added = [np.arange(start, start + length) for start, length in zip(runs[::2], runs[1::2], strict=True)]
            ids = previous[fields["session"]] = np.concatenate([kept, *added])
            yield Request(
                fields["t"],
                fields["session"],
                fields["turn"],
                fields["input_tokens"],
                fields["output_tokens"],
                fields["block_tokens"],
                ids,
            )
