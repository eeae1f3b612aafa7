"""The half of the connector that lives in a vLLM worker: it moves the KV of one shard, in threads beside the computation.

    step's jobs --> loads: memory at once, SSD in FC-MAS order --> ended, and which blocks did not come
                --> stores: one after the other, behind the loads --> their blocks are free

- A load is reported exactly once, whatever became of it; blocks that did not come are named no later than that.
- The engine's memory is written only by loads of requests that wait for them; a cancelled one has stopped when it is reported.
- A store reads blocks that vLLM holds until it is reported. One that is given up never becomes visible.
- What was computed over blocks that did not come in time is never stored: prefills of the same step are given up, and whatever
  has these blocks is not stored for some steps.
- Weights that were changed are others than the scheduler knows, until it says another name of them: till then nothing is moved.
- On a GPU a thread begins when the device has done what was queued before its job: a fence.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from vllm.logger import init_logger

from flatcake_client import Client, Hit, Restore, Space
from flatcake_client.background import Crew, Restores
from flatcake_client.engines.vllm_jobs import Load, StepJobs, Store, Tally, WeightsChanged
from flatcake_client.engines.vllm_settings import Geometry, Settings
from flatcake_client.paged_kv import PagedKv

if TYPE_CHECKING:
    from flatcake_client.keys import KeyArray

log = init_logger("vllm.flatcake")

# With nothing to compute, vLLM's loop would spin beside the threads that load: a step waits this long for one to end.
IDLE_S: Final = 0.002
CLOSE_TIMEOUT_S: Final = 5.0
# Blocks of a load inside a step that failed are not stored by requests that end within as many steps: vLLM may have two
# under way before it computes them anew.
SUSPECT_STEPS: Final = 8


class Fence:
    """What a device was told before a moment. On the CPU nothing is ever under way."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type != "cpu":
            self._event = torch.Event(device)
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class Layers:
    """How far the computation of a step is: a layer is ready when vLLM has written its KV."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._device = device
        self._marks = [threading.Event() for _ in range(count)]
        self._fences: list[Fence | None] = [None] * count

    def mark(self, layer: int) -> None:
        if not self._marks[layer].is_set():
            self._fences[layer] = Fence(self._device)
            self._marks[layer].set()

    def mark_all(self) -> None:
        for layer in range(len(self._marks)):
            self.mark(layer)

    def ready(self, layer: int, timeout_s: float) -> bool:
        if not self._marks[layer].wait(timeout_s):
            return False
        fence = self._fences[layer]
        if fence is not None:
            fence.wait()
        return True


class _Inside:
    """A load inside the step, layer by layer."""

    def __init__(self, job: Load, hit: Hit, restore: Restore | None) -> None:
        self.job, self.hit, self.restore, self.layers = job, hit, restore, 0


class WorkerSide:
    """Belongs to the worker's thread; its own threads touch only what says so."""

    def __init__(self, client: Client, space: Space, shape: Geometry, settings: Settings) -> None:
        self._client, self._space, self._shape, self._settings = client, space, shape, settings
        self._registered: PagedKv | None = None
        self._kv: PagedKv | None = None  # None: not there, or asleep
        self._device = torch.device("cpu")
        self._layer_of = {name: layer for layer, name in enumerate(shape.names)}
        self._restores: Restores[str] = Restores()
        self._crew = Crew("store", 1, settings.stores_max, yields_to=lambda: self._restores.busy())  # noqa: PLW0108 - there will be others
        self._lock = threading.Lock()
        self._failed_blocks: set[int] = set()  # under the lock, and so are:
        self._open: Counter[str] = Counter()  # stores of a request that may still read its blocks
        self._waiting: dict[int, tuple[Store, list[bool]]] = {}  # of these, those that no thread has begun
        self._given_up: set[str] = set()
        self._freed = threading.Condition(self._lock)
        self._owed: set[str] = (
            set()
        )  # requests that had a store: reported once they are over and nothing reads their blocks
        self._ended: set[str] = set()  # those of them that are over
        self._layers = Layers(len(shape.names), self._device)
        self._inside: list[_Inside] = []
        self._prefills: list[Store] = []  # of this step
        self._over: list[str] = []  # loads that are to be reported beside those that `_restores` tells
        self._suspect: dict[int, int] = {}
        self._step = 0
        self._weights: bytes | None = b""  # as the scheduler called them in the last step
        self._gone: bytes | None = None  # the name of those that were here before the last change
        self.tally = Tally()

    def register(self, caches: dict[str, torch.Tensor]) -> None:
        """VLLM's KV, by layer. Raises: ValueError: not the KV that the configuration says."""
        missing = [name for name in self._shape.names if name not in caches]
        if missing:
            raise ValueError(f"vLLM registers no KV for {missing}: FlatCake does not store this model")
        tensors = [caches[name] for name in self._shape.names]
        self._device = tensors[0].device
        self._registered = PagedKv(self._space, [by_block(tensor, self._shape) for tensor in tensors])
        self._kv = self._registered

    def unregister(self) -> None:
        """VLLM is about to take its KV away (sleep): nothing touches it when this returns."""
        self._kv = None
        restores, self._restores = self._restores, Restores()
        # A load that was cancelled ends within its own time. Not before: where it writes will be somebody else's memory.
        restores.close(self._settings.load_timeout_s + CLOSE_TIMEOUT_S)
        self._over += restores.ended()  # vLLM waits to hear of them
        self._give_up(set(self._open))

    def restore(self) -> None:
        """The memory is there again, at its addresses, with other bytes: vLLM has forgotten what was in it."""
        self._kv = self._registered

    def preempted(self, request_ids: frozenset[str]) -> None:
        """Before anything of a step: blocks of these requests are about to be overwritten. What was stored of them is not reported."""
        self._owed -= request_ids
        self._give_up(request_ids)

    def begin(self, jobs: StepJobs) -> None:
        """Before the step is computed: stores that go along with it."""
        self._step += 1
        self._weights = jobs.weights
        self._prefills = [job for job in jobs.stores if job.prefill]
        self._owed.update(job.request_id for job in self._prefills)
        if self._prefills:
            self._layers = Layers(len(self._shape.names), self._device)
        for job in self._prefills:
            self._submit(job, self._layers.ready)

    def start(self, jobs: StepJobs) -> None:
        """Loads, and stores of what was computed before this step, or in it by now."""
        finished = [job for job in jobs.stores if not job.prefill]
        self._owed.update(job.request_id for job in finished)
        fence: Fence | None = None
        for load in jobs.loads:
            begun = False
            try:
                fence = fence or Fence(self._device)
                begun = bool(load.hashes) and not self._others() and self._begin_load(load, fence)
            except Exception as error:  # noqa: BLE001 - each load is reported, whatever became of the others
                self.tally.add("errors")
                log.warning("FlatCake could not begin a load, its blocks are computed: %r", error)
            if not begun:
                self._fail(load, load.first_block)
                if not load.inside:
                    self._over.append(load.request_id)
        for job in finished:
            fence = fence or Fence(self._device)
            self._submit(job, partial(_ready_after, fence))

    def weights_changed(self) -> None:
        """They are others from now on, or about to be."""
        self._gone = self._weights

    def weights_gone(self) -> WeightsChanged | None:
        """What the scheduler is to hear: that it still goes by weights that are not here any more."""
        return WeightsChanged(self._gone) if self._gone is not None and self._others() else None

    def _others(self) -> bool:
        return self._weights is None or self._weights == self._gone

    def layer_computed(self, name: str) -> None:
        layer = self._layer_of.get(name)
        if layer is not None:
            self._computed_without(layer)
            if self._open:
                self._layers.mark(layer)

    def computed(self) -> None:
        """The step is computed, or queued; whatever was loaded inside it has been waited for."""
        self._computed_without(len(self._shape.names) - 1)
        for inside in self._inside:
            self._crew.submit(inside.hit.release)
        self._inside = []
        self._layers.mark_all()  # behind the failures: a prefill over what did not come is given up by now

    def wait_layer(self, name: str) -> None:
        """Return when what is loaded inside the step is in place in that layer, or is known not to come."""
        layer = self._layer_of.get(name)
        if layer is None or not self._inside:
            return
        for inside in self._inside:
            if inside.restore is None:
                continue
            try:
                inside.restore.wait_layer(layer)
                inside.layers = max(inside.layers, layer + 1)
            except Exception as error:  # noqa: BLE001 - one that fails must not let the others' layers be computed without
                log.warning("a restore failed, its blocks are computed: %s", error)
                self._fail(inside.job, getattr(error, "usable_blocks", inside.job.first_block))
                inside.restore = None

    def finished(self, ended_ids: set[str], *, idle: bool) -> tuple[set[str], set[str]]:
        """Requests whose stores hold no blocks any more, and those whose load has ended; those that are over are cancelled."""
        for request_id in ended_ids:
            self._restores.cancel(request_id)
        received = set(self._restores.ended(IDLE_S if idle else 0.0)) | set(self._over)
        self._over = []
        with self._freed:
            self._ended |= ended_ids & self._owed
            if idle and not received and self._ended and all(self._open[request_id] for request_id in self._ended):
                self._freed.wait(IDLE_S)
            sent = {request_id for request_id in self._ended if not self._open[request_id]}
            self._ended -= sent
            self._owed -= sent
        return sent, received

    def all_blocks(self) -> set[int]:
        return set(range(self._shape.blocks))

    def failures(self) -> set[int]:
        """Blocks that did not come, since the last call."""
        with self._lock:
            failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def close(self) -> None:
        self._restores.close(CLOSE_TIMEOUT_S)
        self._crew.settle(CLOSE_TIMEOUT_S)
        self._give_up(set(self._open))
        self._crew.close(CLOSE_TIMEOUT_S)
        self._client.close(CLOSE_TIMEOUT_S)

    # In threads.

    def _load(self, job: Load, fence: Fence, cancelled: Callable[[], bool]) -> None:
        usable = job.first_block
        try:
            fence.wait()
            kv = self._kv
            if kv is not None:
                keys = self._keys(job.hashes, job.salt)
                slots = np.array(job.block_ids, np.int64)
                ending = partial(self._restores.ending, job.request_id)
                loaded = kv.load(keys, job.first_block, slots, self._settings.load_timeout_s, cancelled, ending)
                usable = max(usable, loaded.blocks)
                self.tally.add("loaded_memory_bytes", loaded.memory_bytes)
                self.tally.add("loaded_ssd_bytes", loaded.ssd_bytes)
        except Exception:
            self.tally.add("errors")
            raise
        finally:
            if cancelled():
                self.tally.add("loads_cancelled")
            else:
                self._fail(job, usable)
                self.tally.add("loaded_blocks", usable - job.first_block)

    def _store(self, job: Store, ready: Callable[[int, float], bool], closed: list[bool]) -> None:
        timeout_s = self._settings.store_timeout_s
        with self._lock:
            if self._waiting.pop(id(closed), None) is None:
                return  # given up while it waited
        try:
            kv = self._kv
            if kv is None or self._unwanted(job):
                return
            stored = kv.store(
                self._keys(job.hashes, job.salt),
                np.array(job.block_ids, np.int64),
                job.facts,
                timeout_s,
                salt=job.salt,
                taken=partial(self._free, job, closed),
                wanted=lambda: not self._unwanted(job),
                layer_ready=lambda layer: ready(layer, timeout_s),
            )
            self.tally.add("stores_failed" if stored.failure else "stores")
            self.tally.add("stored_blocks", stored.blocks)
        except Exception:
            self.tally.add("stores_failed")
            self.tally.add("errors")
            raise
        finally:
            self._free(job, closed)

    def _keys(self, hashes: Sequence[bytes], salt: bytes) -> KeyArray:
        return self._space.keys_of_hashes(hashes, salt)

    def _free(self, job: Store, closed: list[bool]) -> None:
        with self._freed:
            self._close_store(job, closed)

    def _close_store(self, job: Store, closed: list[bool]) -> None:
        """It reads no blocks any more. Under the lock."""
        self._waiting.pop(id(closed), None)
        if not closed:
            closed.append(True)
            self._open[job.request_id] -= 1
            if not self._open[job.request_id]:
                del self._open[job.request_id]
                self._given_up.discard(job.request_id)
            self._freed.notify_all()

    def _unwanted(self, job: Store) -> bool:
        with self._lock:
            return job.request_id in self._given_up

    def _fail(self, job: Load, usable_blocks: int) -> None:
        """The blocks behind the usable ones did not come."""
        failed = job.block_ids[max(0, usable_blocks - job.first_block) :]
        if failed:
            with self._lock:
                self._failed_blocks.update(failed)
                if job.inside:
                    self._suspect |= dict.fromkeys(failed, self._step)
                    self._given_up |= {
                        each.request_id
                        for each in self._prefills
                        if self._open[each.request_id] and not set(failed).isdisjoint(each.block_ids)
                    }
            self.tally.add("load_failed_blocks", len(failed))

    # In the worker's thread.

    def _submit(self, job: Store, ready: Callable[[int, float], bool]) -> None:
        self._suspect = {block: step for block, step in self._suspect.items() if self._step - step < SUSPECT_STEPS}
        if self._others() or (self._suspect and not self._suspect.keys().isdisjoint(job.block_ids)):
            self.tally.add("stores_dropped")
            return
        closed: list[bool] = []
        with self._lock:
            self._open[job.request_id] += 1
            self._waiting[id(closed)] = job, closed
        taken = False
        try:
            taken = self._crew.submit(partial(self._store, job, ready, closed))
        finally:
            if not taken:
                self.tally.add("stores_dropped")
                self._free(job, closed)

    def _give_up(self, request_ids: set[str] | frozenset[str]) -> None:
        """Their blocks are taken away: stores of them end, and what is already on its way is waited for; what only waits is not begun."""
        with self._freed:
            for job, closed in [each for each in self._waiting.values() if each[0].request_id in request_ids]:
                self._close_store(job, closed)
            going = {request_id for request_id in request_ids if self._open[request_id]}
            self._given_up |= going
            if going:
                rested = lambda: not any(self._open[request_id] for request_id in going)  # noqa: E731
                self._layers.mark_all()
                self._freed.wait_for(rested, self._settings.store_timeout_s)

    def _computed_without(self, layer: int) -> None:
        """Loads inside the step that this layer did not wait for have failed; they write nothing any more."""
        for inside in self._inside:
            if inside.restore is not None and inside.layers <= layer:
                self._fail(inside.job, inside.job.first_block)
                inside.restore.close()
                inside.restore = None

    def _begin_load(self, job: Load, fence: Fence) -> bool:
        if not job.inside:
            return self._restores.submit(job.request_id, job.ssd_bytes, partial(self._load, job, fence))
        kv = self._kv
        hit = self._space.lookup(self._keys(job.hashes, job.salt))
        try:
            if kv is None or hit.blocks <= job.first_block:
                hit.release()
                return False
            slots = np.array((0,) * job.first_block + job.block_ids, np.int64)[: hit.blocks]
            restore = hit.restore(kv.pages, slots, first_block=job.first_block, timeout_s=self._settings.load_timeout_s)
        except BaseException:
            hit.release()
            raise
        if hit.blocks < len(job.hashes):
            self._fail(job, hit.blocks)
        self._inside.append(_Inside(job, hit, restore))
        return True


def by_block(cache: torch.Tensor, shape: Geometry) -> torch.Tensor:
    """A layer's KV seen with the block first, whatever vLLM's layout is. Raises: ValueError: no such view, or other sizes.

    vLLM's own blocks may be several of the kernel's: these lie one behind the other.
    """
    for axis in range(min(2, cache.dim())):
        parts, rest = divmod(cache.shape[axis], shape.blocks)
        if not rest and parts:
            pages = cache.movedim(axis, 0)
            pages = pages if parts == 1 else pages.view(shape.blocks, parts, *pages.shape[1:])
            if pages[0].numel() * pages.element_size() == shape.page_bytes:
                return pages
    raise ValueError(
        f"KV of shape {tuple(cache.shape)} {cache.dtype} has no {shape.blocks} blocks of {shape.page_bytes} bytes: "
        "FlatCake does not store this layout; run without kv_connector"
    )


def _ready_after(fence: Fence, _layer: int, _timeout_s: float) -> bool:
    fence.wait()
    return True
