"""Traffic without a trace: requests drawn from distributions that public traces were measured to have. Pure, seeded.

    claude-code   coding agents: kv-cache-tester's v8 set (WEKA), 45,219 requests of 744 sessions
    chat          people: Mooncake's conversation trace, 12,031 requests of 8,081 inferred sessions
    api           programs with prompt templates: Mooncake's synthetic trace, 3,993 requests of 3,349 inferred sessions

Sizes and pauses are log-normal, given by their median and 90th percentile as published or measured on those traces, and
cut at what was seen at most. A session starts with a prompt that others share, or not; each turn appends, and rarely
changes its last block, goes back, or starts over, with the shares measured. What is not fitted: correlation between
turns, size and pause of a session, and the hour of the day. docs/traffic.md says how near each figure comes.

The same profile, seed and count of sessions give the same requests everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import log
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flatcake_transport.trace import Ids, Request, join_sessions

_P90: Final = 1.2815515655446004  # standard deviations from the median to the 90th percentile
_HOUR_S: Final = 3600.0
COMPACTED_SHARE: Final = 0.2  # of a context that became too long, kept as its summary


@dataclass(frozen=True, slots=True)
class Spread:
    """Log-normal by its median and 90th percentile, cut to [low, high]."""

    p50: float
    p90: float
    low: float
    high: float

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        drawn = rng.lognormal(log(self.p50), log(self.p90 / self.p50) / _P90, count)
        return np.clip(drawn, self.low, self.high)


@dataclass(frozen=True, slots=True)
class Profile:
    """Sizes are tokens, pauses seconds from one request of a session to the next, shares are of follow-up requests."""

    name: str
    block_tokens: int
    sessions: int  # generated when nobody says how many
    sessions_per_hour: float
    turns: Spread  # rounded
    prompts: int  # different shared prompts; the k-th is chosen with weight 1 / k
    prompt_share: float  # of sessions that start with one
    prompt_tokens: Spread
    first_tokens: Spread  # of a session's own, behind the prompt
    resumed_share: float  # of sessions that bring a long context along
    resumed_tokens: Spread
    growth_tokens: Spread  # of a follow-up, the previous reply counted in
    large_share: float  # of follow-ups that read something large
    large_tokens: Spread
    reply_tokens: Spread
    pause_s: Spread
    edit_share: float  # the last block changes
    back_share: float  # up to a tenth of the context goes
    restart_share: float  # more than half of the context goes
    limit_tokens: Spread  # by session: a context is compacted there


PROFILES: Final = {
    profile.name: profile
    for profile in (
        Profile(
            name="claude-code",
            block_tokens=64,
            sessions=150,
            sessions_per_hour=31,  # 744 in 24 h
            turns=Spread(36, 143, 2, 514),
            prompts=9,  # namespaces of the older set
            prompt_share=1.0,
            prompt_tokens=Spread(15_033, 19_600, 2_000, 30_000),
            first_tokens=Spread(4_000, 12_000, 64, 60_000),
            resumed_share=0.17,
            resumed_tokens=Spread(180_000, 450_000, 20_000, 680_000),
            growth_tokens=Spread(800, 4_390, 80, 40_000),
            large_share=0.014,
            large_tokens=Spread(50_000, 110_000, 10_000, 300_000),
            reply_tokens=Spread(217, 877, 1, 18_195),
            pause_s=Spread(17, 129, 5, 40_000),
            edit_share=0.041,
            back_share=0.012,
            restart_share=0.018,
            limit_tokens=Spread(210_000, 380_000, 120_000, 895_000),
        ),
        Profile(
            name="chat",
            block_tokens=512,
            sessions=3_000,
            sessions_per_hour=8_081,
            turns=Spread(0.85, 2.5, 1, 43),  # rounded: 75% have one turn, 15% two, 5% three
            prompts=1,
            prompt_share=1.0,
            prompt_tokens=Spread(890, 900, 880, 910),
            first_tokens=Spread(5_000, 25_600, 4, 120_000),
            resumed_share=0.0,
            resumed_tokens=Spread(1, 2, 1, 2),
            growth_tokens=Spread(620, 4_800, 8, 60_000),
            large_share=0.0,
            large_tokens=Spread(1, 2, 1, 2),
            reply_tokens=Spread(350, 597, 3, 2_000),
            pause_s=Spread(123, 474, 5, 3_000),
            edit_share=0.0,
            back_share=0.02,
            restart_share=0.0,
            limit_tokens=Spread(126_000, 126_001, 126_000, 126_000),
        ),
        Profile(
            name="api",
            block_tokens=512,
            sessions=3_000,
            sessions_per_hour=10_000,
            turns=Spread(0.4, 1.4, 1, 12),  # rounded: 91% have one turn
            prompts=700,
            prompt_share=0.78,
            prompt_tokens=Spread(10_000, 38_000, 64, 120_000),
            first_tokens=Spread(1_000, 8_000, 15, 60_000),
            resumed_share=0.0,
            resumed_tokens=Spread(1, 2, 1, 2),
            growth_tokens=Spread(306, 680, 8, 5_000),
            large_share=0.0,
            large_tokens=Spread(1, 2, 1, 2),
            reply_tokens=Spread(69, 389, 2, 2_000),
            pause_s=Spread(78, 292, 1, 900),
            edit_share=0.0,
            back_share=0.0,
            restart_share=0.0,
            limit_tokens=Spread(191_000, 191_001, 191_000, 191_000),
        ),
    )
}


def generate(profile: Profile, *, sessions: int = 0, seed: int = 1) -> Iterator[Request]:
    """Requests in order of arrival.

    Args:
        sessions: how many; 0: as many as the profile says.
        seed: another one gives other requests with the same distributions.

    Raises: ValueError: a negative count.
    """
    if sessions < 0:
        raise ValueError(f"{sessions} sessions cannot be generated")
    return join_sessions(_sessions(profile, sessions or profile.sessions, seed))


def _sessions(profile: Profile, count: int, seed: int) -> Iterator[tuple[float, Iterator[Request]]]:
    rng = np.random.default_rng(seed)
    starts_s = np.cumsum(rng.exponential(_HOUR_S / profile.sessions_per_hour, count))
    lengths = profile.prompt_tokens.draw(rng, profile.prompts) // profile.block_tokens
    ends = np.cumsum(lengths.astype(np.int64))
    prompts = np.split(np.arange(ends[-1]), ends[:-1])
    weight = 1.0 / np.arange(1, profile.prompts + 1)
    chosen = rng.choice(profile.prompts, count, p=weight / weight.sum())
    bare = rng.random(count) >= profile.prompt_share
    next_id = int(ends[-1])

    def fresh(blocks: int) -> Ids:
        nonlocal next_id
        next_id += blocks
        return np.arange(next_id - blocks, next_id)

    for n, (start_s, prompt) in enumerate(zip(starts_s.tolist(), chosen.tolist(), strict=True)):
        own_rng = np.random.default_rng((seed, n))
        head = prompts[prompt][:0] if bare[n] else prompts[prompt]
        yield start_s, _session(profile, f"{profile.name}-{n + 1}", start_s, head, own_rng, fresh)


def _session(
    profile: Profile, name: str, start_s: float, prompt: Ids, rng: np.random.Generator, fresh: Callable[[int], Ids]
) -> Iterator[Request]:
    turns = int(profile.turns.draw(rng, 1).round()[0])
    first = profile.resumed_tokens if rng.random() < profile.resumed_share else profile.first_tokens
    growth = profile.growth_tokens.draw(rng, turns)
    growth = np.where(rng.random(turns) < profile.large_share, profile.large_tokens.draw(rng, turns), growth)
    replies = profile.reply_tokens.draw(rng, turns).astype(np.int64).tolist()
    at_s = start_s + np.concatenate(([0.0], np.cumsum(profile.pause_s.draw(rng, turns - 1))))
    kept_share, regained, edited = _losses(profile, rng, turns)
    head_tokens = len(prompt) * profile.block_tokens
    tokens = head_tokens + int(first.draw(rng, 1)[0])
    limit_tokens = max(tokens + tokens // 4, int(profile.limit_tokens.draw(rng, 1)[0]))  # what it brings along fits
    ids = np.concatenate([prompt, fresh(tokens // profile.block_tokens - len(prompt))])
    for turn in range(turns):
        if turn:
            new_tokens = int(growth[turn]) + int(regained[turn] * tokens)
            if tokens + new_tokens > limit_tokens:
                kept_share[turn] = COMPACTED_SHARE
            # What is left, but never less than the prompt; then what comes anew, cut where no context goes further.
            tokens = max(head_tokens, int(tokens * kept_share[turn]))
            keep = tokens // profile.block_tokens - int(edited[turn] and len(ids) > len(prompt))
            tokens = max(tokens, min(tokens + new_tokens, limit_tokens))
            ids = np.concatenate([ids[:keep], fresh(tokens // profile.block_tokens - keep)])
        yield Request(float(at_s[turn]), name, turn + 1, tokens, replies[turn], profile.block_tokens, ids)


def _losses(
    profile: Profile, rng: np.random.Generator, turns: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """By turn: the shares of the context that are kept and come back otherwise, and whether its last block changes."""
    kind = rng.random(turns)
    ends = np.cumsum([profile.restart_share, profile.back_share, profile.edit_share])
    restart, back = rng.uniform(0.0, 0.5, turns), rng.uniform(0.9, 1.0, turns)
    kept_share = np.select([kind < ends[0], kind < ends[1]], [restart, back], 1.0)
    # Who starts over mostly brings other files along: the contexts after it are hardly shorter than those before.
    regained = np.where(kind < ends[0], (1.0 - restart) * rng.uniform(0.0, 1.0, turns), 0.0)
    return kept_share, regained, (kind >= ends[1]) & (kind < ends[2])
