"""The L2 adapter of LMCache's server: its contract by hand, LMCache's storage manager over it, and LMCache's own bench."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine import InProcess
from lmcache.cli.commands.bench.l2_adapter_bench.data import make_memory_objects
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import EvictionConfig, L1ManagerConfig, L1MemoryManagerConfig, StorageManagerConfig
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.storage_manager import StorageManager
from waiting import until

import flatcake_client as fc
from flatcake_client.engines import lmcache, lmcache_l2
from flatcake_client.engines.lmcache import SETTINGS
from flatcake_client.engines.lmcache_l2 import FlatCakeL2AdapterConfig

SIZE = 64 << 10
LAYOUT = MemoryLayoutDesc(shapes=[torch.Size([2, 4, 64, 64])], dtypes=[torch.bfloat16])


def config_of(daemon, **params):
    return PluginL2AdapterConfig.from_dict(
        {
            "module_path": "flatcake_client.engines.lmcache_l2",
            "class_name": "FlatCakeL2Adapter",
            "adapter_params": {"endpoint": daemon.endpoint, "timeout_s": 20.0, "load_timeout_s": 20.0, **params},
        }
    )


@pytest.fixture
def make_adapter(daemon):
    made = []

    def make(**params):
        made.append(create_l2_adapter(config_of(daemon, **params)))
        return made[-1]

    yield make
    for adapter in made:
        adapter.close()


def keys_of(count, seed=0, rank=0, group=0, salt=""):
    return [ObjectKey(bytes([seed, at]) * 8, "m", rank, group, salt) for at in range(count)]


class Buffers:
    """Objects over one buffer of ours."""

    def __init__(self, count):
        self.memory = torch.zeros(count * SIZE, dtype=torch.uint8)
        self.objects = make_memory_objects(self.memory, count, SIZE, 0)
        self.memory.zero_()

    def fill(self, seed=1):
        self.memory[:] = torch.randint(0, 256, self.memory.shape, generator=torch.Generator().manual_seed(seed))
        return self


def source_of(buffers, positions):
    """Some of them."""
    return SimpleNamespace(objects=[buffers.objects[at] for at in positions])


def wait_for(fd, ask):
    """What LMCache's controllers do: wait for the descriptor, then read the result."""
    deadline_s = time.monotonic() + 40.0  # longer than any task's
    while (answer := ask()) is None:
        assert select.select([fd], [], [], max(0.0, deadline_s - time.monotonic()))[0], "no event came"
        os.eventfd_read(fd)
    return answer


def store(adapter, keys, buffers):
    task = adapter.submit_store_task(keys, buffers.objects)
    return wait_for(adapter.get_store_event_fd(), lambda: adapter.pop_completed_store_tasks().get(task))


def find(adapter, keys, layouts=None):
    task = adapter.submit_lookup_and_lock_task(keys, layouts or {})
    found = wait_for(adapter.get_lookup_and_lock_event_fd(), lambda: adapter.query_lookup_and_lock_result(task))
    assert adapter.query_lookup_and_lock_result(task) is None, "a result is read once"
    return bits(found, keys)


