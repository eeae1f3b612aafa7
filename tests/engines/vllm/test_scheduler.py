"""The scheduler's half by itself: an answer that comes late, however slow steps or the daemon are, is an answer."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
from waiting import until

from flatcake_client.engines import vllm_scheduler
from flatcake_client.engines.vllm_scheduler import SchedulerSide
from flatcake_client.engines.vllm_settings import Geometry, Settings

HIT = SimpleNamespace(
    blocks=2, bytes_by_medium={"ssd": 0, "memory": 2}, lease=SimpleNamespace(alive=lambda: True), release=lambda: None
)


@pytest.fixture
def side():
    space = SimpleNamespace(
        keys_of_hashes=lambda hashes, _: np.zeros((len(hashes), 16), np.uint8), lookup=lambda _keys, **_: HIT
    )
    client = SimpleNamespace(close=lambda _: None)
    side = SchedulerSide(client, space, Geometry(("l",), 16, 64, 1, 8), Settings(), loads=True, stores=True)
    # Hit.release is a real hit's.
    side._lookups._discard = lambda _: None
    yield side
    side.close()


def test_an_answer_older_than_is_fresh_is_asked_again_once_for_each_time_it_was_used(side, monkeypatch):
    request = SimpleNamespace(
        request_id="a", num_preemptions=0, lora_request=None, num_tokens=33, block_hashes=[b"1", b"2"],
        skip_reading_prefix_cache=False,
    )  # fmt: skip
    offset_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + offset_s[0], sleep=time.sleep)
    monkeypatch.setattr(vllm_scheduler, "time", clock)
    side.arrived(request)
    for _ in range(2):  # it waits for long, twice: each time the store is asked again, and then the answer is used
        until(lambda: not side._lookups.waiting())
        offset_s[0] += 60
        assert side.matched(request, 0) == (None, False)
        offset_s[0] += 60  # a step that takes as long
        until(lambda: not side._lookups.waiting())
        assert side.matched(request, 0) == (32, True)
