"""Which model SGLang serves, and what becomes of KV when its weights change while it runs: through SGLang's own classes and hooks."""

from __future__ import annotations

import importlib
import json
import logging
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from conformance.connectors import Engine, Shape
from engines.sglang.harness import StorageHarness
from engines.sglang.linker_harness import LinkerHarness
from sglang.srt.arg_groups.arg_utils import namespace_of
from sglang.srt.arg_groups.lora_hook import check_lora_server_args
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs

from flatcake_client.engines import sglang_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    updater = importlib.import_module(sglang_model.UPDATER)

SHAPE = Shape(block_tokens=4)
CHANGES = (
    "begin_weight_update",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"hidden_size": 64, "rope_scaling": {"rope_type": "yarn", "factor": 4}})
    )
    (tmp_path / "model.safetensors").write_bytes(b"first")
    return tmp_path


@pytest.fixture
def unwatched(folder, monkeypatch):
    """A process whose weights nobody watches yet."""
    sglang_model.served.cache_clear()
    HookRegistry.reset()
    for owner, names in (
        (updater.WeightUpdater, (*CHANGES, "update_weights_from_disk", "end_weight_update")),
        (HiCacheController, ("reset",)),
    ):
        for name in names:
            monkeypatch.setattr(
                owner, name, loads(folder) if name == "update_weights_from_disk" else lambda *_, **__: (True, "")
            )
    yield
    HookRegistry.reset()
    sglang_model.served.cache_clear()


@pytest.fixture
def settings(folder, monkeypatch, unwatched):
    """What SGLang resolved its arguments to."""
    settings = {"model_path": str(folder), "load_format": "auto", "dtype": "bfloat16", "context_length": None}
    arguments = SimpleNamespace(hicache_storage_backend="dynamic", kv_cache_dtype="auto")
    monkeypatch.setattr(sglang_model, "_settings", lambda: settings)
    monkeypatch.setattr(sglang_model, "get_server_args", lambda: arguments)
    settings["arguments"] = arguments
    return settings


@pytest.fixture
def started(folder, unwatched):
    """What is served by an engine started with such arguments: SGLang's own, resolved as far as adapters go, and published."""

    def started(**arguments):
        sglang_model.served.cache_clear()
        HookRegistry.reset()
        told = ServerArgs(**{"model_path": str(folder)} | arguments)
        check_lora_server_args(told)
        get_context().set_server_args(told)
        return sglang_model.served()

    with get_context().override_server_args():
        yield started


def loads(folder):
    """SGLang's own needs a model: here what it does is given by a file of the test."""

    def update_weights_from_disk(_self, model_path, load_format, **_):
        if (folder / "while").exists():
            (folder / "model.safetensors").write_bytes(b"overwritten while it was read")
        if (folder / "raise").exists():
            raise RuntimeError("as a rollback that fails")
        return not (folder / "fail").exists(), ""

    return update_weights_from_disk


def space_of(settings, **changed):
    sglang_model.served.cache_clear()
    HookRegistry.reset()
    settings.update(changed)
    served = sglang_model.served()
    return served.model, served.weights_name("")


def test_weights_of_the_hub_are_those_in_the_download_directory(started, tmp_path):
    """Elsewhere may be another commit of the model, which this engine has not loaded."""
    names = set()
    for commit in ("a", "b"):
        root = tmp_path / commit / "models--some--model"
        (root / "snapshots" / commit).mkdir(parents=True)
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text(commit)
        (root / "snapshots" / commit / "model.safetensors").write_bytes(commit.encode())
        names.add(started(model_path="some/model", download_dir=str(tmp_path / commit)).started)
    assert len(names) == 2


