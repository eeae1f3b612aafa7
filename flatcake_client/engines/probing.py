"""What has to be known of a Hugging Face model before its KV can be stored: shapes, how it is called, and that it is itself."""

from __future__ import annotations

import hashlib
import inspect
from typing import Any, Final

import torch

from flatcake_client.engines.fingerprint import config_digest, turns_by_context
from flatcake_client.engines.landing import LayerShape

SAMPLES_PER_PARAMETER: Final = 64


def probe(model: Any, arguments: tuple[str, dict[str, Any]]) -> tuple[torch.dtype, tuple[LayerShape, ...]]:
    """Shapes as the model's own cache shows them after one token. `arguments`: of `forward_arguments`.

    Raises: ValueError: the model is in training mode, or its cache is not of plain keys and values that depend on what is before them only.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    if model.training:
        raise ValueError("the model is in training mode, where KV is random: call model.eval() first")
    if turns_by_context(model.config.to_dict()):
        raise ValueError(
            f"the rope of {type(model).__name__} turns keys by the length of the prompt (longrope, dynamic): blocks of a short "
            "one would be wrong in a long one"
        )
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        ids = torch.zeros((1, 1), dtype=torch.long, device=model.device)
        model(input_ids=ids, use_cache=True, **{arguments[0]: cache})
    shapes = []
    dtypes = set()
    for index, layer in enumerate(cache.layers):
        keys: Any = getattr(layer, "keys", None)
        values: Any = getattr(layer, "values", None)
        if type(layer) is not DynamicLayer or keys is None or keys.dim() != 4 or keys.shape != values.shape:
            raise ValueError(
                f"layer {index} of {type(model).__name__} keeps a {type(layer).__name__}: only plain caches of keys "
                "and values, equal in shape, can be stored block by block"
            )
        shapes.append(LayerShape(keys.shape[1], keys.shape[3], keys.device))
        dtypes.add(keys.dtype)
    if len(dtypes) != 1:
        raise ValueError(f"KV of {type(model).__name__} is of {len(dtypes)} dtypes, not one")
    return dtypes.pop(), tuple(shapes)


def weights_digest(model: Any) -> str:
    """Tells models apart by their configuration and samples of every parameter: milliseconds, whatever their size."""
    digest = hashlib.sha256(config_digest(model.config.to_dict()).encode())
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // SAMPLES_PER_PARAMETER)][: 2 * SAMPLES_PER_PARAMETER]
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(sample.to("cpu", torch.float64).numpy().tobytes())
    return digest.hexdigest()[:32]


def forward_arguments(model: Any) -> tuple[str, dict[str, Any]]:
    """How this model's forward calls its cache (transformers 5.2x renamed it), and what spares the prompt's other logits.

    Raises: ValueError: it takes no cache, or it is no decoder.
    """
    names = inspect.signature(model.forward).parameters
    cache = next((name for name in ("past_key_values", "cache") if name in names), None)
    if cache is None or getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} is no causal LM with a cache that its caller may fill")
    return cache, {"logits_to_keep": 1} if "logits_to_keep" in names else {}
