"""LMCache through FlatCake, beside the bare client: the same chunks, the same daemon, taking turns.

    server mode   submit_store_task, event, result; submit_load_task, event, result      / begin_turn, write_layer, commit;
    in-process    batched_put; batched_get, with LMCache's memory objects made for it     / lookup, restore, wait
    contiguity    chunks of 1 MiB stored in batches and loaded at once, beside each stored by itself

Chunks are in SSD files, all buffers touched before. Needs LMCache: make .venv-lmcache/.stamp, then
.venv-lmcache/bin/python bench/connector_lmcache.py [--dir DIR]
"""

from __future__ import annotations

import asyncio
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from _support import GIB, MIB, Compared, Node, Report, arguments, cpu_s, disk_directory, say, take_turns, timed_s

import flatcake_client as fc
from flatcake_client.engines.lmcache_chunks import ChunkKind, ChunkStore, pages, planes_of
from flatcake_transport.window import aligned_buffer

try:
    import torch
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
    from lmcache.v1.metadata import LMCacheMetadata

    from flatcake_client.engines.lmcache import FlatCakeConnector
    from flatcake_client.engines.lmcache_l2 import FlatCakeL2Adapter, FlatCakeL2AdapterConfig
except ImportError as error:
    print(f"nothing measured: {error}. Run: make .venv-lmcache/.stamp; .venv-lmcache/bin/python {sys.argv[0]}")
    sys.exit(0)

LAYERS, CHUNK_TOKENS, WIDTH = 32, 256, 512  # 16 MiB a chunk in bfloat16: half a Llama-3-8B's
CHUNK_BYTES = 2 * LAYERS * CHUNK_TOKENS * WIDTH * 2
SMALL_BYTES, SMALL_CHUNKS, BATCH = MIB, 256, 32
DEADLINE_S = 60.0


class Chunks:
    """Buffers for a batch, and LMCache's objects over them."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.memory = aligned_buffer(count * CHUNK_BYTES)
        self.memory[:] = seed
        if seed:
            noise = np.random.default_rng(seed).integers(0, 256, CHUNK_BYTES, np.uint8)
            for at in range(count):
                self.memory[at * CHUNK_BYTES : (at + 1) * CHUNK_BYTES] = np.roll(noise, at)
        self.addresses = [self.memory.ctypes.data + at * CHUNK_BYTES for at in range(count)]
        self.objects = [
            memory_object(torch.from_numpy(self.memory[at * CHUNK_BYTES : (at + 1) * CHUNK_BYTES]))
            for at in range(count)
        ]


def memory_object(data: Any) -> Any:
    shape, dtype = torch.Size([2, LAYERS, CHUNK_TOKENS, WIDTH]), torch.bfloat16
    meta = MemoryObjMetadata(
        shape=shape, dtype=dtype, address=0, phy_size=CHUNK_BYTES, ref_count=1, fmt=MemoryFormat.KV_2LTD
    )
    return TensorMemoryObj(data, meta, None)


class Bare:
    """The client as an engine would call it, a chunk a block."""

    def __init__(self, client: fc.Client, source: Chunks, target: Chunks) -> None:
        self._space = client.open_space(
            model="bare", dtype="bfloat16", block_tokens=CHUNK_TOKENS, plane_bytes=planes_of(CHUNK_BYTES)
        )
        self._source, self._target = source, target

    def keys(self, number: int) -> Any:
        return self._space.keys_of_hashes([b"%d/%d" % (number, at) for at in range(len(self._source.objects))])

    def store(self, number: int) -> None:
        rows, slots = pages(self._source.addresses, CHUNK_BYTES)
        with self._space.begin_turn(self.keys(number)) as turn:
            for layer, source in enumerate(rows):
                turn.write_layer(layer, source, slots)
            turn.commit()

    def load(self, number: int) -> Any:
        rows, slots = pages(self._target.addresses, CHUNK_BYTES)
        with self._space.lookup(self.keys(number)) as hit:
            assert hit.restore(rows, slots).wait() == len(slots)
        return self._target.memory


class ServerMode:
    """LMCache's controllers: submit, wait for the event, read the result."""

    def __init__(self, endpoint: str, source: Chunks, target: Chunks) -> None:
        self.adapter = FlatCakeL2Adapter(FlatCakeL2AdapterConfig(endpoint=endpoint))
        self._source, self._target = source, target

    def keys(self, number: int) -> list[Any]:
        return [ObjectKey(b"%08d%08d" % (number, at), "server", 0) for at in range(len(self._source.objects))]

    def store(self, number: int) -> None:
        task = self.adapter.submit_store_task(self.keys(number), self._source.objects)
        done = _result(self.adapter.get_store_event_fd(), lambda: self.adapter.pop_completed_store_tasks().get(task))
        assert done.is_successful()

    def load(self, number: int) -> Any:
        task = self.adapter.submit_load_task(self.keys(number), self._target.objects)
        done = _result(self.adapter.get_load_event_fd(), lambda: self.adapter.query_load_result(task))
        assert done.popcount() == len(self._target.objects)
        return self._target.memory