def load(adapter, keys, buffers):
    task = adapter.submit_load_task(keys, buffers.objects)
    loaded = wait_for(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
    assert adapter.query_load_result(task) is None
    return bits(loaded, keys)


def bits(bitmap: Bitmap, keys):
    return [at for at in range(len(keys)) if bitmap.test(at)]


def test_stored_found_locked_loaded_unlocked(daemon, make_adapter):
    adapter, keys = make_adapter(), keys_of(6)
    assert len({adapter.get_store_event_fd(), adapter.get_load_event_fd(), adapter.get_lookup_and_lock_event_fd()}) == 3
    assert find(adapter, keys) == []
    source, target = Buffers(6).fill(), Buffers(6)
    stored = store(adapter, keys, source)
    assert (stored.is_successful(), stored.bytes_transferred()) == (True, 6 * SIZE)
    assert store(adapter, keys, source).bytes_transferred() == 0
    assert find(adapter, keys) == [0, 1, 2, 3, 4, 5]
    assert daemon.status()["leases"] == 1
    assert load(adapter, keys, target) == [0, 1, 2, 3, 4, 5]
    assert torch.equal(source.memory, target.memory)
    adapter.submit_unlock(keys[:5])
    adapter.submit_unlock(keys[5:])
    daemon.until(lambda status: not status["leases"])
    assert adapter.report_status()["is_healthy"]
    assert adapter.report_status()["chunks_loaded"] == 6
    assert adapter.get_usage().total_bytes_used == 6 * SIZE


def test_a_lookup_that_breaks_half_way_keeps_nothing_locked(daemon, make_adapter, monkeypatch):
    adapter, keys = make_adapter(), keys_of(5)
    source = Buffers(5).fill()
    store(adapter, [*keys[:2], *keys[4:]], source_of(source, (0, 1, 4)))
    real, asked = fc.Space.lookup, []

    def lookup(*args, **kwargs):
        asked.append(1)
        if len(asked) == 2:
            raise RuntimeError("x")
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(fc.Space, "lookup", lookup)
        assert find(adapter, keys) == []
    assert len(asked) == 2
    daemon.until(lambda status: not status["leases"])
    assert adapter.report_status()["locked_hits"] == 0


def test_what_differs_in_rank_group_salt_or_model_is_another_chunk(make_adapter):
    adapter = make_adapter()
    store(adapter, keys_of(3), Buffers(3).fill())
    for other in (keys_of(3, rank=1), keys_of(3, group=1), keys_of(3, salt="you"), keys_of(3, seed=1)):
        assert find(adapter, other) == []
        assert load(adapter, other, Buffers(3)) == []
    mixed = [*keys_of(3, rank=1), *keys_of(3)]
    assert find(adapter, mixed) == [3, 4, 5]
    adapter.submit_unlock(mixed)


def test_a_partial_hit_says_which(make_adapter):
    adapter, keys = make_adapter(), keys_of(8)
    source, target = Buffers(8).fill(), Buffers(8)
    store(adapter, [keys[at] for at in (0, 1, 4)], source_of(source, (0, 1, 4)))
    assert find(adapter, keys) == [0, 1, 4]
    assert load(adapter, keys, target) == [0, 1, 4]
    for at in (0, 1, 4):
        assert torch.equal(target.memory[at * SIZE : (at + 1) * SIZE], source.memory[at * SIZE : (at + 1) * SIZE])


def test_bytes_are_counted_once_also_of_what_was_reclaimed_and_stored_again(daemon, make_adapter):
    adapter, keys, source = make_adapter(), keys_of(6), Buffers(6).fill()
    assert store(adapter, keys[:4], source_of(source, range(4))).bytes_transferred() == 4 * SIZE
    assert store(adapter, keys, source).bytes_transferred() == 2 * SIZE
    assert adapter.get_usage().total_bytes_used == 6 * SIZE
    with daemon.admin() as admin:
        admin.drop([session["name"] for session in admin.sessions()])
    assert store(adapter, keys[:3], source_of(source, range(3))).bytes_transferred() == 3 * SIZE
    assert adapter.get_usage().total_bytes_used == 6 * SIZE


def test_a_chunk_that_is_named_twice_is_stored_once(make_adapter):
    """LMCache's controller names what was written twice before it looked."""
    adapter, keys, target = make_adapter(), keys_of(3), Buffers(3)
    source = Buffers(3).fill()
    stored = store(adapter, [*keys, keys[1]], source_of(source, [0, 1, 2, 1]))
    assert (stored.is_successful(), stored.bytes_transferred()) == (True, 3 * SIZE)
    assert load(adapter, keys, target) == [0, 1, 2]
    assert torch.equal(source.memory, target.memory)


@pytest.mark.parametrize("module", [lmcache, lmcache_l2], ids=["in-process", "server"])
def test_chunks_of_another_version_of_lmcache_are_others(daemon, monkeypatch, module):
    """It decides how a chunk lies, and what its hash is of."""
    names = []
    for each in (lmcache.VERSION, "0.5.7"):
        monkeypatch.setattr(module, "VERSION", each)
        if module is lmcache:
            engine = InProcess(daemon.endpoint)
            names.append(engine.connector._kind)
            engine.close()
        else:
            adapter = create_l2_adapter(config_of(daemon))
            names.append(adapter._kind("m", [torch.Size([2, 3, 16, 32])], [torch.bfloat16], 6144))
            adapter.close()
    assert names[0] != names[1]


def test_other_weights_are_other_chunks_as_far_as_they_are_named(make_adapter, tmp_path):
    """LMCache passes a model's name only: an operator names the weights, or the files at that path do."""
    source = Buffers(2).fill()
    assert store(make_adapter(), keys_of(2), source).is_successful()
    assert find(make_adapter(weights="v2"), keys_of(2)) == []
    (tmp_path / "config.json").write_text("{}")
    found = []
    for weights in (b"one", b"one", b"two"):
        (tmp_path / "model.safetensors").write_bytes(weights)
        adapter, keys = make_adapter(), [ObjectKey(bytes([at]) * 8, str(tmp_path), 0, 0, "") for at in range(2)]
        found.append(load(adapter, keys, Buffers(2)))
        store(adapter, keys, source)
    assert found == [[], [0, 1], []]


def test_a_daemon_that_is_stopped_costs_each_task_its_deadline(daemon, make_adapter):
    adapter, keys = make_adapter(timeout_s=1.0, load_timeout_s=1.0, store_timeout_s=1.0), keys_of(3)
    source = Buffers(3).fill()
    until(lambda: store(adapter, keys, source).is_successful())
    daemon.signal(signal.SIGSTOP)
    try:
        started_s = time.monotonic()
        assert find(adapter, keys) == []
        target = Buffers(3)
        assert load(adapter, keys, target) == []
        assert not target.memory.any()
        assert not store(adapter, keys_of(3, seed=9), source).is_successful()
        assert time.monotonic() - started_s < 6
        assert not adapter.report_status()["is_healthy"]
    finally:
        daemon.signal(signal.SIGCONT)
    until(lambda: find(adapter, keys) == [0, 1, 2])
    adapter.submit_unlock(keys)


def test_submitting_never_blocks_and_what_is_too_much_is_a_miss_at_once(daemon, make_adapter):
    adapter, keys = make_adapter(waiting_max=2, timeout_s=1.0, load_timeout_s=1.0), keys_of(2)
    until(lambda: store(adapter, keys, Buffers(2).fill()).is_successful())
    daemon.signal(signal.SIGSTOP)
    try:
        started_s = time.monotonic()
        tasks = [adapter.submit_load_task(keys, Buffers(2).objects) for _ in range(20)]
        lookups = [adapter.submit_lookup_and_lock_task(keys, {}) for _ in range(20)]
        assert time.monotonic() - started_s < 5, "a submit that waited would take a second each"
        assert adapter.report_status()["tasks_refused"] >= 20
        for task in tasks:
            assert (
                bits(wait_for(adapter.get_load_event_fd(), lambda task=task: adapter.query_load_result(task)), keys)
                == []
            )
        for task in lookups:
            fd = adapter.get_lookup_and_lock_event_fd()
            assert bits(wait_for(fd, lambda task=task: adapter.query_lookup_and_lock_result(task)), keys) == []
    finally:
        daemon.signal(signal.SIGCONT)


def test_a_locked_chunk_outlives_its_lease_time(tmp_path):
    from daemon import Daemon

    with Daemon(tmp_path, lease_ttl="6s") as daemon:  # renewed when half of it is gone: so long may this machine stall
        adapter, keys = create_l2_adapter(config_of(daemon)), keys_of(2)
        try:
            store(adapter, keys, Buffers(2).fill())
            assert find(adapter, keys) == [0, 1]
            deadline_s = time.monotonic() + 7
            daemon.until(lambda status: status["leases"] == 1 and time.monotonic() > deadline_s)
            adapter.submit_unlock(keys)
            daemon.until(lambda status: not status["leases"])
        finally:
            adapter.close()


def test_settings_that_make_no_sense_are_refused(daemon):
    for params in ({"treads": 1}, {"timeout_s": 0}, {"store_timeout_s": math.inf}, {"load_threads": 0}):
        with pytest.raises(ValueError, match=next(iter(params))):
            create_l2_adapter(config_of(daemon, **params))


def test_close_twice_and_results_after_it(make_adapter):
    adapter = make_adapter()
    adapter._stores.submit(lambda: until(lambda: adapter._stores._crew._closed))
    task = adapter.submit_store_task(keys_of(4), Buffers(4).fill().objects)
    adapter.close()
    adapter.close()
    results = adapter.pop_completed_store_tasks()
    assert set(results) == {task}, "what was still waiting has its answer"
    assert not results[task].is_successful()
    assert adapter.pop_completed_store_tasks() == {}
    assert adapter.query_load_result(task) is None


# -- LMCache's own storage manager, with its store and prefetch controllers ----------------------------------------------


def manager_of(daemon):
    return StorageManager(
        StorageManagerConfig(
            l1_manager_config=L1ManagerConfig(
                L1MemoryManagerConfig(size_in_bytes=16 << 20, use_lazy=False, shm_name="")
            ),
            eviction_config=EvictionConfig("LRU"),
            l2_adapter_config=L2AdaptersConfig([config_of(daemon)]),
        )
    )


def prefetch(manager, keys):
    handle = manager.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(keys, 0, LAYOUT)]))
    assert manager.wait_prefetch_status(handle, 20.0)
    return manager.query_prefetch_status(handle)


