"""One run: requests arrive in real time, their blocks are brought, prefill takes the time it would, and what is new is stored.

    clock      each request at its time / load, but never before the previous turn of its session is done: an agent reads the
               reply before it asks again. It counts from then on, also while all threads that ask are busy
    asking     lookup (a few threads), then the queues: ready at once, or prefetch first (scheduler.py)
    prefetch   threads of the scheduler: slots of the engine's pages, then `System.restore` into them
    prefill    one request at a time a worker: what memory holds is restored now, delivered bytes are checked, the new blocks' bytes
               are made, and the worker sleeps until (tokens - delivered) / rate seconds have passed: the cost model
    store      threads that hand the new blocks to the system; then the request is done

Only prefill is modelled, all else happens. Checking and making bytes takes place within the prefill's time, so it costs no system
anything unless its prefills are shorter than that; then `Record.prefill_began_s` to `first_token_s` says so.

Before the clock starts every system is warmed up alike: a few sessions of no trace are stored and restored, so that connections,
staging and what else is made at first use are there, as they are in an engine that runs for long.

Pages are cut once: slots for prefetches, from which a prefetch waits for as many as it needs, and an area for each prefill under way,
which holds the longest prompt. A prefill never waits for slots of prefetches, so what is ready always runs and gives its
slots back: no order of events can stop.
"""

from __future__ import annotations

import heapq
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np

from flatcake_client.replay.contents import Contents
from flatcake_client.replay.maximum import Seen
from flatcake_client.replay.metrics import Record
from flatcake_client.replay.system import Asked, Found, Pages, Slots, System
from flatcake_client.replay.workload import Planned, Workload, block_keys
from flatcake_client.scheduler import ENDING_MAX, Queues, Scheduler

log = logging.getLogger(__name__)

ASKING_THREADS: Final = 4
STORING_THREADS: Final = 2
WARM_BLOCKS: Final = 64
LOOK_S: Final = 0.1  # how soon a stop is noticed


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine that is played."""

    prefill_tokens_per_s: float
    workers: int
    timeout_s: float  # of one restore or store
    all_prefetched: bool  # also what lies in memory: the system does not say where things are
    stores: bool = True  # False: nobody looks at what prefill brings, so its bytes need not be made

    @property
    def areas(self) -> int:
        """Prefills under way, and stores that still read what one left."""
        return self.workers + STORING_THREADS


class SlotPool:
    """Slots `0 .. count` of the pages. Thread-safe, first come first served."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._changed = threading.Condition()
        self._order: list[object] = []

    def take(self, count: int, stopped: Callable[[], bool]) -> Slots | None:
        """Wait for that many. None: the run was stopped."""
        ticket = object()
        with self._changed:
            self._order.append(ticket)
            try:
                while self._order[0] is not ticket or len(self._free) < count:
                    if stopped():
                        return None
                    self._changed.wait(LOOK_S)
                taken = self._free[len(self._free) - count :]
                del self._free[len(self._free) - count :]
                return np.array(taken[::-1], np.int64)
            finally:
                self._order.remove(ticket)
                self._changed.notify_all()

    def give(self, slots: Slots) -> None:
        with self._changed:
            self._free.extend(slots.tolist())
            self._changed.notify_all()


