"""What the replays must show, and whether they did: the figures of the issue, from the documents; and where others are ahead. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flatcake_client.replay.report import Document, milliseconds, name_of, percent

Run = Mapping[str, Any]
BUSY = 0.8  # of the time something was being restored: beyond it the disk is saturated

GAP_POINTS_MAX = 0.6
PREFETCH_RATIO_MAX = 1.3
AMPLIFICATION_MAX = 1.02
BANDWIDTH_MIN = 0.95

# What systems are compared in: its name, of a run, whether more is better, and how it is shown.
COMPARED: tuple[tuple[str, str, bool, Callable[[float], str]], ...] = (
    ("delivered hit rate", "delivered_hit", True, percent),
    ("mean TTFT", "ttft_mean_s", False, milliseconds),
    ("P99 TTFT", "ttft_p99_s", False, milliseconds),
    ("mean prefetch", "prefetch_mean_s", False, milliseconds),
    ("SSD bandwidth while restoring", "ssd_bytes_per_s", True, lambda rate: f"{rate / 1e9:.2f} GB/s"),
)


def verdicts(parts: Mapping[str, Sequence[Document]], raw_bytes_per_s: float) -> list[list[str]]:
    """Rows of figure, must, measured, verdict; the heading first."""
    found = [["figure", "must", "measured", ""]]
    for part, ours, others in _played(parts):
        found += _of_flatcake(part, ours, raw_bytes_per_s)
        for other in others:
            found += _beside(part, ours, other)
    return found


def where_others_win(parts: Mapping[str, Sequence[Document]]) -> list[list[str]]:
    """Rows of who is ahead of FlatCake, in what and at which loads; the heading first. What is shown alike is level."""
    found = [["workload", "system", "ahead in", "at load: theirs for ours"]]
    for part, ours, others in _played(parts):
        for other in others:
            both = _at_loads_of_both(ours, other)
            for what, figure, more, show in COMPARED:
                pairs = [(theirs["load"], theirs[figure], mine[figure]) for theirs, mine in both]
                won = [
                    f"{load:g}: {show(theirs)} for {show(mine)}"
                    for load, theirs, mine in pairs
                    if theirs and mine  # 0: nothing was restored
                    if (theirs > mine) == more and show(theirs) != show(mine)
                ]
                if won:
                    found.append([part, name_of(other), what, "; ".join(won)])
    return found


def _played(parts: Mapping[str, Sequence[Document]]) -> Iterator[tuple[str, Document, list[Document]]]:
    """Of each part that FlatCake has played: its name, our document, the others'."""
    for part, documents in parts.items():
        ours = next((d for d in documents if d["system"] == "flatcake" and not d["ablation"]), None)
        if ours is not None and ours["runs"]:
            yield part, ours, [other for other in documents if other is not ours and other["runs"]]


def _at_loads_of_both(ours: Document, other: Document) -> list[tuple[Run, Run]]:
    """The other's runs and ours, where both came to their end."""
    mine = {run["load"]: run for run in ours["runs"] if not run["partial"]}
    return [(run, mine[run["load"]]) for run in other["runs"] if run["load"] in mine and not run["partial"]]


def _of_flatcake(part: str, ours: Document, raw_bytes_per_s: float) -> list[list[str]]:
    runs = ours["runs"]
    gap = max(100 * (run["stored_hit"] - run["delivered_hit"]) for run in runs)
    if not ours["holds_working_set"]:
        gap = max(100 * (ours["oracle_hit"] - run["delivered_hit"]) for run in runs)
    rows = [
        _row(f"{part}: points below the maximum, any load", f"<= {GAP_POINTS_MAX}", f"{gap:.2f}", met=gap <= GAP_POINTS_MAX),
        _zero(f"{part}: restores cancelled", sum(run["cancelled_restores"] for run in runs)),
        _zero(f"{part}: wrong blocks", sum(run["wrong_blocks"] for run in runs)),
    ]  # fmt: skip
    from_ssd = [run for run in runs if run["prefetches"]]
    below = [run for run in from_ssd if run["restoring_s"] < BUSY * run["span_s"]]
    if len(below) > 1:
        ratio = below[-1]["prefetch_mean_s"] / below[0]["prefetch_mean_s"]
        what = f"{part}: prefetch at load {below[-1]['load']:g} (below saturation) / at {below[0]['load']:g}"
        rows.append(_row(what, f"<= {PREFETCH_RATIO_MAX}", f"{ratio:.2f}", met=ratio <= PREFETCH_RATIO_MAX))
    if from_ssd:
        most = max(from_ssd, key=lambda run: run["ssd_bytes_per_s"])
        share = most["ssd_bytes_per_s"] / raw_bytes_per_s
        what = f"{part}: SSD bandwidth while restoring / raw, best load"
        rows.append(_row(what, f">= {BANDWIDTH_MIN}", f"{share:.2f}", met=share >= BANDWIDTH_MIN))
    amplified = [run["read_amplification"] for run in from_ssd if run["read_amplification"] is not None]
    if amplified:
        what = f"{part}: device bytes / useful bytes, median load"
        middle = sorted(amplified)[len(amplified) // 2]
        rows.append(_row(what, f"<= {AMPLIFICATION_MAX}", f"{middle:.3f}", met=middle <= AMPLIFICATION_MAX))
    return rows


def _beside(part: str, ours: Document, other: Document) -> list[list[str]]:
    """Time to first token at each load that both ran: below the other's, and by how much."""
    both = _at_loads_of_both(ours, other)
    rows = []
    at = "at load " + ", ".join(f"{theirs['load']:g}" for theirs, _ in both)
    if both:
        for name, figure in (("mean", "ttft_mean_s"), ("P99", "ttft_p99_s")):
            ratios = [theirs[figure] / mine[figure] for theirs, mine in both]
            shown, met = ", ".join(f"{ratio:.2f}" for ratio in ratios), all(ratio > 1 for ratio in ratios)
            rows.append(_row(f"{part}: {name} TTFT of {name_of(other)} / ours, {at}", "> 1", shown, met=met))
    if other["ablation"] == "memory-off":
        shown = ", ".join(
            f"{1e3 * theirs['ttft_hit_mean_s']:.0f} for {1e3 * mine['ttft_hit_mean_s']:.0f} ms" for theirs, mine in both
        )
        rows.append([f"{part}: mean TTFT of hits with all on SSD for that with a home each, {at}", "", shown, ""])
    delivered = ", ".join(percent(run["delivered_hit"]) for run in other["runs"])
    rows.append([f"{part}: delivered hit rate of {name_of(other)}", "", delivered, ""])
    return rows


def _row(name: str, must: str, measured: str, *, met: bool) -> list[str]:
    return [name, must, measured, "met" if met else "**missed**"]


def _zero(name: str, count: int) -> list[str]:
    return _row(name, "0", f"{count}", met=count == 0)
