"""Which model SGLang serves in this process, and with which weights: what its storage and linker interfaces do not say.

Its runtime context has the model's path and how it is loaded: configuration and weight files give the names of the space. SGLang
changes weights while it runs (`update_weights_from_disk`, `_distributed`, `_tensor`, `_ipc`, and whatever is written into them between
`begin_` and `end_weight_update`) and tells no backend of it; a version is optional there, and anybody's choice. So hooks of SGLang's
own registry are on the methods that every such change goes through, and on the flush of its cache.

One a process, as the model and SGLang's hooks are. Where no model runs (tests of pools, tools) there is nothing to know or hook.
"""

from __future__ import annotations

import json
import logging
import os
import pkgutil
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_context, get_server_args
from sglang.version import __version__

from flatcake_client.engines.fingerprint import (
    adapter_digest,
    config_digest,
    folder_of,
    turns_by_context,
    weights_bytes,
    weights_digest,
)
from flatcake_client.engines.weights import Weights

log = logging.getLogger(__name__)

# What changes KV of equal shapes, besides the model's own configuration.
SETTINGS: Final = (
    "dtype", "quantization", "modelopt_quant", "quantize_and_serve", "model_impl", "kv_cache_dtype", "mm_process_config",
)  # fmt: skip
FILES: Final = (
    "quantization_param_path",
    "rl_quant_profile",
    "speculative_draft_model_path",
)  # what lies there, not where
ASKED: Final = (
    "model_path", "revision", "load_format", "json_model_override_args", "context_length", "enable_lora", "lora_paths",
    "download_dir", *SETTINGS, *FILES,
)  # fmt: skip
UPDATER: Final = "sglang.srt.model_executor.model_runner_components.weight_updater"
RESET: Final = "sglang.srt.managers.cache_controller.HiCacheController.reset"
SAVER: Final = "sglang.srt.utils.torch_memory_saver_adapter"
FLUSH: Final = "POST /flush_cache to SGLang"
WHOLE: Final = 0.99  # of the bytes of the start: headers differ a little
FOREIGN_LOADS: Final = frozenset(("remote_instance",))  # weights that are another engine's, whatever lies at the path


@dataclass(frozen=True, slots=True)
class Served:
    """`model`: its name and a digest of its configuration, "" if not known; `started`: name of the weights it started with.

    `sure`: nothing can have changed them before they were watched.
    """

    model: str
    started: str
    weights: Weights
    sure: bool

    def weights_name(self, setting: str) -> str:
        """What names the weights in a space: also what the operator said."""
        if self.sure or setting:
            return f"{setting} {self.started}".strip()
        log.warning(
            "FlatCake was attached to a running engine, whose weights may have been changed before: nothing is shared with other "
            'engines or restarts. Set "weights" in the extra config to name them, or attach at the start'
        )
        return f"engine {engine_id()}"


@cache
def served() -> Served:
    """Of this process."""
    settings = _settings()
    path = str(settings.get("model_path") or "")
    if not path:
        return Served("", "", Weights("", engine_id, FLUSH), sure=True)
    hub = settings.get("download_dir")
    folder = folder_of(path, settings.get("revision"))
    config = _config(folder, str(settings.get("json_model_override_args") or "{}"))
    if turns_by_context(config):
        log.warning(
            "the rope of this model turns keys by the longest position in a batch, so SGLang's KV is not that of its tokens alone, in "
            "FlatCake as in its own cache. A --context-length up to the model's original one avoids it"
        )
    more = {name: str(settings.get(name)) for name in SETTINGS} | {"sglang": __version__}
    more |= _adapters(settings.get("lora_paths") if settings.get("enable_lora") else ())
    more |= {name: _on_disk(str(settings[name]), "", hub=hub) for name in FILES if settings.get(name)}
    digest = config_digest(config, context_tokens=settings.get("context_length"), **more)
    started = _on_disk(path, str(settings.get("load_format")), settings.get("revision"), hub)
    weights = Weights(started, engine_id, FLUSH)
    _watch(weights, _bytes_on_disk(path, settings.get("revision"), hub))
    return Served(f"{Path(path).name}/{digest}", started, weights, sure=_since_start(get_server_args()))


@cache
def engine_id() -> str:
    """The same in all ranks of this engine, and in no other: agreed on in the store of their process group, without waiting for them."""
    mine = uuid.uuid4().hex
    try:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            store = torch.distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no other name for it
            return str(store.compare_set("flatcake/engine", "", mine).decode())
    except Exception as error:  # noqa: BLE001 - an engine's edge: ranks that differ find nothing, and that is all
        log.warning(
            "the ranks did not agree on a name of this engine, nothing will be found after a change of weights: %r",
            error,
        )
    return mine


def before_sleep(settle: Callable[[], object]) -> None:
    """Have `settle` called before SGLang takes the memory of its device pools away (`release_memory_occupation`).

    It flushes only after that, and does not count a linker's transfers when it asks whether it is idle: a copy that is under way
    would read memory that is gone, and end the process.
    """
    if SAVER not in sys.modules:
        return

    def about_to_sleep(*_: Any, **__: Any) -> None:
        settle()

    HookRegistry.register(f"{SAVER}._TorchMemorySaverAdapterReal.pause", about_to_sleep, HookType.BEFORE)
    HookRegistry.apply_hooks()


