from __future__ import annotations

import base64
import dataclasses
import json
import re
import sys

import numpy as np
import pytest
from traces import request

from flatcake_server.traffic import plots
from flatcake_server.traffic.advice import Facts, advise
from flatcake_server.traffic.report import distribution, report, weighted_quantiles
from flatcake_server.traffic.reuse import analyse
from flatcake_server.traffic.spans import gather
from flatcake_transport import page

# A session of 2, 3 and 4 blocks, and another that shares the first; blocks of 16 tokens.
REQUESTS = [
    request(0, "x", [0, 1], turn=1),
    request(10, "x", [0, 1, 2], turn=2),
    request(20, "y", [0, 9], turn=1),
    request(40, "x", [0, 1, 2, 3], turn=3),
]
FACTS = Facts(
    memory_bytes=64 << 30,
    hit_share_max=0.9,
    hit_share_memory=0.2,
    filter_bytes=1 << 40,
    once_share=0.05,
    own_share=0.99,
    session_p50_bytes=18 << 30,
    session_p90_bytes=40 << 30,
    active_sessions=4.3,
)


@pytest.fixture(scope="module")
def document():
    traffic = gather(REQUESTS)
    return report("small", traffic, analyse(traffic), bytes_per_token=1024, memory_bytes=3 * 16 * 1024)


def test_every_figure_of_a_small_trace(document):
    assert document["trace"] == {
        "name": "small",
        "requests": 4,
        "sessions": 2,
        "block_tokens": 16,
        "bytes_per_token": 1024,
        "duration_s": 40.0,
        "input_tokens_mean": 16 * 11 / 4,
    }
    assert document["blocks"] == {
        "different": 5,
        "different_bytes": 5 * 16 * 1024,
        "asked_for": 11,
        "used_once_share": pytest.approx(2 / 5),
        "reused_share": pytest.approx(3 / 5),
    }
    assert document["hits"] == {
        "max_share_tokens": pytest.approx(6 / 11),
        "max_share_blocks": pytest.approx(6 / 11),
        "own_session_share_blocks": pytest.approx(5 / 11),
        "from_others_share_of_hits": pytest.approx(1 / 6),
    }
    # Since their last use: 0 and 1 by the next request, 0 by the next, 0 by the next, 1 and 2 two requests on.
    assert document["reuse"]["distance_requests"] == {"p50": 1, "p90": 2, "p99": 2, "max": 2}
    assert document["reuse"]["gap_s"] == {"p50": 10, "p90": 30, "p99": 30, "max": 30}
    assert document["sessions"]["turns"]["max"] == 3
    assert document["sessions"]["peak_tokens"]["max"] == 4 * 16 + 8
    assert document["sessions"]["peak_bytes"]["max"] == (4 * 16 + 8) * 1024
    assert document["sessions"]["distinct_bytes"]["max"] == 4 * 16 * 1024
    assert document["hit_rate_by_cache"][-1]["hit_share"] == pytest.approx(6 / 11)
    assert document["hit_rate_by_cache"][-1]["share_of_different"] == 1
    assert document["cache_for_hits"][-1]["cache_bytes"] == 4 * 16 * 1024
    assert document["working_set"]["summary"]["used_60s_bytes"]["max"] == 5 * 16 * 1024
    json.dumps(document)


def test_sizes_have_to_be_sizes():
    traffic = gather(REQUESTS)
    with pytest.raises(ValueError, match="count from 1"):
        report("small", traffic, analyse(traffic), bytes_per_token=0, memory_bytes=1)


def test_a_trace_in_which_nothing_comes_back_has_a_report():
    traffic = gather([request(0, "x", [1, 2]), request(0, "y", [3])])
    document = report("once", traffic, analyse(traffic), bytes_per_token=1024, memory_bytes=1 << 20)
    assert document["hits"]["max_share_blocks"] == 0
    assert document["reuse"]["gap_s"] == {}
    assert document["advice"]["plan"] == "tiered"
    assert set(plots.analysis_plots(document)) == {"hit-rate", "reuse-gap", "sessions", "working-set"}


def test_blocks_of_two_sizes_are_refused():
    with pytest.raises(ValueError, match="request 2 has blocks of 64 tokens, those before it 16"):
        gather([request(0, "x", [1]), request(1, "x", [1], block_tokens=64)])
    with pytest.raises(ValueError, match="no request with a whole block"):
        gather([request(0, "x", [])])


def test_quantiles_by_weight_are_those_of_the_repeated():
    values, weights = np.array([5, 1, 9]), np.array([2, 7, 1])
    repeated = np.sort(np.repeat(values, weights))
    assert weighted_quantiles(values, weights) == {"p50": 1, "p90": 5, "p99": 9, "max": 9}
    drawn = distribution(values, weights)
    assert len(drawn) == 101
    assert (drawn[0], drawn[-1]) == (repeated[0], repeated[-1])
    assert distribution(np.array([]), None) == []


@pytest.mark.parametrize(
    ("changes", "plan"),
    [
        ({}, "per-session"),
        ({"hit_share_memory": 0.71}, "per-session"),
        ({"hit_share_memory": 0.73}, "tiered"),  # 0.8 of 0.9 is 0.72
        ({"hit_share_max": 0.09, "hit_share_memory": 0.0}, "tiered"),
        ({"hit_share_max": 0.0, "hit_share_memory": 0.0}, "tiered"),
    ],
)
def test_the_advice_goes_by_what_the_memory_would_filter(changes, plan):
    assert advise(dataclasses.replace(FACTS, **changes)).plan == plan


def test_the_advice_says_its_numbers():
    advice = advise(FACTS)
    assert "64 GiB in front of SSD would serve only 22.2% of the reads" in advice.summary
    text = " ".join(advice.reasons)
    for number in ("90%", "20%", "1 TiB", "16 times 64 GiB", "18 GiB", "40 GiB", "4.3", "holds 1.6", "99%", "5%"):
        assert number in text, number


def test_a_page_needs_no_other_file(document, tmp_path):
    figures = plots.analysis_plots(document)
    rows = [("a", "b"), ("<script>", "2")]
    written = page.write_page(tmp_path / "new", "small & nice", "do it", figures, [("numbers", rows)], "x = 1")
    assert [path.name for path in written] == [
        "hit-rate.png",
        "reuse-gap.png",
        "sessions.png",
        "working-set.png",
        "index.html",
    ]
    text = written[-1].read_text()
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', text)
    assert [base64.b64decode(data) for data in pictures] == [path.read_bytes() for path in written[:-1]]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written[:-1])
    assert not re.search(r'(src|href)="(?!data:)', text)
    assert "<script>" not in text
    assert "small &amp; nice" in text
    assert "<pre>x = 1</pre>" in text


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install 'flatcake\[plots\]'"):
        page.require()
