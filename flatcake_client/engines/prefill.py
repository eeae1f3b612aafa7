"""A prefill whose KV is on its way in and out: its cache waits for a layer when attention asks for it, and hands over what it has.

    store --thread--> landing --+                                              +--thread--> store
                                +-- update of layer l: wait, join the new -----+
    model: ... layer l - 1 ...  |            attention of layer l ...          |  ... layer l + 1 ...

`PrefillLayer.update` is called by every decoder layer just before its attention: that is the one hook. So layer l is computed
before layer l + 1 has landed, and is being stored while layer l + 1 is computed.

- A layer that will not land ends the forward with NotLanded, before anything was computed from it.
- A store that fails or is slow is never felt by the forward: it takes what it is handed, and drops it after a failure.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicLayer

from flatcake_client import Part, Turn

KeysValues = tuple[torch.Tensor, torch.Tensor]


class NotLanded(Exception):
    """A layer of a restore did not come. The cause is what the restore raised."""


class PrefillLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # transformers' own
    """A layer of a cache that holds `tokens` tokens from the start, though they may still be on their way.

    Args:
        tokens: how many.
        land: waits for them and gives their keys and values, (1, kv_heads, tokens, head_dim); called once, if there are any.
        computed: is given keys and values of the first forward's end, and may keep them: a cache that grows makes new ones.
    """

    def __init__(
        self, tokens: int, land: Callable[[], KeysValues], computed: Callable[[KeysValues], None] | None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._coming = tokens
        self._land: Callable[[], KeysValues] | None = land
        self._computed = computed

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> KeysValues:
        """Raises: NotLanded."""
        if self._coming and self._land is not None:
            try:
                keys, values = self._land()
            except Exception as error:
                raise NotLanded(str(error)) from error
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            self.keys, self.values = keys, values
        self._land, self._coming = None, 0
        held: KeysValues = super().update(key_states, value_states, *args, **kwargs)
        computed, self._computed = self._computed, None
        if computed is not None:
            computed(held)
        return held

    def get_seq_length(self, *args: Any) -> int:
        """Of what has landed and what is still to land: masks and positions are made before the first layer runs."""
        return self._coming or int(super().get_seq_length(*args))


class PromptStore:
    """One turn, begun, written and committed by a thread of its own while its prompt is computed. Thread-safe.

    Args:
        begin: makes the turn.
        pages: of keys, values and a range of blocks makes what `write_layer` takes.
        layers: of the model; each is put once.
    """

    def __init__(
        self, begin: Callable[[], Turn], pages: Callable[[KeysValues, range], torch.Tensor], layers: int
    ) -> None:
        self._begin, self._pages, self._layers = begin, pages, layers
        self._coming: queue.SimpleQueue[tuple[int, KeysValues] | None] = queue.SimpleQueue()
        self._over = False
        self._parts: tuple[Part, ...] = ()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="flatcake-store", daemon=True)
        self._thread.start()

    def put(self, layer: int, held: KeysValues) -> None:
        """What one layer has of the whole prompt. Returns at once."""
        if not self._over:
            self._coming.put((layer, held))

    def drop(self) -> None:
        """Store nothing: the prompt is computed once more. Not after all layers were put."""
        self._coming.put(None)
        self._thread.join()

    def wait(self) -> tuple[Part, ...]:
        """What was stored. Raises: what begin, write or commit raised."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._parts

    def _run(self) -> None:
        try:
            self._store()
        except Exception as error:  # noqa: BLE001 - a thread's edge: `wait` raises it
            self._failure = error
        finally:
            self._over = True
            while not self._coming.empty():  # nobody will look at these, and they are large
                self._coming.get()

    def _store(self) -> None:
        with self._begin() as turn:
            slots = np.arange(len(turn.blocks))
            for _ in range(self._layers if len(slots) else 0):
                put = self._coming.get()
                if put is None:
                    return
                turn.write_layer(put[0], self._pages(put[1], turn.blocks), slots)
                del put  # while it waits for the next one, this one is not kept
            turn.commit()
            self._parts = turn.parts
