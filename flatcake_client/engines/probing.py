"""What has to be known of a Hugging Face model before its KV can be stored: shapes, how it is called, and that it is itself."""

from __future__ import annotations

import hashlib
import inspect
import json
from typing import Any, Final

import torch

from flatcake_client.engines.landing import LayerShape

# What a configuration says of its file and not of the model.
CONFIG_NOISE: Final = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
SAMPLES_PER_PARAMETER: Final = 64


def probe(model: Any, arguments: tuple[str, dict[str, Any]]) -> tuple[torch.dtype, tuple[LayerShape, ...]]:
    """Shapes as the model's own cache shows them after one token. `arguments`: of `forward_arguments`.

    Raises: ValueError: the model is in training mode, or its cache is not of plain keys and values.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    if model.training:
        raise ValueError("the model is in training mode, where KV is random: call model.eval() first")
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
    config = {name: value for name, value in model.config.to_dict().items() if name not in CONFIG_NOISE}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
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
