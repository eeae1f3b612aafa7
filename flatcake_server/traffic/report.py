"""What `flatcake analyze` says: the numbers of reuse.py in bytes of a model, as one JSON document. Pure.

A block's bytes are its tokens times the model's bytes a token, so one trace answers for any model.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

import numpy as np

from flatcake_server.traffic.advice import FILTERED_SHARE_MIN, Facts, advise
from flatcake_server.traffic.reuse import WINDOWS_S, Floats, Reuse
from flatcake_server.traffic.spans import Ints, Traffic

# K and V of a token over all layers, bfloat16. 8B: 32 layers x 8 heads x 128 x 2 x 2 B. 70B: 80 layers of the same.
# DeepSeek-V3: 61 layers x (512 + 64) latent and rope x 2 B.
MODELS: Final = {"llama-3.1-8b": 131_072, "llama-3.1-70b": 327_680, "deepseek-v3-mla": 70_272}

QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
CACHE_SHARES: Final = (1 / 256, 1 / 64, 1 / 16, 1 / 4, 1 / 2, 1.0)  # of all different blocks
CURVE_POINTS: Final = 60
HIT_SHARES: Final = (0.5, FILTERED_SHARE_MIN, 0.9, 0.95, 0.99)  # of what a cache without end hits


def report(name: str, traffic: Traffic, reuse: Reuse, *, bytes_per_token: int, memory_bytes: int) -> dict[str, Any]:
    """Everything but the pictures. Shares are 0 to 1; names carry the units.

    Raises: ValueError: a size below 1.
    """
    if bytes_per_token < 1 or memory_bytes < 1:
        raise ValueError("bytes a token and bytes of memory count from 1")
    block_bytes = traffic.block_tokens * bytes_per_token
    runs, sessions = reuse.runs, reuse.sessions
    unique, asked = traffic.unique_blocks, traffic.accesses
    hit_share = reuse.hit_blocks / asked
    document: dict[str, Any] = {
        "trace": {
            "name": name,
            "requests": traffic.requests,
            "sessions": len(traffic.sessions),
            "block_tokens": traffic.block_tokens,
            "bytes_per_token": bytes_per_token,
            "duration_s": float(traffic.arrival_s[-1] - traffic.arrival_s[0]),
            "input_tokens_mean": float(traffic.input_tokens.mean()),
        },
        "blocks": {
            "different": unique,
            "different_bytes": unique * block_bytes,
            "asked_for": asked,
            "used_once_share": reuse.once_blocks / unique,
            "reused_share": 1 - reuse.once_blocks / unique,
        },
        "reuse": {
            "distance_requests": weighted_quantiles(runs.requests_since, runs.blocks),
            "gap_s": weighted_quantiles(runs.gap_s, runs.blocks),
        },
        "hits": {
            "max_share_tokens": reuse.hit_tokens / max(1, int(traffic.input_tokens.sum())),
            "max_share_blocks": hit_share,
            "own_session_share_blocks": reuse.own_hit_blocks / asked,
            "from_others_share_of_hits": 1 - reuse.own_hit_blocks / reuse.hit_blocks if reuse.hit_blocks else 0.0,
        },
        "sessions": {
            "turns": quantiles(sessions.turns),
            "peak_tokens": quantiles(sessions.peak_tokens),
            "peak_bytes": quantiles(sessions.peak_tokens * bytes_per_token),
            "distinct_bytes": quantiles(sessions.distinct_blocks * block_bytes),
        },
        "distributions": {
            "gap_s": distribution(runs.gap_s, runs.blocks),
            "distance_requests": distribution(runs.requests_since, runs.blocks),
            "turns": distribution(sessions.turns),
            "peak_bytes": distribution(sessions.peak_tokens * bytes_per_token),
        },
        "hit_rate_by_cache": hit_curve(traffic, reuse, block_bytes),
        "cache_for_hits": [
            {
                "share_of_max_hits": share,
                "cache_bytes": reuse.runs.cache_for(share * reuse.hit_blocks) * block_bytes,
                "hit_share": share * hit_share,
            }
            for share in HIT_SHARES
        ],
        "working_set": _working_set(reuse, block_bytes),
    }
    document["memory_bytes"] = memory_bytes
    return document | {"advice": asdict(advise(_facts(document, reuse, asked, block_bytes, memory_bytes)))}


def hit_curve(traffic: Traffic, reuse: Reuse, block_bytes: int) -> list[dict[str, float | None]]:
    """Hit rate of an LRU by its size: those `marked` with one of CACHE_SHARES, and others for a smooth line."""
    unique, asked = traffic.unique_blocks, traffic.accesses
    marked = (np.array(CACHE_SHARES) * unique).astype(np.int64)
    drawn = np.geomspace(max(1, unique // 4096), unique, CURVE_POINTS).astype(np.int64)
    sizes = np.unique(np.concatenate([marked, drawn]))
    sizes = sizes[sizes > 0]
    marks = dict(zip(marked.tolist(), CACHE_SHARES, strict=True))
    return [
        {
            "cache_bytes": size * block_bytes,
            "share_of_different": size / unique,
            "hit_share": hits / asked,
            "marked": marks.get(size),
        }
        for size, hits in zip(sizes.tolist(), reuse.runs.hits(sizes).tolist(), strict=True)
    ]


def quantiles(values: Ints | Floats) -> dict[str, float]:
    return {name: float(np.quantile(values, share)) for name, share in QUANTILES.items()}


def weighted_quantiles(values: Ints | Floats, weights: Ints) -> dict[str, float]:
    """Each value counts `weights` times. Empty where there are none."""
    if len(values) == 0:
        return {}
    found = _at_shares(values, weights, np.array(list(QUANTILES.values())))
    return dict(zip(QUANTILES, found, strict=True))


def distribution(values: Ints | Floats, weights: Ints | None = None) -> list[float]:
    """Quantiles 0 to 1 in hundredths, for drawing. Empty where there is nothing."""
    if len(values) == 0:
        return []
    weights = np.ones(len(values), np.int64) if weights is None else weights
    return _at_shares(values, weights, np.linspace(0, 1, 101))


def _at_shares(values: Ints | Floats, weights: Ints, shares: Floats) -> list[float]:
    order = np.argsort(values, kind="stable")
    sums = np.cumsum(weights[order])
    return [float(value) for value in values[order[np.searchsorted(sums, shares * sums[-1])]]]


def _working_set(reuse: Reuse, block_bytes: int) -> dict[str, Any]:
    found = reuse.working_set
    used = {
        f"used_{window:.0f}s_bytes": blocks * block_bytes
        for window, blocks in zip(WINDOWS_S, found.used_blocks, strict=True)
    }
    columns = used | {"different_bytes": found.unique_blocks * block_bytes, "active_sessions": found.active_sessions}
    summary = {name: {"mean": float(values.mean()), "max": float(values.max())} for name, values in columns.items()}
    return {"summary": summary, "at_s": found.at_s.tolist()} | {
        name: values.tolist() for name, values in columns.items()
    }


def _facts(document: dict[str, Any], reuse: Reuse, asked: int, block_bytes: int, memory_bytes: int) -> Facts:
    memory_blocks = np.array([memory_bytes // block_bytes], np.int64)
    peak = document["sessions"]["peak_bytes"]
    return Facts(
        memory_bytes=memory_bytes,
        hit_share_max=reuse.hit_blocks / asked,
        hit_share_memory=int(reuse.runs.hits(memory_blocks)[0]) / asked,
        filter_bytes=reuse.runs.cache_for(FILTERED_SHARE_MIN * reuse.hit_blocks) * block_bytes,
        once_share=document["blocks"]["used_once_share"],
        own_share=1 - document["hits"]["from_others_share_of_hits"] if reuse.hit_blocks else 0.0,
        session_p50_bytes=int(peak["p50"]),
        session_p90_bytes=int(peak["p90"]),
        active_sessions=document["working_set"]["summary"]["active_sessions"]["mean"],
    )