class Run:
    """Runs once."""

    def __init__(
        self,
        workload: Workload,
        system: System,
        engine: Engine,
        pages: Pages,
        contents: Contents,
        queues: Queues[int],
        *,
        load: float,
        prefetches: int = 0,
        done: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`pages` hold `engine.areas` longest prompts, and as much more as prefetches may use. `done` is told each request.

        `queues` and `prefetches` bound restores in the background alike; 0: as the system says.
        """
        self._workload, self._system, self._engine = workload, system, engine
        self._pages, self._contents, self._load, self._done = pages, contents, load, done
        area_slots = workload.blocks_max
        pool_slots = len(pages) - engine.areas * area_slots
        if pool_slots < area_slots:
            raise ValueError(f"{len(pages)} slots of pages cannot hold {engine.areas + 1} prompts of {area_slots}")
        self._slots = SlotPool(pool_slots)
        self._areas: queue.Queue[Slots] = queue.Queue()
        for n in range(engine.areas):
            self._areas.put(np.arange(pool_slots + n * area_slots, pool_slots + (n + 1) * area_slots, dtype=np.int64))
        self.records = [
            Record(p.asked.number, p.asked.session, p.asked.turn, p.asked.input_tokens, p.blocks)
            for p in workload.requests
        ]
        self._queues, self._prefetches = queues, prefetches or system.prefetches_max
        self._found: dict[int, Found] = {}
        self._held: dict[int, Slots] = {}  # slots of prefetched requests
        self._lock = threading.Lock()
        self._arrived, self._stored = Seen(workload.different_blocks), Seen(workload.different_blocks)
        self._changed = threading.Condition()
        self._due: list[tuple[float, int]] = []
        self._next: dict[int, int] = {}
        self._left = len(self.records)
        self._stop = threading.Event()
        self._broken: BaseException | None = None
        self._zero_s = 0.0

    def stop(self) -> None:
        """Take no new request; those under way are given up. May be called from a signal handler."""
        self._stop.set()

    def warm_up(self) -> None:
        """Before `run`: as many sessions as there will be restores at once, or areas, stored and restored, at the same time."""
        areas = list(self._areas.queue)[: self._prefetches + ENDING_MAX]
        blocks = min(WARM_BLOCKS, self._workload.blocks_max)
        first = self._workload.different_blocks  # numbers that no request has

        def warm(n: int) -> None:
            keys = block_keys(np.arange(first + n * blocks, first + (n + 1) * blocks))
            slots, tokens = areas[n][:blocks], blocks * self._workload.block_tokens
            asked = Asked(-1 - n, f"warm-up-{n}", 1, keys, tokens, None, np.ones(blocks, np.int64))
            self._contents.fill(self._pages, slots, keys)
            try:
                self._system.store(asked, 0, self._pages, slots, self._engine.timeout_s)
                found = self._system.lookup(asked)
                if found.blocks:
                    self._system.restore(asked, found, self._pages, slots[: found.blocks], self._engine.timeout_s)
            except Exception as error:  # noqa: BLE001 - a foreign system's edge; what is wrong with it shows in the run
                log.info("warming up: %r", error)

        with ThreadPoolExecutor(max(1, len(areas)), "replay-warm") as pool:
            list(pool.map(warm, range(len(areas))))

    def run(self) -> bool:
        """Play all requests. False: it was stopped before."""
        self._plan()
        self._zero_s = time.monotonic()
        stores: queue.Queue[tuple[Planned, Slots, Slots] | None] = queue.Queue()
        scheduler: Scheduler[int] = Scheduler(self._prefetches, queues=self._queues)
        asking = ThreadPoolExecutor(ASKING_THREADS, "replay-ask")
        workers = [
            threading.Thread(target=self._guarded, args=(self._work, scheduler, stores), name=f"replay-prefill{n}")
            for n in range(self._engine.workers)
        ]
        storing = [
            threading.Thread(target=self._guarded, args=(self._keep, stores), name=f"replay-store{n}")
            for n in range(STORING_THREADS)
        ]
        for thread in (*workers, *storing):
            thread.start()
        try:
            self._pace(lambda planned, due_s: asking.submit(self._guarded, self._ask, planned, due_s, scheduler))
        finally:
            asking.shutdown()
            scheduler.close()  # wakes workers that wait for a request
            for thread in workers:
                thread.join()
            for _ in storing:
                stores.put(None)
            for thread in storing:
                thread.join()
        if self._broken is not None:
            raise self._broken
        return self._left == 0

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        """A thread that ends for a fault of ours ends the run: it would wait for ever for what that thread was to do."""
        try:
            work(*arguments)
        except BaseException as error:  # noqa: BLE001 - the edge of a thread: `run` raises it
            self._broken = self._broken or error
            self.stop()

    # -- the clock -------------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        last: dict[str, int] = {}
        for planned in self._workload.requests:
            number, session = planned.asked.number, planned.asked.session
            if session in last:
                self._next[last[session]] = number
            else:
                heapq.heappush(self._due, (planned.arrival_s / self._load, number))
            last[session] = number

    def _pace(self, arrive: Callable[[Planned, float], object]) -> None:
        """Returns when all requests are done, or the run was stopped."""
        while not self._stop.is_set():
            with self._changed:
                if not self._left:
                    return
                wait_s = self._due[0][0] - self._now_s() if self._due else LOOK_S
                if wait_s > 0:
                    self._changed.wait(min(wait_s, LOOK_S))
                    continue
                due_s, number = heapq.heappop(self._due)
            arrive(self._workload.requests[number], due_s)

    def _finished(self, number: int) -> None:
        """A request is done: the next turn of its session may come."""
        self.records[number].done = True
        with self._changed:
            self._left -= 1
            following = self._next.get(number)
            if following is not None:
                planned = self._workload.requests[following]
                heapq.heappush(self._due, (max(planned.arrival_s / self._load, self._now_s()), following))
            self._changed.notify_all()
        self._done(number)

    def _now_s(self) -> float:
        return time.monotonic() - self._zero_s

    # -- a request -------------------------------------------------------------------------------------------------------

    def _ask(self, planned: Planned, due_s: float, scheduler: Scheduler[int]) -> None:
        asked, record = planned.asked, self.records[planned.asked.number]
        record.arrived_s = due_s  # not now: a store that is slow to answer would hide the wait of those behind it
        began_s = self._now_s()
        with self._lock:
            # In the order in which they really came: a session that is behind its plan comes after others.
            record.ideal_blocks = self._arrived.prefix(planned.numbers)
            record.stored_blocks = self._stored.prefix(planned.numbers)
            self._arrived.add(planned.numbers)
        try:
            found = self._system.lookup(asked)
        except Exception as error:  # noqa: BLE001 - a foreign system's edge: whatever it raises is a miss
            found = Found(0)
            record.error = f"lookup: {error!r}"
        record.lookup_s = self._now_s() - began_s
        record.found_blocks = found.blocks
        record.found_ssd_bytes = found.ssd_bytes if found.blocks else 0
        record.found_memory_bytes = found.bytes_by_medium.get("memory", 0) if found.blocks else 0
        self._found[asked.number] = found
        weight = sum(found.bytes_by_medium.values()) if self._engine.all_prefetched else found.ssd_bytes
        asked = replace(asked, ending=partial(scheduler.ending, asked.number))
        prefetch = partial(self._guarded, self._prefetch, asked, found)
        scheduler.submit(asked.number, weight if found.blocks else 0, prefetch)

    def _prefetch(self, asked: Asked, found: Found) -> None:
        slots = self._slots.take(found.blocks, self._stop.is_set)
        if slots is not None:
            self._held[asked.number] = slots
            self.records[asked.number].prefetched = True
            self._restore(asked, found, slots)

    def _restore(self, asked: Asked, found: Found, slots: Slots) -> None:
        record = self.records[asked.number]
        self._contents.wipe(self._pages, slots)
        record.prefetch_began_s = self._now_s()
        try:
            usable = self._system.restore(asked, found, self._pages, slots, self._engine.timeout_s)
            record.delivered_blocks = max(0, min(usable, found.blocks))
        except Exception as error:  # noqa: BLE001 - a foreign system's edge: whatever it raises is a miss
            record.error = f"restore: {error!r}"
        record.prefetch_ended_s = self._now_s()

    def _work(self, scheduler: Scheduler[int], stores: queue.Queue[tuple[Planned, Slots, Slots] | None]) -> None:
        while self._left and not self._stop.is_set():
            number = scheduler.next_ready(LOOK_S)
            if number is None:
                continue
            while True:
                try:
                    area = self._areas.get(timeout=LOOK_S)
                    break
                except queue.Empty:
                    if self._stop.is_set():
                        return
            planned = self._workload.requests[number]
            stores.put((planned, self._prefill(planned, area), area))

    def _prefill(self, planned: Planned, area: Slots) -> Slots:
        """Compute what was not delivered. Returns where every block of the prompt is now."""
        asked, record = planned.asked, self.records[planned.asked.number]
        found = self._found.pop(asked.number)
        held = self._held.get(asked.number)
        if found.blocks and not record.prefetched:
            held = area[: found.blocks]
            self._restore(asked, found, held)
        record.prefill_began_s = self._now_s()
        delivered = record.delivered_blocks
        if delivered and held is not None:
            record.wrong_blocks = self._contents.wrong_blocks(self._pages, held[:delivered], asked.keys[:delivered])
            if record.wrong_blocks:  # found out only here: an engine would have computed with them
                delivered = record.delivered_blocks = delivered - record.wrong_blocks
                held = None
        place = np.array(area[: planned.blocks])
        kept = delivered if held is not None else 0
        if held is not None:
            place[:kept] = held[:kept]
        if self._engine.stores:
            self._contents.fill(self._pages, place[kept:], asked.keys[kept:])
        tokens = max(1, asked.input_tokens - delivered * self._workload.block_tokens)
        end_s = record.prefill_began_s + tokens / self._engine.prefill_tokens_per_s
        self._stop.wait(max(0.0, end_s - self._now_s()))
        record.first_token_s = self._now_s()
        with self._lock:
            # What a cache without end that stores at once has from now on, whatever this system keeps of it.
            self._stored.add(planned.numbers)
        return place

    def _keep(self, stores: queue.Queue[tuple[Planned, Slots, Slots] | None]) -> None:
        while (each := stores.get()) is not None:
            planned, place, area = each
            asked, record = planned.asked, self.records[planned.asked.number]
            first = min(record.delivered_blocks, planned.blocks)
            record.offered_blocks = planned.blocks - first
            began_s = self._now_s()
            if record.offered_blocks and not self._stop.is_set():
                try:
                    record.kept_blocks = self._system.store(asked, first, self._pages, place, self._engine.timeout_s)
                except Exception as error:  # noqa: BLE001 - a foreign system's edge: whatever it raises is a block less
                    record.error = record.error or f"store: {error!r}"
            record.store_s = self._now_s() - began_s
            held = self._held.pop(asked.number, None)
            if held is not None:
                self._slots.give(held)
            self._areas.put(area)
            if not self._stop.is_set():
                self._finished(asked.number)


def pages_slots(workload: Workload, engine: Engine, pages_bytes: int, block_bytes: int) -> int:
    """Slots that pages of that size have. Raises: ValueError: too few for one request to be prefetched."""
    need = (engine.areas + 1) * workload.blocks_max
    slots = pages_bytes // block_bytes
    if slots < need:
        raise ValueError(
            f"--pages-bytes {pages_bytes} holds {slots} blocks of {block_bytes} bytes, but the longest prompt has "
            f"{workload.blocks_max} and {engine.areas + 1} of them must fit: give {need * block_bytes}, or fewer --max-tokens"
        )
    return slots
