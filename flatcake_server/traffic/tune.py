"""Thresholds and sizes for a trace: tried one after the other on a simulated node, each with the curve it was chosen from.
Pure.

The order follows what depends on what. First the SSD, with memory as large as it may be: the smallest that hits as much as
one without end, less HIT_LOSS_MAX. Then the thresholds of placement, by how long requests restore: more homes in memory are
faster until they push each other out, so no candidate may lose more hits than that either: what is computed anew costs
the engine everybody's time, what is restored streams in beside it. Then the memory, the smallest at which requests wait as
little as with all of it. Among equals (COST_SLACK) the smaller value wins: memory not needed is better spent by the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt
from typing import Any, Final

from flatcake_server.placement import Policy
from flatcake_server.traffic.simulate import Node, Outcome, Rates, share_counts, simulate
from flatcake_server.traffic.spans import Traffic
from flatcake_transport.units import approximate_size, format_size

CONTEXT_TOKENS: Final = tuple(1024 << n for n in range(1, 9))  # 2K to 256K
REPLY_TOKENS: Final = (64, 128, 256, 512, 1024, 2048, 4096)
MEMORY_SHARES: Final = tuple(2.0**-n for n in range(7))  # of the most there may be
SSD_SHARES: Final = tuple(2.0**-n for n in range(7))  # of what a disk without end comes to hold
HIT_LOSS_MAX: Final = 0.005  # half a point: DESIGN section 5 allows 0.6 to the theoretical maximum
COST_SLACK: Final = 0.01
SSD_REFINEMENTS: Final = 2
_NO_END: Final = 1 << 60
_HIGH: Final = 0.95  # what is held must lie below the high watermark, or reclaim starts
_UNIT: Final = 1 << 28  # sizes are recommended in 256 MiB

Progress = Callable[[int, int], None]  # simulated requests, of how many


@dataclass(frozen=True, slots=True)
class Recommendation:
    """`curves`: by option, each candidate with its outcome, as tried; `reasons`: a sentence an option."""

    agent_context_tokens: int
    short_reply_tokens: int
    memory_bytes: int
    ssd_bytes: int
    expected: Outcome
    curves: dict[str, list[dict[str, Any]]]
    reasons: tuple[str, ...]

    def toml(self) -> str:
        """For flatcake.toml."""
        return (
            f"agent_context_tokens = {self.agent_context_tokens}\n"
            f"short_reply_tokens = {self.short_reply_tokens}\n"
            f'memory_bytes = "{format_size(self.memory_bytes)}"\n'
            f'ssd_bytes = "{format_size(self.ssd_bytes)}"\n'
        )


def tune(
    traffic: Traffic,
    *,
    bytes_per_token: int,
    memory_bytes_max: int,
    ssd_bytes_max: int = _NO_END,
    rates: Rates | None = None,
    progress: Progress | None = None,
) -> Recommendation:
    """Try, and choose. About 30 simulated runs of the trace.

    Args:
        memory_bytes_max: the most the arena may be.
        ssd_bytes_max: the most the disks may hold.

    Raises: ValueError: bytes a token, or a limit, that no node can have.
    """
    if bytes_per_token < 1 or memory_bytes_max < _UNIT or ssd_bytes_max < _UNIT:
        raise ValueError(f"a node has at least {format_size(_UNIT)} of memory and of SSD, and a token bytes")
    tries = _Tries(traffic, rates or Rates(), progress)
    node = Node(memory_bytes_max, _NO_END, Policy(), bytes_per_token)
    endless = tries.run(node)
    sizes = {_rounded(endless.ssd_peak_bytes / _HIGH * share, ssd_bytes_max) for share in SSD_SHARES}
    enough = endless.hit_share - HIT_LOSS_MAX
    node, outcome = _smallest_ssd(tries, node, sorted(sizes), enough)
    reasons = [_ssd_reason(node, outcome, endless)]

    longest = int(traffic.input_tokens.max())
    contexts = [tokens for i, tokens in enumerate(CONTEXT_TOKENS) if i < 2 or CONTEXT_TOKENS[i - 1] < longest]
    nodes = (replace(node, policy=Policy(tokens, node.policy.short_reply_tokens)) for tokens in contexts)
    node, outcome = _cheapest(tries.curve("agent_context_tokens", nodes), enough)
    reasons.append(_cost_reason("agent_context_tokens", node.policy.agent_context_tokens, outcome))

    context = node.policy.agent_context_tokens
    nodes = (replace(node, policy=Policy(context, tokens)) for tokens in REPLY_TOKENS)
    node, outcome = _cheapest(tries.curve("short_reply_tokens", nodes), enough)
    reasons.append(_cost_reason("short_reply_tokens", node.policy.short_reply_tokens, outcome))

    sizes = {_rounded(memory_bytes_max * share, memory_bytes_max) for share in MEMORY_SHARES}
    nodes = (replace(node, memory_bytes=size) for size in sorted(sizes))
    node, outcome = _cheapest(tries.curve("memory_bytes", nodes), enough)
    reasons.append(_cost_reason("memory_bytes", node.memory_bytes, outcome))
    return Recommendation(
        context,
        node.policy.short_reply_tokens,
        node.memory_bytes,
        node.ssd_bytes,
        outcome,
        tries.curves,
        tuple(reasons),
    )


Tried = tuple[Node, Outcome]


def _smallest_ssd(tries: _Tries, node: Node, sizes: list[int], hit_share_min: float) -> Tried:
    """The smallest disk that hits enough, to a quarter of an octave; the largest there may be where none does."""

    def enough(tried: Tried) -> bool:
        return tried[1].hit_share >= hit_share_min

    tried = tries.curve("ssd_bytes", (replace(node, ssd_bytes=size) for size in sizes))
    for _ in range(SSD_REFINEMENTS):
        good = next((i for i, one in enumerate(tried) if enough(one)), 0)
        if good == 0:
            break
        between = _rounded(sqrt(tried[good - 1][0].ssd_bytes * tried[good][0].ssd_bytes), _NO_END)
        sizes = sorted({between, *sizes})
        tried = tries.curve("ssd_bytes", (replace(node, ssd_bytes=size) for size in sizes))
    return next((one for one in tried if enough(one)), tried[-1])


class _Tries:
    """Runs, and what they gave."""

    def __init__(self, traffic: Traffic, rates: Rates, progress: Progress | None) -> None:
        self.curves: dict[str, list[dict[str, Any]]] = {}
        self._traffic, self._rates, self._progress = traffic, rates, progress
        self._shares = share_counts(traffic)
        self._runs = 0
        self._most = (
            1 + SSD_REFINEMENTS + len(SSD_SHARES) + len(CONTEXT_TOKENS) + len(REPLY_TOKENS) + len(MEMORY_SHARES)
        )
        self._known: dict[Node, Outcome] = {}

    def run(self, node: Node) -> Outcome:
        if node not in self._known:
            done = self._runs * self._traffic.requests
            self._runs += 1
            self._known[node] = simulate(
                self._traffic, self._shares, node, self._rates, lambda r, _: self._tell(done + r)
            )
        return self._known[node]

    def curve(self, option: str, nodes: Iterable[Node]) -> list[Tried]:
        tried = [(node, self.run(node)) for node in nodes]
        self.curves[option] = [
            {"value": _value(option, node), "cost_s": outcome.cost_s} | asdict(outcome) for node, outcome in tried
        ]
        return tried

    def _tell(self, requests: int) -> None:
        if self._progress:
            self._progress(requests, self._most * self._traffic.requests)


def _value(option: str, node: Node) -> int:
    return int(getattr(node.policy if option.endswith("tokens") else node, option))


def _cheapest(tried: Sequence[Tried], hit_share_min: float) -> Tried:
    """The first, hence smallest, about as cheap as any that hits enough, or as much as any."""
    floor = min(hit_share_min, max(outcome.hit_share for _, outcome in tried))
    fit = [one for one in tried if one[1].hit_share >= floor]
    least = min(outcome.cost_s for _, outcome in fit)
    return next(one for one in fit if one[1].cost_s <= least * (1 + COST_SLACK))


def _rounded(size_bytes: float, most: int) -> int:
    unit = _UNIT if size_bytes < 64 * _UNIT else 4 * _UNIT
    return min(most, max(_UNIT, -int(-size_bytes // unit) * unit))


def _ssd_reason(node: Node, outcome: Outcome, endless: Outcome) -> str:
    held = f"a disk without end would come to hold {approximate_size(endless.ssd_peak_bytes)}"
    lost = 100 * (endless.hit_share - outcome.hit_share)
    return (
        f"ssd_bytes {approximate_size(node.ssd_bytes)}: hits {100 * outcome.hit_share:.2f}% of all blocks, {lost:.2f} points "
        f"below the most there is; {held}"
    )


def _cost_reason(option: str, value: int, outcome: Outcome) -> str:
    shown = approximate_size(value) if option == "memory_bytes" else f"{value:,}"
    return (
        f"{option} {shown}: a request restores for {1000 * outcome.restore_s:.1f} ms and computes anew for "
        f"{1000 * outcome.recompute_s:.1f} ms on average; {100 * outcome.memory_hit_share:.1f}% of all blocks come from memory"
    )
