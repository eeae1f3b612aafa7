"""Reports of replays, side by side: a table for people, and curves over load. Pure.

A document is what `sweep` wrote, one system on one workload; what stands side by side must have been given the same requests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from flatcake_client.replay.sweep import FORMAT

Document = Mapping[str, Any]
HEADINGS: Final = (
    "system", "load", "requests", "delivered hit", "maximum", "of the trace", "TTFT mean", "TTFT p99", "prefetch mean",
    "prefetch p99", "SSD read", "GB/s", "read ampl.", "cancelled", "lost", "rejected", "wrong", "errors",
)  # fmt: skip


def name_of(document: Document) -> str:
    """Of the system, in tables and legends."""
    return f"{document['system']} {document['ablation']}".strip()


def read_documents(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Raises: ValueError: one is no report of a replay. OSError."""
    documents = []
    for file in files:
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} is no JSON: {error}") from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError(f"{file} is no report of flatcake replay ({FORMAT}): write one with --json")
        documents.append(document)
    return documents


def rows(documents: Sequence[Document]) -> list[list[str]]:
    """One a run, the heading first."""
    found = [list(HEADINGS)]
    for document in documents:
        for run in document["runs"]:
            found.append(_row(document, run))
    return found


def _row(document: Document, run: Mapping[str, Any]) -> list[str]:
    stats, amplification = run["stats"], run["read_amplification"]
    count = f"{run['requests']:,}" + (f" of {run['requests_planned']:,}" if run["partial"] else "")
    best = document["oracle_hit"] if not document["holds_working_set"] else run["ideal_hit"]
    return [
        name_of(document),
        f"{run['load']:g}",
        count,
        percent(run["delivered_hit"]),
        percent(run["stored_hit"]),
        percent(best) + ("" if document["holds_working_set"] else " (oracle)"),
        milliseconds(run["ttft_mean_s"]),
        milliseconds(run["ttft_p99_s"]),
        milliseconds(run["prefetch_mean_s"]) if run["prefetches"] else "-",
        milliseconds(run["prefetch_p99_s"]) if run["prefetches"] else "-",
        f"{run['ssd_bytes'] / 1e9:.2f} GB",
        f"{run['ssd_bytes_per_s'] / 1e9:.2f}" if run["prefetches"] else "-",
        f"{amplification:.2f}" if amplification is not None else "-",
        told(run["cancelled_restores"]),
        told(stats["lost_blocks"]),
        told(stats["rejected_blocks"]),
        f"{run['wrong_blocks']}",
        f"{run['errors']}",
    ]


def facts(document: Document) -> list[list[str]]:
    """What all systems beside each other were given."""
    trace, budget, engine = document["trace"], document["budget"], document["engine"]
    rate = engine["prefill_tokens_per_s"] * engine["workers"]
    return [
        ["what", ""],
        ["requests", f"{trace['requests']:,} of {trace['sessions']:,} sessions, {trace['input_tokens']:,} tokens"],
        ["at load 1 they take", f"{trace['duration_s']:.1f} s"],
        ["longest prompt", f"{trace['blocks_max']:,} blocks of {trace['block_tokens']} tokens"],
        ["KV", f"{engine['kv_bytes_per_token']:,} B a token, {budget['planes']} planes of {budget['plane_bytes']:,} B a block"],
        ["working set", f"{trace['working_set_bytes'] / 1e9:.2f} GB"],
        ["memory, SSD", f"{budget['memory_bytes'] / 1e9:.2f} GB, {budget['ssd_bytes'] / 1e9:.2f} GB"],
        ["prefill", f"{engine['prefill_tokens_per_s']:,.0f} tokens/s a worker, {engine['workers']} of them"],
        ["prefill, in bytes of KV", f"{rate * engine['kv_bytes_per_token'] / 1e9:.2f} GB/s"],
        ["hit rate of a cache without end", percent(document["ideal_hit"])],
        ["best of one with this budget", percent(document["oracle_hit"])],
    ]  # fmt: skip


def headline(document: Document) -> str:
    """One sentence on one system."""
    whole = [run for run in document["runs"] if run["requests"]]
    if not whole:
        return f"{name_of(document)}: nothing was done"
    worst = max(whole, key=lambda run: run["stored_hit"] - run["delivered_hit"])
    lacking = 100 * (worst["stored_hit"] - worst["delivered_hit"])
    cancelled = sum(run["cancelled_restores"] or 0 for run in whole)
    return (
        f"{name_of(document)}: delivers {percent(min(run['delivered_hit'] for run in whole))} to "
        f"{percent(max(run['delivered_hit'] for run in whole))} of all tokens, at most {lacking:.2f} points below what had been "
        f"computed by then; {cancelled} restores cancelled, {sum(run['wrong_blocks'] for run in whole)} wrong blocks"
    )


def percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.1f} ms"


def told(count: int | None) -> str:
    return "?" if count is None else f"{count:,}"
