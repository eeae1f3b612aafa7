"""LMCache in its own environment: `make test-lmcache`. It warns of what is not ours, and leaves sockets and loops to the collector."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import pytest

os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ["LMCACHE_DISABLE_BANNER"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lmcache.v1.cache_engine  # noqa: F401


def pytest_configure(config):
    for line in ("default", "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"):
        config.addinivalue_line("filterwarnings", line)
    # What the collector finds after the last test is judged by the filters of the process.
    for kind in (ResourceWarning, pytest.PytestUnraisableExceptionWarning):
        warnings.simplefilter("ignore", kind)
