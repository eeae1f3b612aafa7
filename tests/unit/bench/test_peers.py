"""The pure part of bench/peers/: a budget becomes settings, settings become command lines."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from flatcake_client.replay.system import Budget, open_adapter

PEERS = Path(__file__).resolve().parents[3] / "bench" / "peers"
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"peer_{name}", PEERS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


mooncake, lmcache = load("mooncake"), load("lmcache")


def budget(*, memory_bytes: int = GIB, ssd_bytes: int = 8 * GIB, block_bytes: int = 4 * MIB) -> Budget:
    pages = np.zeros((1, 1, 1), np.uint8)
    return Budget(memory_bytes, ssd_bytes, Path("/ssd/run"), 64, block_bytes // 32, 32, pages)


def test_mooncake_gets_the_same_memory_and_ssd_and_stays_on_loopback() -> None:
    settings = mooncake.Settings.for_budget(budget(), "client")
    master = settings.master_command(Path("/bin/mooncake_master"), 1111, 2222)
    client = settings.client_command(Path("/bin/mooncake_client"), 1111, 3333)
    environment = settings.environment()
    assert {"--rpc_address=127.0.0.1", "--rpc_port=1111", "--metrics_host=127.0.0.1", "--metrics_port=2222"} <= {
        *master
    }
    assert {"--enable_offload=true", "--offload_on_evict=true"} <= {*master}
    assert {f"--global_segment_size={GIB}", "--enable_offload=true", "--protocol=tcp", "--port=3333"} <= {*client}
    assert environment["MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE"] == str(8 * GIB)
    assert environment["MOONCAKE_OFFLOAD_BUCKET_MAX_PHYSICAL_BYTES"] == str(8 * GIB)
    assert environment["MOONCAKE_OFFLOAD_BUCKET_EVICTION_POLICY"] == "lru"
    assert environment["MOONCAKE_OFFLOAD_FILE_STORAGE_PATH"] == "/ssd/run/mooncake"


@pytest.mark.parametrize("block_bytes", [64 * KIB, 4 * MIB, 100 * MIB, 256 * MIB])
def test_mooncakes_staging_holds_all_batches_at_once(block_bytes: int) -> None:
    settings = mooncake.Settings.for_budget(budget(memory_bytes=4 * GIB, block_bytes=block_bytes), "embedded")
    at_once = settings.batches_at_once * settings.batch_blocks * settings.block_bytes
    assert 0 < at_once <= settings.staging_bytes * mooncake.STAGING_USABLE


@pytest.mark.parametrize("memory_bytes", [64 * MIB, GIB, 64 * GIB])
def test_what_mooncake_evicts_at_once_fills_a_bucket(memory_bytes: int) -> None:
    """Else nothing reaches the SSD, and puts are refused for ever."""
    settings = mooncake.Settings.for_budget(budget(memory_bytes=memory_bytes, block_bytes=256 * KIB), "embedded")
    assert settings.block_bytes <= settings.bucket_bytes <= memory_bytes * settings.eviction_ratio / 4


@pytest.mark.parametrize("block_bytes", [64 * KIB, 4 * MIB, 60 * MIB])
def test_lmcaches_batches_at_once_leave_room_in_its_memory(block_bytes: int) -> None:
    settings = lmcache.Settings.for_budget(budget(block_bytes=block_bytes))
    at_once = settings.batches_at_once * settings.batch_blocks * settings.block_bytes
    assert 0 < at_once <= settings.memory_bytes * lmcache.L1_SHARE
    assert settings.l1_trigger_watermark + lmcache.L1_SHARE <= 1.0


def test_lmcache_gets_the_same_ssd_with_o_direct_and_eviction() -> None:
    spec = lmcache.Settings.for_budget(budget()).adapter_spec()
    assert (spec["type"], spec["use_odirect"], spec["max_capacity_gb"]) == ("fs_native", True, 8.0)
    assert spec["eviction"]["eviction_policy"] == "LRU"
    assert spec["base_path"] == "/ssd/run/lmcache"


@pytest.mark.parametrize("name", ["mooncake", "lmcache"])
def test_a_memory_of_too_few_blocks_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="8 blocks"):
        open_adapter(PEERS / f"{name}.py", budget(memory_bytes=16 * MIB))


def test_a_deployment_that_mooncake_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATCAKE_PEER_MOONCAKE", "cluster")
    with pytest.raises(ValueError, match="embedded or client"):
        open_adapter(PEERS / "mooncake.py", budget())


def test_a_key_is_its_hexadecimal_name() -> None:
    keys = np.arange(32, dtype=np.uint8).reshape(2, 16)
    assert mooncake.key_names(keys) == [bytes(range(16)).hex(), bytes(range(16, 32)).hex()]
