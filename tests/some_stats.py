"""StoreStats with a different number in each field, so that a mix-up shows."""

from __future__ import annotations

import dataclasses
from itertools import count

from flatcake_server.stats import Counters, IndexStats, PoolStats, StoreStats

LABELS = {
    "hit_blocks_total": ("memory", "ssd"),
    "hit_bytes_total": ("memory", "ssd"),
    "stored_blocks_total": ("memory/short-reply", "ssd/first-turn"),
    "stored_bytes_total": ("memory", "ssd"),
    "sessions_reclaimed_total": ("memory", "/mnt/a/b"),
}


def some_stats() -> StoreStats:
    numbers = count(1001)
    counters = {
        field.name: {label: next(numbers) for label in LABELS[field.name]} if field.name in LABELS else next(numbers)
        for field in dataclasses.fields(Counters)
    }

    def pool(name: str, medium: str, failure: str) -> PoolStats:
        integers = [field.name for field in dataclasses.fields(PoolStats) if field.type == "int"]
        return PoolStats(
            name=name, medium=medium, failure=failure, direct=True, **{field: next(numbers) for field in integers}
        )

    scalars = [field.name for field in dataclasses.fields(StoreStats) if field.type in ("int", "float")]
    return StoreStats(
        version="0.1.0",
        incarnation="ab" * 16,
        index=IndexStats(blocks=next(numbers), bytes=next(numbers), bytes_per_block=45.5),
        pools=(pool("memory", "memory", ""), pool("/mnt/a/b", "ssd", "disk died")),
        counters=Counters(**counters),
        rpc_seconds={"lookup": (next(numbers), 2.5)},
        **{name: next(numbers) for name in scalars},
    )
