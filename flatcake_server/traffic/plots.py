"""Pictures of a report: a PNG each, and one HTML page that needs no other file.

matplotlib is an extra (`pip install 'flatcake[plots]'`), imported only here and only when something is drawn. Figures are
made without pyplot, so nothing global is touched and no display is needed.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flatcake_server.units import approximate_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GIB: Final = 1 << 30
_BLUE, _ORANGE, _GREY = "#2563eb", "#ea580c", "#6b7280"
_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#111}"
    "img{max-width:100%}table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .8rem;text-align:left;"
    "border-bottom:1px solid #ddd}pre{background:#f3f4f6;padding:1rem}.advice{font-weight:600;font-size:1.1rem}"
)

Table = tuple[str, Sequence[Sequence[str]]]  # title, rows; the first row is the heading
Draw = Callable[["Axes"], None]


def analysis_plots(report: Mapping[str, Any]) -> dict[str, Figure]:
    """By file name, without its ending. Raises: ValueError: matplotlib is not installed."""
    return {
        "hit-rate": _figure("Hit rate of an LRU by its size", lambda axes: _hit_rate(axes, report)),
        "reuse-gap": _figure("Time until a block is used again", lambda axes: _gap(axes, report)),
        "sessions": _figure("Session sizes", lambda axes: _sessions(axes, report)),
        "working-set": _figure("Working set over time", lambda axes: _working_set(axes, report)),
    }


def tuning_plots(curves: Mapping[str, Sequence[Mapping[str, Any]]], chosen: Mapping[str, int]) -> dict[str, Figure]:
    """One an option: hit rate and cost of each candidate. Raises: ValueError: matplotlib is not installed."""

    def draw(option: str) -> Draw:
        return lambda axes: _curve(axes, option, curves[option], chosen[option])

    return {option.replace("_", "-"): _figure(option, draw(option)) for option in curves}


def write_page(
    folder: Path, title: str, summary: str, figures: Mapping[str, Figure], tables: Sequence[Table], code: str = ""
) -> list[Path]:
    """Write `<name>.png` of each figure and `index.html` with all of them in it. Returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    written, pictures = [], []
    for name, figure in figures.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110)
        path = folder / f"{name}.png"
        path.write_bytes(buffer.getvalue())
        written.append(path)
        data = base64.b64encode(buffer.getvalue()).decode()
        pictures.append(f'<img alt="{html.escape(name)}" src="data:image/png;base64,{data}">')
    body = [f"<h1>{html.escape(title)}</h1>", f'<p class="advice">{html.escape(summary)}</p>']
    body += [_html_table(*table) for table in tables]
    body += pictures + ([f"<pre>{html.escape(code)}</pre>"] if code else [])
    page = folder / "index.html"
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    page.write_text(f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(body)}</body></html>\n", "utf-8")
    return [*written, page]


def _html_table(title: str, rows: Sequence[Sequence[str]]) -> str:
    lines = [
        "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in row) + "</tr>"
        for row, tag in zip(rows, ["th", *["td"] * len(rows)], strict=False)
    ]
    return f"<h2>{html.escape(title)}</h2><table>{''.join(lines)}</table>"


def require() -> None:
    """Raises: ValueError: matplotlib is not installed."""
    try:
        import matplotlib as mpl  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise ValueError("plots need matplotlib: pip install 'flatcake[plots]', or leave --plot out") from error


def _figure(title: str, draw: Draw) -> Figure:
    require()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.grid(visible=True, alpha=0.3)
    draw(axes)
    return figure


def _hit_rate(axes: Axes, report: Mapping[str, Any]) -> None:
    curve = report["hit_rate_by_cache"]
    most = 100 * report["hits"]["max_share_blocks"]
    axes.semilogx([p["cache_bytes"] / GIB for p in curve], [100 * p["hit_share"] for p in curve], color=_BLUE)
    axes.axhline(most, color=_GREY, linestyle="--", label=f"no end: {most:.1f}%")
    memory_bytes = report["memory_bytes"]
    axes.axvline(memory_bytes / GIB, color=_ORANGE, linestyle=":", label=f"memory: {approximate_size(memory_bytes)}")
    axes.set(xlabel="cache, GiB", ylabel="hit rate, % of blocks", ylim=(0, 100))
    axes.legend()


def _gap(axes: Axes, report: Mapping[str, Any]) -> None:
    shares = range(101)
    for name, colour, label in (("gap_s", _BLUE, "seconds"), ("distance_requests", _ORANGE, "requests")):
        values = report["distributions"][name]
        if values:
            axes.plot([max(value, 0.1) for value in values], list(shares), color=colour, label=label)
    axes.set(xscale="log", xlabel="since the last use", ylabel="% of reuses", ylim=(0, 100))
    if axes.lines:
        axes.legend()


def _sessions(axes: Axes, report: Mapping[str, Any]) -> None:
    sizes = [max(size, 1.0) / GIB for size in report["distributions"]["peak_bytes"]]
    axes.semilogx(sizes, list(range(101)), color=_BLUE)
    axes.axvline(report["memory_bytes"] / GIB, color=_ORANGE, linestyle=":", label="memory")
    axes.set(xlabel="GiB at the longest context", ylabel="% of sessions", ylim=(0, 100))
    axes.legend()


def _working_set(axes: Axes, report: Mapping[str, Any]) -> None:
    found = report["working_set"]
    hours = [(at_s - found["at_s"][0]) / 3600 for at_s in found["at_s"]]
    labels = {"used_60s_bytes": "minute", "used_300s_bytes": "5 minutes", "used_3600s_bytes": "hour"}
    for (name, label), colour in zip(labels.items(), (_BLUE, _ORANGE, _GREY), strict=True):
        axes.plot(hours, [size / GIB for size in found[name]], color=colour, label=f"used in the last {label}")
    axes.set(xlabel="hours", ylabel="GiB of different blocks")
    axes.legend()


def _curve(axes: Axes, option: str, points: Sequence[Mapping[str, Any]], chosen: int) -> None:
    scale = GIB if option.endswith("bytes") else 1
    values = [point["value"] / scale for point in points]
    axes.semilogx(values, [100 * point["hit_share"] for point in points], color=_BLUE, marker="o", label="hit rate, %")
    axes.set(xlabel=option.replace("_bytes", ", GiB"), ylabel="hit rate, % of blocks", ylim=(0, 100))
    costs = axes.twinx()
    costs.plot(values, [point["cost_s"] for point in points], color=_ORANGE, marker="s")
    costs.set_ylabel("restore + recompute, s a request", color=_ORANGE)
    costs.set_ylim(bottom=0)
    axes.axvline(chosen / scale, color=_GREY, linestyle="--", label="chosen")
    axes.legend(loc="lower right")
