"""SGLang's imports on a machine without a GPU. Nothing that is tested is replaced."""

from __future__ import annotations

import importlib
import warnings

import pytest

torch = pytest.importorskip("torch")

# Its model configurations import torchvision, whose compiled operators want CUDA's libraries. Declared, they need not be there:
# nothing of what is tested looks at an image.
OPERATORS = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

# Its imports warn of much that is not ours; what it says while tests run counts.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for module in (
        "sglang.srt.mem_cache.storage",
        "sglang.srt.mem_cache.pool_host.mha",
        "sglang.srt.mem_cache.pool_host.mla",
        "sglang.srt.managers.cache_controller",
        "sglang.srt.mem_cache.unified_cache.unified_cache_linker",
        "sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler",
        "sglang.srt.observability.metrics_collector",
    ):
        importlib.import_module(module)
