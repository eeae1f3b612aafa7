"""What bench/replay_report.py decides: which runs belong together, and whether a figure was met; and that the page says so."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flatcake_client.replay.report import read_documents

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "replay"
GB = 1e9


def load(name: str) -> ModuleType:
    """A script of bench/, which is no package."""
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "bench"))


report = load("replay_report")
verdicts, where_others_win = load("_verdicts").verdicts, load("_verdicts").where_others_win


def run(load: float, **figures: Any) -> dict[str, Any]:
    told = {
        "stored_hit": 0.8, "delivered_hit": 0.8, "cancelled_restores": 0, "wrong_blocks": 0, "prefetches": 10,
        "restoring_s": 1.0, "span_s": 10.0, "prefetch_mean_s": 0.1, "ssd_bytes_per_s": 2 * GB, "read_amplification": 1.0,
        "ttft_mean_s": 1.0, "ttft_p99_s": 2.0, "ttft_hit_mean_s": 0.5, "partial": False,
    }  # fmt: skip
    return {"load": load} | told | figures


def document(system: str, *runs: dict[str, Any], ablation: str = "", **more: Any) -> dict[str, Any]:
    return {"system": system, "ablation": ablation, "runs": list(runs), "holds_working_set": True} | more


def judged(*documents: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """What was measured and the verdict, by figure."""
    return {row[0]: (row[2], row[3]) for row in verdicts({"p": documents}, 4 * GB)[1:]}


@pytest.mark.parametrize(
    ("figure", "worse", "measured"),
    [
        ("p: points below the maximum, any load", {"delivered_hit": 0.79}, "1.00"),
        ("p: restores cancelled", {"cancelled_restores": 2}, "2"),
        ("p: wrong blocks", {"wrong_blocks": 1}, "1"),
        ("p: prefetch at load 2 (below saturation) / at 1", {"prefetch_mean_s": 0.14}, "1.40"),
        ("p: device bytes / useful bytes, median load", {"read_amplification": 1.1}, "1.100"),
    ],
)
def test_one_load_that_misses_is_a_figure_that_is_missed(figure, worse, measured):
    assert judged(document("flatcake", run(1), run(2)))[figure][1] == "met"
    assert judged(document("flatcake", run(1), run(2, **worse)))[figure] == (measured, "**missed**")


def test_a_disk_that_is_busy_most_of_the_time_is_saturated():
    figure = "p: prefetch at load 2 (below saturation) / at 1"
    slow = run(4, prefetch_mean_s=9.0, restoring_s=8.0)
    assert judged(document("flatcake", run(1), run(2), slow))[figure] == ("1.00", "met")


def test_bandwidth_is_that_of_the_best_load():
    figure = "p: SSD bandwidth while restoring / raw, best load"
    ours = document("flatcake", run(1), run(2, ssd_bytes_per_s=3.9 * GB))
    assert judged(ours)[figure] == ("0.97", "met")
    assert judged(document("flatcake", run(1)))[figure] == ("0.50", "**missed**")


def test_where_the_room_is_too_small_the_oracle_is_the_measure():
    small = document("flatcake", run(1, delivered_hit=0.7), holds_working_set=False, oracle_hit=0.705)
    assert judged(small)["p: points below the maximum, any load"] == ("0.50", "met")


def test_a_peer_that_wins_at_one_load_is_said_and_only_common_whole_loads_count():
    ours = document("flatcake", run(1), run(2))
    peer = document("other", run(1, ttft_mean_s=2.0), run(2, ttft_mean_s=0.9), run(3), run(1.5, partial=True))
    found = judged(ours, peer)
    assert found["p: mean TTFT of other / ours, at load 1, 2"] == ("2.00, 0.90", "**missed**")
    assert found["p: P99 TTFT of other / ours, at load 1, 2"] == ("1.00, 1.00", "**missed**")
    assert found["p: delivered hit rate of other"][1] == ""


def test_where_others_win_is_told_by_system_figure_and_load():
    ours = document("flatcake", run(1), run(2), run(4), run(8, partial=True))
    peer = document(
        "other",
        run(1, delivered_hit=0.81),
        run(2, ttft_p99_s=1.9, ssd_bytes_per_s=1 * GB),
        run(4, ttft_p99_s=1.5, prefetch_mean_s=0.0),
        run(8, ttft_mean_s=0.1),
    )
    without = document("flatcake", run(4, ttft_mean_s=0.9), ablation="one-queue")
    level = document("level", run(1, delivered_hit=0.80001, ttft_mean_s=0.9999))
    assert where_others_win({"p": [ours, peer, without, level], "q": [peer]})[1:] == [
        ["p", "other", "delivered hit rate", "1: 81.00% for 80.00%"],
        ["p", "other", "P99 TTFT", "2: 1,900 ms for 2,000 ms; 4: 1,500 ms for 2,000 ms"],
        ["p", "flatcake one-queue", "mean TTFT", "4: 900 ms for 1,000 ms"],
    ]


def test_what_the_wrong_home_costs_is_told_without_a_verdict():
    off = document("flatcake", run(1, ttft_hit_mean_s=0.7), ablation="memory-off")
    (told,) = [row for name, row in judged(document("flatcake", run(1)), off).items() if "all on SSD" in name]
    assert told == ("700 for 500 ms", "")


def test_without_ours_nothing_is_judged():
    assert judged(document("other", run(1))) == judged(document("flatcake")) == {}


def told(**options: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"systems": "", "no_ablations": False} | options)


def test_a_part_runs_ours_then_what_is_taken_out_of_it_then_other_systems():
    heavy, small = report.PARTS[0], report.PARTS[3]
    lines = list(report._lines(heavy, told()))
    assert lines[:6] == [("flatcake", ""), *(("flatcake", ablation) for ablation in report.ABLATIONS)]
    assert lines[6:] == [("mooncake", ""), ("lmcache", ""), ("none", "")]
    assert list(report._lines(heavy, told(systems="none"))) == [("none", "")]
    assert list(report._lines(heavy, told(systems="flatcake,none", no_ablations=True))) == [
        ("flatcake", ""),
        ("none", ""),
    ]
    assert list(report._lines(small, told())) == [("flatcake", "")]


def test_the_same_reads_alone_are_told_without_a_verdict(tmp_path):
    file = tmp_path / report.SAME_READS
    assert report.same_reads_rows(file) == []
    file.write_text(
        '{"figures": [{"name": "chat: restores / reads", "measured": 0.891, "detail": "0.67 of 0.75 GB/s"}]}'
    )
    assert report.same_reads_rows(file) == [["chat: restores / reads", "", "0.89: 0.67 of 0.75 GB/s", ""]]


def test_the_page_has_the_figures_of_its_reports():
    """docs/replay/README.md against the JSON beside it: nobody has mended a number by hand."""
    text = (PAGE / "README.md").read_text(encoding="utf-8")
    (raw_gb_s,) = re.findall(r"raw O_DIRECT reads ([\d.]+) GB/s", text)
    parts = {}
    for part in report.PARTS:
        files = [PAGE / f"{part.name}-{ablation or system}.json" for system, ablation in report._lines(part, told())]
        parts[part.name] = read_documents([file for file in files if file.exists()])
    judged = verdicts(parts, float(raw_gb_s) * GB) + report.same_reads_rows(PAGE / report.SAME_READS)
    rows = report._markdown(judged)
    shown = text.split("## Figures\n\n")[1].split("\n\n")[0].splitlines()
    rounded = [row for row in rows if "/ raw, best load" in row]  # the rate is told to two digits
    assert [row for row in shown if "/ raw, best load" not in row] == [row for row in rows if row not in rounded]
    assert len([row for row in shown if "/ raw, best load" in row]) == len(rounded)
    shown = text.split("## Where others win\n\n")[1].split("\n\n")[0].splitlines()
    assert shown == report._markdown(where_others_win(parts))
