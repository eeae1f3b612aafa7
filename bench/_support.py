"""What the scripts of this folder share: a directory on a real disk, a node on it, raw I/O to compare with, and tables.

Figures are ratios of ours to the machine's limit, taken in one run. Disks of virtual machines are noisy and their noise
is one-sided: something else takes time away. So ours and the limit take turns, equally often, and the bests are compared;
the medians stand beside them. Every buffer is touched before its first use: a first touch alone runs at 0.7 GB/s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from flatcake_server.machine import is_memory
from flatcake_server.rpc_admin import AdminClient
from flatcake_transport.window import aligned_buffer

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
COMMANDS = (256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB)
THREADS = (1, 4, 8, 16)
START_TIMEOUT_S = 120.0

Bytes = NDArray[np.uint8]


def arguments(doc: str | None, **more: tuple[int, str]) -> argparse.Namespace:
    """--dir, --json and integers of the script's own: name -> (default, help)."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dir", type=Path, default=Path.cwd(), help="a directory on the disk to measure (default: the working one)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    for name, (default, text) in more.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=default, help=f"{text} (default {default})"
        )
    return parser.parse_args()


@contextlib.contextmanager
def disk_directory(parent: Path, need_bytes: int) -> Iterator[Path]:
    """A directory of our own below `parent`, gone afterwards. Exits where that is memory, or has no room."""
    parent = parent.resolve()
    if is_memory(parent):
        sys.exit(f"{parent} lies in memory: give --dir a directory on the disk to measure")
    free_bytes = shutil.disk_usage(parent).free
    if free_bytes < need_bytes + GIB:
        sys.exit(
            f"{parent} has {free_bytes / 1e9:.1f} GB free: this needs {(need_bytes + GIB) / 1e9:.1f}; give --dir another"
        )
    with tempfile.TemporaryDirectory(prefix=".flatcake-bench-", dir=parent) as directory:
        yield Path(directory)


