"""What a run was worth: one `Record` a request, and the sums of them. Pure.

    delivered   blocks that were in the engine's pages, with the right bytes, before the request's prefill began. Found but
                late, short or wrong is no hit
    hit rate    tokens delivered / tokens of all prompts; maxima likewise (maximum.py)
    first token from the request's arrival to the end of its prefill
    prefetch    from the first read of a restore to its last, without the wait for its turn
    bandwidth   useful SSD bytes restored / time in which at least one restore from SSD was under way

All times are seconds from the run's start.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from flatcake_client.replay.system import SystemStats

_NEVER: Final = -1.0


@dataclass(slots=True)
class Record:
    """One request. Filled in as it goes; `done` when its blocks were offered to the store."""

    number: int
    session: str
    turn: int
    input_tokens: int
    blocks: int
    arrived_s: float = _NEVER
    ideal_blocks: int = 0
    stored_blocks: int = 0  # a cache without end would have had so many: what had been computed by its arrival
    found_blocks: int = 0
    found_ssd_bytes: int = 0
    found_memory_bytes: int = 0
    delivered_blocks: int = 0
    wrong_blocks: int = 0
    lookup_s: float = 0.0
    prefetch_began_s: float = _NEVER
    prefetch_ended_s: float = _NEVER
    prefetched: bool = False  # in the background; False: by the worker, right before prefill
    prefill_began_s: float = _NEVER
    first_token_s: float = _NEVER
    offered_blocks: int = 0
    kept_blocks: int = 0
    store_s: float = 0.0
    error: str = ""
    done: bool = False

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrived_s

    @property
    def prefetch_s(self) -> float:
        return self.prefetch_ended_s - self.prefetch_began_s


@dataclass(frozen=True, slots=True)
class Summary:
    """Of the requests that were done. Counts add up: `found = delivered + short + wrong`, in blocks."""

    requests: int
    requests_planned: int
    input_tokens: int
    blocks: int
    found_blocks: int
    delivered_blocks: int
    short_blocks: int
    wrong_blocks: int
    short_restores: int
    offered_blocks: int
    kept_blocks: int
    errors: int
    delivered_hit: float
    stored_hit: float
    ideal_hit: float
    found_hit: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    ttft_hit_mean_s: float  # of requests of which something was delivered
    ttft_hit_p99_s: float
    lookup_p99_s: float
    prefetches: int
    prefetch_mean_s: float
    prefetch_p99_s: float
    store_mean_s: float
    ssd_bytes: int
    memory_bytes: int
    restoring_s: float
    ssd_bytes_per_s: float
    span_s: float
    requests_per_s: float


def summarise(records: Sequence[Record], block_tokens: int, requests_planned: int) -> Summary:
    """Sums over the records that are done; with none, zeros."""
    done = [record for record in records if record.done]
    tokens = sum(record.input_tokens for record in done)

    def hit(blocks: Iterable[int]) -> float:
        return sum(blocks) * block_tokens / tokens if tokens else 0.0

    ttft = sorted(record.ttft_s for record in done)
    of_hits = sorted(record.ttft_s for record in done if record.delivered_blocks)
    from_ssd = [record for record in done if record.prefetch_ended_s >= 0 and record.found_ssd_bytes]
    prefetch = sorted(record.prefetch_s for record in from_ssd)
    delivered_ssd = sum(_share(record, record.found_ssd_bytes) for record in done)
    restoring_s = covered_s([(record.prefetch_began_s, record.prefetch_ended_s) for record in from_ssd])
    span_s = max((record.first_token_s for record in done), default=0.0) - min(
        (record.arrived_s for record in done), default=0.0
    )
    found, delivered = sum(r.found_blocks for r in done), sum(r.delivered_blocks for r in done)
    wrong = sum(record.wrong_blocks for record in done)
    return Summary(
        requests=len(done),
        requests_planned=requests_planned,
        input_tokens=tokens,
        blocks=sum(record.blocks for record in done),
        found_blocks=found,
        delivered_blocks=delivered,
        short_blocks=found - delivered - wrong,
        wrong_blocks=wrong,
        short_restores=sum(record.found_blocks > record.delivered_blocks + record.wrong_blocks for record in done),
        offered_blocks=sum(record.offered_blocks for record in done),
        kept_blocks=sum(record.kept_blocks for record in done),
        errors=sum(bool(record.error) for record in done),
        delivered_hit=hit(record.delivered_blocks for record in done),
        stored_hit=hit(record.stored_blocks for record in done),
        ideal_hit=hit(record.ideal_blocks for record in done),
        found_hit=hit(record.found_blocks for record in done),
        ttft_mean_s=mean(ttft),
        ttft_p50_s=quantile(ttft, 0.5),
        ttft_p99_s=quantile(ttft, 0.99),
        ttft_hit_mean_s=mean(of_hits),
        ttft_hit_p99_s=quantile(of_hits, 0.99),
        lookup_p99_s=quantile(sorted(record.lookup_s for record in done), 0.99),
        prefetches=len(prefetch),
        prefetch_mean_s=mean(prefetch),
        prefetch_p99_s=quantile(prefetch, 0.99),
        store_mean_s=mean([record.store_s for record in done if record.offered_blocks]),
        ssd_bytes=delivered_ssd,
        memory_bytes=sum(_share(record, record.found_memory_bytes) for record in done),
        restoring_s=restoring_s,
        ssd_bytes_per_s=delivered_ssd / restoring_s if restoring_s > 0 else 0.0,
        span_s=span_s,
        requests_per_s=len(done) / span_s if span_s > 0 else 0.0,
    )


def covered_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union."""
    total = end = 0.0
    started = False
    for begin, finish in sorted(intervals):
        if not started or begin > end:
            total, end, started = total + finish - begin, finish, True
        elif finish > end:
            total, end = total + finish - end, finish
    return total


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed; 0 of none."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def run_document(
    summary: Summary, stats: SystemStats, *, load: float, device: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """One load of one system, as JSON knows it. Read amplification is None where nobody counts the device's bytes."""
    read_bytes = device.get("read_bytes")
    return {
        "load": load,
        **asdict(summary),
        "cancelled_restores": stats.cancelled_restores,
        "read_amplification": read_bytes / summary.ssd_bytes if read_bytes and summary.ssd_bytes else None,
        "device": dict(device),
        "stats": asdict(stats),
        "settings": dict(settings),
    }


def _share(record: Record, size_bytes: int) -> int:
    """Of the bytes found, those of blocks that were delivered."""
    return size_bytes * record.delivered_blocks // record.found_blocks if record.found_blocks else 0
