"""A restore that a thread of its own brings, while its engine computes on the layers that have landed.

`Restore.wait_layer` works only while somebody waits in it: an engine that computes a layer for seconds brings nothing
meanwhile, and its restore may meet the deadline with all bytes at hand. Here the bringing goes on at its own pace.

    thread:  | layer 0 | layer 1 | layer 2 | ...
    engine:            | compute 0 ... | compute 1 ... | compute 2 ...

The engine's memory is written until `close` has returned, or all layers have landed; at most as long as the restore's timeout.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Protocol, Self


class Bringing(Protocol):
    """What is asked of a restore."""

    def wait_layer(self, layer: int) -> None: ...
    def close(self) -> None: ...


class Arrival:
    """Layers of one restore, as they land. Thread-safe; a context manager that closes itself and the restore.

    Attributes:
        waited_s: seconds that `wait_layer` was waited in.
        brought_s: seconds from the first byte to the last, or to the failure; 0 until then.
    """

    def __init__(self, restore: Bringing, layers: int) -> None:
        self._restore, self._layers = restore, layers
        self._changed = threading.Condition()
        self._landed = 0
        self._failure: Exception | None = None
        self.waited_s = self.brought_s = 0.0
        self._thread = threading.Thread(target=self._bring, name="flatcake-arrival", daemon=True)
        self._thread.start()

    def wait_layer(self, layer: int) -> None:
        """Return when layer `layer` is in place, and those before it.

        Raises: what the restore raised, as soon as that is known: whoever computes need not go on to the layer that lacks.
        """
        started_s = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._landed > layer or self._failure is not None)
            self.waited_s += time.perf_counter() - started_s
            if self._failure is not None:
                raise self._failure

    def failure(self) -> Exception | None:
        """What the restore raised, once it has come to its end: None if every layer is in place."""
        self._thread.join()
        return self._failure

    def close(self) -> None:
        """Bring no more layers; the engine's memory is its own again when this returns. Twice is fine."""
        self._restore.close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _bring(self) -> None:
        started_s = time.perf_counter()
        failure: Exception | None = None
        for layer in range(self._layers):
            try:
                self._restore.wait_layer(layer)
            except Exception as error:  # noqa: BLE001 - a thread's edge: whoever waits for a layer must hear of it
                failure = error
            with self._changed:
                self._landed = layer + (failure is None)
                self._failure = failure
                if failure is not None or self._landed == self._layers:
                    self.brought_s = time.perf_counter() - started_s
                self._changed.notify_all()
            if failure is not None:
                return
