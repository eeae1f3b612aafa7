"""LMCache inside an engine, on FlatCake: its remote connector. Translates; `lmcache_chunks.py` has the theory.

    extra_config: {"remote_storage_plugin.flatcake.module_path": "flatcake_client.engines.lmcache",
                   "remote_storage_plugin.flatcake.class_name": "FlatCakeConnectorAdapter"}
    remote_storage_plugins: ["flatcake"]

LMCache calls from its event loop and from the engine's threads. Whatever waits for the daemon or moves bytes does so in threads of
ours; the loop is never blocked. Chunks are stored whole: a partial last chunk (`save_unfull_chunk`), and what a serde
compressed, is declined and counted.

Memory objects: one that is stored is held (`ref_count_up`) until our thread has read it, also when LMCache stops waiting, since
its memory would be another chunk's by then. One that is loaded is the caller's with one reference; when the caller has stopped
waiting, or the bytes did not come, it is given back here.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from importlib.util import find_spec
from typing import Any, Final, TypeVar

import torch
from lmcache.logging import init_logger
from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

import flatcake_client as fc
from flatcake_client.deadline import checked_timeout
from flatcake_client.engines.edge import Edge
from flatcake_client.engines.fingerprint import digest_of
from flatcake_client.engines.lmcache_chunks import ChunkKind, ChunkStats, ChunkStore, FoundRun
from flatcake_client.engines.lmcache_tasks import Workers

log = init_logger(__name__)  # whose lines LMCache shows

NAME: Final = "flatcake"
VERSION: Final = importlib.metadata.version("lmcache")  # which decides how a chunk lies, and what its hash is of
SETTINGS: Final = (
    "endpoint",
    "timeout_s",
    "load_timeout_s",
    "store_timeout_s",
    "load_threads",
    "waiting_max",
    "weights",
)
# LMCache's class and module are configured beside ours, under the same prefix.
FOREIGN_SETTINGS: Final = ("module_path", "class_name")
STORE_TIMEOUT_S: Final = 30.0
# LMCache stops waiting after `blocking_timeout_secs`; an answer just before that is a miss, one after it is a warning.
LOAD_SHARE: Final = 0.8

T = TypeVar("T")


class FlatCakeConnectorAdapter(ConnectorAdapter):  # type: ignore[misc]  # LMCache has no types here
    """What LMCache makes of the class name in its configuration; makes the connector."""

    def __init__(self) -> None:
        super().__init__(f"plugin://{NAME}")

    def create_connector(self, context: ConnectorContext) -> FlatCakeConnector:
        return FlatCakeConnector(
            context.loop, context.local_cpu_backend, context.config, context.metadata, context.plugin_name
        )


class FlatCakeConnector(RemoteConnector):  # type: ignore[misc]
    """LMCache's view of one daemon. Thread-safe."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        local_cpu_backend: Any,
        config: Any,
        metadata: Any = None,
        plugin_name: str | None = None,
    ) -> None:
        """Works without a daemon. Raises: ValueError: a setting is unknown or wrong, or LMCache is in its layerwise mode."""
        metadata = local_cpu_backend.metadata if metadata is None else metadata
        super().__init__(config, metadata)
        if config.use_layerwise:
            raise ValueError("FlatCake stores whole chunks: set use_layerwise to false")
        settings = settings_of(config.extra_config or {}, plugin_name or NAME)
        self._loop = loop
        self._memory = local_cpu_backend
        shapes = "+".join("x".join(map(str, shape)) for shape in self.meta_shapes)
        self._kind = ChunkKind(
            model=metadata.model_name or "lmcache",
            dtype="+".join(str(dtype).removeprefix("torch.") for dtype in self.meta_dtypes),
            layout=f"{VERSION} {self.meta_fmt.name} {shapes}",
            chunk_bytes=self.full_chunk_size_bytes,
            chunk_tokens=metadata.chunk_size,
            weights=f"{settings.get('weights', '')} {digest_of(metadata.model_name or '')}".strip(),
        )
        load_timeout_s = float(settings.get("load_timeout_s", LOAD_SHARE * config.blocking_timeout_secs))
        self._load_timeout_s = checked_timeout("load_timeout_s", load_timeout_s)
        store_timeout_s = float(settings.get("store_timeout_s", STORE_TIMEOUT_S))
        self._store_timeout_s = checked_timeout("store_timeout_s", store_timeout_s)
        self._client = fc.connect(
            settings.get("endpoint"),
            timeout_s=min(float(settings.get("timeout_s", 2.0)), self._load_timeout_s),
            name=f"lmcache[{os.getpid()}] worker {metadata.worker_id} of {metadata.world_size}",
        )
        self._store = ChunkStore(self._client)
        waiting_max = int(settings.get("waiting_max", 256))
        self._asking = Workers("lookup", 1, waiting_max)
        self._loads = Workers("load", int(settings.get("load_threads", 2)), waiting_max)
        self._stores = Workers("store", 1, waiting_max)  # one: a batch's predecessor is visible before the batch comes
        self._edge = Edge(log, "its chunks are computed")
        if config.pre_caching_hash_algorithm == "builtin" or find_spec("vllm") is None:  # then LMCache takes it as well
            log.warning(
                "LMCache names chunks by Python's hash(): a prompt can be made whose chunks have the names of another's, and its KV is then "
                "given for that. Unless all who send prompts are trusted set pre_caching_hash_algorithm to sha256_cbor, which LMCache takes "
                "from vLLM, or run LMCache's server"
            )
        if config.pre_caching_hash_algorithm == "builtin" and "PYTHONHASHSEED" not in os.environ:
            log.warning(
                "LMCache names chunks by Python's hash(), which differs in every process: nothing will be found after a restart. "
                "Set pre_caching_hash_algorithm to sha256_cbor, or PYTHONHASHSEED to the same number everywhere"
            )
        log.info("LMCache stores its chunks of %d bytes in FlatCake", self._kind.chunk_bytes)

    # -- asking ----------------------------------------------------------------------------------------------------

    async def exists(self, key: Any) -> bool:
        return await self._wait(self._asking, partial(self._prefix, [key]), 0) == 1

    def exists_sync(self, key: Any) -> bool:
        return self._prefix([key]) == 1

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: Sequence[Any]) -> int:
        """How many keys from the first on are stored. Blocks its caller, at most `timeout_s`."""
        return self._prefix(keys)

    async def batched_async_contains(self, lookup_id: str, keys: Sequence[Any], pin: bool = False) -> int:  # noqa: ARG002
        """LMCache never says when a pin ends, so nothing is pinned: what is reclaimed meanwhile is a miss at the load."""
        return await self._wait(self._asking, partial(self._prefix, list(keys)), 0)

    def support_ping(self) -> bool:
        return True

    async def ping(self) -> int:
        """0 when the daemon answers. Not an error for LMCache to stop at: its monitor leaves us out until we answer."""
        ask = partial(self._edge.attempt, "a ping", False, partial(self._store.ping, self._kind))
        return 0 if await self._wait(self._asking, ask, False) else 1

    def _prefix(self, keys: Sequence[Any]) -> int:
        def look() -> int:
            found, deadline_s = 0, time.monotonic() + self._client.timeout_s
            names = [name_of(key) for key in keys]
            for run in self._store.search(self._kind, names, pin=False, deadline_s=deadline_s, prefix_only=True):
                found = len(run.positions)
            return found

        return self._edge.attempt("a lookup", 0, look)

    # -- loading ---------------------------------------------------------------------------------------------------

    async def get(self, key: Any) -> Any:
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: Sequence[Any]) -> list[Any]:
        """One memory object a key, None where it did not come."""
        deadline_s = time.monotonic() + self._load_timeout_s
        names = [name_of(key) for key in keys]
        act = partial(self._get, names, deadline_s)
        return await self._wait(self._loads, act, [None] * len(names), unwanted=_give_back)

    async def batched_get_non_blocking(self, lookup_id: str, keys: Sequence[Any]) -> list[Any]:  # noqa: ARG002
        """Memory objects of the keys from the first on, up to the first that did not come."""
        objects = await self.batched_get(keys)
        end = next((at for at, each in enumerate(objects) if each is None), len(objects))
        _give_back(objects[end:])
        return objects[:end]

    def _get(self, names: Sequence[bytes], deadline_s: float) -> list[Any]:
        objects: list[Any] = [None] * len(names)

        def load() -> None:
            for run in self._store.search(self._kind, names, pin=True, deadline_s=deadline_s):
                self._get_run(run, objects, deadline_s)

        self._edge.attempt("a load", None, load)  # what is in place is used, the rest is computed
        return objects

    def _get_run(self, run: FoundRun, objects: list[Any], deadline_s: float) -> None:
        fresh: list[Any] = []
        usable = 0
        try:
            for _ in run.positions:
                each = self._memory.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt, busy_loop=False)
                if each is None:
                    break  # LMCache's memory is full: fewer are brought
                fresh.append(each)
            if fresh:
                addresses = [address_of(each) for each in fresh]
                usable = self._store.bring(self._kind, run, addresses, deadline_s=deadline_s)
        finally:
            run.hit.release()
            _give_back(fresh[usable:])
        for position, each in zip(run.positions[:usable].tolist(), fresh, strict=False):
            objects[position] = each

    # -- storing ---------------------------------------------------------------------------------------------------

    async def put(self, key: Any, memory_obj: Any) -> None:
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: Sequence[Any], memory_objs: Sequence[Any]) -> None:
        """Store what is whole. Returns when the objects are not needed any more; a failure is a count and a log line."""
        whole = [(key, each) for key, each in zip(keys, memory_objs, strict=True) if self._is_whole(each)]
        self._store.count(chunks_declined=len(keys) - len(whole))
        if not whole:
            return
        names, objects = [name_of(key) for key, _ in whole], [each for _, each in whole]
        act = partial(self._put, names, objects, time.monotonic() + self._store_timeout_s)
        for each in objects:
            each.ref_count_up()
        await self._wait(self._stores, act, None, ended=partial(_give_back, objects))

    def _put(self, names: Sequence[bytes], objects: Sequence[Any], deadline_s: float) -> None:
        def store() -> None:
            addresses = [address_of(each) for each in objects]
            self._store.store(self._kind, names, addresses, deadline_s=deadline_s)

        self._edge.attempt("a store", None, store)

    def _is_whole(self, memory_obj: Any) -> bool:
        return on_host(memory_obj) and memory_obj.get_size() == self._kind.chunk_bytes

    # -- the rest --------------------------------------------------------------------------------------------------

    async def list(self) -> list[str]:
        """Nothing: FlatCake keeps digests of names, which nobody can turn back."""
        return []

    def remove_sync(self, key: Any) -> bool:  # noqa: ARG002
        """Nothing is removed by name: FlatCake reclaims whole sessions, least recently used first."""
        return False

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._close)

    def _close(self) -> None:
        for workers in (self._asking, self._loads, self._stores):
            workers.close()
        self._client.close()

    def stats(self) -> ChunkStats:
        return self._store.stats()

    def __repr__(self) -> str:
        return "FlatCakeConnector"

    async def _wait(
        self,
        workers: Workers,
        act: Callable[[], T],
        refused: T,
        *,
        unwanted: Callable[[T], None] = lambda _: None,
        ended: Callable[[], None] = lambda: None,
    ) -> T:
        """What a thread of ours answers; `refused` when too many wait. `unwanted` gets an answer nobody waits for any more."""
        try:
            future: Future[T] = workers.submit(act)
        except fc.Overloaded:
            self._store.count(tasks_refused=1)
            ended()
            return refused
        future.add_done_callback(lambda _: ended())
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(lambda done: None if done.cancelled() else unwanted(done.result()))
            raise


