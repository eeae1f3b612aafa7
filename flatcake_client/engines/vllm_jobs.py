"""What vLLM's scheduler tells its workers of FlatCake in a step, and what is counted on both sides.

Jobs travel between processes (pickle), so they hold plain values only. A chain is vLLM's block hashes, from the context's
first block; keys are made of them where there is time, in a thread.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from flatcake_client.paged_kv import TurnFacts


@dataclass(frozen=True, slots=True)
class Load:
    """Bring blocks `first_block .. len(hashes)` into `block_ids`. `inside`: in this step, layer by layer.

    Without hashes: nothing is to be brought, and vLLM is to be told that it did not come.
    """

    request_id: str
    hashes: tuple[bytes, ...]
    salt: bytes
    first_block: int
    block_ids: tuple[int, ...]
    ssd_bytes: int
    inside: bool = False


@dataclass(frozen=True, slots=True)
class Store:
    """Store what is not stored of a chain; `block_ids` one a hash. `prefill`: its last blocks are computed in this step."""

    request_id: str
    hashes: tuple[bytes, ...]
    salt: bytes
    block_ids: tuple[int, ...]
    facts: TurnFacts
    prefill: bool = False


@dataclass
class StepJobs(KVConnectorMetadata):
    """`idle`: nothing is computed in this step, so a worker may wait a moment for a load. `preempted`: request ids.

    `weights`: what names the weights by which the scheduler looks up; None: its cache may have KV of several.
    """

    loads: tuple[Load, ...] = ()
    stores: tuple[Store, ...] = ()
    preempted: frozenset[str] = frozenset()
    idle: bool = False
    weights: bytes | None = b""


@dataclass
class WeightsChanged(KVConnectorWorkerMetadata):
    """A worker says that its weights are no longer those that the scheduler calls so."""

    weights: bytes

    def aggregate(self, _other: KVConnectorWorkerMetadata) -> WeightsChanged:
        return self


COUNTERS: Final = {
    "lookups": "Requests that asked FlatCake for their prefix.",
    "lookups_late": "Lookups that found no answer in time: misses.",
    "hit_tokens": "Tokens found in FlatCake beyond vLLM's own prefix cache.",
    "loads": "Restores that were begun.",
    "loads_cancelled": "Restores whose request was gone before they ended.",
    "load_failed_blocks": "Blocks that were found and did not come: computed.",
    "loaded_blocks": "Blocks restored, of each worker.",
    "loaded_memory_bytes": "Bytes restored from memory.",
    "loaded_ssd_bytes": "Bytes restored from SSD.",
    "stores": "Turns that were stored, by each worker.",
    "stored_blocks": "Blocks stored, of each worker.",
    "stores_dropped": "Turns not stored because too many waited, or too many of vLLM's blocks were held.",
    "stores_failed": "Turns not stored because the daemon refused or a write failed.",
    "errors": "Calls of vLLM that failed inside FlatCake: bugs, each of them a miss.",
}


@dataclass
class FlatCakeStats(KVConnectorStats):
    """Counts since they were last taken."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: value for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class FlatCakePromMetrics(KVConnectorPromMetrics):
    """`vllm:flatcake_<counter>_total`, one a counter and engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, meaning in COUNTERS.items():
            counter = self._counter_cls(name=f"vllm:flatcake_{name}", documentation=meaning, labelnames=labelnames)
            self._counters[name] = {engine: counter.labels(*values) for engine, values in labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if value and name in self._counters:
                self._counters[name][engine_idx].inc(value)


class Tally:
    """Counts of `COUNTERS`. Thread-safe. `totals`: since the start."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self.totals: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count
            self.totals[name] += count

    def take(self) -> FlatCakeStats | None:
        """Those since the last call; None: nothing was counted."""
        with self._lock:
            if not self._counts:
                return None
            counts, self._counts = self._counts, Counter()
        return FlatCakeStats(dict(counts))
