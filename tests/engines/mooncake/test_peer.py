"""bench/peers/mooncake.py drives the real thing: bytes back as they went in, from memory and SSD, and nothing left behind."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from peer_system import check_peer

pytestmark = pytest.mark.skipif(
    find_spec("mooncake") is None, reason="Mooncake's adapter was not tested: run make test-mooncake"
)


@pytest.mark.parametrize("deployment", ["embedded", "client"])
def test_mooncake_as_a_system_of_replay(deployment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATCAKE_PEER_MOONCAKE", deployment)
    check_peer("mooncake", tmp_path)
