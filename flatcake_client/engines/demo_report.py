"""What the demo found, as tables for people and as one JSON document. Pure but for the printing.

Sums are over the requests of the five scenes; the control and the measured restores are apart. Times to first token are medians,
with the cache and without it, of the same requests on the same machine one after the other.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

MEDIA: Final = ("memory", "ssd")
KINDS: Final = ("agents", "chats", "one-shots")
# Why a block is where it is: words of the daemon's placement (DESIGN section 1).
REASONS: Final = {
    "shared": "read by many requests",
    "first-turn": "most first turns never go on",
    "long-context": "worth one long read; memory is small",
    "long-reply": "the next turn is not near",
    "reply-unknown": "how soon it goes on is unknown",
    "short-reply": "the next turn is near",
    "memory-full": "meant for memory, which is full",
}


@dataclass(frozen=True, slots=True)
class Record:
    """One request. `stored`: what was stored where; `restored`: as transformers.Restored."""

    scene: str
    kind: str
    name: str
    identical: bool
    prompt_tokens: int
    computed_tokens: int
    restored: dict[str, Any]
    stored: list[dict[str, Any]]
    ttft_s: float
    ttft_uncached_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Bests of several rounds. `raw_bytes_per_s` is 0 where the file system has no O_DIRECT."""

    ssd_bytes: int
    ssd_commands: int
    ssd_bytes_per_s: float
    raw_bytes_per_s: float
    raw_setting: str
    memory_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    records: list[Record]
    zeroed_differ: bool
    figures: Figures
    engine: dict[str, Any]
    law_holds: bool
    seconds: float

    @property
    def tokens_identical(self) -> bool:
        return bool(self.records) and all(record.identical for record in self.records)

    @property
    def restored_tokens(self) -> int:
        return sum(record.restored["tokens"] for record in self.records)

    @property
    def proved(self) -> bool:
        """Tokens are identical, the cache had a part in them, and wrong KV would have shown."""
        return self.tokens_identical and self.zeroed_differ and self.restored_tokens > 0 and self.law_holds


def document(outcome: Outcome, scale: dict[str, Any]) -> dict[str, Any]:
    """Everything, as JSON knows it."""
    records = outcome.records
    return {
        "tokens_identical": outcome.tokens_identical,
        "zeroed_kv_differs": outcome.zeroed_differ,
        "law_holds": outcome.law_holds,
        "proved": outcome.proved,
        "requests": len(records),
        "prompt_tokens": sum(record.prompt_tokens for record in records),
        "restored_tokens": outcome.restored_tokens,
        "computed_tokens": sum(record.computed_tokens for record in records),
        "bytes_restored_by_medium": _restored_bytes(records),
        "bytes_stored_by_medium": _stored_bytes(records),
        "read_commands": sum(record.restored["read_commands"] for record in records),
        "placement": [
            {"kind": kind, "medium": medium, "reason": reason, "blocks": blocks, "bytes": size_bytes}
            for (kind, medium, reason), (blocks, size_bytes) in _placement(records).items()
        ],
        "restore": asdict(outcome.figures) | {"of_raw": _of_raw(outcome.figures)},
        "records": [asdict(record) for record in records],
        "engine": outcome.engine,
        "scale": scale,
        "seconds": outcome.seconds,
    }


def show(outcome: Outcome, console: Console) -> None:
    """Print the tables and the verdict."""
    console.print(_placement_table(outcome.records))
    console.print(_requests_table(outcome.records))
    for line in _lines(outcome):
        console.print(line)


def _placement_table(records: Sequence[Record]) -> Table:
    table = _table("Where each kind of block went, and why", "blocks of", "home", "case", ">blocks", ">MB", "why")
    for (kind, medium, reason), (blocks, size_bytes) in _placement(records).items():
        table.add_row(kind, medium, reason, f"{blocks}", _megabytes(size_bytes), REASONS.get(reason, ""))
    return table


def _requests_table(records: Sequence[Record]) -> Table:
    table = _table(
        "Tokens restored and computed, bytes by medium, ms to the first token with the cache and without it",
        *("requests", ">prompt\ntokens", ">re-\nstored", ">com-\nputed", ">mem.\nMB", ">SSD\nMB", ">read\ncmds"),
        *(">first\ntoken", ">no\ncache", ">times\nsooner", "tokens"),
    )
    for scene in dict.fromkeys(record.scene for record in records):
        of_scene = [record for record in records if record.scene == scene]
        table.add_row(scene, style="bold")
        for kind in KINDS:
            mine = [record for record in of_scene if record.kind == kind]
            if mine:
                table.add_row(f"  {len(mine)} {kind}", *_costs(mine))
    table.add_row(f"all {len(records)}", *_costs(records), style="bold")
    return table


def plain_table(title: str) -> Table:
    """Fits 80 columns."""
    return Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )


