"""Devices that tests of GPU code run on: "cpu" everywhere, through the very code that a GPU gets, and "cuda" where one is.

What is left untested without a GPU are streams, events and pinned memory.
"""

from __future__ import annotations

from typing import Any

import pytest

from flatcake_client import writer
from flatcake_transport.movers import memory
from flatcake_transport.paged import is_tensor

NO_CUDA = "no CUDA device: side streams, events, pinned memory and GDS were not tested"


def has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


needs_cuda = [pytest.mark.gpu, pytest.mark.skipif(not has_cuda(), reason=NO_CUDA)]
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]


def device_path(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send moves of CPU tensors where those of CUDA tensors go: to `DeviceCopies`, which has no stream for them."""
    if device == "cpu":
        import torch

        real: Any = memory._device_of
        monkeypatch.setattr(writer, "on_device", is_tensor)
        monkeypatch.setattr(memory, "_device_of", lambda move: torch.device("cpu") if _has_pages(move) else real(move))


def _has_pages(move: Any) -> bool:
    return any(is_tensor(getattr(span, "pages", getattr(span, "data", None))) for span in (move.source, move.target))
