from __future__ import annotations

import pytest
from traces import request

from flatcake_server.config import load_config
from flatcake_server.traffic import tune as tune_module
from flatcake_server.traffic.spans import gather
from flatcake_server.traffic.tune import HIT_LOSS_MAX, tune

GIB = 1 << 30
TOKEN_BYTES = 1 << 20  # a block of 64 tokens is 64 MiB


def agents(sessions=12, turns=20, reply=100):
    """Sessions one beside the other; each grows by a block a turn, from 4 to 23 blocks: 1.5 GiB in the end."""
    requests = []
    for turn in range(turns):
        for n in range(sessions):
            ids = range(1000 * n, 1000 * n + 4 + turn)
            at = 100.0 * turn + n
            requests.append(request(at, f"s{n}", ids, turn=turn + 1, block_tokens=64, output_tokens=reply))
    return gather(requests)


def curve(found, option, value):
    return next(point for point in found.curves[option] if point["value"] == value)


def test_what_is_recommended_was_tried_and_hits_enough():
    found = tune(agents(), bytes_per_token=TOKEN_BYTES, memory_bytes_max=8 * GIB)
    endless = max(point["hit_share"] for point in found.curves["ssd_bytes"])
    for option in ("ssd_bytes", "agent_context_tokens", "short_reply_tokens", "memory_bytes"):
        assert curve(found, option, getattr(found, option))["hit_share"] >= endless - HIT_LOSS_MAX, option
    smaller = [point for point in found.curves["ssd_bytes"] if point["value"] < found.ssd_bytes]
    assert all(point["hit_share"] < endless - HIT_LOSS_MAX for point in smaller)
    assert found.expected.hit_share >= endless - HIT_LOSS_MAX
    assert len(found.reasons) == 4


def test_memory_is_used_where_it_holds_what_replies_are_short_enough_for():
    roomy = tune(agents(), bytes_per_token=TOKEN_BYTES, memory_bytes_max=64 * GIB)
    assert roomy.agent_context_tokens == 2048  # the longest context has 1,472 tokens: no more is needed
    assert roomy.short_reply_tokens == 128  # replies have 100: the first candidate above
    assert roomy.expected.memory_hit_share > 0.5
    assert 12 * GIB < roomy.memory_bytes < 32 * GIB  # 12 sessions of 19 blocks are 14 GiB
    enough = roomy.expected.hit_share_max - HIT_LOSS_MAX
    best = min(point["cost_s"] for point in roomy.curves["memory_bytes"] if point["hit_share"] >= enough)
    assert curve(roomy, "memory_bytes", roomy.memory_bytes)["cost_s"] <= 1.01 * best


def test_long_replies_leave_memory_unused_and_small():
    found = tune(agents(reply=9000), bytes_per_token=TOKEN_BYTES, memory_bytes_max=16 * GIB)
    assert found.expected.memory_hit_share == 0
    assert found.memory_bytes == GIB // 4
    assert found.short_reply_tokens == 64


def test_a_small_disk_is_the_most_there_is():
    found = tune(agents(), bytes_per_token=TOKEN_BYTES, memory_bytes_max=GIB, ssd_bytes_max=4 * GIB)
    assert found.ssd_bytes <= 4 * GIB
    assert found.expected.hit_share < 0.9
    assert "points below the most there is" in found.reasons[0]


def test_the_snippet_is_a_configuration(tmp_path):
    found = tune(agents(4, 6), bytes_per_token=TOKEN_BYTES, memory_bytes_max=GIB)
    file = tmp_path / "flatcake.toml"
    file.write_text(found.toml())
    config = load_config(file)
    for option in ("agent_context_tokens", "short_reply_tokens", "memory_bytes", "ssd_bytes"):
        assert getattr(config, option) == getattr(found, option)


def test_progress_counts_requests_and_stays_below_its_end():
    told = []
    tune(agents(4, 4), bytes_per_token=TOKEN_BYTES, memory_bytes_max=GIB, progress=lambda *step: told.append(step))
    assert told == sorted(told)
    assert all(done <= total for done, total in told)
    assert told[-1][0] > 0


def test_no_setting_is_simulated_twice(monkeypatch):
    seen = []
    simulate = tune_module.simulate
    monkeypatch.setattr(tune_module, "simulate", lambda *args: seen.append(args[2]) or simulate(*args))
    tune(agents(4, 4), bytes_per_token=TOKEN_BYTES, memory_bytes_max=GIB)
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize("wrong", [{"bytes_per_token": 0}, {"memory_bytes_max": 1}, {"ssd_bytes_max": 1}])
def test_limits_no_node_can_have_are_refused(wrong):
    with pytest.raises(ValueError, match="a node has at least 256MiB"):
        tune(agents(2, 2), **({"bytes_per_token": 1, "memory_bytes_max": GIB} | wrong))
