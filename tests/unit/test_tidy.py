"""Rules of the house that no linter knows: CONVENTIONS.md 3, 5, 7 and 9."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("flatcake_client", "flatcake_server", "transport/flatcake_transport", "bench", "tests")
FILE_LINES_MAX = 450
FUNCTION_LINES_MAX = 70
# Put together here, so that this file does not find itself.
UNFINISHED = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b")
# Where every error becomes a miss, a status or a line: CONVENTIONS.md 5.
EDGES = re.compile(r"rpc(_admin)?\.py|engines/|cluster/|cli\w*\.py|app\.py|^tests/|^bench/")
REASON = re.compile(r"# noqa: BLE001\W+\w.{15,}")  # the edge of a thread is one, too

FILES = sorted(path.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def text_of(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def findings(path: Path, text: str) -> list[str]:
    """What is untidy in one file, a sentence each."""
    tree = ast.parse(text)
    found = []
    if text.count("\n") > FILE_LINES_MAX:
        found.append(f"{text.count(chr(10))} lines: two ideas in one file")
    found += [f"line {n}: unfinished" for n, line in enumerate(text.splitlines(), 1) if UNFINISHED.search(line)]
    if "from __future__ import annotations" not in text and any(map(is_annotated, ast.walk(tree))):
        found.append("no future annotations")
    if text.strip() and path.parts[0] != "tests" and ast.get_docstring(tree) is None:
        found.append("opens without its theory")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                found.append(f"line {node.lineno}: {node.name} has {lines} lines")
        if path.parts[0] == "tests" and isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "sleep":
            found.append(f"line {node.lineno}: a test that sleeps; wait for the condition")
        silent = isinstance(node, ast.ExceptHandler) and not REASON.search(text.splitlines()[node.lineno - 1])
        if silent and swallows(node) and not EDGES.search(str(path)):
            found.append(f"line {node.lineno}: catches everything away from the edge, and says no reason")
    return found


def is_annotated(node: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign) or (
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.args.args != []
    )


def swallows(handler: ast.ExceptHandler) -> bool:
    """Undoing and passing on is no swallowing."""
    caught = "BaseException" if handler.type is None else ast.unparse(handler.type)
    passed_on = isinstance(handler.body[-1], ast.Raise) and handler.body[-1].exc is None
    return re.search(r"\b(Exception|BaseException)\b", caught) is not None and not passed_on


@pytest.mark.parametrize("path", FILES, ids=str)
def test_the_house_is_tidy(path):
    assert findings(path, text_of(path)) == []


def test_there_is_a_house():
    assert len(FILES) > 30


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("flatcake_server/x.py", '"""x"""\nfrom __future__ import annotations\n' + "\n" * FILE_LINES_MAX),
        ("flatcake_server/x.py", '"""x"""\nfrom __future__ import annotations\n# ' + "FIX" + "ME\n"),
        ("flatcake_server/x.py", '"""x"""\nx: int = 1\n'),
        ("flatcake_server/x.py", "from __future__ import annotations\n"),
        (
            "flatcake_server/x.py",
            '"""x"""\nfrom __future__ import annotations\ndef f():\n' + "    pass\n" * FUNCTION_LINES_MAX,
        ),
        (
            "flatcake_server/x.py",
            '"""x"""\nfrom __future__ import annotations\ntry:\n    x\nexcept Exception:\n    pass\n',
        ),
        ("flatcake_server/x.py", '"""x"""\nfrom __future__ import annotations\ntry:\n    x\nexcept:\n    pass\n'),
        ("tests/unit/test_x.py", "from __future__ import annotations\nimport asyncio\nasyncio.sleep(0)\n"),
    ],
)
def test_each_rule_finds_what_it_is_for(name, text):
    assert len(findings(Path(name), text)) == 1
