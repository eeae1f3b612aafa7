"""The index alone, without daemon or gRPC: lookups of one agent request, growth pauses, bytes a block.

Filled as a daemon fills it, in commits of --batch keys; the longest of those calls is the longest pause the event loop
sees. Then lookups of --keys keys, all stored, all unknown, and a chain of which the first half is stored; a session's drop
(removal of --keys); and a restart (one insert of a million keys a call). Prints milliseconds of each call (best, p50, p99, max) and
bytes a block, as the index counts them and as the process has grown; nothing else is compared with: DESIGN allows 50 B a block.
Run: python bench/index.py [--blocks 10000000]
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from flatcake_server.index import BlockIndex
from flatcake_server.records import KeyArray

LOAD_KEYS = 1_000_000
ROUNDS = 200


def measured_ms(work: Callable[[], object], clock_s: Callable[[], float]) -> float:
    start_s = clock_s()
    work()
    return (clock_s() - start_s) * 1e3


def spread(times_ms: list[float]) -> dict[str, float]:
    p50, p99 = np.quantile(times_ms, [0.5, 0.99]).tolist()
    return {"best": min(times_ms), "p50": p50, "p99": p99, "max": max(times_ms)}


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def measure(
    blocks: int, batch: int, keys_asked: int, clock_s: Callable[[], float]
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    rng = np.random.default_rng(1)
    keys: KeyArray = rng.integers(0, 256, (blocks, 16), np.uint8)
    addresses = np.arange(blocks, dtype=np.uint64)
    found: dict[str, dict[str, float]] = {}
    gc.disable()

    def inserts(index: BlockIndex, size: int) -> list[float]:
        cuts = [slice(first, first + size) for first in range(0, blocks, size)]
        return [measured_ms(partial(index.insert, keys[cut], addresses[cut]), clock_s) for cut in cuts]

    def each(verb: Callable[[KeyArray], object], batches: list[KeyArray]) -> dict[str, float]:
        return spread([measured_ms(partial(verb, batch_keys), clock_s) for batch_keys in batches])

    before_bytes = rss_bytes()
    index = BlockIndex(2 * blocks)
    times = inserts(index, batch)
    found[f"insert of {batch:,}, while growing"] = spread(times)
    found[f"insert of {batch:,}, last tenth"] = spread(times[-max(1, len(times) // 10) :])
    bytes_a_block = {"counted": index.stats().bytes_per_block, "resident": (rss_bytes() - before_bytes) / blocks}

    rounds = min(ROUNDS, blocks // keys_asked)
    picks = np.split(rng.permutation(blocks)[: rounds * keys_asked], rounds)
    stored: list[KeyArray] = [keys[pick] for pick in picks]
    unknown: list[KeyArray] = [rng.integers(0, 256, (keys_asked, 16), np.uint8) for _ in picks]
    half = keys_asked // 2
    mixed: list[KeyArray] = [np.concatenate([k[:half], u[half:]]) for k, u in zip(stored, unknown, strict=True)]
    found[f"lookup of {keys_asked:,}, stored"] = each(index.lookup, stored)
    found[f"lookup of {keys_asked:,}, unknown"] = each(index.lookup, unknown)
    found[f"prefix of {keys_asked:,}, half stored"] = each(index.prefix, mixed)
    gone = zip(stored, picks, strict=True)
    found[f"remove of {keys_asked:,}"] = spread(
        [measured_ms(partial(index.remove, k, addresses[pick]), clock_s) for k, pick in gone]
    )
    del index
    found[f"insert of {LOAD_KEYS:,}"] = spread(inserts(BlockIndex(2 * blocks), LOAD_KEYS))
    return found, bytes_a_block


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=3500, help="keys of one commit (default 3500)")
    parser.add_argument("--keys", type=int, default=3500, help="keys of one lookup (default 3500)")
    parser.add_argument("--cpu", action="store_true", help="processor time, not wall time: for a machine that is busy")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    args = parser.parse_args()
    clock_s = time.thread_time if args.cpu else time.perf_counter
    found, sizes = measure(args.blocks, args.batch, args.keys, clock_s)
    clock = "processor" if args.cpu else "wall"
    if args.json:
        print(json.dumps({"blocks": args.blocks, "clock": clock, "ms": found, "bytes_a_block": sizes}))
        return
    memory = f"{sizes['counted']:.1f} bytes a block, resident {sizes['resident']:.1f}"
    table = Table(title=f"index of {args.blocks:,} blocks: {memory}; ms of {clock} time")
    for name in ("call", "best", "p50", "p99", "max"):
        table.add_column(name, justify="left" if name == "call" else "right")
    for call, times in found.items():
        table.add_row(call, *(f"{ms:.2f}" for ms in times.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
