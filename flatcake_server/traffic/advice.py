"""Tiered, or planned per session: what a trace's numbers say. Pure.

A memory in front of SSD (tiered) earns its keep if it filters reads: if what comes back comes back before it is pushed out.
So the question is one number: of all hits that any cache can have, which share would an LRU of the memory that is there
serve? Where that is most of them, tiers are fine, and simpler. Where it is not, most reads reach the SSD anyway, after a
detour through memory that scatters sessions and fights for staging; then it pays to give each session one home when it is
written (placement.py), contiguous, read in one sweep.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from flatcake_transport.units import approximate_size

# Four reads of five served by memory: the SSD then sees so few that their layout hardly matters.
FILTERED_SHARE_MIN: Final = 0.8
# Below, nine of ten tokens are computed anew whatever the cache does: its layout cannot matter.
HIT_SHARE_MIN: Final = 0.1

Plan = Literal["tiered", "per-session"]


@dataclass(frozen=True, slots=True)
class Facts:
    """What the advice goes by. Shares of `hit_share` kinds are of all blocks asked for."""

    memory_bytes: int
    hit_share_max: float  # of a cache without end
    hit_share_memory: float  # of an LRU of `memory_bytes`
    filter_bytes: int  # an LRU that serves FILTERED_SHARE_MIN of all that can hit
    once_share: float  # of different blocks
    own_share: float  # of hits, from the session's own earlier turns
    session_p50_bytes: int
    session_p90_bytes: int
    active_sessions: float  # mean over time


@dataclass(frozen=True, slots=True)
class Advice:
    plan: Plan
    summary: str
    reasons: tuple[str, ...]


def advise(facts: Facts) -> Advice:
    """The plan, one sentence, and the numbers it stands on."""
    memory = approximate_size(facts.memory_bytes)
    filtered = facts.hit_share_memory / facts.hit_share_max if facts.hit_share_max else 0.0
    reasons = [
        f"{_percent(facts.hit_share_max)} of all blocks asked for were computed before: no cache can hit more",
        f"an LRU of {memory} hits {_percent(facts.hit_share_memory)}: it would serve {_percent(filtered)} of those reads",
        (
            f"to serve {_percent(FILTERED_SHARE_MIN)} of them it takes {approximate_size(facts.filter_bytes)}, "
            f"{facts.filter_bytes / facts.memory_bytes:.2g} times {memory}"
        ),
        (
            f"a session takes {approximate_size(facts.session_p50_bytes)} (median) to "
            f"{approximate_size(facts.session_p90_bytes)} (p90), and {facts.active_sessions:.3g} are active at once: {memory} "
            f"holds {facts.memory_bytes / max(1, facts.session_p90_bytes):.2g} large ones"
        ),
        (
            f"{_percent(facts.own_share)} of the hits are a session's own earlier turns; {_percent(facts.once_share)} of all "
            "blocks are asked for only once"
        ),
    ]
    if facts.hit_share_max < HIT_SHARE_MIN:
        plan: Plan = "tiered"
        summary = (
            f"tiered is fine: hardly anything comes back ({_percent(facts.hit_share_max)}), so no layout can gain much"
        )
    elif filtered >= FILTERED_SHARE_MIN:
        plan = "tiered"
        summary = f"tiered is fine: {memory} in front of SSD would serve {_percent(filtered)} of the reads"
    else:
        plan = "per-session"
        summary = (
            f"plan per session: {memory} in front of SSD would serve only {_percent(filtered)} of the reads, the others "
            "come from SSD whatever is in front of it"
        )
    return Advice(plan, summary, tuple(reasons))


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"
