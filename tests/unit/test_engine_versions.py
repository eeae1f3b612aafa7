"""The table of engine versions says what the tests install, and every engine has its page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs/engines/README.md").read_text()
ROWS = {
    row[0].lower(): row for row in re.findall(r"^\| (\w+) \| ([^|]+) \| ([^|]+) \| ([^|]*) \|$", TABLE, re.MULTILINE)
}


def pins_of(engine: str) -> dict[str, str]:
    """What an engine's environment pins, by package."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "tests/engines" / engine).glob("*.txt")))
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "lmcache"])
def test_the_table_says_what_is_installed(engine: str) -> None:
    pins, row = pins_of(engine), ROWS[engine]
    said = " ".join(row[1:3])
    tested = {version for name, version in pins.items() if name.split("-")[0] == engine}
    assert tested, f"tests/engines/{engine} pins no {engine}"
    assert all(version in said for version in tested), f"{engine} is tested with {tested}, the table says: {said}"


@pytest.mark.parametrize("engine", ["vllm", "sglang", "lmcache"])
def test_an_engine_has_its_page(engine: str) -> None:
    page = ROOT / "docs/engines" / f"{engine}.md"
    assert f"[{page.name}]({page.name})" in ROWS[engine][3]
    assert ROWS[engine][1].strip() in page.read_text()


def test_the_oldest_transformers_is_that_of_the_package() -> None:
    oldest = re.search(r"transformers>=([\d.]+)", (ROOT / "pyproject.toml").read_text())
    assert oldest is not None
    assert f"from {oldest[1]}" in ROWS["transformers"][1]
    assert re.search(
        rf"^transformers=={ROWS['transformers'][1][0]}\.", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
