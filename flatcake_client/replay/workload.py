"""From a trace to the requests of a replay: which of them, how long, when, and what their blocks are called. Pure.

    choose   a window of time, the first sessions, their first turns, the first requests; a session ends at its first prompt above
             `max_tokens`, so that contexts grow as they did and are never cut
    regroup  blocks of the trace into blocks of the replay, a whole number of them each; what is behind the last whole one has no key
    re-time  as in the trace, or dense: the order of a busy node where the trace is that of many idle ones

Dense re-timing keeps each session's turns in order. Its pauses are cut at the 90th percentile of all pauses, sessions start evenly over
the longest session's time, and then only the order counts: the requests arrive as a Poisson process (seeded) that takes
`dense_s`. So how many requests lie between two turns of a session is what it would be on a node with that many users.

A block of the replay is named by the chain number of its last block in the trace, which names the whole prefix; its key is that
number, mixed to 16 bytes. Two requests have equal keys exactly where their prefixes are equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flatcake_client.keys import KeyArray
from flatcake_client.replay.system import Asked
from flatcake_transport.chains import ChainNumbers
from flatcake_transport.trace import Request

Numbers = NDArray[np.int64]
PAUSE_SHARE: Final = 0.9  # of all pauses that stay as they are when a trace is made dense
_GOLDEN: Final = 0.618_033_988_749_895
_MIX: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # splitmix64


@dataclass(frozen=True, slots=True)
class Shaping:
    """What is taken of a trace. 0: no bound, or as in the trace."""

    limit: int = 0  # requests
    sessions: int = 0
    turns: int = 0  # of each session
    max_tokens: int = 0
    from_s: float = 0.0  # of the trace's own time
    window_s: float = 0.0
    block_tokens: int = 0  # a multiple of the trace's
    dense_s: float = 0.0
    rate: float = 1.0  # arrivals so many times as fast
    seed: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """One request of a replay. `numbers` name its full blocks; `arrival_s` counts from the run's start, at load 1."""

    asked: Asked
    arrival_s: float
    numbers: Numbers

    @property
    def blocks(self) -> int:
        return len(self.numbers)


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests by arrival. `different_blocks` bounds their numbers."""

    requests: tuple[Planned, ...]
    block_tokens: int
    different_blocks: int

    @property
    def blocks_max(self) -> int:
        """Of the longest prompt."""
        return max((planned.blocks for planned in self.requests), default=0)

    @property
    def input_tokens(self) -> int:
        return sum(planned.asked.input_tokens for planned in self.requests)

    @property
    def stored_blocks(self) -> int:
        """Different blocks that requests really have: the working set of the whole replay."""
        return len(np.unique(np.concatenate([p.numbers for p in self.requests]))) if self.requests else 0


def shape(requests: Iterable[Request], shaping: Shaping) -> Workload:
    """The workload of a trace.

    Raises: ValueError: nothing is left, or the blocks cannot be grouped like this.
    """
    chosen = _choose(requests, shaping)
    if not chosen:
        raise ValueError(
            "no request of the trace is left: widen --from, --window, --max-tokens, --sessions, --turns or --limit"
        )
    trace_tokens = chosen[0].block_tokens
    block_tokens = shaping.block_tokens or trace_tokens
    if block_tokens % trace_tokens:
        raise ValueError(f"--block-tokens {block_tokens} is no multiple of the trace's {trace_tokens}")
    if shaping.dense_s:
        arrivals = dense([r.arrival_s for r in chosen], [r.session for r in chosen], shaping.dense_s, shaping.seed)
        order = np.argsort(arrivals, kind="stable").tolist()
    else:
        arrivals = [request.arrival_s - chosen[0].arrival_s for request in chosen]
        order = list(range(len(chosen)))
    chosen, arrivals = [chosen[i] for i in order], [arrivals[i] / shaping.rate for i in order]
    return _named(chosen, arrivals, block_tokens)


def dense(arrivals: Sequence[float], sessions: Sequence[str], dense_s: float, seed: int) -> list[float]:
    """When each request arrives instead; turns of a session keep their order."""
    of: dict[str, list[int]] = {}
    for i, session in enumerate(sessions):
        of.setdefault(session, []).append(i)
    at_s = np.array(arrivals)
    pauses = np.concatenate([np.diff(at_s[mine]) for mine in of.values()])
    longest_s = float(np.quantile(pauses, PAUSE_SHARE)) if len(pauses) else 0.0
    moved = np.zeros(len(at_s))
    own = [np.concatenate(([0.0], np.cumsum(np.minimum(np.diff(at_s[mine]), longest_s)))) for mine in of.values()]
    span_s = max((float(times[-1]) for times in own), default=0.0) or 1.0
    for n, (mine, times) in enumerate(zip(of.values(), own, strict=True)):
        moved[mine] = (n * _GOLDEN) % 1.0 * span_s + times
    order = np.lexsort((np.arange(len(moved)), moved))
    steps = np.random.default_rng(seed).exponential(1.0, len(moved))
    times = np.cumsum(steps)
    result = np.empty(len(moved))
    result[order] = (times - times[0]) * dense_s / max(times[-1] - times[0], 1e-9) if len(moved) > 1 else 0.0
    return [float(time) for time in result]


def block_keys(numbers: Numbers) -> KeyArray:
    """16 bytes a number, (n, 16) uint8; different for different numbers, and never all zeros."""
    words = np.empty((len(numbers), 2), np.uint64)
    seeds = numbers.astype(np.uint64)
    for column, salt in enumerate((0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)):
        mixed = seeds + np.uint64(salt)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[0]
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[1]
        words[:, column] = mixed ^ (mixed >> np.uint64(31))
    return words.view(np.uint8).reshape(len(numbers), 16)


def _choose(requests: Iterable[Request], shaping: Shaping) -> list[Request]:
    turns: Counter[str] = Counter()
    ended: set[str] = set()
    chosen: list[Request] = []
    end_s = shaping.from_s + shaping.window_s if shaping.window_s else float("inf")
    for request in requests:
        if request.arrival_s < shaping.from_s:
            continue
        if request.arrival_s > end_s or (shaping.limit and len(chosen) == shaping.limit):
            break
        session = request.session
        if shaping.max_tokens and request.input_tokens > shaping.max_tokens:
            ended.add(session)
        if session in ended or (shaping.turns and turns[session] == shaping.turns):
            continue
        if session not in turns and shaping.sessions and len(turns) == shaping.sessions:
            continue
        turns[session] += 1
        chosen.append(request)
    return chosen


def _named(chosen: Sequence[Request], arrivals: Sequence[float], block_tokens: int) -> Workload:
    chains, group = ChainNumbers(), block_tokens // chosen[0].block_tokens
    numbered: list[Numbers] = []
    for request in chosen:
        if request.block_tokens != chosen[0].block_tokens:
            raise ValueError(f"the trace has blocks of {chosen[0].block_tokens} and of {request.block_tokens} tokens")
        full = min(len(request.ids) // group, request.input_tokens // block_tokens)
        numbered.append(chains.number(request.ids)[0][group - 1 :: group][:full].astype(np.int64))
    shares = share_counts(numbered, [request.session for request in chosen], chains.blocks)
    turns: Counter[str] = Counter()
    replies: dict[str, int] = {}
    planned = []
    for n, (request, arrival_s, numbers) in enumerate(zip(chosen, arrivals, numbered, strict=True)):
        turns[request.session] += 1
        asked = Asked(
            number=n,
            session=request.session,
            turn=turns[request.session],
            keys=block_keys(numbers),
            input_tokens=request.input_tokens,
            previous_reply_tokens=replies.get(request.session),
            share_counts=shares[numbers],
        )
        replies[request.session] = request.output_tokens
        planned.append(Planned(asked, arrival_s, numbers))
    return Workload(tuple(planned), block_tokens, chains.blocks)


def share_counts(numbered: Sequence[Numbers], sessions: Sequence[str], blocks: int) -> Numbers:
    """By number: how many sessions ask for it."""
    names = {session: n for n, session in enumerate(dict.fromkeys(sessions))}
    pairs = [numbers * len(names) + names[session] for numbers, session in zip(numbered, sessions, strict=True)]
    return np.bincount(np.unique(np.concatenate(pairs)) // len(names), minlength=blocks)
