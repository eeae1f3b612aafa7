"""The scheduler's half by itself: an answer that comes late, however slow steps or the daemon are, is an answer."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.request import RequestStatus
from waiting import until

from flatcake_client.engines import vllm_scheduler, vllm_settings
from flatcake_client.engines.vllm_jobs import WeightsChanged
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


def running(side, *, waits=True, started=True, **more):
    """A request of two blocks, that has them; `waits`: for an answer, `started`: it has its blocks."""
    request = SimpleNamespace(
        request_id="a", num_preemptions=0, lora_request=None, num_tokens=33, num_prompt_tokens=33, num_computed_tokens=32,
        block_hashes=[b"1", b"2"], skip_reading_prefix_cache=False, num_output_tokens=0, kv_transfer_params=None,
        status=RequestStatus.FINISHED_STOPPED,
    )  # fmt: skip
    vars(request).update(more)
    side.arrived(request)
    if waits:
        until(lambda: side.matched(request, 0)[0] is not None)
    if started:
        side.allocated(request, [5, 6], 0)
    return request


def stored(side, request):
    """What is, when its prompt is computed, or else when it ends."""
    state = SimpleNamespace(resolve_block_ids=lambda _: ([5, 6],))
    side.store_prefill(SimpleNamespace(kv_connector_block_state=state, num_scheduled_tokens={"a": 1}), "a")
    prefill, side._stores, side._known["a"].stored_blocks = side._stores, [], 0
    side.ended(request, [5, 6])
    finish, side._stores = side._stores, []
    side._let_go("a")
    assert len(prefill) == len(finish)
    return finish


def test_what_ran_through_a_reset_is_not_stored(side):
    """Its first blocks may be of the old weights, its last of the new, and its keys are of one of them."""
    assert stored(side, running(side))
    request = running(side)
    side.reset()
    assert not stored(side, request)
    assert stored(side, running(side)), "what began after it is"
    request = running(side)
    side.reset()
    request.num_preemptions += 1
    side.matched(request, 0)
    assert stored(side, request)[0].salt == side._salt(request), "computed anew"


def test_weights_that_changed_without_a_reset_are_not_known_until_there_is_one(side):
    changed = SimpleNamespace(
        finished_sending=None, finished_recving=None, kv_connector_worker_meta=WeightsChanged(side._weights_salt())
    )
    before = running(side)
    side.heard(changed)
    assert not stored(side, before), "it has KV of both"
    late = running(side)
    assert side.matched(late, 0) == (0, False)
    assert not stored(side, late)
    meanwhile = running(side)
    side.reset()
    assert not stored(side, meanwhile), "what it had before the reset may be of either"
    assert stored(side, running(side))
    side.heard(changed)
    assert stored(side, running(side)), "told of the weights before the reset: they are gone already"


def test_what_ran_while_its_adapters_files_changed_is_not_stored(side, tmp_path):
    """VLLM loads an adapter between a request's coming and its end."""
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"first")
    adapter = LoRARequest("one", 1, str(tmp_path))
    assert stored(side, running(side, lora_request=adapter))
    request = running(side, lora_request=adapter)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"second")
    assert not stored(side, request)
    assert stored(side, running(side, lora_request=adapter))


def test_adapters_that_are_known_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_settings, "ADAPTERS_MAX", 2)
    adapters = vllm_settings.Adapters()
    salts = [adapters.learn(LoRARequest(str(number), 1, str(tmp_path))) for number in (0, 1, 0, 2)]
    assert len(adapters._known) == 2
    assert adapters.salt(LoRARequest("2", 1, str(tmp_path))) == salts[3]
    assert adapters.salt(LoRARequest("0", 1, str(tmp_path))) == salts[0] == salts[2], "it is in use"
    assert adapters.salt(LoRARequest("1", 1, str(tmp_path))) is None, "it was forgotten"
    assert adapters.learn(LoRARequest("1", 1, str(tmp_path))) != salts[1], (
        "it cannot be read: this process gives it a name"
    )


@pytest.mark.parametrize("loads", [True, False])
def test_an_adapters_files_are_not_read_on_vllms_thread(side, tmp_path, monkeypatch, loads):
    """A file server that takes its time would else stop the whole engine."""
    go, readers = threading.Event(), []
    digest = vllm_settings.adapter_digest

    def slow(folder):
        readers.append(threading.get_ident())
        go.wait(20)
        return digest(folder)

    monkeypatch.setattr(vllm_settings, "adapter_digest", slow)
    side._loads_on = loads
    side._settings = Settings(lookup_timeout_s=600.0)
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"first")
    adapter = LoRARequest("one", 1, str(tmp_path))
    request = running(side, lora_request=adapter, waits=False)
    assert not stored(side, request), "it is computed, and not waited for"
    request = running(side, lora_request=adapter, waits=False, started=False)
    assert side.matched(request, 0) == (None, False)
    go.set()
    until(lambda: side.matched(request, 0)[0] is not None)
    side.allocated(request, [5, 6], 0)
    assert stored(side, request)
    assert threading.get_ident() not in readers


@pytest.mark.parametrize("asked", [True, False], ids=["asked for meanwhile", "not asked for"])
def test_an_adapter_whose_files_change_while_they_are_read_has_no_name_that_others_know(tmp_path, monkeypatch, asked):
    """VLLM may have loaded it before: what it computes is of the files of then."""
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"first")
    adapter, digest = LoRARequest("one", 1, str(tmp_path)), vllm_settings.adapter_digest
    adapters = vllm_settings.Adapters()

    def meanwhile(folder):
        (tmp_path / "adapter_model.safetensors").write_bytes(b"second")
        if asked:
            adapters.salt(adapter)
        return digest(folder)

    monkeypatch.setattr(vllm_settings, "adapter_digest", meanwhile)
    salts = [adapters.learn(adapter)]
    monkeypatch.undo()
    salts.append(vllm_settings.Adapters().learn(adapter))
    assert None not in salts
    assert salts[0] != salts[1]


def test_a_lookup_without_an_answer_in_time_is_a_miss_and_counted(side):
    go = threading.Event()
    side._space.lookup = lambda *_, **__: (go.wait(10), HIT)[1]
    side._settings = Settings(lookup_timeout_s=0.05)
    request = SimpleNamespace(
        request_id="a", num_preemptions=0, lora_request=None, num_tokens=33, block_hashes=[b"1", b"2"],
        skip_reading_prefix_cache=False,
    )  # fmt: skip
    side.arrived(request)
    until(lambda: side.matched(request, 0) == (0, False))
    assert side.matched(request, 0) == (0, False)
    go.set()
    assert side.tally.totals["lookups_late"] == 1


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


def test_a_hit_of_an_adapter_that_was_forgotten_meanwhile_is_not_offered(side, tmp_path, monkeypatch):
    """Its salt would have to be in the load."""
    monkeypatch.setattr(vllm_settings, "ADAPTERS_MAX", 1)
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"first")
    request = running(side, lora_request=LoRARequest("one", 1, str(tmp_path)), waits=False, started=False)
    until(lambda: not side._lookups.poll("a").waiting)
    side._adapters.salt(LoRARequest("another", 2, str(tmp_path)))
    assert side.matched(request, 0) == (0, False)
