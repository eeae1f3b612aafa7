"""A process that has everything imported and forks one child a line: `action root tick`. The child dies by SIGKILL before its
`tick`-th step; a step is a call that changes the disk. Prints, a line each, how many steps were made and how it ended.

What the child has been told is done it writes to `root.acks` as it goes.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import disk_path

from flatcake_server import journal, offline, session

STEPS = ("open", "pwrite", "fdatasync", "fsync", "ftruncate", "truncate", "unlink", "mkdir", "rmdir", "rename")


class Killer:
    """Wraps the calls of this process; what the tests break is never the product."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.steps = 0

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def stepping(*a: Any, **k: Any) -> Any:
            self.steps += 1
            if self.steps == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*a, **k)

        return stepping

    def install(self) -> None:
        for name in STEPS:
            setattr(os, name, self.wrap(getattr(os, name)))
        session.fallocate = self.wrap(session.fallocate)
        journal.Rdict = self.wrap(journal.Rdict)
        journal.RocksRecords.write = self.wrap(journal.RocksRecords.write)
        journal.RocksRecords.close = self.wrap(journal.RocksRecords.close)


def use(root: Path, ack: Callable[[str], None]) -> None:
    """A life of a path: turns, an append, a trim, a drop."""
    path = disk_path.DiskPath(root)
    ack(f"turn {path.turn('a', 1).generation}")
    ack(f"turn {path.turn('a', 2).generation}")
    ack(f"turn {path.turn('b', 1).generation}")
    gone = [s.generation for s in path.segments if s.session_no == path.sessions["a"].session_no]
    path.trim("b")
    ack("drops " + " ".join(map(str, gone)))
    path.drop("a")
    ack("dropped " + " ".join(map(str, gone)))
    ack(f"turn {path.turn('c', 1).generation}")
    path.close()


def rebuild(root: Path, ack: Callable[[str], None]) -> None:
    ack(f"segments {offline.rebuild(root)['segments']}")


def child(action: str, root: Path, at: int, steps_fd: int) -> None:
    acks = os.open(f"{root}.acks", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    write = os.write
    killer = Killer(at)
    killer.install()
    {"use": use, "rebuild": rebuild}[action](root, lambda text: (write(acks, f"{text}\n".encode()), None)[1])
    write(steps_fd, str(killer.steps).encode())


def main() -> None:
    for line in sys.stdin:
        action, root, at = line.split()
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            child(action, Path(root), int(at), writer)
            os._exit(0)
        os.close(writer)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        steps = os.read(reader, 32).decode() or at
        os.close(reader)
        print(steps, status, flush=True)


if __name__ == "__main__":
    main()
