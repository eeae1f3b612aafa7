"""SGLang's third tier on FlatCake: a `HiCacheStorage` for `--hicache-storage-backend dynamic`.

    host pool (registered once) --pages, zero copy--> turn --commit--> hit --restore--> host pool

SGLang's host pool is read and written where it lies: its own formulas give the address of each page, in any layout. A page of a
pool is a block; model, dtype, page size, layout, pipeline and context rank are in the space; tensor-parallel ranks are shards of
it. Ranks that hold the same KV (MLA) have one shard, which one of them writes. See sglang_pages.py for chains and leases.

- Nothing raises and every page has an answer: SGLang reduces answers over ranks, and one that is missing hangs them all.
- Every call ends by its deadline, and writes no page after it returned: SGLang gives the pages of an aborted request away.
- Other pools (hybrid models) have a space each. Those with a state at node borders only (Mamba, sliding windows) are found by
  asking for the windows before a border, longest prefix first, a bounded number of times.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.runtime_context import get_server_args

from flatcake_client import Client, Overloaded, connect
from flatcake_client.engines.edge import Edge
from flatcake_client.engines.sglang_model import served
from flatcake_client.engines.sglang_pages import PageStore, host_planes, page_slots, page_tokens_of

log = logging.getLogger(__name__)

LAYOUT: Final = "sglang/1"
TIMEOUT_S: Final = 1.0
TRANSFER_TIMEOUT_S: Final = 10.0
WINDOW_PROBES_MAX: Final = 128  # lookups for the borders of one hit: a millisecond each, on the prefetch thread
PROBES_S: Final = 1.0  # and no longer than that: the linker asks on SGLang's scheduler thread
BORDERS_FOUND: Final = 4  # ranks must agree on one; the longest are enough
SAMPLES_KEPT: Final = 1000
SGLANG_KEYS: Final = frozenset(("backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size"))
OUR_KEYS: Final = frozenset(("endpoint", "timeout_s", "transfer_timeout_s", "weights"))


@dataclass(frozen=True, slots=True)
class StorageStats:
    """Counts of pages since the backend was made; calls that failed count their pages as not found, loaded or stored."""

    pages_asked: int = 0
    pages_found: int = 0
    pages_wanted: int = 0
    pages_loaded: int = 0
    pages_given: int = 0
    pages_stored: int = 0
    stores_refused: int = 0
    calls_failed: int = 0


class FlatCakeStorage(HiCacheStorage):  # type: ignore[misc]
    """Made by SGLang, one a rank. Thread-safe: it is called from prefetch, I/O and backup threads."""

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:  # noqa: ARG002
        """Works without a daemon. Raises: ValueError: settings that make no sense, which ends SGLang's attach."""
        extra = dict(storage_config.extra_config or {})
        check_settings(extra, SGLANG_KEYS)
        if not extra.get("interface_v1"):
            raise ValueError(
                'FlatCake needs "interface_v1": 1 in the extra config: pages are moved without staging copies'
            )
        self._config = storage_config
        self._served = served()
        self._weights_name = self._served.weights_name(str(extra.get("weights", "")))
        self.client = client_of(extra, f"sglang-tp{storage_config.tp_rank}-pp{storage_config.pp_rank}")
        self._stores: dict[str, PageStore] = {}
        self._pools: dict[str, Any] = {}
        self._edge = Edge(log, "its pages are computed")
        self._lock = threading.Lock()
        self._samples: dict[str, list[float]] = {}
        self._told_prefix = False

    # -- pools ---------------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Raises: ValueError: a pool without memory of its own, or of a layout that is not understood."""
        super().register_mem_pool_host(mem_pool_host)
        self._open(str(PoolName.KV), mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Raises: as `register_mem_pool_host`."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._open(str(host_pool_name), host_pool)

    def _open(self, name: str, pool: Any) -> None:
        if self._pools.get(name) is pool:
            return
        config = self._config
        shards = 1 if self._replicated(name) else config.tp_size
        store = PageStore(
            self.client,
            host_planes(pool),
            model=self._served.model or config.model_name or "sglang",
            dtype=dtype_of(pool.dtype, _kv_cache_dtype()),
            page_tokens=page_tokens_of(pool),
            weights_name=self._weights_name,
            weights=self._served.weights,
            layout=" ".join((
                LAYOUT, name, pool.layout, getattr(pool, "storage_format_tag", None) or "", _device_layout(pool),
                f"pp {config.pp_rank}/{config.pp_size} cp {config.attn_cp_rank}/{config.attn_cp_size}",
            )),
            shards=shards,
            shard=0 if shards == 1 else config.tp_rank,
        )  # fmt: skip
        self._stores[name], self._pools[name] = store, pool
        log.info(
            "FlatCake holds pages of pool %s (%s): %d tokens, %d bytes in %d planes, shard %d of %d",
            name, pool.layout, store.page_tokens, store.page_bytes, len(store.planes), store.space.shard, shards,
        )  # fmt: skip

    def _replicated(self, name: str) -> bool:
        """Whether all tensor-parallel ranks hold the same bytes. A Mamba state is each rank's own, also beside MLA."""
        return bool(self._config.is_mla_model) and name != PoolName.MAMBA.value

    # -- one pool ------------------------------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Pages that are stored, from the first on."""
        found = self._edge.attempt(
            "a lookup", 0, lambda: self._stores[PoolName.KV.value].count(self._prefix(extra_info), keys)
        )
        self._edge.count(pages_asked=len(keys), pages_found=found)
        return found

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Bring pages into the host pool; whether each came."""
        return self._load(PoolName.KV.value, keys, host_indices, self._prefix(extra_info))

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages of the host pool; whether each is."""
        if extra_info is not None and getattr(extra_info, "prefix_keys", None) is None and not self._told_prefix:
            self._told_prefix = True
            log.warning(
                'SGLang passes no prefix keys, so each batch is a chain and a file of its own: set '
                '"hicache_storage_pass_prefix_keys": true in --hicache-storage-backend-extra-config'
            )  # fmt: skip
        return self._store(PoolName.KV.value, keys, host_indices, self._prefix(extra_info))

    def _load(self, name: str, keys: Sequence[str], indices: Any, prefix: Sequence[str]) -> list[bool]:
        def load() -> int:
            store = self._stores[name]
            slots = page_slots(indices, store.page_tokens, len(keys))
            started_s = time.monotonic()
            loaded = store.load(prefix, keys, slots)
            self._sample("prefetch", loaded, loaded * store.page_bytes, time.monotonic() - started_s)
            return loaded

        loaded = self._edge.attempt("a load", 0, load)
        self._edge.count(pages_wanted=len(keys), pages_loaded=loaded)
        return [True] * loaded + [False] * (len(keys) - loaded)

    def _store(self, name: str, keys: Sequence[str], indices: Any, prefix: Sequence[str]) -> list[bool]:
        def store_pages() -> bool:
            if self._replicated(name) and not self._config.is_storage_writer:
                return True  # another rank has the same bytes and stores them
            store = self._stores[name]
            slots = page_slots(indices, store.page_tokens, len(keys))
            started_s = time.monotonic()
            try:
                store.store(prefix, keys, slots)
            except Overloaded as error:  # of a store that is no failure
                self._edge.count(stores_refused=1)
                log.info("pages were not stored: %s", error)
                return False
            self._sample("backup", len(keys), len(keys) * store.page_bytes, time.monotonic() - started_s)
            return True

        stored = self._edge.attempt("a store", False, store_pages)
        self._edge.count(pages_given=len(keys), pages_stored=len(keys) * stored)
        return [stored] * len(keys)

    # -- several pools -------------------------------------------------------------------------------------------------

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[PoolTransfer] | None = None, extra_info: Any = None
    ) -> Any:
        """The longest prefix that all pools can restore, each by its policy, and every length that was found to be."""
        self._edge.count(pages_asked=len(keys))
        result = self._edge.attempt(
            "a lookup", PoolTransferResult.empty(), lambda: self._exists_v2(keys, pool_transfers or (), extra_info)
        )
        self._edge.count(pages_found=result.kv_hit_pages)
        return result

    def _exists_v2(self, keys: list[str], transfers: Sequence[PoolTransfer], extra_info: Any) -> Any:
        prefix = self._prefix(extra_info)
        kv_pages = self._stores[PoolName.KV.value].count(prefix, keys)
        hits = {PoolName.KV.value: kv_pages} if kv_pages else {}
        lengths = set(range(1, kv_pages + 1))
        for transfer in transfers:
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS or not lengths:
                continue  # never gates the hit; not reporting it is no verdict
            store = self._stores[str(transfer.name)]
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(transfer.keys or ()))
                found = borders(store, keys[:kv_pages], window, lengths)
            else:
                found = set(range(1, store.count(prefix, keys[:kv_pages]) + 1))
            if found:
                hits[str(transfer.name)] = max(found)
            lengths &= found
        return PoolTransferResult(max(lengths, default=0), hits, sorted(lengths))

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """Bring pages of several pools; by pool, whether each came."""
        return {transfer.name: self._load(*self._transfer(transfer, extra_info)) for transfer in transfers}

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """Store pages of several pools; by pool, whether each is."""
        return {transfer.name: self._store(*self._transfer(transfer, extra_info)) for transfer in transfers}

    def _transfer(self, transfer: PoolTransfer, extra_info: Any) -> tuple[str, list[str], Any, Sequence[str]]:
        """Windows are chains of their own: the pages before them are not stored in their pool."""
        trailing = transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES
        prefix = () if trailing else self._prefix(extra_info)
        return str(transfer.name), list(transfer.keys or ()), transfer.host_indices, prefix

    # -- what SGLang calls no more, and the end ------------------------------------------------------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:  # noqa: ARG002
        """The interface before v1 moves tensors one by one; `interface_v1` is required, so nobody calls it: a miss."""
        return

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:  # noqa: ARG002
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:  # noqa: ARG002
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None  # noqa: ARG002
    ) -> bool:  # fmt: skip
        return False

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def clear(self) -> None:
        """What is stored belongs to all engines of the node: an operator drops it, with `flatcake sessions drop`."""
        log.warning("FlatCake is shared, so SGLang does not clear it: use flatcake sessions drop")

    def get_stats(self) -> Any:
        """Pages and GB/s of each call since the last time, for SGLang's own metrics; None if these are off."""
        return self._edge.attempt("a metric", None, self._metrics) if self._config.enable_storage_metrics else None

    def _metrics(self) -> Any:
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            samples, self._samples = self._samples, {}
        return StorageMetrics(**samples)

    def stats(self) -> StorageStats:
        return StorageStats(calls_failed=self._edge.failures(), **self._edge.counts())

    def close(self) -> None:
        """Twice is fine."""
        self.client.close()

    # -- the edge ------------------------------------------------------------------------------------------------------

    def _prefix(self, extra_info: Any) -> Sequence[str]:
        return tuple(getattr(extra_info, "prefix_keys", None) or ())

    def _sample(self, kind: str, pages: int, size_bytes: int, took_s: float) -> None:
        if self._config.enable_storage_metrics and pages:
            with self._lock:
                for name, value in (
                    (f"{kind}_pgs", pages),
                    (f"{kind}_bandwidth", size_bytes / max(took_s, 1e-9) / 1e9),
                ):
                    values = self._samples.setdefault(name, [])
                    del values[: len(values) + 1 - SAMPLES_KEPT]
                    values.append(value)


