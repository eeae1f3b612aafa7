"""SGLang's device pages straight to and from FlatCake: a `UnifiedCacheLinker`, with no host tier in between.

    match   lookup -> every length that all pools can restore; what was found stays pinned, for its load
    load    queued; a batch of them starts together, and layers are announced as they land, so prefill runs meanwhile
    offload queued in order; one turn a pool, with SGLang's session id as the session

SGLang aborts requests whose load fails, so a load must not fail for want of a page: a lookup's lease is kept until the load, the
next lookup of the request, or `PINS_MAX` later ones; one that expired is looked up again. A load of many requests brings all but
the last few whole before the first layer is announced: each restore under way holds a window of bounded staging, and they share
one thread.

SGLang tells only the pages that a device lacks, so which page came before which is kept in a bounded map: it is what lets a turn
continue the chain before it. What the map does not know is stored as a chain of its own, in the session that SGLang names.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, takewhile
from typing import Any, Final

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
    DevicePoolEntry,
    DevicePoolGroup,
    resolve_hybrid_device_pool_group,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker

from flatcake_client import Hit, Unavailable
from flatcake_client.background import Crew
from flatcake_client.engines.edge import Edge
from flatcake_client.engines.sglang import LAYOUT, borders, check_settings, client_of, dtype_of
from flatcake_client.engines.sglang_model import before_sleep, served
from flatcake_client.engines.sglang_pages import PageStore, Slots

log = logging.getLogger(__name__)

PINS_MAX: Final = 256  # requests that were looked up and are not loaded yet
CHAIN_PAGES_MAX: Final = 1 << 18
LAYERED_MAX: Final = 4  # restores that go layer by layer at once; a window each, of some twelve
QUEUE_MAX: Final = 1024
SETTLE_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class LinkerStats:
    """Counts since the linker was made. Loads are of batches of requests; one that failed is among the loads."""

    lookups: int = 0
    lookups_failed: int = 0
    pages_found: int = 0
    loads: int = 0
    loads_failed: int = 0
    offloads: int = 0
    offloads_failed: int = 0
    offloads_dropped: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Pinned:
    """What a lookup found of one pool: block `first` of the hit is the first of `keys`."""

    keys: tuple[str, ...]
    hit: Hit
    first: int

    def has(self, keys: Sequence[str]) -> bool:
        return (
            self.hit.lease.alive()
            and self.keys[: len(keys)] == tuple(keys)
            and self.hit.blocks - self.first >= len(keys)
        )


class DevicePool:
    """One physical pool of device pages: its planes in the order of the layers, and the store they go to."""

    def __init__(self, entry: Any, open_store: Callable[[list[Any], str, int], PageStore]) -> None:
        planes: list[Any] = []
        self.planes_of: dict[int, int] = {}  # by layer: planes up to and with it
        self.entry = entry
        for layer in sorted(entry.layer_mapping):
            mapped = entry.layer_mapping[layer]
            for component in entry.components:
                for index in (mapped,) if isinstance(mapped, int) else mapped:
                    planes.append(component[index])
            self.planes_of[layer] = len(planes)
        rows = entry.buffer_meta[0][0][2] * len(planes[0]) // planes[0].nbytes
        self.rows_a_page = int(rows)
        self.store = open_store(
            [plane[: len(plane) // rows * rows].unflatten(0, (-1, rows)) for plane in planes],
            str(planes[0].dtype).removeprefix("torch."),
            int(entry.page_size),
        )

    def slots(self, indices: torch.Tensor) -> Slots:
        """Raises: ValueError: not aligned pages of the pool."""
        return np.asarray(self.entry.prepare_locations(indices), np.int64) // self.rows_a_page


class FlatCakeLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """Made by SGLang, one a worker; its scheduler thread calls."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        """Works without a daemon. Raises: ValueError: settings that make no sense, or pools that SGLang cannot link."""
        extra = dict(extra_config or {})
        check_settings(extra)
        if getattr(server_args, "enable_linker_mla_dedup", False):
            raise ValueError("FlatCake's linker reads on every rank: start without --enable-linker-mla-dedup")
        self.forward_stream = forward_stream
        self.pool_group = pool_group_of(params, components)
        self.pools = self.pool_group.entry_map
        rank, size = _rank_of(params)
        replicated = self.pool_group.rank_replicated
        self._owner = not replicated or rank == 0
        self.client = client_of(extra, f"sglang-linker-tp{rank}-pp{params.pp_rank}")

        model = served()
        self._weights = model.weights
        weights_name = model.weights_name(str(extra.get("weights", "")))

        def open_store(name: str, planes: list[Any], dtype: str, page_tokens: int) -> PageStore:
            return PageStore(
                self.client, planes, model=model.model or server_args.model_path, page_tokens=page_tokens,
                dtype=dtype_of(dtype, str(getattr(server_args, "kv_cache_dtype", "auto"))),
                weights_name=weights_name, weights=model.weights, shards=1 if replicated else size, shard=0 if replicated else rank,
                layout=f"{LAYOUT} device {name} pp {params.pp_rank}/{params.pp_size} "
                f"cp {params.attn_cp_rank}/{params.attn_cp_size}",
            )  # fmt: skip

        self._pools = {
            name: DevicePool(entry, partial(open_store, f"{name} {getattr(entry.device_pool, 'kv_cache_layout', '')}"))
            for name, entry in self.pools.items()
        }
        self._device = next(iter(self.pools.values())).kv_buffer[0].device
        self.layer_done_counter = LayerWiseLoadCounter(self.pool_group.num_layers)
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._loads = Crew("sglang-load", 1, QUEUE_MAX)
        self._offloads = Crew("sglang-offload", 1, QUEUE_MAX)  # one: results are in the order of the calls
        self._results: deque[Future[bool]] = deque()  # one an offload, in the order of the calls
        self._pending: dict[str, list[PoolTransfer]] = {}
        self._pins: OrderedDict[str, dict[str, Pinned]] = OrderedDict()
        self._before: OrderedDict[str, str] = OrderedDict()  # page -> the page before it
        self._lock = threading.Lock()
        self._edge = Edge(log, "its pages are computed")
        before_sleep(self._settle)
        log.info("FlatCake links pools %s of %d layers", ", ".join(map(str, self.pools)), self.pool_group.num_layers)

    # -- match ---------------------------------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Every number of pages, from the first asked for on, that all pools can restore."""
        none: list[int] = []
        lengths = self._edge.attempt("a lookup", none, lambda: self._lookup(rid, transfers))
        if not lengths:
            self._unpin(rid)
        self._edge.count(lookups=1, pages_found=lengths[-1] if lengths else 0)
        return lengths

    def _lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        self._unpin(rid)
        expanded = self.pool_group.resolve_transfers(transfers)
        keys = next((list(each.keys) for each in transfers if each.name == PoolName.KV), [])
        if not expanded or not keys:
            return []
        prefix = self._learn(keys)
        pins = self._pins[rid] = {}
        lengths = set(range(1, len(keys) + 1))
        for each in expanded:
            store = self._pools[each.name].store
            if each.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                lengths &= borders(store, keys, max(1, len(each.keys or ())), lengths)
            else:
                pin = pins[each.name] = Pinned(tuple(keys), *store.find(prefix, keys, pin=True))
                lengths &= set(range(1, pin.hit.blocks - pin.first + 1))
        while len(self._pins) > PINS_MAX:
            self._unpin(next(iter(self._pins)))
        return sorted(lengths)

    def _unpin(self, rid: str) -> None:
        """Releasing is a call to the daemon, so not on this thread; where it finds no room, the lease ends by itself."""
        for pin in self._pins.pop(rid, {}).values():
            self._loads.submit(pin.hit.release)

    # -- load ----------------------------------------------------------------------------------------------------------

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Queue a load for the next batch. The answer is the same on all ranks: they are given the same, and weights change on all."""

        def resolve() -> list[PoolTransfer]:
            self._weights.salt()
            found: list[PoolTransfer] = self.pool_group.resolve_transfers(
                transfers, allow_partial=True, allow_missing_kv=True
            )
            return found

        none: list[PoolTransfer] = []
        expanded = self._edge.attempt("a request to load", none, resolve)
        if not expanded or rid in self._pending:
            return False
        self._pending[rid] = expanded
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        """Take a load out of the batch that has not started; what it had found is released."""
        self._unpin(rid)
        return self._pending.pop(rid, None) is not None

    def start_layer_wise_loading(self) -> int:
        """Start what is queued; the index to wait with, -1 if that is nothing."""
        if not self._pending:
            return -1
        pending, self._pending = self._pending, {}
        pins = {rid: self._pins.pop(rid, {}) for rid in pending}
        index = int(self.layer_done_counter.update_producer())
        self._edge.count(loads=1)
        try:
            if not self._loads.submit(partial(self._load_batch, index, pending, pins, self._ready())):
                raise Unavailable("too many loads wait")  # noqa: TRY301 - the forward waits for the layers, whatever fails
        except Exception as error:  # noqa: BLE001 - an engine's edge: who waits for a layer must hear of it
            self._not_loaded(index, error)
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Return when a batch writes no more; whether all of it landed."""
        return bool(self.layer_done_counter.finish(counter_index))

    def _load_batch(
        self, index: int, pending: dict[str, list[PoolTransfer]], pins: dict[str, dict[str, Pinned]], ready: list[Any]
    ) -> None:
        error: Exception | None = None
        try:
            for event in ready:
                event.synchronize()
            with ExitStack() as stack:
                for found in pins.values():
                    for pin in found.values():
                        stack.callback(pin.hit.release)
                self._bring(index, pending, pins, stack)
        except Exception as failure:  # noqa: BLE001 - a thread's edge: SGLang must hear of it, or it waits for ever
            error = failure
        if error is not None:
            self._not_loaded(index, error)
        else:
            self._edge.worked("a load")

    def _not_loaded(self, index: int, error: Exception) -> None:
        self._edge.failed("a load", error)
        self.layer_done_counter.fail(index, error)

    def _bring(
        self, index: int, pending: dict[str, list[PoolTransfer]], pins: dict[str, dict[str, Pinned]], stack: ExitStack
    ) -> None:
        """Raises: FlatCakeError: not everything came. Restores are closed when the stack is: then nothing is written."""
        restores = []
        for rid, transfers in pending.items():
            for each in transfers:
                pool, keys = self._pools[each.name], list(each.keys)
                pin = pins[rid].get(each.name)
                if pin is None or not pin.has(keys):
                    trailing = each.hit_policy == PoolHitPolicy.TRAILING_PAGES
                    pin = Pinned(
                        tuple(keys), *pool.store.find(() if trailing else self._chain(keys[0]), keys, pin=True)
                    )
                    stack.callback(pin.hit.release)
                if not pin.has(keys):
                    raise Unavailable(f"{pin.hit.blocks - pin.first} of {len(keys)} pages are left of what was found")
                restore = pool.store.restore(pin.hit, pin.first, pool.slots(each.host_indices))
                restores.append((pool, stack.enter_context(restore)))
        for pool, restore in restores[:-LAYERED_MAX]:
            restore.wait_layer(len(pool.store.planes) - 1)
        for layer in range(self.pool_group.num_layers):
            for pool, restore in restores[-LAYERED_MAX:]:
                if layer in pool.planes_of:
                    restore.wait_layer(pool.planes_of[layer] - 1)
            self.layer_done_counter.complete(index, layer)

    # -- offload -------------------------------------------------------------------------------------------------------

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Queue pages of all pools for storing; False if there is nothing to. Its result comes with `pop_completed_offload`."""
        none: list[PoolTransfer] = []
        expanded = self._edge.attempt(
            "a request to offload", none, lambda: self.pool_group.resolve_transfers(transfers, allow_partial=True)
        )
        if not expanded:
            return False
        # From here on it has a result: SGLang reduces the results of ranks one by one, so none may lack.
        result: Future[bool] = Future()
        self._results.append(result)
        if not self._owner:
            result.set_result(True)  # another rank has the same bytes and stores them
            return True

        def queue() -> bool:
            prefix = self._learn(next((list(each.keys) for each in transfers if each.name == PoolName.KV), []))
            return self._offloads.submit(partial(self._offload, result, expanded, prefix, session_id, self._ready()))

        queued = self._edge.attempt("a request to offload", False, queue)
        self._edge.count(**{"offloads" if queued else "offloads_dropped": 1})
        if not queued:
            result.set_result(False)
        return True

    def _offload(
        self,
        result: Future[bool],
        transfers: list[PoolTransfer],
        prefix: list[str],
        session_id: str | None,
        ready: list[Any],
    ) -> None:
        def store_all() -> bool:
            for event in ready:
                event.synchronize()
            for each in transfers:
                pool = self._pools[each.name]
                trailing = each.hit_policy == PoolHitPolicy.TRAILING_PAGES
                slots = pool.slots(each.host_indices)
                pool.store.store(() if trailing else prefix, list(each.keys), slots, session_id)
            return True

        result.set_result(self._edge.attempt("an offload", False, store_all))

    def num_completed_offloads(self) -> int:
        return sum(1 for _ in takewhile(Future.done, self._results))

    def pop_completed_offload(self) -> bool:
        """The result of the oldest offload: every pool has all its pages stored."""
        return self._edge.attempt("a request to offload", False, lambda: self._results.popleft().result(0))

    # -- the end, and what all use -------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Return when nothing moves any more; results that were not taken are forgotten. What is stored stays."""
        self._pending.clear()
        for rid in list(self._pins):
            self._unpin(rid)
        if self._settle():
            self._weights.flushed()
        self._results.clear()
        self.layer_done_counter.reset()

    def _settle(self) -> bool:
        """Wait until nothing moves; whether that is so."""
        settled = self._loads.settle(SETTLE_TIMEOUT_S) and self._offloads.settle(SETTLE_TIMEOUT_S)
        if not settled:
            log.error("transfers are under way after %.0f s", SETTLE_TIMEOUT_S)
        return settled

    def close(self) -> None:
        """Twice is fine."""
        self.reset()
        self._loads.close(SETTLE_TIMEOUT_S)
        self._offloads.close(SETTLE_TIMEOUT_S)
        self.client.close()

    def stats(self) -> LinkerStats:
        failed = self._edge.failures
        return LinkerStats(
            lookups_failed=failed("a lookup"), loads_failed=failed("a load", "a request to load"),
            offloads_failed=failed("an offload", "a request to offload"),
            **self._edge.counts(),
        )  # fmt: skip

    def _ready(self) -> list[Any]:
        """Events after which the pages may be touched; pages of a CPU may be at once."""
        return [] if self._device.type == "cpu" else list(self.record_offload_ready())

    def _learn(self, keys: Sequence[str]) -> list[str]:
        """Remember in which order pages come; the chain before the first of them, as far as it is known."""
        with self._lock:
            for before, page in pairwise(keys):
                self._before[page] = before
                self._before.move_to_end(page)
            while len(self._before) > CHAIN_PAGES_MAX:
                self._before.popitem(last=False)
        return self._chain(keys[0]) if keys else []

    def _chain(self, page: str) -> list[str]:
        chain: list[str] = []
        with self._lock:
            while (before := self._before.get(page)) is not None and len(chain) < CHAIN_PAGES_MAX:
                chain.append(before)
                page = before
        return chain[::-1]


