"""When a call is over. Pure; the clock is an argument."""

from __future__ import annotations

from typing import Final

TIMEOUT_S_MAX: Final = 1e6  # 11 days: more than anybody means, and less than the system's clocks take


def deadline(now_s: float, timeout_s: float) -> float:
    """Raises: ValueError: no end, or no number: nothing waits without one."""
    if not timeout_s <= TIMEOUT_S_MAX:
        raise ValueError(f"a timeout is {timeout_s} s: expected seconds, at most {TIMEOUT_S_MAX:.0f}")
    return now_s + timeout_s


def checked_timeout(name: str, timeout_s: float) -> float:
    """A setting, for whoever passes it to calls later. Raises: ValueError: with it every call would be refused, or have no time."""
    if not 0 < timeout_s <= TIMEOUT_S_MAX:
        raise ValueError(f"{name} is {timeout_s}: expected seconds, more than 0 and at most {TIMEOUT_S_MAX:.0f}")
    return timeout_s
