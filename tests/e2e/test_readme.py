"""The example of the README runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_example_of_the_readme_runs_and_restores_what_it_stored(daemon):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    verdict = "\nassert all(np.array_equal(a, b) for a, b in zip(source, target, strict=True))\nprint('same')\n"
    environment = {"FLATCAKE_ENDPOINT": daemon.endpoint}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", example + verdict],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=False,
    )
    assert (run.stdout, run.returncode) == ("same\n", 0), run.stderr
    assert daemon.status()["counters"]["stored_blocks_total"] == {"ssd/first-turn": 10}