def test_what_changes_kv_of_equal_shapes_is_another_space(settings, folder):
    first = space_of(settings)
    assert space_of(settings) == first
    spaces = {first}
    for changed in (
        {"json_model_override_args": '{"rope_scaling": {"rope_type": "yarn", "factor": 8}}'},
        {"json_model_override_args": "{}", "quantization": "fp8"},
        {"quantization": None, "dtype": "float16"},
        {"dtype": "bfloat16", "load_format": "dummy"},
        {"load_format": "auto", "json_model_override_args": '{"rope_scaling": {"rope_type": "longrope"}}'},
        {"context_length": 8192},
        {"mm_process_config": {"image": {"max_pixels": 1048576}}},
    ):
        spaces.add(space_of(settings, **changed))
    (folder / "model.safetensors").write_bytes(b"other")
    spaces.add(space_of(settings, json_model_override_args="{}", context_length=None))
    assert len(spaces) == 9


def test_files_that_settings_name_are_what_they_hold(settings, folder):
    """Scales of fp8 KV, a profile of quantization, a model that drafts."""
    other, spaces = folder / "other", set()
    other.mkdir()
    for name in sglang_model.FILES:
        for path in (folder / "scales.json", other / "scales.json"):
            path.write_text("1")
        spaces.add(first := space_of(settings, **{name: str(folder / "scales.json")}))
        assert space_of(settings, **{name: str(other / "scales.json")}) == first
        (other / "scales.json").write_text("2")
        spaces.add(space_of(settings, **{name: str(other / "scales.json")}))
        spaces.add(space_of(settings, **{name: None}))
    assert len(spaces) == 2 * len(sglang_model.FILES) + 1


def test_all_that_the_name_is_made_of_is_a_setting_of_this_sglang():
    """What a version does not have is left out without a word."""
    assert set(sglang_model.ASKED) <= set(namespace_of(ServerArgs))


def adapter(folder, weights, config="{}"):
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "adapter_config.json").write_text(config)


def test_adapters_of_the_start_are_their_files(started, folder):
    """SGLang has name and path in the hashes of pages, and nothing else of them."""
    bot, other = folder / "bot", folder / "other"
    adapter(bot, b"1" * 9000)
    adapter(other, b"1" * 9000)
    none, first = started().model, started(lora_paths=[f"bot={bot}"]).model
    assert get_context().config_leaf("lora_paths")[0].lora_id == LoRARef.deterministic_id("bot", str(bot))
    assert none != first
    assert started(lora_paths=[f"bot={bot}"]).model == first
    assert started(lora_paths={"bot": str(bot)}).model == first
    assert started(lora_paths=[f"bot={other}"]).model == first, "the path is in SGLang's hashes"
    assert started(lora_paths=[f"bot={bot}"], enable_lora=False).model == none
    models = {none, first, started(lora_paths=[f"bot={bot}", f"other={other}"]).model}
    for weights, config in ((b"1" * 8999 + b"2", "{}"), (b"1" * 9000, '{"lora_alpha": 2}')):
        adapter(bot, weights, config)
        models.add(started(lora_paths=[{"lora_name": "bot", "lora_path": str(bot)}]).model)
    assert len(models) == 5
    adapter(bot, b"1" * 9000)
    assert started(lora_paths=[f"bot={bot}"]).model == first


def test_an_adapter_that_cannot_be_read_is_known_to_this_engine_only(started, folder, monkeypatch):
    (folder / "bot").mkdir()  # without weights
    for path in ("bot", "nowhere", "x" * 5000):
        lora_paths = [f"bot={folder / path}"]
        first = started(lora_paths=lora_paths).model
        assert started(lora_paths=lora_paths).model == first
        with monkeypatch.context() as patch:
            patch.setattr(sglang_model, "engine_id", lambda: "another")
            assert started(lora_paths=lora_paths).model != first


def test_a_model_of_one_file_is_that_file(started, tmp_path):
    names = set()
    for weights in (b"first", b"second", b"second"):
        (tmp_path / "x.gguf").write_bytes(weights)
        names.add(started(model_path=str(tmp_path / "x.gguf"), load_format="gguf").started)
    assert len(names) == 2


@pytest.fixture
def engine(daemon, settings):
    engine = Engine(StorageHarness(daemon.endpoint, SHAPE))
    yield engine
    engine.harness.close()


def flush():
    HiCacheController.reset(None)