def pool_group_of(params: Any, components: Any) -> Any:
    """SGLang's own view of a model's device pools; plain MHA and MLA pools, for which 0.5.23 has none, are put into one here.

    Raises: ValueError: pools that cannot be linked.
    """
    kvcache, page_tokens = params.token_to_kv_pool_allocator.get_kvcache(), params.page_size
    if type(kvcache) is MLATokenToKVPool:
        buffers = list(kvcache.kv_buffer)
        mapping: dict[int, Any] = {layer: layer for layer in range(len(buffers))}
    elif type(kvcache) is MHATokenToKVPool and kvcache.kv_cache_layout == "nhd" and kvcache.k_scale_buffer is None:
        buffers = [*kvcache.k_buffer, *kvcache.v_buffer]
        layers = len(kvcache.k_buffer)
        mapping = {layer: (layer, layers + layer) for layer in range(layers)}
    else:
        return resolve_hybrid_device_pool_group(
            kvcache=kvcache, page_size=page_tokens, params=params, components=components
        )
    if getattr(params, "mtp_draft_device_pools", ()) or getattr(params, "sidecar_draft_device_pools", ()):
        raise ValueError("a draft model's KV beside a plain pool is not linked: start without speculative decoding")
    entry = DevicePoolEntry(
        name=PoolName.KV, indices_from_pool=PoolName.KV, device_pool=kvcache, components=[buffers],
        layer_mapping=mapping, page_size=page_tokens, rows_are_pages=False,
    )  # fmt: skip
    replicated = type(kvcache) is MLATokenToKVPool
    return DevicePoolGroup([entry], len(mapping), page_tokens, rank_replicated=replicated)


def _rank_of(params: Any) -> tuple[int, int]:
    """Of this worker in its tensor-parallel group, and the size of that."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0, 1
    group = params.attn_tp_cache_group or params.tp_cache_group
    return torch.distributed.get_rank(group=group), torch.distributed.get_world_size(group=group)
