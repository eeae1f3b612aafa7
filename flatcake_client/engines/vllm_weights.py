"""VLLM changes weights while it runs and tells no connector. Whoever does it through vLLM goes through these methods of a worker.

They are wrapped once a process; a wrapper tells the connector that the worker has by then. Weights that are written past vLLM, by code
that is injected into its workers, are not seen: that needs a reset (docs/engines/vllm.md).
"""

from __future__ import annotations

import contextlib
import functools
import pkgutil
from collections.abc import Callable
from typing import Any, Final

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.logger import init_logger

log = init_logger("vllm.flatcake")

WORKER: Final = "vllm.v1.worker.gpu_worker:Worker"  # that of other devices is derived from it
CHANGES: Final = (
    "start_weight_update",
    "start_draft_weight_update",
    "update_weights",
    "reload_weights",
    "reset_weights",
)


def watch_weights() -> None:
    """Have the worker's connector told before each change. Twice is fine."""
    worker: Any = None
    with contextlib.suppress(AttributeError, ImportError):
        worker = pkgutil.resolve_name(WORKER)
    for name in CHANGES:
        change = getattr(worker, name, None)
        if change is None:
            log.warning(
                "FlatCake does not hear of %s in this version of vLLM: pause and reset before weights change", name
            )
        elif not getattr(change, "tells_flatcake", False):
            setattr(worker, name, _telling(change))


def _telling(change: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(change)
    def changing(*arguments: Any, **named: Any) -> Any:
        for tell in _connectors():
            tell()
        return change(*arguments, **named)

    changing.tells_flatcake = True  # type: ignore[attr-defined]
    return changing


def _connectors() -> list[Callable[[], object]]:
    """How to tell ours in this worker, also inside a `MultiConnector`."""
    group: Any = get_kv_transfer_group() if has_kv_transfer_group() else None
    both = (group, *getattr(group, "_connectors", ()))
    return [tell for each in both if (tell := getattr(each, "_weights_changed", None)) is not None]
