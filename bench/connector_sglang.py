"""SGLang through FlatCake, beside the bare client: the same pages of the same session, taking turns.

    storage    batch_exists and batch_get_v1, 128 pages at a time, into SGLang's own host pool   / lookup, restore and wait
    linker     lookup, load, every layer waited for, into SGLang's own device pool (on the CPU)  / of all pages at once

The CPU time of both is compared too: it says what the connector itself costs, also where the disk or others decide how long it takes.

Pages are in SSD files, all pools touched before. Needs SGLang: make .venv-sglang/.stamp, then
.venv-sglang/bin/python bench/connector_sglang.py [--dir DIR]
"""

from __future__ import annotations

import hashlib
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
from _support import GIB, MIB, Compared, Node, Report, arguments, cpu_s, disk_directory, say, take_turns, timed_s

from flatcake_client.engines.sglang_pages import PageStore

try:
    import torch

    # SGLang's imports want torchvision's operators; tests/engines/sglang/conftest.py says more.
    operators = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        operators.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
        from sglang.srt.mem_cache.hicache_storage import (
            STORAGE_BATCH_SIZE,
            HiCacheStorageConfig,
            HiCacheStorageExtraInfo,
            PoolName,
            PoolTransfer,
        )
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
        from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
        from sglang.srt.mem_cache.storage import StorageBackendFactory
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    from flatcake_client.engines.sglang_linker import FlatCakeLinker
except (ImportError, RuntimeError) as error:
    print(f"nothing measured: {error}. Run: make .venv-sglang/.stamp; .venv-sglang/bin/python {sys.argv[0]}")
    sys.exit(0)

LAYERS, PAGE_TOKENS, HEADS, DIM = 32, 64, 4, 128  # 4 MiB a page in bfloat16: a rank of two of Llama-3-8B
PAGE_BYTES = 2 * LAYERS * PAGE_TOKENS * HEADS * DIM * 2
TIMEOUT_S = 60.0


class Pages:
    """Which pages of a pool, in no order, and what SGLang calls them."""

    def __init__(self, name: str, count: int) -> None:
        self.keys = [hashlib.sha256(f"{name} {page}".encode()).hexdigest() for page in range(count)]
        self.slots = np.random.default_rng(0).permutation(np.arange(1, count + 1))
        self.rows = torch.from_numpy((self.slots[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)).reshape(-1))

    def restore_bare(self, store: PageStore) -> None:
        """The client as it is: one lookup, one restore."""
        keys = store.space.keys_of_hashes([key.encode() for key in self.keys])
        with store.space.lookup(keys) as hit, hit.restore(store.planes, self.slots) as restore:
            assert restore.wait() == len(keys)


class Storage:
    """HiCache's controller: asks and reads in batches, and tells of the pages before."""

    def __init__(self, endpoint: str, layout: str, count: int) -> None:
        device = tuple(torch.zeros(PAGE_TOKENS, HEADS, DIM, dtype=torch.bfloat16) for _ in range(LAYERS))
        pointers = torch.tensor([buffer.data_ptr() for buffer in device], dtype=torch.uint64)
        info = MHABufferInfo(
            buffers=KVBuffers(
                k=device, v=device, k_data_ptrs=pointers, v_data_ptrs=pointers, layout=KVBufferLayout.NHD
            ),
            page_size=PAGE_TOKENS, head_num=HEADS, head_dim=DIM, v_head_dim=DIM, dtype=torch.bfloat16,
            device=torch.device("cpu"),
        )  # fmt: skip
        with host_memory_budget_scope(1 << 40):
            self.pool = MHATokenToKVPoolHost(
                info, 1.0, 0, PAGE_TOKENS, layout, pin_memory=False, device_capacity_tokens=PAGE_TOKENS,
                start_layer=0, end_layer=LAYERS, host_token_capacity=(count + 1) * PAGE_TOKENS,
            )  # fmt: skip
        extra = {
            "backend_name": "flatcake", "module_path": "flatcake_client.engines.sglang",
            "class_name": "FlatCakeStorage", "interface_v1": 1, "endpoint": endpoint, "transfer_timeout_s": TIMEOUT_S,
        }  # fmt: skip
        config = HiCacheStorageConfig(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
            enable_storage_metrics=False, is_page_first_layout=layout == "page_first", model_name="bench",
            extra_config=extra,
        )  # fmt: skip
        self.backend = StorageBackendFactory.create_backend("dynamic", config, self.pool)
        self.backend.register_mem_pool_host(self.pool)
        self.memory = [self.pool.kv_buffer]
        self.store: PageStore = self.backend._stores["kv"]  # noqa: SLF001 - the bare client works on the same pages
        self.pages = Pages(layout, count)

    def batches(self) -> Any:
        for start in range(0, len(self.pages.keys), STORAGE_BATCH_SIZE):
            part = slice(start, start + STORAGE_BATCH_SIZE)
            rows = self.pages.rows[part.start * PAGE_TOKENS : part.stop * PAGE_TOKENS]
            yield self.pages.keys[part], rows, HiCacheStorageExtraInfo(prefix_keys=self.pages.keys[:start])

    def write(self) -> None:
        for keys, rows, info in self.batches():
            assert all(self.backend.batch_set_v1(keys, rows, info))

    def read(self) -> None:
        for keys, _, info in self.batches():
            assert self.backend.batch_exists(keys, info) == len(keys)
        for keys, rows, info in self.batches():
            assert all(self.backend.batch_get_v1(keys, rows, info))

    def close(self) -> None:
        self.backend.close()


