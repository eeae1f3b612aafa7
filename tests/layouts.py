"""Paged KV as engines lay it out: one array a layer, its first axis the slot, whatever lies how far apart in memory.

Every layout is made of zeros and seen as an engine hands it over: a view with the slot first. What a slot's bytes are is said
by a loop over slots that knows nothing of strides, words or batches (`bytes_of`, `fill`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

TOKENS, HEADS = 2, 2


@dataclass(frozen=True)
class Layout:
    """`shape` is how it lies in memory, of B slots, T tokens, H heads and D numbers; `order` how the engine sees it."""

    shape: str
    order: Sequence[int]

    def make(self, slots: int, tokens: int, heads: int, dim: int, zeros: Callable[[list[int]], Any]) -> Any:
        sizes = {"B": slots, "T": tokens, "H": heads, "D": dim, "2": 2, "3": 3}
        memory = zeros([sizes[axis] for axis in self.shape])
        view = memory.transpose(self.order) if isinstance(memory, np.ndarray) else memory.permute(*self.order)
        return view[:, 1] if "3" in self.shape else view


LAYOUTS = {
    "vllm 2,blocks NHD": Layout("2BTHD", (1, 0, 2, 3, 4)),  # FlashAttention
    "vllm blocks,2 NHD": Layout("B2THD", (0, 1, 2, 3, 4)),  # FlashInfer, Triton
    "vllm 2,blocks HND": Layout("2BHTD", (1, 0, 3, 2, 4)),  # seen as NHD: runs of one head's numbers
    "vllm blocks,2 HND": Layout("B2HTD", (0, 1, 3, 2, 4)),
    "2,blocks HND as it lies": Layout("2BHTD", (1, 0, 2, 3, 4)),
    "heads before blocks": Layout("2HBTD", (2, 0, 1, 3, 4)),  # what Hugging Face's caches are cut from
    "numbers apart": Layout("B2HDT", (0, 1, 4, 2, 3)),  # not even two numbers side by side
    "all layers in one": Layout("B32THD", (0, 1, 2, 3, 4, 5)),
}


def layout_pages(name: str, slots: int, plane_bytes: int, zeros: Callable[[list[int], int], Any]) -> Any | None:
    """Pages whose slots hold `plane_bytes`, or None where that many bytes are no K and V. `zeros(shape, item bytes)`."""
    item = 2 if plane_bytes % (4 * TOKENS * HEADS) == 0 else 1
    dim, rest = divmod(plane_bytes, 2 * TOKENS * HEADS * item)
    if rest or not dim:
        return None
    return LAYOUTS[name].make(slots, TOKENS, HEADS, dim, lambda shape: zeros(shape, item))


def numpy_zeros(shape: list[int], item: int) -> np.ndarray:
    return np.zeros(shape, f"u{item}")


def torch_zeros(shape: list[int], item: int, device: str = "cpu") -> Any:
    import torch

    return torch.zeros(shape, dtype=torch.bfloat16 if item == 2 else torch.uint8, device=device)


def bytes_of(pages: Any) -> np.ndarray:
    """(slots, plane bytes): what each slot holds, taken slot by slot."""
    if not isinstance(pages, np.ndarray):
        import torch

        words = {1: torch.uint8, 2: torch.int16}[pages.dtype.itemsize]
        pages = pages.cpu().contiguous().view(words).numpy()
    taken = [np.frombuffer(np.ascontiguousarray(page).tobytes(), np.uint8) for page in pages]
    return np.stack(taken) if taken else np.zeros((0, math.prod(pages.shape[1:]) * pages.itemsize), np.uint8)


def fill(pages: Any, slots: Sequence[int] | np.ndarray, blocks: np.ndarray) -> None:
    """Put `blocks[i]` into slot `slots[i]`, one by one."""
    for slot, block in zip(np.asarray(slots).tolist(), blocks, strict=True):
        if isinstance(pages, np.ndarray):
            pages[slot] = np.frombuffer(block.tobytes(), pages.dtype).reshape(pages.shape[1:])
        else:
            import torch

            whole = torch.from_numpy(block.copy()).view(pages.dtype).view(pages.shape[1:])
            pages[slot] = whole.to(pages.device)
