"""A home for turns without a daemon, and movers that do what a test tells them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from images import plane_starts, up

from flatcake_client.linger import Linger
from flatcake_client.records import Grant, Part
from flatcake_transport.address import Address, Medium
from flatcake_transport.errors import Unavailable
from flatcake_transport.layout import SegmentLayout, segment_layout
from flatcake_transport.mover import FileSpan, Move, Transfer
from flatcake_transport.space import SpaceSpec
from flatcake_transport.window import OpenFile

FOOTER = 4096


class FakeHome:
    """`writer.TurnHome` over one arena and one file."""

    def __init__(self, spec: SpaceSpec, root: Path) -> None:
        self.spec = spec
        self.path = root / "turn.kv"
        self.memory = np.full(0, 0, np.uint8)
        self.tail = 0
        self.committed: list[list[tuple[int, bytes]]] = []
        self.aborted: list[str] = []
        self.outcomes: list[str] = []
        self.commit_error: Exception | None = None
        self.hand_error: Exception | None = None
        self.linger = Linger()
        self.lost = False
        self.fd = -1

    def grant(self, parts: Sequence[tuple[int, int, bool]]) -> Grant:
        """Parts as (first block, blocks, in memory); every byte of their space is 0xEE before."""
        made = []
        for first, blocks, in_memory in parts:
            size = plane_starts(self.spec, blocks)[-1] + FOOTER
            if in_memory:
                at = len(self.memory)
                self.memory = np.concatenate([self.memory, np.full(size, 0xEE, np.uint8)])
                made.append(Part(Address.of(Medium.MEMORY, 1, at), first, blocks, size, 0, 0, "told"))
            else:
                made.append(Part(Address.of(Medium.SSD, 1, self.tail), first, blocks, size, 5, self.tail, "told"))
                self.tail += size
        self.path.write_bytes(b"\xee" * self.tail)
        return Grant(9 if made else 0, tuple(made), "s")

    def segment(self, part: Part) -> np.ndarray:
        """The bytes that stand in a part's space now."""
        if not part.file_id:
            return self.memory[part.segment.offset : part.segment.offset + part.segment_bytes]
        return np.frombuffer(self.path.read_bytes(), np.uint8)[part.file_offset : part.file_offset + part.segment_bytes]

    def layout_of(self, blocks: int) -> SegmentLayout:
        return segment_layout(self.spec, blocks)

    def check(self) -> None:
        if self.lost:
            raise Unavailable("lost")

    def arena(self, timeout_s: float) -> np.ndarray:
        return self.memory

    def files(self, turn_id: int, timeout_s: float) -> dict[int, OpenFile]:
        if self.hand_error is not None:
            raise self.hand_error
        self.fd = os.open(self.path, os.O_RDWR)
        return {5: OpenFile(self.fd, False)}

    def commit(self, turn_id: int, sums: Sequence[tuple[int, bytes]], timeout_s: float) -> bool:
        if self.commit_error is not None:
            raise self.commit_error
        self.committed.append(list(sums))
        return True

    def abort(self, turn_id: int, failure: str, timeout_s: float) -> None:
        self.aborted.append(failure)

    def when_rested(self, transfers: Sequence[Transfer], act: Callable[[], None]) -> None:
        self.linger.when_rested(transfers, act)

    def ended(self, outcome: str) -> None:
        self.outcomes.append(outcome)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Gate:
    """A mover whose file commands wait for `open`, and fail where `fails(offset)` says so. Everything else is the real one's."""

    def __init__(self, mover: Any) -> None:
        self.mover = mover
        self.open = threading.Event()
        self.open.set()
        self.fails: Callable[[int], bool] = lambda _: False
        self.submitted: list[list[FileSpan]] = []

    def register(self, region: Any) -> None:
        self.mover.register(region)

    def submit(self, moves: Sequence[Move]) -> Transfer:
        spans = [span for move in moves for span in (move.source, move.target) if isinstance(span, FileSpan)]
        self.submitted.append(spans)
        return GatedTransfer(self, moves, any(self.fails(span.offset) for span in spans))

    def stats(self) -> Any:
        return self.mover.stats()

    def close(self) -> None:
        self.mover.close()


class GatedTransfer:
    """Moves that begin when the gate opens, on a thread of their own."""

    def __init__(self, gate: Gate, moves: Sequence[Move], fails: bool) -> None:
        self.rested = threading.Event()
        self.error: Exception | None = None
        threading.Thread(target=self._run, args=(gate, moves, fails), daemon=True).start()

    def _run(self, gate: Gate, moves: Sequence[Move], fails: bool) -> None:
        gate.open.wait()
        try:
            if fails:
                self.error = Unavailable("told to fail")
            else:
                gate.mover.submit(moves).wait()
        except Exception as error:  # noqa: BLE001
            self.error = error
        self.rested.set()

    def done(self) -> bool:
        return self.rested.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        if not self.rested.wait(timeout_s):
            raise TimeoutError
        if self.error is not None:
            raise Unavailable(str(self.error)) from self.error


def padding_is_zero(segment: np.ndarray, spec: SpaceSpec, blocks: int, planes: Sequence[int]) -> bool:
    """Whether what lies behind the blocks of the planes, up to the next page, is zero."""
    starts, sizes = plane_starts(spec, blocks), list(spec.plane_bytes) * spec.shards
    return all(not segment[starts[p] + blocks * sizes[p] : starts[p] + up(blocks * sizes[p])].any() for p in planes)
