"""The worker's half by itself, over a store that fails as told: what goes beside a step, and what sleep takes away."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from waiting import until

from flatcake_client import Unavailable
from flatcake_client.engines import vllm_worker
from flatcake_client.engines.vllm_jobs import Load, StepJobs, Store
from flatcake_client.engines.vllm_settings import Geometry, Settings
from flatcake_client.engines.vllm_worker import WorkerSide
from flatcake_client.paged_kv import TurnFacts

NAMES = ("layers.0", "layers.1", "layers.2")
BLOCKS = 8


class Hit:
    """Whose restore fails in the layer that is told."""

    def __init__(self, space, keys):
        self.space, self.blocks, self.waited = space, len(keys), []
        self.bytes_by_medium = {"memory": 0, "ssd": 0}
        self.released = self.closed = False

    def restore(self, *_, **__):
        return self

    def wait_layer(self, layer):
        self.waited.append(layer)
        if (failure := self.space.failures.get((self.space.hits.index(self), layer))) is not None:
            raise failure

    def wait(self):
        self.space.reached.set()
        assert self.space.open.wait(10)
        return self.blocks

    failure = None
    stats = SimpleNamespace(bytes_by_medium={})

    def close(self):
        self.closed = True

    def release(self):
        self.released = True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release()


class Turn:
    def __init__(self, space, keys):
        self.space, self.parts, self.blocks = space, (SimpleNamespace(blocks=len(keys)),), range(len(keys))

    def write_layer(self, *_):
        pass

    def commit(self, _):
        self.space.commits += 1

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class Space:
    def __init__(self):
        self.hits, self.failures, self.commits = [], {}, 0
        self.reached, self.open = threading.Event(), threading.Event()

    def keys_of_hashes(self, hashes, _):
        return np.zeros((len(hashes), 16), np.uint8)

    def lookup(self, keys):
        self.hits.append(Hit(self, keys))
        return self.hits[-1]

    def begin_turn(self, keys, **_):
        return Turn(self, keys)


@pytest.fixture
def space():
    return Space()


@pytest.fixture
def worker(space):
    shape = Geometry(NAMES, 16, 64, 1, BLOCKS)
    worker = WorkerSide(SimpleNamespace(close=lambda _: None), space, shape, Settings(load_timeout_s=20.0))
    worker.register({name: torch.zeros(BLOCKS, 64, dtype=torch.uint8) for name in NAMES})
    yield worker
    space.open.set()
    worker.close()


def load(name: str, blocks: tuple[int, ...], *, inside: bool = True) -> Load:
    return Load(name, (b"h",) * len(blocks), b"", 0, blocks, 0, inside)


def prefill(name: str, blocks: tuple[int, ...]) -> Store:
    return Store(name, (b"h",) * len(blocks), b"", blocks, TurnFacts(), prefill=True)


def finish(name: str, blocks: tuple[int, ...]) -> Store:
    return Store(name, (b"h",) * len(blocks), b"", blocks, TurnFacts())


def step(worker: WorkerSide, jobs: StepJobs, asking: tuple[str, ...] = NAMES) -> set[int]:
    """One of vLLM's: each layer waits for what it reads, is computed, and says so."""
    worker.begin(jobs)
    worker.start(jobs)
    for name in NAMES:
        if name in asking:
            worker.wait_layer(name)
        worker.layer_computed(name)
    worker.computed()
    return worker.failures()


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("error", [Unavailable("x"), RuntimeError("x")])
def test_a_prefill_over_blocks_that_did_not_come_is_not_stored(worker, space, layer, error):
    space.failures[0, layer] = error
    jobs = StepJobs((load("a", (1, 2)),), (prefill("a", (1, 2, 3)), prefill("b", (4, 5))))
    assert step(worker, jobs) == {1, 2}
    worker._crew.settle(5)
    assert space.commits == 1, "that of the other request"
    assert worker.finished({"a", "b"}, idle=False)[0] == {"a", "b"}


