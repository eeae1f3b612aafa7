"""A client and the daemon it talks to: a stand-in that fails when it is told to."""

from __future__ import annotations

import pytest
from fake_daemon import FakeDaemon

import flatcake_client as fc


@pytest.fixture
def daemon(tmp_path):
    with FakeDaemon(tmp_path) as running:
        yield running


@pytest.fixture
def client(daemon):
    with fc.connect(daemon.endpoint, name="test", timeout_s=20.0) as connected:
        yield connected
