"""Documents name the script that prints a figure: it is there, and no figure of the table is without one."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


FILES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(
        file
        for room in ("flatcake_client", "flatcake_server", "transport", "bench")
        for file in (ROOT / room).rglob("*.py")
    ),
]


def test_every_script_that_is_named_is_there():
    named = {
        (script, file.name)
        for file in FILES
        for script in re.findall(r"\bbench/\w+(?:/\w+)?\.py", file.read_text(encoding="utf-8"))
    }
    assert len(named) > 30
    gone = [(script, file) for script, file in named if "/NAME.py" not in script and not (ROOT / script).exists()]
    assert gone == []


def test_every_figure_of_the_table_names_what_prints_it():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = text.split("## Figures")[1].split("| figure |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert len(rows) > 20
    assert [row[0] for row in rows if not re.search(r"bench/\w+\.py|make bench|the same", row[-1])] == []
