"""LMCache's server mode on FlatCake: an L2 adapter, loaded by its `plugin` type. Translates; `lmcache_chunks.py` has the theory.

    lmcache server ... --l2-adapter '{"type": "plugin", "module_path": "flatcake_client.engines.lmcache_l2",
        "class_name": "FlatCakeL2Adapter", "adapter_params": {"endpoint": "unix:///run/flatcake/flatcake.sock"}}'

LMCache's controllers submit and go on; an event descriptor for each of store, lookup and load tells them to read a result, once.

- Nothing blocks in a `submit`: beyond `waiting_max` tasks a task is answered at once, as a miss.
- Every task is answered by its deadline, counted from its submission, or by `close`. Buffers are not touched after the answer.
- Locks are leases (`lmcache_tasks.Locks`). A daemon that restarts forgets them; the load is a miss then.
- A lookup knows its chunks' layout from the server, or from the last chunk of that group that was stored or loaded.
- FlatCake reclaims by itself: `delete` does nothing, and LMCache's eviction of this adapter stays off.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase

import flatcake_client as fc
from flatcake_client.deadline import checked_timeout
from flatcake_client.engines.edge import Edge
from flatcake_client.engines.fingerprint import digest_of
from flatcake_client.engines.lmcache import VERSION, address_of, on_host
from flatcake_client.engines.lmcache_chunks import ChunkKind, ChunkStore
from flatcake_client.engines.lmcache_tasks import Locks, Workers

log = init_logger(__name__)  # whose lines LMCache shows

CHUNK_TOKENS: Final = 256  # LMCache's default, where a chunk's shape does not tell
KINDS_MAX: Final = 256
COUNTED_MAX: Final = 1 << 16  # as many chunks as `lmcache_chunks.LINKS_MAX`
RESULTS_MAX: Final = 4096  # answers that nobody has read
TICK_S: Final = 1.0


@dataclass(frozen=True)
class FlatCakeL2AdapterConfig(L2AdapterConfigBase):  # type: ignore[misc]  # LMCache has no types here
    """`adapter_params`.

    Attributes:
        endpoint: of the daemon; None: FLATCAKE_ENDPOINT, else the default socket.
        timeout_s: of a lookup.
        load_timeout_s, store_timeout_s: from the submission to the answer.
        load_threads: loads at the same time.
        waiting_max: tasks of each kind that may wait.
        weights: names the weights, and what else makes other KV of the same model name: LMCache passes only that.
    """

    endpoint: str | None = None
    timeout_s: float = 2.0
    load_timeout_s: float = 10.0
    store_timeout_s: float = 30.0
    load_threads: int = 2
    waiting_max: int = 256
    weights: str = ""

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> FlatCakeL2AdapterConfig:
        """Raises: ValueError: an unknown setting, or one out of range."""
        known = tuple(cls.__dataclass_fields__)
        unknown = sorted(set(d) - set(known))
        if unknown:
            raise ValueError(f"unknown adapter_params {unknown}: expected {list(known)}")
        config = cls(**d)
        for name in ("timeout_s", "load_timeout_s", "store_timeout_s"):
            checked_timeout(name, getattr(config, name))
        if config.load_threads < 1 or config.waiting_max < 1:
            raise ValueError("load_threads and waiting_max are 1 or more")
        return config

    @classmethod
    def help(cls) -> str:
        return cls.__doc__ or ""


class _Answers:
    """Results of one verb, each read once, and the descriptor that says there is one. Thread-safe."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._results: OrderedDict[int, Any] = OrderedDict()
        self._open = True

    def put(self, task_id: int, result: Any) -> None:
        with self._lock:
            if not self._open:
                return
            self._results[task_id] = result
            if len(self._results) > RESULTS_MAX:
                self._results.popitem(last=False)
            os.eventfd_write(self.fd, 1)

    def take(self, task_id: int) -> Any:
        with self._lock:
            return self._results.pop(task_id, None)

    def take_all(self) -> dict[int, Any]:
        with self._lock:
            taken, self._results = dict(self._results), OrderedDict()
            return taken

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                os.close(self.fd)


