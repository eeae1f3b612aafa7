"""What decides the meaning of a model's KV besides its shapes: configuration and weights. One for all engines; imports none of them.

Two models of equal shapes may differ in rope scaling, in the context from which on their keys are turned otherwise, in a norm's
epsilon, or in their weights alone. So a space's name has a digest of the whole configuration, less what only says where it came from,
and a digest of samples of the weight files: milliseconds, whatever their size. It tells any trained or random models apart, but not
two that differ in a few numbers only.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

log = logging.getLogger(__name__)

# What a configuration says of its file and not of the model.
CONFIG_NOISE: Final = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
# Ropes by which a key is turned by more than its position: also by the longest context that is served, or that a batch has.
CONTEXT_ROPES: Final = frozenset(("longrope", "su", "dynamic"))
ADAPTER_CONFIG: Final = "adapter_config.json"
WEIGHT_FILES: Final = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
SAMPLES_PER_FILE: Final = 64
SAMPLE_BYTES: Final = 4096


def config_digest(config: Mapping[str, Any], *, context_tokens: int | None = None, **more: str) -> str:
    """Of everything in a model's configuration that may change its KV.

    Args:
        config: as in `config.json`, with what the engine was told to change in it.
        context_tokens: the longest context that is served; counts where the rope depends on it.
        more: what else changes KV of equal shapes, by name: quantization, ...
    """
    of_model = {name: value for name, value in config.items() if name not in CONFIG_NOISE}
    text = json.dumps([of_model, more], sort_keys=True, default=str)
    if turns_by_context(config):
        text += f" {context_tokens}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def turns_by_context(config: Mapping[str, Any]) -> bool:
    """Whether keys are turned by more than their position (`CONTEXT_ROPES`)."""
    return not CONTEXT_ROPES.isdisjoint(_ropes(config))


def _ropes(config: Mapping[str, Any], *, inside: bool = False) -> Iterator[str]:
    """The kinds of rope in a configuration, wherever they stand: one a model, a layer type, or a part of a model."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _ropes(value, inside=inside or name in ("rope_scaling", "rope_parameters"))
        elif inside and name in ("rope_type", "type") and isinstance(value, str):
            yield value


def weights_digest(folder: Path, *also: str) -> str:
    """Of samples of the weight files in a folder, or of the one file; by its path where there are none.

    Raises: OSError: they cannot be read.

    Args:
        also: what else makes other weights of the same files: how they are loaded, ...
    """
    digest = hashlib.sha256(" ".join(also).encode())
    if not sample_weights(digest, folder):
        digest.update(str(folder).encode())
    return digest.hexdigest()[:32]


def adapter_digest(folder: Path | None) -> str | None:
    """Of a LoRA adapter's files; None: they are not here, or cannot be read. A millisecond or two."""
    digest = hashlib.sha256()
    try:
        if folder is not None and sample_weights(digest, folder):
            digest.update((folder / ADAPTER_CONFIG).read_bytes())
            return digest.hexdigest()[:32]
    except OSError as error:
        log.warning("an adapter is known to this process only, its files cannot be read: %s", error)
    return None


def sample_weights(digest: hashlib._Hash, folder: Path) -> int:
    """Samples of the weight files of a folder, or of one file. Returns: how many files there are. Raises: OSError."""
    paths = _weight_files(folder)
    for path in paths:
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name} {size_bytes}".encode())
            for number in range(SAMPLES_PER_FILE):
                offset = max(0, size_bytes - SAMPLE_BYTES) * number // (SAMPLES_PER_FILE - 1)
                digest.update(os.pread(file.fileno(), SAMPLE_BYTES, offset))
    return len(paths)


def weights_bytes(folder: Path | None) -> int:
    """Size of the weight files in a folder, or of the one file; 0: there are none. Raises: OSError."""
    return sum(path.stat().st_size for path in _weight_files(folder)) if folder is not None else 0


def _weight_files(folder: Path) -> list[Path]:
    return [folder] if folder.is_file() else sorted(path for pattern in WEIGHT_FILES for path in folder.glob(pattern))


def digest_of(model: str) -> str:
    """Of configuration and weights, for who knows a model by its name only; "" where it does not lie on this disk, or cannot be read."""
    folder = folder_of(model)
    if folder is None:
        return ""
    try:
        config = json.loads((folder / "config.json").read_text())
        return f"{config_digest(config)}-{weights_digest(folder)}"
    except (OSError, ValueError) as error:
        log.warning("%s is known by its name only: %s", model, error)
        return ""


def folder_of(model: str, revision: str | None = None, hub: str | None = None) -> Path | None:
    """Where a model lies on this disk: the path itself, or the hub's snapshot; None: it does not.

    `hub`: where the engine keeps what it downloads (`--download-dir`). Only there: another snapshot may be of other weights.
    """
    if os.path.isdir(model):  # noqa: PTH112 - of a path that is too long or closed to us, Path.is_dir raises
        return Path(model)
    try:
        from huggingface_hub import snapshot_download

        # No pattern: whatever of it is here.
        return Path(
            snapshot_download(model, revision=revision, cache_dir=hub, allow_patterns=[], local_files_only=True)
        )
    except (ImportError, OSError, ValueError):  # no hub here, nothing of it, or no name that it could have
        return None