def borders(store: PageStore, keys: Sequence[str], window: int, lengths: set[int]) -> set[int]:
    """The longest prefixes of `keys`, of these lengths, whose last `window` pages are stored: a bounded number of lookups, in bounded time."""
    found: set[int] = set()
    deadline_s = time.monotonic() + PROBES_S
    for length in sorted(lengths, reverse=True)[:WINDOW_PROBES_MAX]:
        if time.monotonic() >= deadline_s:
            break
        asked = keys[max(0, length - window) : length]
        if store.count((), asked) == len(asked):
            found.add(length)
            if len(found) == BORDERS_FOUND:
                break
    return found


def dtype_of(stored: Any, kv_cache_dtype: str) -> str:
    """Pools keep every fp8 format as bytes: what these mean only SGLang's own setting tells."""
    name = str(stored).removeprefix("torch.")
    return name if kv_cache_dtype == "auto" else f"{name}/{kv_cache_dtype}"


def _device_layout(pool: Any) -> str:
    """How numbers lie in a page on the device, where that may differ (`SGLANG_USE_HND_KVCACHE`): a host pool has them as they come."""
    of_buffers = [getattr(info.buffers, "layout", None) for info in getattr(pool, "_buffer_infos", ())]
    return "+".join(sorted({layout.value for layout in of_buffers if layout is not None}))


def _kv_cache_dtype() -> str:
    """Of the engine in this process, since neither the pool nor the configuration has it; "auto" where there is none."""
    try:
        return str(get_server_args().kv_cache_dtype)
    except (AttributeError, LookupError, RuntimeError, ValueError):
        return "auto"


def check_settings(extra: Mapping[str, Any], others: frozenset[str] = frozenset()) -> None:
    """Raises: ValueError: a setting that nobody knows."""
    unknown = sorted(set(extra) - OUR_KEYS - others)
    if unknown:
        raise ValueError(f"FlatCake knows no setting {', '.join(unknown)}; known: {', '.join(sorted(OUR_KEYS))}")


def client_of(extra: Mapping[str, Any], name: str) -> Client:
    """The client that settings name. Raises: ValueError: an endpoint that names nothing."""
    return connect(
        extra.get("endpoint"),
        timeout_s=float(extra.get("timeout_s", TIMEOUT_S)),
        transfer_timeout_s=float(extra.get("transfer_timeout_s", TRANSFER_TIMEOUT_S)),
        name=name,
    )
