"""How all tests run: no wall-clock verdicts from Hypothesis, and a longer profile for `make soak`."""

from __future__ import annotations

from hypothesis import settings

# A machine shared with builds is slow at random, so Hypothesis judges no example by its time.
settings.register_profile("default", deadline=None)
settings.register_profile("soak", deadline=None, max_examples=5000, stateful_step_count=200)
settings.load_profile("default")
