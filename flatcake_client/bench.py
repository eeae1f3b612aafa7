"""`flatcake bench`: what FlatCake reaches on this machine, beside what the machine itself does. For a first look at a disk.

A daemon of its own, on a directory that is gone afterwards; one context in the shape of a large model's, stored and restored on SSD
and in memory, every byte compared; raw reads of a file of the same size, and one copy of as much memory. The best of a few rounds each:
what else the machine does costs time and gives none. Each store is the first into its place, which touches fresh memory. The scripts in bench/ take the figures of the documents, in longer turns.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import flatcake_client as fc
from flatcake_client.arguments import Parser
from flatcake_client.raw_reads import raw_read_rates
from flatcake_client.replay.node import Node
from flatcake_transport.errors import FlatCakeError, Unavailable
from flatcake_transport.units import approximate_size, parse_size
from flatcake_transport.window import aligned_buffer

LAYERS: Final = 32
PLANE_BYTES: Final = 128 << 10
BLOCK_TOKENS: Final = 64
BLOCK_BYTES: Final = LAYERS * PLANE_BYTES
LOOKUPS: Final = 50
TIMEOUT_S: Final = 120.0
# Hints with which the daemon's placement chooses each medium.
HINTS: Final[dict[str, dict[str, int]]] = {
    "ssd": {"turn": 1},
    "memory": {"turn": 2, "context_tokens": 1, "previous_reply_tokens": 1},
}
EXIT_WRONG, EXIT_USAGE, EXIT_UNAVAILABLE, EXIT_INTERRUPTED = 1, 2, 3, 130
PIPE_COLUMNS: Final = 120  # rich assumes 80 where there is no terminal

Say = Callable[[str], None]


class WrongBytes(Exception):
    """What was restored is not what was stored."""


@dataclass(frozen=True, slots=True)
class Figure:
    """`limit_bytes_per_s`: of the machine without us; 0: it cannot be told."""

    name: str
    bytes_per_s: float
    limit_bytes_per_s: float = 0.0
    limit: str = ""

    @property
    def share(self) -> float | None:
        return self.bytes_per_s / self.limit_bytes_per_s if self.limit_bytes_per_s else None


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes a second of each medium, and the median of a lookup of all blocks."""

    store: dict[str, float]
    restore: dict[str, float]
    memcpy_bytes_per_s: float
    lookup_s: float
    blocks: int


class Pages:
    """An engine's paged KV: an array a layer, slots in no order."""

    def __init__(self, blocks: int, seed: int) -> None:
        self.memory = aligned_buffer(blocks * BLOCK_BYTES)
        self.layers: list[NDArray[np.uint8]] = list(self.memory.reshape(LAYERS, blocks, PLANE_BYTES))
        self.slots = np.random.default_rng(seed).permutation(blocks)

    def same(self, other: Pages) -> bool:
        pairs = zip(self.layers, other.layers, strict=True)
        return all(np.array_equal(mine[self.slots], theirs[other.slots]) for mine, theirs in pairs)


def measure(client: fc.Client, blocks: int, rounds: int) -> Measured:
    """Store and restore a context of so many blocks on each medium. Raises: FlatCakeError. WrongBytes."""
    space = client.open_space("flatcake-bench", "uint8", BLOCK_TOKENS, [PLANE_BYTES] * LAYERS)
    source, target = Pages(blocks, 1), Pages(blocks, 2)
    source.memory[:] = np.resize(np.random.default_rng(0).integers(0, 256, (1 << 20) + 1, np.uint8), len(source.memory))
    store: dict[str, float] = {}
    restore: dict[str, float] = {}
    lookups: list[float] = []
    for seed, (medium, hints) in enumerate(HINTS.items()):
        keys = space.keys(np.random.default_rng(seed).integers(0, 1 << 31, blocks * BLOCK_TOKENS))
        store[medium] = len(source.memory) / _stored_s(space, keys, medium, hints, source)
        target.memory[:] = 0
        restore[medium] = len(source.memory) / min(_restored_s(space, keys, target) for _ in range(rounds))
        if not source.same(target):
            raise WrongBytes(f"other bytes came back from {medium} than were stored")
        lookups += [_timed_s(lambda keys=keys: space.lookup(keys, pin=False)) for _ in range(LOOKUPS)]  # type: ignore[misc]
    copied_s = min(_timed_s(lambda: np.copyto(target.memory, source.memory)) for _ in range(rounds))
    return Measured(store, restore, len(source.memory) / copied_s, statistics.median(lookups), blocks)


def _stored_s(space: fc.Space, keys: Any, medium: str, hints: dict[str, int], source: Pages) -> float:
    """Of one turn, up to its commit. Raises: Unavailable: it has another home, so it would be another figure."""
    started_s = time.perf_counter()
    with space.begin_turn(keys, session=f"bench-{medium}", **hints, timeout_s=TIMEOUT_S) as turn:  # type: ignore[arg-type]
        homes = {part.medium for part in turn.parts}
        if homes != {medium}:
            raise Unavailable(
                f"the daemon puts on {' and '.join(sorted(homes)) or 'nothing'} what is meant for {medium}"
            )
        for layer, pages in enumerate(source.layers):
            turn.write_layer(layer, pages, source.slots, TIMEOUT_S)
        turn.commit(TIMEOUT_S)
    return time.perf_counter() - started_s