class FlatCakeL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """One daemon as LMCache's second level. Thread-safe."""

    def __init__(self, config: FlatCakeL2AdapterConfig, l1_memory_desc: Any = None) -> None:  # noqa: ARG002 - LMCache passes it
        """Works without a daemon."""
        super().__init__()
        self._config = config
        self._client = fc.connect(config.endpoint, timeout_s=config.timeout_s, name=f"lmcache-server[{os.getpid()}]")
        self._chunks = ChunkStore(self._client)
        self._locks = Locks()
        self._weights: OrderedDict[str, str] = OrderedDict()  # by model
        self._kinds: OrderedDict[tuple[str, int], ChunkKind] = OrderedDict()
        self._counted: OrderedDict[Any, int] = OrderedDict()  # bytes that LMCache was told of, by key
        self._lock = threading.Lock()
        self._last_task_id = 0
        self._stored, self._found, self._loaded = _Answers(), _Answers(), _Answers()
        self._stores = Workers("store", 1, config.waiting_max)  # one: a predecessor is visible before its batch comes
        self._lookups = Workers("lookup", 1, config.waiting_max)
        self._loads = Workers("load", config.load_threads, config.waiting_max)
        self._unlocks = Workers("unlock", 1, 1 << 30)  # never refused: bounded by what is locked
        self._edge = Edge(log, "its chunks are computed")
        self._closing = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="flatcake-locks", daemon=True)
        self._ticker.start()
        log.info("LMCache's server stores its chunks in FlatCake")

    def get_store_event_fd(self) -> int:
        return self._stored.fd

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._found.fd

    def get_load_event_fd(self) -> int:
        return self._loaded.fd

    def submit_store_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        act = partial(self._store, list(keys), list(objects), time.monotonic() + self._config.store_timeout_s)
        return self._submit(
            self._stores, self._stored, "a store", act, L2StoreResult(success=False, bytes_transferred=0)
        )

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stored.take_all()

    def submit_lookup_and_lock_task(self, keys: Sequence[Any], group_layout_descs: dict[int, Any]) -> int:
        act = partial(self._find, list(keys), group_layout_descs, time.monotonic() + self._config.timeout_s)
        return self._submit(self._lookups, self._found, "a lookup", act, Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._found.take(task_id)

    def submit_unlock(self, keys: Sequence[Any]) -> None:
        with contextlib.suppress(fc.Overloaded):  # closed: all locks are given back
            self._unlocks.submit(partial(self._locks.unlock, list(keys)))

    def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        act = partial(self._load, list(keys), list(objects), time.monotonic() + self._config.load_timeout_s)
        return self._submit(self._loads, self._loaded, "a load", act, Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loaded.take(task_id)

    def delete(self, keys: Sequence[Any]) -> None:
        """Nothing: FlatCake reclaims whole sessions, least recently used first."""

    def report_status(self) -> dict[str, Any]:
        return {
            "is_healthy": not self._edge.failing(),
            "type": type(self).__name__,
            "locked_hits": len(self._locks),
            "connected": self._client.stats().connected,
            **asdict(self._chunks.stats()),
        }

    def close(self) -> None:
        """Twice is fine. Waits for what is under way, at most its deadline."""
        self._closing.set()
        for workers in (self._lookups, self._loads, self._stores, self._unlocks):
            workers.close()
        self._ticker.join()
        self._locks.close()
        self._client.close()
        for answers in (self._stored, self._found, self._loaded):
            answers.close()

    # -- in our threads --------------------------------------------------------------------------------------------

    def _submit(self, workers: Workers, answers: _Answers, verb: str, act: Callable[[], Any], miss: Any) -> int:
        with self._lock:
            self._last_task_id += 1
            task_id = self._last_task_id

        def answer(future: Future[Any]) -> None:
            answers.put(task_id, miss if future.cancelled() else future.result())

        try:
            workers.submit(partial(self._edge.attempt, verb, miss, act)).add_done_callback(answer)
        except fc.Overloaded:
            self._chunks.count(tasks_refused=1)
            answers.put(task_id, miss)
        return task_id

    def _store(self, keys: Sequence[Any], objects: Sequence[Any], deadline_s: float) -> L2StoreResult:
        size_bytes = 0
        for kind, positions in self._by_kind(keys, objects):
            mine = [keys[at] for at in positions]
            addresses = [address_of(objects[at]) for at in positions]
            names, lanes = _names(mine)
            stored = self._chunks.store(kind, names, addresses, lanes, deadline_s=deadline_s)
            size_bytes += stored.size_bytes
            self._account([mine[at] for at in stored.positions], kind.chunk_bytes)
        return L2StoreResult(success=True, bytes_transferred=size_bytes)

    def _account(self, fresh: Sequence[Any], chunk_bytes: int) -> None:
        """LMCache counts bytes by what it is told. What is stored anew had been reclaimed, of which FlatCake tells nobody before."""
        with self._lock:
            gone = [key for key in fresh if key in self._counted]
            gone_bytes = [self._counted.pop(key) for key in gone]
            self._counted.update(dict.fromkeys(fresh, chunk_bytes))
            while len(self._counted) > COUNTED_MAX:
                self._counted.popitem(last=False)
        if gone:
            self._notify_keys_deleted(gone, gone_bytes)
        if fresh:
            self._notify_keys_stored(list(fresh), [chunk_bytes] * len(fresh))

    def _find(self, keys: Sequence[Any], layouts: dict[int, Any], deadline_s: float) -> Bitmap:
        found = Bitmap(len(keys))
        locked: list[Any] = []
        try:
            for kind, positions in self._by_layout(keys, layouts).items():
                names, lanes = _names([keys[at] for at in positions])
                for run in self._chunks.search(kind, names, lanes, pin=True, deadline_s=deadline_s):
                    mine = np.array(positions)[run.positions].tolist()
                    self._locks.hold([keys[at] for at in mine], run.hit)
                    locked += [keys[at] for at in mine]
                    for at in mine:
                        found.set(at)
        except BaseException:  # the answer is a miss: nobody will unlock these
            self._locks.unlock(locked)
            raise
        return found

    def _load(self, keys: Sequence[Any], objects: Sequence[Any], deadline_s: float) -> Bitmap:
        loaded = Bitmap(len(keys))
        for kind, positions in self._by_kind(keys, objects):
            names, lanes = _names([keys[at] for at in positions])
            for run in self._chunks.search(kind, names, lanes, pin=True, deadline_s=deadline_s):
                mine = np.array(positions)[run.positions].tolist()
                addresses = [address_of(objects[at]) for at in mine]
                usable = self._chunks.bring(kind, run, addresses, deadline_s=deadline_s)
                for at in mine[:usable]:
                    loaded.set(at)
                self._notify_keys_accessed([keys[at] for at in mine[:usable]])
        return loaded

    def _by_kind(self, keys: Sequence[Any], objects: Sequence[Any]) -> Iterator[tuple[ChunkKind, list[int]]]:
        """Positions of the chunks that can be moved, by kind; of one that is named twice, the first."""
        by_kind: dict[ChunkKind, list[int]] = {}
        seen = set()
        for at, (key, each) in enumerate(zip(keys, objects, strict=True)):
            if on_host(each) and each.get_size() > 0 and key not in seen:
                seen.add(key)
                by_kind.setdefault(self._kind_of(key, each), []).append(at)
        self._chunks.count(chunks_declined=len(keys) - sum(map(len, by_kind.values())))
        yield from by_kind.items()

    def _kind_of(self, key: Any, memory_obj: Any) -> ChunkKind:
        meta = memory_obj.meta
        shapes, dtypes = meta.shapes or [meta.shape], meta.dtypes or [meta.dtype]
        return self._remembered(key, self._kind(key.model_name, shapes, dtypes, memory_obj.get_size()))

    def _by_layout(self, keys: Sequence[Any], layouts: dict[int, Any]) -> dict[ChunkKind, list[int]]:
        """Positions of the chunks whose layout is known, by kind."""
        by_kind: dict[ChunkKind, list[int]] = {}
        for at, key in enumerate(keys):
            kind = self._kind_by_layout(key, layouts.get(key.object_group_id))
            if kind is not None:
                by_kind.setdefault(kind, []).append(at)
        return by_kind

    def _kind_by_layout(self, key: Any, layout: Any) -> ChunkKind | None:
        if layout is None or not layout.shapes:
            with self._lock:
                return self._kinds.get((key.model_name, key.object_group_id))
        size_bytes = sum(
            shape.numel() * dtype.itemsize for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True)
        )
        return self._remembered(key, self._kind(key.model_name, layout.shapes, layout.dtypes, size_bytes))

    def _kind(self, model: str, shapes: Sequence[Any], dtypes: Sequence[Any], size_bytes: int) -> ChunkKind:
        return ChunkKind(
            model=model or "lmcache",
            dtype="+".join(str(dtype).removeprefix("torch.") for dtype in dtypes),
            layout=" ".join((VERSION, *("x".join(map(str, shape)) for shape in shapes))),
            chunk_bytes=size_bytes,
            # [K and V, layers, tokens, heads x dim]
            chunk_tokens=int(shapes[0][2]) if len(shapes[0]) == 4 else CHUNK_TOKENS,
            weights=self._weights_of(model),
        )

    def _weights_of(self, model: str) -> str:
        with self._lock:
            known = self._weights.get(model)
        if known is None:
            known = f"{self._config.weights} {digest_of(model)}".strip()
            with self._lock:
                self._weights[model] = known
                if len(self._weights) > KINDS_MAX:
                    self._weights.popitem(last=False)
        return known

    def _remembered(self, key: Any, kind: ChunkKind) -> ChunkKind:
        with self._lock:
            self._kinds[key.model_name, key.object_group_id] = kind
            if len(self._kinds) > KINDS_MAX:
                self._kinds.popitem(last=False)
        return kind

    def _tick(self) -> None:
        while not self._closing.wait(TICK_S):
            self._locks.tick()


def _names(keys: Sequence[Any]) -> tuple[list[bytes], list[tuple[int, int, str]]]:
    """What names each chunk within its kind, and the lane it is in: chunks of one rank and group follow each other."""
    lanes = [(key.kv_rank, key.object_group_id, key.cache_salt) for key in keys]
    names = [b"%s@%d@%d@%s" % (key.chunk_hash.hex().encode(), rank, group, salt.encode())
             for key, (rank, group, salt) in zip(keys, lanes, strict=True)]  # fmt: skip
    return names, lanes
