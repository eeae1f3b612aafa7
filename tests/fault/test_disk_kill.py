"""kill -9 before every step that changes the disk: what was acknowledged is there, what was dropped is not, the law holds."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from disk_path import DiskPath

from flatcake_server import offline
from flatcake_transport.errors import Corrupt

HERE = Path(__file__).parent


class Zygote:
    """Lets a child die before its n-th step."""

    def __init__(self, temporary: Path) -> None:
        # A killed process cannot remove what it keeps in the directory for temporary files: it gets one of its own.
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path]),
            "TMPDIR": str(temporary),
        }
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "disk_zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, action: str, root: Path, at: int) -> tuple[int, int]:
        """Steps made, and how it ended: 0 or -9."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(action, root, at, file=self.process.stdin, flush=True)
        steps, status = self.process.stdout.readline().split()
        assert int(status) in (0, -signal.SIGKILL), "the child failed by itself"
        return int(steps), int(status)


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    one = Zygote(tmp_path_factory.mktemp("temporary"))
    yield one
    assert one.process.stdin is not None
    assert one.process.stdout is not None
    one.process.stdin.close()
    one.process.wait(10)
    one.process.stdout.close()


@pytest.fixture
def place() -> Iterator[Path]:
    """In memory where there is such a place: a killed process leaves the same there, and nothing waits for a disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as name:
        yield Path(name)


def acknowledged(root: Path) -> tuple[set[int], set[int], set[int]]:
    """Generations that must be there, may be there, and must not."""
    must: set[int] = set()
    perhaps: set[int] = set()
    gone: set[int] = set()
    acks = Path(f"{root}.acks")
    for line in acks.read_text().splitlines():
        word, *numbers = line.split()
        which = set(map(int, numbers))
        if word == "turn":
            must |= which
        elif word == "drops":
            must, perhaps = must - which, perhaps | which
        elif word == "dropped":
            perhaps, gone = perhaps - which, gone | which
    acks.unlink()
    return must, perhaps, gone


def test_every_step_of_a_life(zygote, place):
    at, status = 0, -9
    while status:
        at += 1
        root = place / "ssd"
        _, status = zygote.run("use", root, at)
        must, perhaps, gone = acknowledged(root)
        if root.exists() and any(root.iterdir()):
            report = offline.check(root, data=True)
            assert report.findings == [], f"killed before step {at}"
        with DiskPath(root) as path:
            found = {segment.generation for segment in path.image.segments}
            assert must <= found, f"killed before step {at}: forgotten"
            assert not gone & found, f"killed before step {at}: came back"
            # Of a turn or a drop that was not answered, either is right; at most one was under way.
            assert len(found - must - perhaps) <= 1
            assert perhaps <= found or not perhaps & found, f"killed before step {at}: half a batch"
            assert path.image.next_generation > max(must | perhaps | gone | found, default=0)
            assert path.image.next_file_id > max(path.files.list(), default=0), "the id of an orphan is offered again"
        shutil.rmtree(root)
    assert at > 50, "the steps are not seen"


def test_every_step_of_a_rebuild(zygote, place):
    made = place / "made"
    with DiskPath(made) as path:
        path.turn("a", 1)
        path.turn("b", 1)
        path.turn("a", 1, commit=False)
    at, status = 0, -9
    while status:
        at += 1
        root = place / "ssd"
        shutil.copytree(made, root)
        _, status = zygote.run("rebuild", root, at)
        with suppress(Corrupt), DiskPath(root) as path:  # between the two renames there is none, and it says so
            assert len(path.image.segments) in (2, 3), "the old one or the new one, whole"
        assert offline.rebuild(root)["segments"] == 3, f"killed before step {at}"
        assert offline.check(root, data=True).findings == []
        shutil.rmtree(root)
    assert at > 15, "the steps are not seen"