def test_a_prefill_over_a_layer_that_nobody_waited_for_is_not_stored(worker, space):
    assert step(worker, StepJobs((load("a", (1, 2)),), (prefill("a", (1, 2, 3)),)), NAMES[:2]) == {1, 2}
    worker._crew.settle(5)
    assert not space.commits
    assert space.hits[0].closed, "nothing is written once vLLM computes the blocks"
    until(lambda: space.hits[0].released)


@pytest.mark.parametrize("error", [Unavailable("x"), RuntimeError("x")])
def test_one_load_that_fails_leaves_no_layer_of_another_without_waiting(worker, space, error):
    space.failures[0, 1] = error
    assert step(worker, StepJobs((load("a", (1, 2)), load("b", (3, 4))))) == {1, 2}
    assert space.hits[1].waited == [0, 1, 2]


def test_a_preemption_does_not_wait_for_stores_of_others(worker, space, monkeypatch):
    """One that waits behind them reads nothing yet."""
    begun, go, commits = threading.Event(), threading.Event(), []
    monkeypatch.setattr(Turn, "write_layer", lambda *_: (begun.set(), go.wait(10)))
    monkeypatch.setattr(Turn, "commit", lambda self, _: commits.append(len(self.blocks)))
    worker.start(StepJobs((), (finish("b", (4,)),)))
    assert begun.wait(5)
    worker.start(StepJobs((), (finish("a", (1, 2)), finish("c", (5, 6, 7)))))
    preempting = threading.Thread(target=worker.preempted, args=(frozenset("a"),))
    preempting.start()
    preempting.join(2)
    assert not preempting.is_alive(), "on all ranks, in the step"
    assert worker.finished({"a"}, idle=False)[0] == set(), "nothing is owed of it"
    preempting = threading.Thread(target=worker.preempted, args=(frozenset("b"),))
    preempting.start()
    preempting.join(0.2)
    assert preempting.is_alive(), "its blocks are being read"
    go.set()
    preempting.join(5)
    assert worker._crew.settle(5)
    assert commits[-1] == 3
    assert 2 not in commits
    assert worker.finished({"c"}, idle=False)[0] == {"c"}
    assert not worker._open
    assert not worker._waiting
    assert not worker._given_up


def test_weights_that_changed_move_nothing_under_their_old_name(worker, space):
    """Whatever the scheduler asks for, before it has heard."""
    jobs = {
        weights: StepJobs((load("a", (1, 2)), load("b", (3,), inside=False)), (prefill("c", (4,)), finish("d", (5,))), weights=weights)
        for weights in (b"", None, b"reset")
    }  # fmt: skip
    worker.weights_changed()
    for weights, gone in ((b"", b""), (None, b"")):
        assert step(worker, jobs[weights]) == {1, 2, 3}
        assert worker.weights_gone().weights == gone
        assert worker.finished({"c", "d"}, idle=False) == ({"c", "d"}, {"b"}), "vLLM waits to hear of each"
    assert not space.hits
    assert not space.commits
    space.open.set()
    assert step(worker, jobs[b"reset"]) == set()
    assert worker.weights_gone() is None
    assert worker._crew.settle(5)
    assert space.commits == 2


def test_asleep_nothing_is_moving_and_what_moved_is_reported(worker, space, monkeypatch):
    monkeypatch.setattr(vllm_worker, "CLOSE_TIMEOUT_S", 0.05)
    worker.start(StepJobs((load("a", (1, 2), inside=False),)))
    assert space.reached.wait(5)
    asleep = threading.Thread(target=worker.unregister)
    asleep.start()
    asleep.join(0.5)
    assert asleep.is_alive(), "it must not return while a load may write"
    space.open.set()
    asleep.join(5)
    assert not asleep.is_alive()
    assert worker.finished(set(), idle=False)[1] == {"a"}, "vLLM waits to hear of each load"
