"""Our connector beside the base class of each vLLM that is supported, read and not run: no hook may be missing or misspelt."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
OFFICIAL = "0.33.0"
WHEELS = Path(__file__).parents[3] / "build" / "wheels"
# Hooks that a supported version does not have yet: there they are never called.
ONLY_OFFICIAL = {"unregister_kv_caches", "restore_kv_caches", "supports_sleep_mode"}


def methods(source: str, *classes: str) -> dict[str, ast.FunctionDef]:
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name in classes:
            found |= {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def shape(method: ast.FunctionDef) -> tuple[object, ...]:
    """Names in order, how many have defaults, the kinds of method."""
    arguments = method.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    decorators = {ast.unparse(each) for each in method.decorator_list} & {"classmethod", "property", "staticmethod"}
    return names, [each.arg for each in arguments.kwonlyargs], bool(arguments.kwarg), decorators


def ours() -> dict[str, ast.FunctionDef]:
    path = importlib.util.find_spec("flatcake_client.engines.vllm").origin
    return methods(Path(path).read_text(), "FlatCakeConnector")


def compare(source: str, *, unknown: set[str]) -> None:
    base, mine = methods(source, "KVConnectorBase_V1", "SupportsHMA"), ours()
    abstract = {
        name for name, each in base.items() if any("abstractmethod" in ast.unparse(one) for one in each.decorator_list)
    }
    assert abstract <= set(mine), "abstract, and not implemented"
    public = {name for name in mine if not name.startswith("_")}
    assert public - set(base) == unknown, "hooks that this version never calls"
    for name in (public | {"__init__"}) & set(base):
        assert shape(mine[name]) == shape(base[name]), name


def test_the_installed_vllm():
    source = Path(importlib.util.find_spec("vllm").submodule_search_locations[0]).parent / BASE
    compare(source.read_text(), unknown=ONLY_OFFICIAL)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_official_wheel():
    """Some 340 MB, downloaded once into build/wheels; nothing of it is installed."""
    wheels = sorted(WHEELS.glob(f"vllm-{OFFICIAL}-*.whl"))
    if not wheels:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            f"vllm=={OFFICIAL}",
            "-d",
            str(WHEELS),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"vllm {OFFICIAL} cannot be downloaded here: {done.stderr[-200:]}")
        wheels = sorted(WHEELS.glob(f"vllm-{OFFICIAL}-*.whl"))
    with zipfile.ZipFile(wheels[0]) as wheel:
        compare(wheel.read(BASE).decode(), unknown=set())
