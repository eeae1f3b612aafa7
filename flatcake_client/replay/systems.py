"""FlatCake as a replay drives it, its ablations, and the store that stores nothing.

    one-queue        one queue in order of arrival in place of two (queues.OneQueue)
    eviction-layout  a turn goes to files as a tiered store evicts: a few blocks at a time, into the file that is open then, so a session
                     lies scattered over all files of its time
    no-merge         every block of every layer is a read of its own
    window-of-one    one buffer in the window: nothing is read while what was read is scattered
    memory-off       everything has its home on SSD

Each changes one thing, in the real client and daemon; all else stays.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np

import flatcake_client as fc
from flatcake_client.replay.node import Node
from flatcake_client.replay.system import Asked, Budget, Found, Ledger, Pages, Slots, SystemStats, names_of
from flatcake_client.scheduler import PREFETCHES_MAX
from flatcake_transport.errors import FlatCakeError, Unavailable

ABLATIONS: Final = ("one-queue", "eviction-layout", "no-merge", "window-of-one", "memory-off")
DAEMON_ABLATIONS: Final = ("eviction-layout", "memory-off")  # which are options of the daemon, too
EVICTED_BLOCKS: Final = 4  # of one request that lie together under eviction-layout
EVICTION_FILES: Final = 16  # open at a time under eviction-layout
CLOSE_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class FlatCakeOptions:
    """`endpoint`: a daemon that runs already, empty for one of the replay's own. Tokens as the daemon's options; None: its default."""

    ablation: str = ""
    endpoint: str = ""
    agent_context_tokens: int | None = None
    short_reply_tokens: int | None = None


class FlatCakeSystem:
    """The public client, and a daemon."""

    prefetches_max = PREFETCHES_MAX

    def __init__(self, budget: Budget, options: FlatCakeOptions, run_name: str = "replay") -> None:
        """Raises: ValueError: sizes the daemon or the client refuses. Unavailable: the daemon does not serve."""
        self._ablation = options.ablation
        self._node = None if options.endpoint else Node(budget.ssd_dir, _daemon_options(budget, options))
        reads = {"no-merge": {"gap_bytes_max": -1}, "window-of-one": {"buffers": 1}}.get(options.ablation, {})
        try:
            endpoint = options.endpoint or (self._node.endpoint if self._node else "")
            self._client = fc.connect(endpoint, timeout_s=10.0, name=run_name, **reads)
            self._space = self._client.open_space(
                model=f"{run_name}-{budget.block_bytes}", dtype="uint8", block_tokens=budget.block_tokens,
                plane_bytes=[budget.plane_bytes] * budget.planes,
            )  # fmt: skip
            _refuse_silence(self._client, endpoint)
        except BaseException:
            if self._node is not None:
                self._node.close()
            raise
        self.name = f"flatcake {self._ablation}".strip()
        self.settings: Mapping[str, Any] = {
            "ablation": self._ablation, "prefetches_max": self.prefetches_max,
            "agent_context_tokens": options.agent_context_tokens, "short_reply_tokens": options.short_reply_tokens,
        }  # fmt: skip
        self._tidy = ThreadPoolExecutor(1, "replay-release")
        self._lock = threading.Lock()
        self._random = np.random.default_rng(0)
        self._read = {"memory": 0, "ssd": 0}
        self._short = self._rejected = 0
        self._ledger = Ledger(budget.ssd_bytes // budget.block_bytes)
        self._homes: dict[str, int] = {}

    def lookup(self, asked: Asked) -> Found:
        names = names_of(asked.keys)
        known = self._ledger.known(names)
        hit = self._space.lookup(asked.keys)
        self._ledger.miss(known, names[hit.blocks :])
        if not hit.blocks:
            hit.release()
            return Found(0)
        return Found(hit.blocks, hit.bytes_by_medium, hit)

    def restore(self, asked: Asked, found: Found, pages: Pages, slots: Slots, timeout_s: float) -> int:
        layers, hit = [pages[:, plane] for plane in range(pages.shape[1])], found.pin
        try:
            restore = hit.restore(layers, slots, timeout_s=timeout_s, ending=asked.ending)
            usable = int(restore.wait())
        finally:
            self._tidy.submit(hit.release)  # as connectors do: no request waits for it
        with self._lock:
            for medium, size_bytes in restore.stats.bytes_by_medium.items():
                self._read[medium] += size_bytes * usable // found.blocks
            self._short += usable < found.blocks
        return usable

    def store(self, asked: Asked, first_block: int, pages: Pages, slots: Slots, timeout_s: float) -> int:
        blocks = len(asked.keys)
        if self._ablation != "eviction-layout":
            return self._keep(asked, first_block, blocks, asked.session, pages, slots, timeout_s)
        ends = [*range(first_block, blocks, EVICTED_BLOCKS), blocks]
        files = self._random.integers(0, EVICTION_FILES, len(ends))
        epoch = asked.number // EVICTION_FILES
        return sum(
            self._keep(asked, begin, end, f"evicted-{epoch}-{file}", pages, slots, timeout_s)
            for (begin, end), file in zip(pairwise(ends), files.tolist(), strict=False)
        )

    def _keep(
        self, asked: Asked, first_block: int, end: int, session: str, pages: Pages, slots: Slots, timeout_s: float
    ) -> int:
        """Store what is missing up to `end`. How many of `first_block .. end` are there then."""
        try:
            with self._space.begin_turn(
                asked.keys[:end],
                session=session,
                context_tokens=asked.input_tokens,
                previous_reply_tokens=asked.previous_reply_tokens,
                share_counts=None if self._ablation == "memory-off" else asked.share_counts[:end].tolist(),
                turn=asked.turn,
                timeout_s=timeout_s,
            ) as turn:
                mine = slots[turn.blocks.start : turn.blocks.stop]
                for plane in range(pages.shape[1]):
                    turn.write_layer(plane, pages[:, plane], mine)
                turn.commit(timeout_s)
        except FlatCakeError:
            with self._lock:
                self._rejected += end - first_block
            return 0
        self._ledger.accept(names_of(asked.keys[:end]))
        with self._lock:
            for part in turn.parts:
                self._homes[part.reason] = self._homes.get(part.reason, 0) + part.blocks
        return end - first_block

    def settle(self, timeout_s: float) -> None:
        """A committed turn is where it stays."""

    def stats(self) -> SystemStats:
        client = self._client.stats()
        with self._lock:
            return SystemStats(
                bytes_read=dict(self._read),
                read_commands=client.read_commands,
                cancelled_restores=self._short,
                rejected_blocks=self._rejected,
                lost_blocks=self._ledger.lost,
                dropped_blocks=self._ledger.dropped,
                staging_bytes=sum(pool.bytes_made for pool in client.staging.values()),
                more={
                    "file_bytes_read": client.bytes_read,
                    "corrupt_segments": client.corrupt_segments,
                    "blocks_by_home": dict(self._homes),
                    "staging_waits": sum(pool.waits for pool in client.staging.values()),
                    "turns_committed": client.turns_committed,
                },
            )

    def close(self) -> None:
        self._tidy.shutdown()
        self._client.close(CLOSE_TIMEOUT_S)
        if self._node is not None:
            self._node.close()


def _refuse_silence(client: fc.Client, endpoint: str) -> None:
    """Raises: Unavailable: what would be measured is how fast nobody answers."""
    if not client.stats().connected:
        raise Unavailable(f"no daemon answers at {endpoint}: start one with `flatcake serve`, or leave --endpoint out")


class NoSystem:
    """Computes everything."""

    name = "none"
    prefetches_max = 1

    def __init__(self) -> None:
        self.settings: Mapping[str, Any] = {}

    def lookup(self, asked: Asked) -> Found:  # noqa: ARG002
        return Found(0)

    def restore(self, asked: Asked, found: Found, pages: Pages, slots: Slots, timeout_s: float) -> int:  # noqa: ARG002
        return 0

    def store(self, asked: Asked, first_block: int, pages: Pages, slots: Slots, timeout_s: float) -> int:  # noqa: ARG002
        return 0

    def settle(self, timeout_s: float) -> None: ...

    def stats(self) -> SystemStats:
        return SystemStats()

    def close(self) -> None: ...


def _daemon_options(budget: Budget, options: FlatCakeOptions) -> dict[str, object]:
    chosen: dict[str, object] = {
        "memory_bytes": budget.memory_bytes, "ssd_bytes": budget.ssd_bytes, "session_trim_after": "1h",
    }  # fmt: skip
    thresholds = {
        "agent_context_tokens": options.agent_context_tokens,
        "short_reply_tokens": options.short_reply_tokens,
    }
    chosen |= {name: value for name, value in thresholds.items() if value is not None}
    if options.ablation == "memory-off":
        chosen["agent_context_tokens"] = 0  # every context is longer
    if options.ablation == "eviction-layout":
        chosen["sync_commits"] = "false"  # a commit every few blocks: their syncs are no part of what is compared
    return chosen