class Linker:
    """The tree and the scheduler: a lookup, a load, every layer waited for."""

    def __init__(self, endpoint: str, count: int) -> None:
        pool = MHATokenToKVPool(count * PAGE_TOKENS, PAGE_TOKENS, torch.bfloat16, HEADS, DIM, LAYERS, "cpu", False)
        params = SimpleNamespace(
            page_size=PAGE_TOKENS, token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool), pp_rank=0,
            pp_size=1, attn_cp_rank=0, attn_cp_size=1, attn_tp_cache_group=None, tp_cache_group=None,
        )  # fmt: skip
        self.linker = FlatCakeLinker(
            SimpleNamespace(model_path="bench"), params, components={ComponentType.FULL},
            extra_config={"endpoint": endpoint, "transfer_timeout_s": TIMEOUT_S},
        )  # fmt: skip
        self.memory = [*pool.k_buffer, *pool.v_buffer]
        self.store: PageStore = self.linker._pools[PoolName.KV].store  # noqa: SLF001 - as above
        self.pages = Pages("linker", count)

    def _transfers(self) -> list[Any]:
        return [PoolTransfer(PoolName.KV, keys=self.pages.keys, device_indices=self.pages.rows)]

    def write(self) -> None:
        assert self.linker.offload(self._transfers(), "bench")
        self.linker._offloads.settle(TIMEOUT_S)  # noqa: SLF001 - nothing else waits for it here
        assert self.linker.pop_completed_offload()

    def read(self) -> None:
        assert self.linker.lookup("r", self._transfers())[-1] == len(self.pages.keys)
        assert self.linker.load("r", self._transfers())
        index = self.linker.start_layer_wise_loading()
        self.linker.layer_done_counter.set_consumer(index)
        for layer in range(LAYERS):
            self.linker.layer_done_counter.wait_until(layer)
        assert self.linker.finish_layer_wise_loading(index)

    def close(self) -> None:
        self.linker.close()


def bits(plane: Any) -> Any:
    """A plane as integers: random bytes are not always numbers."""
    return plane if isinstance(plane, np.ndarray) else plane.view(torch.int16).numpy()


def measure(name: str, way: Any, rounds: int, report: Report) -> None:
    """Restore by the connector and by the bare client, in turns; what comes is compared with what was stored."""
    for number, memory in enumerate(way.memory):
        memory.view(torch.uint8).random_(0, 256, generator=torch.Generator().manual_seed(number))
    way.write()
    stored = [bits(plane)[way.pages.slots] for plane in way.store.planes]
    for read in (way.read, lambda: way.pages.restore_bare(way.store)):
        for memory in way.memory:
            memory.zero_()
        read()
        for plane, expected in zip(way.store.planes, stored, strict=True):
            assert np.array_equal(bits(plane)[way.pages.slots], expected), "other bytes came back"
    del stored
    say(f"taking turns: bare client, {name}")
    bare_s, ours_s = take_turns(
        rounds, lambda _: timed_s(lambda: way.pages.restore_bare(way.store)), lambda _: timed_s(way.read)
    )
    compared = Compared.of(len(way.pages.keys) * PAGE_BYTES, bare_s, ours_s)
    report.add(f"restore through the connector / bare client, {name}", compared.ratio, 0.95, detail=compared)
    bare_s, ours_s = take_turns(
        rounds, lambda _: cpu_s(lambda: way.pages.restore_bare(way.store)), lambda _: cpu_s(way.read)
    )
    report.add(f"its CPU time / the bare client's, {name}", min(ours_s) / min(bare_s), 1.05, at_most=True)
    way.close()


def main() -> None:
    args = arguments(
        __doc__,
        pages=(256, f"pages of {PAGE_BYTES // MIB} MiB, two batches of SGLang's"),
        rounds=(7, "how often each takes its turn"),
    )
    size_bytes = args.pages * PAGE_BYTES
    report = Report(f"SGLang, {args.pages} pages of {PAGE_TOKENS} tokens, SSD")
    with disk_directory(args.dir, 3 * size_bytes) as directory, Node(directory, ssd_bytes=4 * size_bytes + GIB) as node:
        for layout in ("page_first", "layer_first"):
            measure(f"storage, {layout}", Storage(node.endpoint, layout, args.pages), args.rounds, report)
        measure("linker", Linker(node.endpoint, args.pages), args.rounds, report)
    report.show(as_json=args.json)


if __name__ == "__main__":
    main()
