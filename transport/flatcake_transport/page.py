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
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE: Final = "#2563eb"
ORANGE: Final = "#ea580c"
GREY: Final = "#6b7280"
COLOURS: Final = (BLUE, ORANGE, "#16a34a", GREY, "#9333ea", "#ca8a04", "#db2777", "#0891b2", "#78350f", "#111827")
_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#111}"
    "img{max-width:100%}table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .8rem;text-align:left;"
    "border-bottom:1px solid #ddd}pre{background:#f3f4f6;padding:1rem}.advice{font-weight:600;font-size:1.1rem}"
)

Table = tuple[str, Sequence[Sequence[str]]]  # title, rows; the first row is the heading
Draw = Callable[["Axes"], None]


def require() -> None:
    """Raises: ValueError: matplotlib is not installed."""
    try:
        import matplotlib as mpl  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise ValueError("plots need matplotlib: pip install 'flatcake[plots]', or leave --plot out") from error


def draw_figure(title: str, draw: Draw) -> Figure:
    """Raises: ValueError: matplotlib is not installed."""
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


def write_page(
    folder: Path, title: str, summary: str, figures: Mapping[str, Figure], tables: Sequence[Table], code: str = ""
) -> list[Path]:
    """Write `<name>.png` of each figure and `index.html` with all of them in it. Returns what was written.

    Raises: OSError: it cannot; says where.
    """
    try:
        return _write_page(folder, title, summary, figures, tables, code)
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or str(folder)) from error  # a full disk names none


def _write_page(
    folder: Path, title: str, summary: str, figures: Mapping[str, Figure], tables: Sequence[Table], code: str
) -> list[Path]:
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