def name_of(key: Any) -> bytes:
    """All that names a chunk, and its whole prefix: model, ranks, hash, dtype, tags."""
    return str(key.to_string()).encode()


def on_host(memory_obj: Any) -> bool:
    return isinstance(memory_obj.raw_data, torch.Tensor) and memory_obj.raw_data.is_cpu


def address_of(memory_obj: Any) -> int:
    """Raises: ValueError: not in host memory."""
    if not on_host(memory_obj):
        raise ValueError("a memory object is not in host memory")
    return int(memory_obj.raw_data.data_ptr())


def settings_of(extra_config: dict[str, Any], plugin_name: str) -> dict[str, Any]:
    """Ours among LMCache's: `remote_storage_plugin.<name>.<setting>`. Raises: ValueError: one that is not known."""
    prefix = f"remote_storage_plugin.{plugin_name}."
    found = {key.removeprefix(prefix): value for key, value in extra_config.items() if key.startswith(prefix)}
    found = {key: value for key, value in found.items() if "." not in key}  # those are of `<name>.<instance>`
    unknown = sorted(set(found) - set(SETTINGS) - set(FOREIGN_SETTINGS))
    if unknown:
        raise ValueError(f"unknown settings {unknown}: expected {list(SETTINGS)}")
    return found


def _give_back(objects: Sequence[Any]) -> None:
    for each in objects:
        if each is not None:
            each.ref_count_down()