def _settings() -> dict[str, Any]:
    """Of the engine in this process, as resolved; empty where there is none. What this version does not have is left out."""
    found = {}
    for name in ASKED:
        try:
            found[name] = get_context().config_leaf(name)
        except (AttributeError, LookupError, RuntimeError, ValueError):
            continue
    return found


def _config(folder: Path | None, changed: str) -> dict[str, Any]:
    """A model's configuration with what SGLang was told to change in it; empty if it is not on this disk."""
    try:
        config = json.loads((folder / "config.json").read_text()) if folder is not None else {}
        return dict(config) | dict(json.loads(changed))
    except (OSError, ValueError) as error:
        log.warning("the model's configuration is not part of the space's name, it cannot be read: %s", error)
        return {"changed": changed}


def _since_start(arguments: Any) -> bool:
    """Whether FlatCake was there when the engine began. `arguments`: of its start; attaching and detaching leave them as they are.

    Another backend's start is not ours: what changed under it was not watched.
    """
    linked = getattr(arguments, "enable_unified_cache_external_linker", False)
    way = "unified_cache_external_linker_backend" if linked else "hicache_storage_backend"
    return bool(getattr(arguments, way, None) == "dynamic")


def _adapters(paths: Any) -> dict[str, str]:
    """What files of `--lora-paths` hold: SGLang names these adapters by name and path only. Empty where there are none, so that names stay.

    Adapters that cannot be read make the space this engine's alone. Those loaded by request have a number of their own each time.
    """
    found = {}
    for each in paths or ():
        folder = folder_of(each.lora_path)
        found[each.lora_name] = adapter_digest(folder) or engine_id()
    return {"adapters": json.dumps(found, sort_keys=True)} if found else {}


def _on_disk(path: str, load_format: str, revision: str | None = None, hub: str | None = None) -> str:
    """A name for the weights that are loaded from there now. `hub`: `--download-dir`, which SGLang looks at when it starts only."""
    if load_format in FOREIGN_LOADS:
        return f"engine {engine_id()}"
    try:
        folder = _folder(path, revision, hub)
        if folder is not None:
            return weights_digest(folder, load_format)
    except Exception as error:  # noqa: BLE001 - SGLang's scheduler calls, and would end
        log.warning("the weights are known by their path only, their files cannot be read: %s", error)
    return f"{path} {revision or ''} {load_format}"


def _bytes_on_disk(path: str, revision: str | None = None, hub: str | None = None) -> int:
    """0: they are not here, or cannot be read."""
    try:
        return weights_bytes(_folder(path, revision, hub))
    except Exception:  # noqa: BLE001 - as above
        return 0


def _folder(path: str, revision: str | None, hub: str | None) -> Path | None:
    return Path(path) if os.path.isfile(path) else folder_of(path, revision, hub)  # noqa: PTH113 - Path's may raise


def _watch(weights: Weights, size_bytes: int) -> None:
    """Have it told of every change and every flush. Class methods, so also for objects that exist already.

    `size_bytes`: of all weights. Files of fewer may be a part of a model, and what that makes depends on what was there before.
    """
    if UPDATER not in sys.modules:
        return
    updater = f"{UPDATER}.WeightUpdater"

    def about_to_change(*_: Any, **__: Any) -> None:
        weights.changed()

    def ended(*_: Any, run_post_load: bool = False, **__: Any) -> None:
        if run_post_load:  # none was loaded through SGLang: they were written from outside
            weights.changed()

    def from_disk(
        original: Callable[..., Any], self: Any, model_path: str, load_format: str, *more: Any, **named: Any
    ) -> Any:
        before = _on_disk(model_path, load_format)
        weights.changed(before)
        named_right = False
        try:
            done = original(self, model_path, load_format, *more, **named)
            named_right = done[0] and _on_disk(model_path, load_format) == before
            named_right &= _bytes_on_disk(model_path) >= WHOLE * size_bytes
            return done
        finally:
            if not named_right:
                weights.changed()  # what is loaded now has no name

    def flushed(*_: Any, **__: Any) -> None:
        weights.flushed()

    hooks: dict[str, tuple[Callable[..., Any], HookType]] = {
        f"{updater}.begin_weight_update": (about_to_change, HookType.BEFORE),
        f"{updater}.load_weights_from_distributed": (about_to_change, HookType.BEFORE),
        f"{updater}.update_weights_from_tensor": (about_to_change, HookType.BEFORE),
        f"{updater}.update_weights_from_ipc": (about_to_change, HookType.BEFORE),
        f"{updater}.update_weights_from_disk": (from_disk, HookType.AROUND),
        f"{updater}.end_weight_update": (ended, HookType.BEFORE),
        RESET: (flushed, HookType.AFTER),
    }
    before = {target: _resolved(target) for target in hooks}
    for target, (hook, kind) in hooks.items():
        HookRegistry.register(target, hook, kind)
    HookRegistry.apply_hooks()  # leaves out what it was applied to before, without a word
    missing = [target for target in hooks if _resolved(target) in (None, before[target])]
    if missing:
        log.error(
            "this version of SGLang has no %s, or a plug-in hooked it before: after a change of weights in a running engine FlatCake may return KV of the old ones. "
            'Restart it instead, or detach FlatCake before and attach it with another "weights" after',
            ", ".join(missing),
        )


def _resolved(target: str) -> object:
    try:
        return pkgutil.resolve_name(target)
    except (AttributeError, ImportError):
        return None
