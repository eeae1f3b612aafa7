"""The examples of the README and of the engines' pages run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(300)


def said_by(page: str, environment: dict[str, str], verdict: str = "", *, warnings: str = "error") -> str:
    """What all examples of a page print, run as one program."""
    examples = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    program = "\n".join([*examples, verdict])
    for hasty, patient in (("fc.connect()", "fc.connect(timeout_s=60.0)"), ("timeout_s=5.0", "timeout_s=60.0")):
        program = program.replace(hasty, patient)  # a machine that is busy is no reason to miss
    run = subprocess.run(
        [sys.executable, "-W", warnings, "-c", program],
        capture_output=True,
        text=True,
        timeout=250,
        env=environment,
        check=False,
    )
    assert not run.returncode, run.stderr
    return run.stdout


def test_the_example_of_the_readme_runs_and_restores_what_it_stored(daemon):
    verdict = "assert all(np.array_equal(a, b) for a, b in zip(source, target, strict=True))\nprint('same')"
    assert said_by("README.md", {"FLATCAKE_ENDPOINT": daemon.endpoint}, verdict) == "same\n"
    assert daemon.status()["counters"]["stored_blocks_total"] == {"ssd/first-turn": 10}


def test_an_engine_of_ones_own(daemon):
    verdict = "client = fc.connect()\nspace = client.open_space('other', 'u8', 64, [PLANE] * LAYERS)\n"
    verdict += "print(load(space, keys, pages, range(10)), prefill(space, keys, pages, range(10), lambda *_: None))"
    assert said_by("docs/engines/own.md", {"FLATCAKE_ENDPOINT": daemon.endpoint}, verdict) == "20\n0 0\n"


def test_an_engine_of_ones_own_without_a_daemon(tmp_path):
    """All that the page's functions promise then: nothing is in place, nothing is stored."""
    page = (ROOT / "docs/engines/own.md").read_text(encoding="utf-8")
    functions = re.findall(r"```python\n((?:import|def).*?)```", page, re.DOTALL)
    program = (
        "\n".join(functions)
        + f"""
client = fc.connect("unix://{tmp_path}/nobody")
space = client.open_space("m", "u8", 64, [4096])
keys, pages = space.keys(range(640)), [np.zeros((10, 4096), np.uint8)]
print(load(space, keys, pages, range(10)), store(space, keys, pages, range(10), "s"), prefill(space, keys, pages, range(10), lambda *_: None))
"""
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250, check=False)
    assert run.stdout == "0 False 0\n", run.stderr


def test_transformers(daemon, tmp_path):
    pytest.importorskip("transformers")
    from flatcake_client.engines.models import ModelShape, make_model

    make_model(ModelShape()).save_pretrained(tmp_path)
    environment = os.environ | {"FLATCAKE_ENDPOINT": daemon.endpoint, "MODEL": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    said = said_by("docs/engines/transformers.md", environment, warnings="ignore")  # theirs
    assert said == "448 tokens restored, 62 computed\n"
