"""Pictures of what `flatcake analyze` and `flatcake tune` found. How a page is made: flatcake_transport/page.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from flatcake_transport.page import BLUE, GREY, ORANGE, Draw, draw_figure
from flatcake_transport.units import approximate_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GIB: Final = 1 << 30


def analysis_plots(report: Mapping[str, Any]) -> dict[str, Figure]:
    """By file name, without its ending. Raises: ValueError: matplotlib is not installed."""
    return {
        "hit-rate": draw_figure("Hit rate of an LRU by its size", lambda axes: _hit_rate(axes, report)),
        "reuse-gap": draw_figure("Time until a block is used again", lambda axes: _gap(axes, report)),
        "sessions": draw_figure("Session sizes", lambda axes: _sessions(axes, report)),
        "working-set": draw_figure("Working set over time", lambda axes: _working_set(axes, report)),
    }


def tuning_plots(curves: Mapping[str, Sequence[Mapping[str, Any]]], chosen: Mapping[str, int]) -> dict[str, Figure]:
    """One an option: hit rate and cost of each candidate. Raises: ValueError: matplotlib is not installed."""

    def draw(option: str) -> Draw:
        return lambda axes: _curve(axes, option, curves[option], chosen[option])

    return {option.replace("_", "-"): draw_figure(option, draw(option)) for option in curves}


def _hit_rate(axes: Axes, report: Mapping[str, Any]) -> None:
    curve = report["hit_rate_by_cache"]
    most = 100 * report["hits"]["max_share_blocks"]
    axes.semilogx([p["cache_bytes"] / GIB for p in curve], [100 * p["hit_share"] for p in curve], color=BLUE)
    axes.axhline(most, color=GREY, linestyle="--", label=f"no end: {most:.1f}%")
    memory_bytes = report["memory_bytes"]
    axes.axvline(memory_bytes / GIB, color=ORANGE, linestyle=":", label=f"memory: {approximate_size(memory_bytes)}")
    axes.set(xlabel="cache, GiB", ylabel="hit rate, % of blocks", ylim=(0, 100))
    axes.legend()


def _gap(axes: Axes, report: Mapping[str, Any]) -> None:
    shares = range(101)
    for name, colour, label in (("gap_s", BLUE, "seconds"), ("distance_requests", ORANGE, "requests")):
        values = report["distributions"][name]
        if values:
            axes.plot([max(value, 0.1) for value in values], list(shares), color=colour, label=label)
    axes.set(xscale="log", xlabel="since the last use", ylabel="% of reuses", ylim=(0, 100))
    if axes.lines:
        axes.legend()


def _sessions(axes: Axes, report: Mapping[str, Any]) -> None:
    sizes = [max(size, 1.0) / GIB for size in report["distributions"]["peak_bytes"]]
    axes.semilogx(sizes, list(range(101)), color=BLUE)
    axes.axvline(report["memory_bytes"] / GIB, color=ORANGE, linestyle=":", label="memory")
    axes.set(xlabel="GiB at the longest context", ylabel="% of sessions", ylim=(0, 100))
    axes.legend()


def _working_set(axes: Axes, report: Mapping[str, Any]) -> None:
    found = report["working_set"]
    hours = [(at_s - found["at_s"][0]) / 3600 for at_s in found["at_s"]]
    labels = {"used_60s_bytes": "minute", "used_300s_bytes": "5 minutes", "used_3600s_bytes": "hour"}
    for (name, label), colour in zip(labels.items(), (BLUE, ORANGE, GREY), strict=True):
        axes.plot(hours, [size / GIB for size in found[name]], color=colour, label=f"used in the last {label}")
    axes.set(xlabel="hours", ylabel="GiB of different blocks")
    axes.legend()


def _curve(axes: Axes, option: str, points: Sequence[Mapping[str, Any]], chosen: int) -> None:
    scale = GIB if option.endswith("bytes") else 1
    values = [point["value"] / scale for point in points]
    axes.semilogx(values, [100 * point["hit_share"] for point in points], color=BLUE, marker="o", label="hit rate, %")
    axes.set(xlabel=option.replace("_bytes", ", GiB"), ylabel="hit rate, % of blocks", ylim=(0, 100))
    costs = axes.twinx()
    costs.plot(values, [point["cost_s"] for point in points], color=ORANGE, marker="s")
    costs.set_ylabel("restore + recompute, s a request", color=ORANGE)
    costs.set_ylim(bottom=0)
    axes.axvline(chosen / scale, color=GREY, linestyle="--", label="chosen")
    axes.legend(loc="lower right")
