"""Waiting in tests: for a condition, or to give others the time to do wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Return once the condition holds. Raises: AssertionError: it never did."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "what was waited for never came"
        pause(0.001)


def pause(seconds: float) -> None:
    """Give other threads time to do what they must not do, or be a slow part of the world. Never to let something finish."""
    threading.Event().wait(seconds)