@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change_nothing_older_is_found(engine, change, caplog):
    tokens = engine.tokens(1, 5)
    assert engine.store(tokens)
    getattr(updater.WeightUpdater, change)(None)
    assert (engine.lookup(tokens), engine.load(tokens), engine.store(tokens)) == (0, 0, False)
    assert "flush_cache" in caplog.text
    flush()
    assert engine.lookup(tokens) == 0
    assert engine.store(tokens)
    assert engine.load(tokens) == 5
    getattr(updater.WeightUpdater, change)(None)
    flush()
    assert engine.lookup(tokens) == 0


def test_a_session_of_updates_ends_without_another_flush_unless_it_was_written_from_outside(engine):
    tokens = engine.tokens(1, 5)
    updater.WeightUpdater.begin_weight_update(None)
    updater.WeightUpdater.update_weights_from_tensor(None)
    flush()
    updater.WeightUpdater.end_weight_update(None, run_post_load=False)
    assert engine.store(tokens)
    updater.WeightUpdater.begin_weight_update(None)
    flush()
    updater.WeightUpdater.end_weight_update(None, run_post_load=True)
    assert not engine.store(tokens)
    flush()
    assert engine.lookup(tokens) == 0


def test_weights_from_disk_are_known_by_their_files(engine, folder):
    update, tokens = updater.WeightUpdater.update_weights_from_disk, engine.tokens(1, 5)
    assert engine.store(tokens)
    assert update(None, str(folder), "auto") == (True, "")
    assert engine.lookup(tokens) == 5, "the same files: SGLang loads some again when an expert was lost"
    (folder / "model.safetensors").write_bytes(b"second")
    assert update(None, model_path=str(folder), load_format="auto")[0]
    assert engine.lookup(tokens) == 0
    flush()
    assert engine.store(tokens)
    (folder / "model.safetensors").write_bytes(b"third")
    update(None, str(folder), "auto")
    flush()
    assert engine.lookup(tokens) == 0
    (folder / "model.safetensors").write_bytes(b"second")
    update(None, str(folder), "auto")
    flush()
    assert engine.load(tokens) == 5


def test_an_update_from_files_of_a_part_is_this_engine_s_own(engine, folder, tmp_path_factory):
    """What it makes depends on the weights before."""
    update, tokens, part = (
        updater.WeightUpdater.update_weights_from_disk,
        engine.tokens(1, 5),
        tmp_path_factory.mktemp("part"),
    )
    (part / "model.safetensors").write_bytes(b"part")
    update(None, str(part), "auto")
    flush()
    assert engine.store(tokens)
    update(None, str(folder), "auto")
    update(None, str(part), "auto")
    flush()
    assert engine.lookup(tokens) == 0


def test_an_update_from_disk_that_raises_leaves_weights_without_a_name(engine, folder):
    tokens = engine.tokens(1, 5)
    assert engine.store(tokens)
    (folder / "model.safetensors").write_bytes(b"second")
    (folder / "raise").touch()
    update = updater.WeightUpdater.update_weights_from_disk
    with pytest.raises(RuntimeError, match="rollback"):
        update(None, str(folder), "auto")
    flush()
    assert engine.store(tokens), "under a name of this engine's own"
    (folder / "raise").unlink()
    update(None, str(folder), "auto")
    flush()
    assert engine.lookup(tokens) == 0


@pytest.mark.parametrize("path", ["x" * 5000, "/proc/1/root/x", "a\0b", ""], ids=["long", "closed", "null", "empty"])
def test_a_path_that_nothing_can_lie_at_is_an_answer_of_sglangs(engine, folder, path):
    """Its scheduler calls, and would end."""
    tokens = engine.tokens(1, 5)
    assert engine.store(tokens)
    (folder / "fail").touch()
    assert updater.WeightUpdater.update_weights_from_disk(None, path, "auto") == (False, "")
    assert not engine.store(tokens)
    flush()
    assert engine.lookup(tokens) == 0


@pytest.mark.parametrize("fault", ["fail", "while"])
def test_an_update_from_disk_that_fails_or_is_overtaken_leaves_weights_without_a_name(engine, folder, fault):
    tokens = engine.tokens(1, 5)
    assert engine.store(tokens)
    (folder / fault).touch()
    updater.WeightUpdater.update_weights_from_disk(None, str(folder), "auto")
    assert not engine.store(tokens)
    flush()
    assert engine.lookup(tokens) == 0


