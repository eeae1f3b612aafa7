"""What the cluster's demo found, as a table for people and as one JSON document. Pure but for the printing.

A prompt's tokens are new (nobody ever had them in a full block), or the dead node's alone (computed again), or a living node had
them: of those, what was not restored was computed for nothing, and the demo fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from flatcake_client.engines.demo_report import MEDIA, plain_table, proofs, verdict


@dataclass(frozen=True, slots=True)
class MovingRecord:
    """One request at one node. `known_tokens` of the prompt had been stored by any node, `living_tokens` by a living one."""

    scene: str
    name: str
    node: int
    identical: bool
    prompt_tokens: int
    computed_tokens: int
    known_tokens: int
    living_tokens: int
    restored: dict[str, Any]
    stored: list[dict[str, Any]]
    ttft_s: float
    ttft_uncached_s: float

    @property
    def new_tokens(self) -> int:
        return self.prompt_tokens - self.known_tokens

    @property
    def again_tokens(self) -> int:
        """Computed though it was known: the dead node's, and what was computed for nothing."""
        return self.known_tokens - int(self.restored["tokens"])

    @property
    def recomputed_tokens(self) -> int:
        """Computed though a living node had it."""
        return max(0, self.living_tokens - int(self.restored["tokens"]))

    @property
    def dead_tokens(self) -> int:
        """Computed because only a dead node had it."""
        return self.again_tokens - self.recomputed_tokens

    def blocks(self, node: int, medium: str) -> int:
        return int(self.restored["blocks_by_place"].get(f"{medium}@{node}", 0))


@dataclass(frozen=True, slots=True)
class ClusterOutcome:
    records: list[MovingRecord]
    engine: dict[str, Any]
    law_holds: bool
    seconds: float

    @property
    def tokens_identical(self) -> bool:
        return bool(self.records) and all(record.identical for record in self.records)

    @property
    def recomputed_tokens(self) -> int:
        return sum(record.recomputed_tokens for record in self.records)

    @property
    def blocks_by_place(self) -> dict[str, int]:
        """From where blocks came: "local memory", "memory of node 2"."""
        counts: Counter[str] = Counter()
        for record in self.records:
            for place, blocks in record.restored["blocks_by_place"].items():
                medium, _, node = place.partition("@")
                counts[f"local {medium}" if int(node) == record.node else f"{medium} of node {node}"] += blocks
        return dict(sorted(counts.items()))

    @property
    def from_others(self) -> int:
        """Blocks that came from other nodes."""
        return sum(blocks for place, blocks in self.blocks_by_place.items() if not place.startswith("local"))

    @property
    def proved(self) -> bool:
        """Tokens are identical, other nodes had a part in them, and nothing was computed that a living node had."""
        return self.tokens_identical and self.from_others > 0 and not self.recomputed_tokens and self.law_holds


def document(outcome: ClusterOutcome, scale: dict[str, Any]) -> dict[str, Any]:
    """Everything, as JSON knows it."""
    records = outcome.records
    return {
        "tokens_identical": outcome.tokens_identical,
        "law_holds": outcome.law_holds,
        "proved": outcome.proved,
        "requests": len(records),
        "prompt_tokens": sum(record.prompt_tokens for record in records),
        "restored_tokens": sum(record.restored["tokens"] for record in records),
        "new_tokens": sum(record.new_tokens for record in records),
        "dead_nodes_tokens": sum(record.dead_tokens for record in records),
        "recomputed_tokens": outcome.recomputed_tokens,
        "blocks_by_place": outcome.blocks_by_place,
        "records": [asdict(record) for record in records],
        "engine": outcome.engine,
        "scale": scale,
        "seconds": outcome.seconds,
    }


def show(outcome: ClusterOutcome, console: Console) -> None:
    """Print the table and the verdict."""
    console.print(_table(outcome.records))
    for line in _lines(outcome):
        console.print(line)


def _table(records: Sequence[MovingRecord]) -> Table:
    nodes = sorted({record.node for record in records})
    table = plain_table(
        "Blocks by where they came from, tokens computed, ms to the first token with the cache and without it"
    )
    table.add_column("request", no_wrap=True)
    for name in (
        *("prompt\ntokens", "here:\nmem.", "\nSSD"),
        *(words for node in nodes for words in (f"n{node}:\nmem.", "\nSSD")),
        *("new\ntokens", "the\ndead's", "again", "first\ntoken", "no\ncache"),
    ):
        table.add_column(name, justify="right")
    table.add_column("tokens")
    scene = ""
    for record in records:
        if record.scene != scene:
            scene = record.scene
            table.add_row(scene, style="bold")
        here = [record.blocks(record.node, medium) for medium in MEDIA]
        others = [record.blocks(node, medium) * (node != record.node) for node in nodes for medium in MEDIA]
        table.add_row(
            f"  {record.name} at node {record.node}",
            f"{record.prompt_tokens:,}",
            *(f"{blocks}" if blocks else "" for blocks in (*here, *others)),
            *(f"{count}" for count in (record.new_tokens, record.dead_tokens, record.recomputed_tokens)),
            f"{record.ttft_s * 1e3:.0f}",
            f"{record.ttft_uncached_s * 1e3:.0f}",
            "[green]same[/]" if record.identical else "[red]DIFFER[/]",
        )
    return table


def _lines(outcome: ClusterOutcome) -> Iterable[str]:
    places = ", ".join(f"{blocks} from {place}" for place, blocks in outcome.blocks_by_place.items())
    yield f"Blocks that came back: {places or 'none'}; {outcome.engine['kv_bytes_per_token'] / 1e3:.0f} KB of KV a token."
    dead = sum(record.dead_tokens for record in outcome.records)
    again = outcome.recomputed_tokens
    yield verdict(
        not again,
        f"Nothing was computed again but {dead} tokens that the dead node alone had",
        f"{again} tokens were computed again though a living node had them",
    )
    asked = [(f"{record.name} at node {record.node}", record.identical) for record in outcome.records]
    yield from proofs(outcome.law_holds, asked, where=", on every node")
    yield f"{outcome.seconds:.0f} s in all, through kill -9 of node 1."