def test_lmcache_restarts_and_finds_what_it_stored(daemon):
    keys, stored = keys_of(12), {}
    manager = manager_of(daemon)
    try:
        for key, each in manager.reserve_write(keys, LAYOUT).items():
            each.tensor.copy_(torch.randn(each.tensor.shape))
            stored[key] = each.tensor.clone()
        manager.finish_write(keys)
        until(lambda: manager.report_status()["l2_adapters"][0]["chunks_stored"] == 12)
    finally:
        manager.close()
    daemon.restart()
    manager = manager_of(daemon)
    try:
        result = prefetch(manager, keys)
        assert (result.l1_hit_count, result.l2_hit_count) == (0, 12)
        with manager.read_prefetched_results(keys) as objects:
            assert all(torch.equal(each.tensor, stored[key]) for key, each in zip(keys, objects, strict=True))
        manager.finish_read_prefetched(keys)
        until(lambda: not daemon.status()["leases"])
        assert prefetch(manager, keys_of(12, seed=5)).l2_hit_count == 0
        daemon.kill()
        manager.delete_l1_keys(keys)
        assert prefetch(manager, keys_of(12, seed=6)).l2_hit_count == 0
    finally:
        manager.close()


def test_its_bench_runs_and_verifies(daemon, tmp_path):
    spec = {"type": "plugin", "module_path": "flatcake_client.engines.lmcache_l2", "class_name": "FlatCakeL2Adapter",
            "adapter_params": {"endpoint": daemon.endpoint}}  # fmt: skip
    command = [str(Path(sys.executable).parent / "lmcache"), "bench", "l2", "--l2-adapter", json.dumps(spec),
               "--no-skip-verify", "--lookup-max-hit-rate", "1.0", "--in-flight", "2", "--data-size-kb", "512"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "data verified OK" in done.stdout
    assert "found=64/64" in done.stdout
    assert "loaded=64/64" in done.stdout


def test_the_documents_name_the_version_and_every_setting():
    root = Path(__file__).parents[3]
    page = (root / "docs/engines/lmcache.md").read_text()
    assert f"LMCache {version('lmcache')}" in page
    for setting in {*FlatCakeL2AdapterConfig.__dataclass_fields__, *SETTINGS}:
        assert f"| `{setting}` |" in page
