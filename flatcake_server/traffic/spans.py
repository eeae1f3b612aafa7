"""A whole trace in little memory: its requests as lists of spans. Pure.

A span is a maximal run of blocks that every request of the trace holds wholly or not at all. A request of thousands of
blocks is some dozens of spans, so what is asked of a trace again and again (a replay for each candidate of `tune`) costs
a thirtieth, and the answer is the same to the block: whatever is true of one block of a span is true of all.

Spans are cut where a request stops to follow what was known, and where one ends: elsewhere no two requests part. Since
what is new in a request is a range of numbers (chains.ChainNumbers), a span is a range, too.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flatcake_transport.chains import ChainNumbers
from flatcake_transport.trace import Request

Ints = NDArray[np.int64]
Spans = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """A trace, read once. Arrays by request, in order of arrival, but for `span_blocks` (by span) and `spans`.

    `spans[first[r] : first[r + 1]]` are request r's, from the head of its chain; what is known of them is a prefix.
    """

    block_tokens: int
    arrival_s: NDArray[np.float64]
    session: Ints  # index into `sessions`
    turn: Ints
    input_tokens: Ints
    output_tokens: Ints
    blocks: Ints
    first: Ints
    spans: Spans
    span_blocks: Ints
    sessions: tuple[str, ...]

    @property
    def requests(self) -> int:
        return len(self.arrival_s)

    @property
    def unique_blocks(self) -> int:
        return int(self.span_blocks.sum())

    @property
    def accesses(self) -> int:
        """Blocks asked for, each once a request that holds it."""
        return int(self.blocks.sum())

    def spans_of(self, request: int) -> Spans:
        return self.spans[self.first[request] : self.first[request + 1]]


class _Columns:
    """Requests as they come, until their spans are known."""

    def __init__(self) -> None:
        self.arrival_s = array("d")
        self.counts = array("q")  # session, turn, input, output, blocks, runs of each request
        self.run_first, self.run_last = array("i"), array("i")
        self.cut_after = np.zeros(1 << 16, np.bool_)  # by number: a span ends here
        self.sessions: dict[str, int] = {}
        self.block_tokens = 0

    def add(self, request: Request, chains: ChainNumbers) -> None:
        self.block_tokens = self.block_tokens or request.block_tokens
        if request.block_tokens != self.block_tokens:
            raise ValueError(
                f"request {len(self.arrival_s) + 1} has blocks of {request.block_tokens} tokens, those before it "
                f"{self.block_tokens}: a trace has one block size"
            )
        numbers, known = chains.number(request.ids)
        if chains.blocks > len(self.cut_after):
            more = np.zeros(max(2 * len(self.cut_after), chains.blocks), np.bool_)
            more[: len(self.cut_after)] = self.cut_after
            self.cut_after = more
        breaks = np.flatnonzero(np.diff(numbers) != 1)
        if len(numbers):
            self.cut_after[[numbers[known - 1], numbers[-1]]] = True  # where nothing is known, -1 is the end once more
            self.run_first.extend([int(numbers[0]), *numbers[breaks + 1].tolist()])
            self.run_last.extend([*numbers[breaks].tolist(), int(numbers[-1])])
        session = self.sessions.setdefault(request.session, len(self.sessions))
        runs = len(breaks) + 1 if len(numbers) else 0
        sizes = request.input_tokens, request.output_tokens, len(numbers), runs
        self.arrival_s.append(request.arrival_s)
        self.counts.extend((session, request.turn, *sizes))


def gather(requests: Iterable[Request]) -> Traffic:
    """Read a trace to its end.

    Raises:
        ValueError: no request, no block, or blocks of different sizes; and what reading the trace raises.
    """
    columns, chains = _Columns(), ChainNumbers()
    for request in requests:
        columns.add(request, chains)
    if not chains.blocks:
        raise ValueError("the trace holds no request with a whole block: nothing can be said about reuse")
    starts = np.flatnonzero(np.concatenate(([True], columns.cut_after[: chains.blocks - 1])))
    span_of = np.zeros(chains.blocks, np.int32)
    span_of[starts[1:]] = 1
    span_of = np.cumsum(span_of, dtype=np.int32)
    first_span = span_of[np.frombuffer(columns.run_first, np.int32)].astype(np.int64)
    lengths = span_of[np.frombuffer(columns.run_last, np.int32)] - first_span + 1
    ends = np.cumsum(lengths)
    spans = (np.repeat(first_span - (ends - lengths), lengths) + np.arange(ends[-1])).astype(np.int32)
    counts = np.frombuffer(columns.counts, np.int64).reshape(-1, 6)
    first = np.concatenate(([0], ends))[np.concatenate(([0], np.cumsum(counts[:, 5])))]
    return Traffic(
        block_tokens=columns.block_tokens,
        arrival_s=np.frombuffer(columns.arrival_s, np.float64),
        session=counts[:, 0],
        turn=counts[:, 1],
        input_tokens=counts[:, 2],
        output_tokens=counts[:, 3],
        blocks=counts[:, 4],
        first=first,
        spans=spans,
        span_blocks=np.diff(np.append(starts, chains.blocks)),
        sessions=tuple(columns.sessions),
    )