def test_the_linker_hears_of_a_flush_by_its_reset(daemon, settings):
    engine = Engine(LinkerHarness(daemon.endpoint, SHAPE))
    linker, tokens = engine.harness.linker, engine.tokens(1, 3)
    assert engine.store(tokens)
    _, rid, count = engine.harness.queue(tokens)
    assert count == 3
    linker.cancel_queued_load(rid)
    updater.WeightUpdater.update_weights_from_tensor(None)
    assert engine.lookup(tokens) == 0
    assert not engine.store(tokens)
    linker.reset()
    assert engine.lookup(tokens) == 0
    assert engine.store(tokens)
    assert engine.load(tokens) == 3
    engine.harness.close()


def test_the_linkers_transfers_rest_before_the_memory_of_the_pools_is_taken_away(daemon, settings, monkeypatch):
    saver = importlib.import_module(sglang_model.SAVER)
    real, order = saver._TorchMemorySaverAdapterReal, []
    monkeypatch.setattr(real, "pause", lambda _self, tag: order.append(tag))
    HookRegistry.reset()
    engine = Engine(LinkerHarness(daemon.endpoint, SHAPE))
    linker, go = engine.harness.linker, threading.Event()
    linker._offloads.submit(lambda: (go.wait(10), order.append("offload")))
    pausing = threading.Thread(target=lambda: real.pause(None, "kv_cache"))
    pausing.start()
    go.set()
    pausing.join()
    assert order == ["offload", "kv_cache"]
    engine.harness.close()


def test_who_was_attached_to_a_running_engine_shares_with_nobody_unless_the_weights_are_named(started, caplog):
    linked = "enable_unified_cache_external_linker", "unified_cache_external_linker_backend"
    ours = {"hicache_storage_backend": "dynamic"}, dict(zip(linked, (True, "dynamic"), strict=True))
    for arguments in ours:
        assert "engine" not in started(**arguments).weights_name("")
    get_context().override("attached again", hicache_storage_backend="file")
    assert sglang_model.get_server_args().hicache_storage_backend is None, "what it was at the start"
    assert not caplog.text
    others = (
        {},
        {"hicache_storage_backend": "file"},
        dict(zip(linked, (True, "mori"), strict=True)),
        {linked[1]: "dynamic"},
    )
    for arguments in others:
        caplog.clear()
        served = started(**arguments)
        assert served.weights_name("").startswith("engine ")
        assert 'Set "weights"' in caplog.text
        assert served.weights_name("v7").startswith("v7 ")


def test_a_version_of_sglang_that_cannot_be_watched_says_so(settings, monkeypatch, caplog):
    monkeypatch.delattr(updater.WeightUpdater, "update_weights_from_ipc")
    with caplog.at_level(logging.ERROR):
        space_of(settings)
    assert "has no sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_ipc," in caplog.text  # fmt: skip


@pytest.mark.parametrize("applied", [False, True])
def test_a_plug_in_that_hooked_the_same_before_leaves_us_out_and_we_say_so(settings, caplog, applied):
    """SGLang applies hooks to a method once; what was only registered goes along with ours."""
    sglang_model.served.cache_clear()
    HookRegistry.register(f"{sglang_model.UPDATER}.WeightUpdater.update_weights_from_ipc", lambda *_, **__: None)
    if applied:
        HookRegistry.apply_hooks()
    with caplog.at_level(logging.ERROR):
        sglang_model.served()
    assert ("update_weights_from_ipc, or a plug-in hooked it before" in caplog.text) == applied
    assert "update_weights_from_tensor" not in caplog.text


def test_ranks_agree_on_the_name_of_their_engine(monkeypatch):
    """Through the store of their process group, in whatever order they come."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
    names = []
    ranks = [threading.Thread(target=lambda: names.append(sglang_model.engine_id.__wrapped__())) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(names) == 4
    assert len(set(names)) == 1
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: None)
    assert sglang_model.engine_id.__wrapped__() not in names, "ranks that cannot agree find nothing"
