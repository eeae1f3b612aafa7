"""LMCache in its own environment: `make test-lmcache`. Its libraries warn of what is not ours."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ["LMCACHE_DISABLE_BANNER"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lmcache.v1.cache_engine  # noqa: F401


def pytest_configure(config):
    for line in ("default", "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"):
        config.addinivalue_line("filterwarnings", line)
