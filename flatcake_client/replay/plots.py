"""Curves over load, a line a system. How a page is made: flatcake_transport/page.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from flatcake_client.replay.report import Document, name_of
from flatcake_transport.page import BLUE, COLOURS, GREY, draw_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Value = Callable[[Mapping[str, Any]], float | None]

_CURVES: Final[tuple[tuple[str, str, str, bool, Value], ...]] = (
    # file, title, y axis, logarithmic, value
    ("hit-rate", "Delivered hit rate", "% of tokens", False, lambda run: 100 * run["delivered_hit"]),
    ("ttft-mean", "Mean time to first token", "ms", True, lambda run: 1e3 * run["ttft_mean_s"]),
    ("ttft-p99", "P99 time to first token", "ms", True, lambda run: 1e3 * run["ttft_p99_s"]),
    ("prefetch", "Mean prefetch time", "ms", True, lambda run: 1e3 * run["prefetch_mean_s"] or None),
    ("bandwidth", "SSD bandwidth while restoring", "GB/s", False, lambda run: run["ssd_bytes_per_s"] / 1e9 or None),
    ("amplification", "Device bytes read / useful bytes", "times", False, lambda run: run["read_amplification"]),
    ("cancelled", "Restores cancelled", "count", False, lambda run: run["cancelled_restores"]),
)


def load_plots(documents: Sequence[Document], title: str = "") -> dict[str, Figure]:
    """By file name, without its ending. Raises: ValueError: matplotlib is not installed."""
    return {name: draw_figure(f"{label}{title}", _draw(documents, name, axis, value, log=log))
            for name, label, axis, log, value in _CURVES}  # fmt: skip


def _draw(documents: Sequence[Document], name: str, axis: str, value: Value, *, log: bool) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        if name == "hit-rate" and documents:
            first = documents[0]
            best = first["ideal_hit"] if first["holds_working_set"] else first["oracle_hit"]
            axes.axhline(100 * best, color=GREY, linestyle="--", label=f"maximum: {100 * best:.1f}%")
        for n, document in enumerate(documents):
            points = [(run["load"], value(run)) for run in document["runs"] if run["requests"]]
            points = sorted((load, found) for load, found in points if found is not None)
            style = {"color": BLUE, "linewidth": 2.5, "zorder": 5} if n == 0 else {"color": COLOURS[n % len(COLOURS)]}
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=name_of(document), **style)
        axes.set(xlabel="load, times the trace's arrivals", ylabel=axis, xscale="log")
        if log:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        loads = sorted({run["load"] for document in documents for run in document["runs"]})
        axes.set_xticks(loads, [f"{load:g}" for load in loads])
        axes.minorticks_off()
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")

    return draw
