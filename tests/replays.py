"""What tests of the replay share: a store in a dict, small workloads, and a run of one on the other."""

from __future__ import annotations

import threading

import numpy as np
from traces import request

from flatcake_client.replay.contents import Contents
from flatcake_client.replay.driver import Engine, Run
from flatcake_client.replay.queues import OneQueue
from flatcake_client.replay.system import Found, SystemStats
from flatcake_client.replay.workload import Shaping, shape

PLANES, PLANE_BYTES = 2, 64
ENGINE = Engine(prefill_tokens_per_s=1e6, workers=1, timeout_s=5.0, all_prefetched=True)


class DictSystem:
    """Every verb as the seam says, bytes in a dict. `medium` is what lookups say."""

    name = "dict"
    prefetches_max = 2

    def __init__(self, medium="ssd"):
        self.settings = {}
        self.held, self.medium, self.lock = {}, medium, threading.Lock()
        self.restores = self.stores = 0
        self.overlap = 0

    def lookup(self, asked):
        with self.lock:
            keys = [key.tobytes() for key in asked.keys]
            blocks = next((i for i, key in enumerate(keys) if key not in self.held), len(keys))
        return Found(blocks, {self.medium: blocks * PLANES * PLANE_BYTES}, "pin") if blocks else Found(0)

    def restore(self, asked, found, pages, slots, timeout_s):
        assert found.pin == "pin"
        assert len(slots) == found.blocks
        with self.lock:
            self.restores += 1
            for key, slot in zip(asked.keys, slots.tolist(), strict=False):
                pages[slot] = self.held[key.tobytes()]
        return found.blocks

    def store(self, asked, first_block, pages, slots, timeout_s):
        assert len(slots) == len(asked.keys)
        with self.lock:
            self.stores += 1
            for key, slot in zip(asked.keys[first_block:], slots[first_block:].tolist(), strict=True):
                self.held[key.tobytes()] = pages[slot].copy()
        return len(asked.keys) - first_block

    def settle(self, timeout_s): ...

    def stats(self):
        return SystemStats()

    def close(self): ...


def talk(session, turns, first_id, *, at_s=0.0, blocks=2, gap_s=0.001, shared=()):
    """A session whose context grows by `blocks` a turn, behind a shared head."""
    ids = [*shared]
    for turn in range(turns):
        ids = ids + list(range(first_id + turn * blocks, first_id + (turn + 1) * blocks))
        yield request(at_s + turn * gap_s, session, ids, turn=turn + 1)


def workload_of(*talks, **shaping):
    requests = sorted((each for told in talks for each in told), key=lambda each: each.arrival_s)
    return shape(requests, Shaping(**shaping))


def pages_for(workload, engine=ENGINE, *, spare=1):
    return np.zeros(((engine.areas + spare) * max(1, workload.blocks_max), PLANES, PLANE_BYTES), np.uint8)


def run_of(workload, system, *, engine=ENGINE, queues=None, load=1.0, done=lambda _: None):
    contents = Contents(PLANES, PLANE_BYTES, body_every=1)
    queues = queues or OneQueue(system.prefetches_max, in_order=False)
    return Run(workload, system, engine, pages_for(workload, engine), contents, queues, load=load, done=done)