def _table(title: str, *columns: str) -> Table:
    """Names with > are numbers."""
    table = plain_table(title)
    for column in columns:
        table.add_column(
            column.removeprefix(">"), justify="right" if column.startswith(">") else "left", overflow="fold"
        )
    return table


def _costs(records: Sequence[Record]) -> list[str]:
    restored = _restored_bytes(records)
    with_cache = statistics.median(record.ttft_s for record in records)
    without = statistics.median(record.ttft_uncached_s for record in records)
    same = all(record.identical for record in records)
    return [
        f"{sum(record.prompt_tokens for record in records):,}",
        f"{sum(record.restored['tokens'] for record in records):,}",
        f"{sum(record.computed_tokens for record in records):,}",
        *(_megabytes(restored[medium]) for medium in MEDIA),
        f"{sum(record.restored['read_commands'] for record in records):,}",
        f"{with_cache * 1e3:.0f}",
        f"{without * 1e3:.0f}",
        f"{without / with_cache:.1f}",
        "[green]same[/]" if same else "[red]DIFFER[/]",
    ]


def _lines(outcome: Outcome) -> Iterable[str]:
    figures, stored = outcome.figures, _stored_bytes(outcome.records)
    ratio = _of_raw(figures)
    compared = (
        f"{ratio:.2f} of raw O_DIRECT preadv in the same directory ({figures.raw_bytes_per_s / 1e9:.2f} GB/s, the best of a "
        f"sweep: {figures.raw_setting})"
        if ratio is not None
        else "no O_DIRECT here to compare with"
    )
    yield (
        f"Stored {_megabytes(stored['memory'])} MB in memory and {_megabytes(stored['ssd'])} MB on SSD; "
        f"{outcome.engine['kv_bytes_per_token'] / 1e3:.0f} KB of KV a token, "
        f"{outcome.engine['parameters'] / 1e6:.0f} M parameters."
    )
    yield (
        f"Restore of one agent's {_megabytes(figures.ssd_bytes)} MB from SSD ({outcome.engine['read_path'] or 'posix'}, "
        f"{figures.ssd_commands} reads): {figures.ssd_bytes_per_s / 1e9:.2f} GB/s, {compared}."
    )
    yield f"Restore of the system prompt from memory: {figures.memory_bytes_per_s / 1e9:.1f} GB/s."
    yield "Memory died with the daemon, by design: the system prompt was computed once more, and the chats' later turns."
    yield verdict(
        outcome.zeroed_differ, "Control: zeroed KV gives other tokens", "Control: zeroed KV gives the SAME tokens"
    )
    yield from proofs(outcome.law_holds, [(record.name, record.identical) for record in outcome.records])
    yield f"{outcome.seconds:.0f} s in all, through kill -9 of the engine and of the daemon."


def proofs(law_holds: bool, asked: Sequence[tuple[str, bool]], where: str = "") -> Iterable[str]:
    """`asked`: each request, and whether its tokens are identical."""
    yield verdict(
        law_holds,
        f"flatcake check{where}: every byte is free, reserved or indexed, exactly one",
        "flatcake check: the law is BROKEN",
    )
    differing = [name for name, same in asked if not same]
    yield verdict(
        bool(asked) and not differing,
        f"All tokens of {len(asked)} requests are identical to those of a run without the cache",
        f"Tokens DIFFER from a run without the cache: {', '.join(differing)}",
    )


def verdict(good: bool, yes: str, no: str) -> str:
    return f"[green]{yes}.[/]" if good else f"[bold red]{no}.[/]"


def _of_raw(figures: Figures) -> float | None:
    return figures.ssd_bytes_per_s / figures.raw_bytes_per_s if figures.raw_bytes_per_s else None


def _placement(records: Iterable[Record]) -> dict[tuple[str, str, str], tuple[int, int]]:
    """(kind, medium, reason) -> blocks and bytes, in the order of kinds."""
    sums: dict[tuple[str, str, str], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for record in records:
        for part in record.stored:
            # Whoever comes first stores the shared head: it is nobody's own.
            kind = "system prompt" if part["reason"] == "shared" else record.kind
            key = kind, part["medium"], part["reason"]
            blocks, size_bytes = sums[key]
            sums[key] = blocks + part["blocks"], size_bytes + part["bytes"]
    order = ("system prompt", *KINDS)
    return dict(sorted(sums.items(), key=lambda item: (order.index(item[0][0]), item[0][1:])))


def _restored_bytes(records: Iterable[Record]) -> dict[str, int]:
    sums = dict.fromkeys(MEDIA, 0)
    for record in records:
        for medium, size_bytes in record.restored["bytes_by_medium"].items():
            sums[medium] += size_bytes
    return sums


def _stored_bytes(records: Iterable[Record]) -> dict[str, int]:
    sums = dict.fromkeys(MEDIA, 0)
    for record in records:
        for part in record.stored:
            sums[part["medium"]] += part["bytes"]
    return sums


def _megabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:,.0f}"