class Node:
    """`flatcake serve` in a process of its own, on a directory of ours. A context manager; after `stop` it can `start` again."""

    def __init__(self, directory: Path, /, **options: object) -> None:
        self._directory = directory
        self._sockets = Path(tempfile.mkdtemp(prefix="flatcake-bench-"))  # a socket's path is short
        self.ssd_path = directory / "ssd"
        self.ssd_path.mkdir(exist_ok=True)
        defaults: dict[str, object] = {"memory_bytes": 64 * MIB, "ssd_bytes": 8 * GIB, "session_trim_after": "1h"}
        defaults |= {"grpc_listen": "off", "http_listen": "off"}
        self._options = defaults | options
        self._options |= {"socket": self._sockets / "fc.sock", "ssd_paths": self.ssd_path}
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"unix://{self._options['socket']}"

    def start(self) -> Self:
        """Return when it serves. Exits with its log if it ends instead."""
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in self._options.items()]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FLATCAKE_")}
        command = [sys.executable, "-c", "from flatcake_server.cli import main; main()", "serve", *flags]
        with (self._directory / "daemon.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s and self.process.poll() is None:
            with contextlib.suppress(Exception):
                self.status()
                return self
            time.sleep(0.02)
        sys.exit(f"the daemon does not serve:\n{(self._directory / 'daemon.log').read_text()[-2000:]}")

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait(60)

    def status(self) -> dict[str, Any]:
        with AdminClient(self.endpoint, timeout_s=10.0) as admin:
            return admin.status()

    def rss_bytes(self) -> int:
        assert self.process is not None
        resident = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return resident * os.sysconf("SC_PAGE_SIZE")

    def __enter__(self) -> Self:
        return self.start()

    def close(self, number: int = signal.SIGTERM) -> None:
        self.stop(number)
        shutil.rmtree(self._sockets, ignore_errors=True)

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Setting:
    """One way of raw I/O: commands of so many bytes, so many at once."""

    command_bytes: int
    threads: int

    def __str__(self) -> str:
        return f"{self.command_bytes // KIB} KiB x {self.threads}"


class Raw:
    """preadv and pwritev with O_DIRECT between a file and touched buffers, and nothing else: the disk's limit."""

    def __init__(self) -> None:
        self._buffers = [aligned_buffer(max(COMMANDS)) for _ in range(max(THREADS))]
        noise = np.random.default_rng(0).integers(0, 256, max(COMMANDS), np.uint8)
        for buffer in self._buffers:
            buffer[:] = noise

    def read_s(self, path: Path, setting: Setting, memory: Bytes | None = None, *, copied: bool = False) -> float:
        """The whole file, into a buffer a thread used again and again; or each byte into its own place in `memory`, where it is
        read to, or `copied` to out of such a buffer.
        """
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            return self._run_s(os.preadv, fd, os.fstat(fd).st_size, setting, memory, copied=copied)
        finally:
            os.close(fd)

    def read_open_s(self, fd: int, size_bytes: int, setting: Setting, memory: Bytes | None = None) -> float:
        """As `read_s`, of what is open: a device says no size."""
        return self._run_s(os.preadv, fd, size_bytes, setting, memory)

    def write_s(self, path: Path, size_bytes: int, setting: Setting, memory: Bytes | None = None) -> float:
        """Into a freshly pre-allocated file, up to and with fdatasync; what was at `path` is gone before. From: as `read_s`."""
        path.unlink(missing_ok=True)
        start_s = time.perf_counter()
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
            self._run_s(os.pwritev, fd, size_bytes, setting, memory)
            os.fdatasync(fd)
            return time.perf_counter() - start_s
        finally:
            os.close(fd)

    def _run_s(
        self,
        command: Callable[..., int],
        fd: int,
        size_bytes: int,
        setting: Setting,
        memory: Bytes | None,
        *,
        copied: bool = False,
    ) -> float:
        offsets = iter(range(0, size_bytes, setting.command_bytes))  # `next` on it is atomic

        def work(buffer: Bytes) -> None:
            for offset in offsets:
                count = min(setting.command_bytes, size_bytes - offset)
                place = buffer[:count] if memory is None or copied else memory[offset : offset + count]
                assert command(fd, [place], offset) == count
                if memory is not None and copied:
                    memory[offset : offset + count] = place

        return together_s([partial(work, buffer) for buffer in self._buffers[: setting.threads]])


def together_s(tasks: Sequence[Callable[[], object]]) -> float:
    """Seconds until all tasks, a thread each, are done; they begin at once. What one raises is raised."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(tasks) + 1)

    def run(task: Callable[[], object]) -> None:
        barrier.wait()
        try:
            task()
        except BaseException as error:  # noqa: BLE001 - the edge of a thread: raised by the caller below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    barrier.wait()
    start_s = time.perf_counter()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return time.perf_counter() - start_s


def timed_s(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def cpu_s(work: Callable[[], object]) -> float:
    """Of all threads of this process: others on the machine make a run longer, but not this."""
    start_s = time.process_time()
    work()
    return time.process_time() - start_s


class Contenders:
    """The fastest settings of a sweep. They share the limit's turns: one pass of a noisy disk does not say which is the best."""

    def __init__(
        self, run_s: Callable[[Setting], float], commands: Sequence[int] = COMMANDS, *, count: int = 3
    ) -> None:
        """`run_s`: seconds of one pass with a setting."""
        seconds = {setting: run_s(setting) for setting in (Setting(c, t) for t in THREADS for c in commands)}
        self.swept = dict(sorted(seconds.items(), key=lambda item: item[1]))
        self._run_s = run_s
        self._best = list(self.swept)[:count]

    def setting(self, number: int) -> Setting:
        """Whose turn it is in a round."""
        return self._best[number % len(self._best)]

    def run_s(self, number: int) -> float:
        return self._run_s(self.setting(number))

    def rates(self, size_bytes: int) -> dict[str, float]:
        """GB/s of every setting, for --json."""
        return {str(setting): round(size_bytes / seconds / 1e9, 2) for setting, seconds in self.swept.items()}

    def __str__(self) -> str:
        return ", ".join(map(str, self._best))


def take_turns(rounds: int, *runs: Callable[[int], float]) -> list[list[float]]:
    """Seconds of each run, `rounds` times, in an order that turns round every time. Each is told the round's number."""
    seconds: list[list[float]] = [[] for _ in runs]
    for number in range(rounds):
        order = range(len(runs)) if number % 2 == 0 else reversed(range(len(runs)))
        for which in order:
            seconds[which].append(runs[which](number))
    return seconds


@dataclass(frozen=True, slots=True)
class Compared:
    """Ours beside the limit, from runs that took turns: the ratio of the bests, and that of the medians."""

    ours_gb_s: float
    limit_gb_s: float
    ratio: float
    ratio_of_medians: float

    @classmethod
    def of(cls, size_bytes: int, limit_s: Sequence[float], ours_s: Sequence[float]) -> Compared:
        medians = statistics.median(limit_s) / statistics.median(ours_s)
        return cls(size_bytes / min(ours_s) / 1e9, size_bytes / min(limit_s) / 1e9, min(limit_s) / min(ours_s), medians)

    def __str__(self) -> str:
        return f"{self.ours_gb_s:.2f} of {self.limit_gb_s:.2f} GB/s; medians {self.ratio_of_medians:.2f}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One number, and what it must be: at least or at most `must`; None: it is only told."""

    name: str
    measured: float
    must: float | None = None
    at_most: bool = False
    detail: str = ""

    @property
    def verdict(self) -> str:
        if self.must is None:
            return ""
        met = self.measured <= self.must if self.at_most else self.measured >= self.must
        return "met" if met else "MISSED"


@dataclass(slots=True)
class Report:
    """Figures as they are found, shown at the end."""

    title: str
    figures: list[Figure] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)  # for --json

    def add(
        self, name: str, measured: float, must: float | None = None, *, at_most: bool = False, detail: object = ""
    ) -> None:
        self.figures.append(Figure(name, measured, must, at_most, str(detail)))

    def show(self, *, as_json: bool) -> None:
        if as_json:
            figures = [{**asdict(figure), "verdict": figure.verdict} for figure in self.figures]
            print(json.dumps({"title": self.title, "figures": figures, **self.more}))
            return
        table = Table("figure", "must", "measured", "", "detail", title=self.title)
        for figure in self.figures:
            must = "" if figure.must is None else f"{'<=' if figure.at_most else '>='} {figure.must:g}"
            colour = {"met": "green", "MISSED": "red"}.get(figure.verdict, "")
            verdict = f"[{colour}]{figure.verdict}[/]" if colour else ""
            table.add_row(figure.name, must, f"{figure.measured:.4g}", verdict, figure.detail)
        Console(width=None if sys.stdout.isatty() else 140).print(table)


def say(text: str) -> None:
    """What is going on now; on stderr, so that --json stays one object."""
    print(text, file=sys.stderr, flush=True)