def _result(fd: int, ask: Callable[[], Any]) -> Any:
    while (answer := ask()) is None:
        assert select.select([fd], [], [], DEADLINE_S)[0]
        os.eventfd_read(fd)
    return answer


class InProcess:
    """The remote connector on an event loop of its own, with a pool that gives the target's objects."""

    def __init__(self, endpoint: str, source: Chunks, target: Chunks) -> None:
        self._source, self._target = source, target
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        metadata = LMCacheMetadata(
            "in-process", 1, 1, 0, 0, torch.bfloat16, (LAYERS, 2, CHUNK_TOKENS, 1, WIDTH), chunk_size=CHUNK_TOKENS
        )
        self._free: list[Any] = []
        config = SimpleNamespace(
            use_layerwise=False,
            blocking_timeout_secs=DEADLINE_S,
            pre_caching_hash_algorithm="sha256_cbor",
            extra_config={"remote_storage_plugin.flatcake.endpoint": endpoint},
        )
        memory = SimpleNamespace(metadata=metadata, allocate=lambda *_, **__: self._free.pop())
        self.connector = FlatCakeConnector(self._loop, memory, config)

    def keys(self, number: int) -> list[Any]:
        hashes = [number << 16 | at for at in range(len(self._source.objects))]
        return [CacheEngineKey("in-process", 1, 0, each, torch.bfloat16) for each in hashes]

    def store(self, number: int) -> None:
        self._wait(self.connector.batched_put(self.keys(number), self._source.objects))

    def load(self, number: int) -> Any:
        self._free[:] = self._target.objects[::-1]
        got = self._wait(self.connector.batched_get(self.keys(number)))
        assert None not in got
        return self._target.memory

    def _wait(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(DEADLINE_S)

    def close(self) -> None:
        self._wait(self.connector.close())
        self._loop.call_soon_threadsafe(self._loop.stop)


def throughput(node: Node, chunks: int, rounds: int, report: Report) -> None:
    source, target = Chunks(chunks, seed=1), Chunks(chunks)
    size_bytes = chunks * CHUNK_BYTES
    with fc.connect(node.endpoint) as client:
        bare = Bare(client, source, target)
        server, inside = ServerMode(node.endpoint, source, target), InProcess(node.endpoint, source, target)
        ways: Sequence[Any] = (bare, server, inside)
        for way in ways:
            way.store(0)
            assert np.array_equal(way.load(0), source.memory), "other bytes came back"
            target.memory[:] = 0
        say(f"taking turns: {chunks} chunks of {CHUNK_BYTES // MIB} MiB, bare client, server mode, in-process")
        stores = take_turns(rounds, *[_timed(way.store, 1) for way in ways])
        loads = take_turns(2 * rounds, *[_timed(way.load, 0, over=rounds) for way in ways])
        for name, at in (("server mode", 1), ("in-process", 2)):
            for verb, seconds in (("store", stores), ("load", loads)):
                compared = Compared.of(size_bytes, seconds[0], seconds[at])
                report.add(f"{verb} through the connector / bare client, {name}", compared.ratio, 0.95, detail=compared)
        cpu = take_turns(rounds, *[_cpu(way.load) for way in ways])
        for name, at in (("server mode", 1), ("in-process", 2)):
            share = min(cpu[at]) / min(cpu[0])
            report.add(f"CPU time of a load / the bare client's, {name}", share, 1.05, at_most=True)
        server.adapter.close()
        inside.close()


def _timed(verb: Callable[[int], object], shift: int, over: int = 1 << 30) -> Callable[[int], float]:
    """Seconds of a verb on the round's chunks; loads go over those of all rounds."""
    return lambda number: timed_s(lambda: verb((number + 1 if shift else number) % (over + 1)))


def _cpu(verb: Callable[[int], object]) -> Callable[[int], float]:
    return lambda number: cpu_s(lambda: verb(number))


def contiguity(node: Node, report: Report) -> None:
    """What it is worth that a batch is one turn."""
    kind = ChunkKind("contiguity", "uint8", "bench", SMALL_BYTES, CHUNK_TOKENS)
    memory = aligned_buffer(SMALL_CHUNKS * SMALL_BYTES)
    memory[:] = 7
    addresses = [memory.ctypes.data + at * SMALL_BYTES for at in range(SMALL_CHUNKS)]
    say(f"{SMALL_CHUNKS} chunks of {SMALL_BYTES // MIB} MiB, in batches of {BATCH} and each by itself")
    for batch, what in ((BATCH, f"batches of {BATCH}"), (1, "each chunk by itself")):
        names = [b"%d/%d" % (batch, at) for at in range(SMALL_CHUNKS)]
        with fc.connect(node.endpoint) as client:
            store = ChunkStore(client)
            if batch > 1:
                store.chains.learn(names)  # LMCache has asked for the whole prompt before

            def put(store: Any = store, names: Any = names, batch: int = batch) -> None:
                for at in range(0, SMALL_CHUNKS, batch):
                    end = at + batch
                    store.store(kind, names[at:end], addresses[at:end], deadline_s=time.monotonic() + DEADLINE_S)

            def get(store: Any = store, names: Any = names) -> None:
                deadline_s = time.monotonic() + DEADLINE_S
                for run in store.search(kind, names, pin=True, deadline_s=deadline_s):
                    mine = [addresses[at] for at in run.positions]
                    assert store.bring(kind, run, mine, deadline_s=deadline_s) == len(mine)

            stored_s = timed_s(put)
            before = client.stats().read_commands
            loaded_s = timed_s(get)
            reads = client.stats().read_commands - before
            for _ in range(2):
                loaded_s = min(loaded_s, timed_s(get))
        size_bytes = SMALL_CHUNKS * SMALL_BYTES
        report.add(f"store, GB/s, {what}", size_bytes / stored_s / 1e9)
        report.add(f"load, GB/s, {what}", size_bytes / loaded_s / 1e9, detail=f"{reads} read commands")


def main() -> None:
    args = arguments(__doc__, chunks=(16, "chunks of 16 MiB in a batch"), rounds=(5, "times each way stores"))
    report = Report("LMCache on FlatCake")
    size_bytes = args.chunks * CHUNK_BYTES * 3 * (args.rounds + 1) + 2 * SMALL_CHUNKS * SMALL_BYTES
    with (
        disk_directory(args.dir, 2 * size_bytes) as directory,
        Node(directory, ssd_bytes=2 * size_bytes + GIB) as node,
    ):
        throughput(node, args.chunks, args.rounds, report)
        contiguity(node, report)
    report.show(as_json=args.json)


if __name__ == "__main__":
    main()