def _restored_s(space: fc.Space, keys: Any, target: Pages) -> float:
    """From the lookup to the last byte. Raises: Unavailable: not all came."""
    started_s = time.perf_counter()
    with space.lookup(keys) as hit:
        usable = hit.restore(target.layers, target.slots, timeout_s=TIMEOUT_S).wait()
    if usable < len(keys):
        raise Unavailable(f"{usable} of {len(keys)} blocks came back: {hit.failure or 'see the log'}")
    return time.perf_counter() - started_s


def _timed_s(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def run(parent: Path, size_bytes: int, rounds: int, say: Say) -> dict[str, Any]:
    """All figures, as JSON knows them. Raises: FlatCakeError, OSError. WrongBytes."""
    blocks = size_bytes // BLOCK_BYTES
    with tempfile.TemporaryDirectory(prefix=".flatcake-bench-", dir=parent) as folder:
        say("raw reads")
        raw = ("no O_DIRECT here", 0.0)
        with contextlib.suppress(OSError):
            raw = max(raw_read_rates(Path(folder), blocks * BLOCK_BYTES, rounds), key=lambda pair: pair[1])
        say("stores and restores")
        sizes = {"memory_bytes": blocks * BLOCK_BYTES + (64 << 20), "ssd_bytes": 2 * blocks * BLOCK_BYTES + (64 << 20)}
        with (
            contextlib.closing(Node(Path(folder), sizes)) as node,
            fc.connect(node.endpoint, name="flatcake-bench") as client,
        ):
            found = measure(client, blocks, rounds)
    limits = {"ssd": (raw[1], f"raw reads, {raw[0]}"), "memory": (found.memcpy_bytes_per_s, "one copy")}
    figures = [Figure(f"restore from {medium}", rate, *limits[medium]) for medium, rate in found.restore.items()]
    figures += [Figure("first store to memory", found.store["memory"], *limits["memory"])]
    figures += [Figure("first store to ssd, synced", found.store["ssd"])]
    return {
        "directory": str(parent),
        "size_bytes": blocks * BLOCK_BYTES,
        "lookup_ms": found.lookup_s * 1e3,
        "lookup_blocks": blocks,
        "figures": [asdict(figure) | {"share": figure.share} for figure in figures],
    }


def _refuse(folder: Path, size_bytes: int, rounds: int) -> None:
    """Raises: ValueError: nothing can be measured with these."""
    if not folder.is_dir():
        raise ValueError(f"--dir {folder} is no directory: give one on the disk to measure")
    if size_bytes < BLOCK_BYTES:
        raise ValueError(f"--size is {BLOCK_BYTES >> 20}MiB or more, not {approximate_size(size_bytes)}")
    if rounds < 1:
        raise ValueError(f"--rounds is 1 or more, not {rounds}")


def _show(document: dict[str, Any], console: Console) -> None:
    title = f"{approximate_size(document['size_bytes'])} on {document['directory']}"
    table = Table("", "GB/s", "of", "the machine, GB/s", title=title, title_justify="left", title_style="bold")
    for figure in document["figures"]:
        share = "" if figure["share"] is None else f"{figure['share']:.2f}"
        limit = f"{figure['limit_bytes_per_s'] / 1e9:.2f}: {figure['limit']}" if figure["share"] else figure["limit"]
        table.add_row(figure["name"], f"{figure['bytes_per_s'] / 1e9:.2f}", share, limit)
    console.print(table)
    console.print(f"a lookup of {document['lookup_blocks']:,} blocks takes {document['lookup_ms']:.2f} ms")


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0; 1: wrong bytes came back; 2: the command is wrong; 3: it cannot run here."""
    parser = Parser("flatcake bench", "Restores and stores on this machine, beside raw reads and a memory copy.")
    parser.add_argument("--dir", type=Path, default=Path(), help="a directory on the disk to measure (default: here)")
    parser.add_argument("--size", default="1GiB", help="bytes stored and restored at once (default 1GiB)")
    parser.add_argument("--rounds", type=int, default=5, help="of which the best counts (default 5)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    told = parser.parse_args(arguments)
    logging.getLogger("flatcake_client").addHandler(logging.NullHandler())
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a stop takes daemon and directory along
    errors = Console(stderr=True, highlight=False)
    try:
        size_bytes = parse_size(told.size)
        _refuse(told.dir, size_bytes, told.rounds)
        with errors.status("starting", spinner="dots") as status:
            document = run(told.dir.absolute(), size_bytes, told.rounds, status.update)
    except (ValueError, WrongBytes, FlatCakeError, OSError) as error:
        said = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        errors.print(f"flatcake bench: {' '.join(said.split())}", markup=False, soft_wrap=True)
        return {ValueError: EXIT_USAGE, WrongBytes: EXIT_WRONG}.get(type(error), EXIT_UNAVAILABLE)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    if told.json:
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        _show(document, Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
