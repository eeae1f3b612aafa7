"""The border to an engine: whatever goes wrong behind it is counted, said once when it begins, and answered all the same.

- `attempt` never raises: an engine that asks has its answer, that of a miss.
- One log line when a verb begins to fail, and none until it has worked in between: a daemon that is down for hours is a line a verb,
  not one a request. One that comes and goes is said the first, second, fourth, eighth time it begins. What is no error of ours is a fault of
  ours: it comes with its traceback.
- All counts of a connector are here; its `stats()` reads them.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from flatcake_transport.errors import FlatCakeError

T = TypeVar("T")


class Edge:
    """Of one connector. Thread-safe."""

    def __init__(self, log: logging.Logger, meanwhile: str, on_failure: Callable[[], object] = lambda: None) -> None:
        """`meanwhile`: what happens while a verb fails, for the log: "its pages are computed". `on_failure`: told of each one."""
        self._log = log
        self._meanwhile = meanwhile
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._failing: set[str] = set()
        self._begun: Counter[str] = Counter()  # how often each began to fail
        self._failed: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    def attempt(self, verb: str, otherwise: T, work: Callable[[], T]) -> T:
        """What `work` answers; `otherwise` when it fails."""
        try:
            answer = work()
        except Exception as error:  # noqa: BLE001 - an engine's edge: whatever it is, the engine goes on without
            self.failed(verb, error)
            return otherwise
        self.worked(verb)
        return answer

    def failed(self, verb: str, error: BaseException) -> None:
        """Count a failure; say it when it begins."""
        with self._lock:
            self._begun[verb] += verb not in self._failing
            begun = 0 if verb in self._failing else self._begun[verb]
            self._failing.add(verb)
            self._failed[verb] += 1
        self._on_failure()
        if begun and begun & (begun - 1) == 0:
            ours = isinstance(error, FlatCakeError)
            named = str(error) if ours else repr(error)
            self._log.warning(
                "FlatCake: %s fails, %s meanwhile: %s", verb, self._meanwhile, named, exc_info=None if ours else error
            )

    def worked(self, verb: str) -> None:
        if verb in self._failing:
            with self._lock:
                self._failing.discard(verb)

    def failing(self) -> bool:
        """Whether a verb failed when it was last tried."""
        return bool(self._failing)

    def failures(self, *verbs: str) -> int:
        """How often these verbs failed; all verbs, if none is named."""
        with self._lock:
            return sum(self._failed[verb] for verb in verbs) if verbs else self._failed.total()

    def count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)
