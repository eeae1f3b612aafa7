"""A replay's restores beside a program that reads the same bytes at the same times and does nothing else.

    restores    flatcake replay, real time, stores beside it; each restore's and store's time and size are kept
    reads       preadv of each restore's bytes, begun when it began, from where its session lies, into touched memory
    and writes  the same, and each store's bytes written and synced, begun when it began

Raw reads of one file without a pause (bench/restore.py) are another limit: here restores are short, many begin on an idle
disk, and stores want the same disk. Bandwidth is bytes over the time in which at least one restore was under way, as in
docs/replay.md; the mean restore stands beside it. Needs the trace of --traces; without it a profile is played.

Run: python bench/replay_raw.py [--dir DIR] [--traces DIR] [--load 1,4]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from _support import GIB, MIB, Report, disk_directory, say
from replay_report import COMMON, PARTS, Part

from flatcake_client.replay.metrics import covered_s, mean
from flatcake_transport.layout import align_up
from flatcake_transport.window import aligned_buffer

COMMAND_BYTES = 4 * MIB
THREADS = 4  # what a restore has under way, too
MEMORY_BYTES = 256 * MIB  # the longest restore, and more than a cache holds

Interval = tuple[float, float]
Record = Mapping[str, Any]


class Replayed:
    """What a run of the replay did to the disk, done again with preadv and pwritev alone."""

    def __init__(self, records: Sequence[Record], block_bytes: int, directory: Path) -> None:
        self._records = [record for record in records if record["done"]]
        self._block_bytes, self._path = block_bytes, directory / "raw"
        longest: dict[str, int] = {}
        for record in self._records:
            longest[record["session"]] = max(
                longest.get(record["session"], 0), align_up(record["blocks"] * block_bytes)
            )
        ends = list(itertools.accumulate(longest.values(), initial=0))
        size_bytes, self._base = ends[-1], dict(zip(longest, ends, strict=False))
        self._memory = aligned_buffer(MEMORY_BYTES)
        self._fd = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, size_bytes)
        for at in range(0, size_bytes, COMMAND_BYTES):  # else reads of unwritten space never reach the disk
            os.pwritev(self._fd, [self._memory[: min(COMMAND_BYTES, size_bytes - at)].data], at)
        os.fsync(self._fd)

    def run(self, *, writes: bool) -> list[Interval]:
        """When each restore began and ended."""
        found: list[Interval] = []
        work: list[tuple[float, Callable[[], None]]] = []
        for record in self._records:
            base, block_bytes = self._base[record["session"]], self._block_bytes
            if record["prefetch_began_s"] >= 0 and record["found_ssd_bytes"]:
                reads = partial(self._move, os.preadv, base, record["found_ssd_bytes"], found)
                work.append((record["prefetch_began_s"], reads))
            if writes and record["offered_blocks"]:
                at = base + (record["blocks"] - record["offered_blocks"]) * block_bytes
                stores = partial(self._store, at, record["offered_blocks"] * block_bytes)
                work.append((record["first_token_s"], stores))
        self._zero_s = time.monotonic()
        with ThreadPoolExecutor(THREADS) as self._pool:
            threads = []
            for begin_s, each in sorted(work, key=lambda pair: pair[0]):
                time.sleep(max(0.0, begin_s - self._now_s()))
                threads.append(threading.Thread(target=each))
                threads[-1].start()
            for thread in threads:
                thread.join()
        return found

    def close(self) -> None:
        os.close(self._fd)
        self._path.unlink()

    def _now_s(self) -> float:
        return time.monotonic() - self._zero_s

    def _move(self, command: Callable[..., int], base: int, size_bytes: int, found: list[Interval]) -> None:
        began_s = self._now_s()
        commands = [
            self._pool.submit(
                command, self._fd, [self._memory[at % (MEMORY_BYTES - COMMAND_BYTES) :][:count]], base + at
            )
            for at in range(0, size_bytes, COMMAND_BYTES)
            for count in [align_up(min(COMMAND_BYTES, size_bytes - at))]
        ]
        for each in commands:
            each.result()
        found.append((began_s, self._now_s()))

    def _store(self, base: int, size_bytes: int) -> None:
        self._move(os.pwritev, base, size_bytes, [])
        os.fdatasync(self._fd)


def replayed(part: Part, traces: Path, directory: Path, load: str) -> dict[str, Any]:
    """The document of one run."""
    trace, file = traces / part.trace, directory / "replay.json"
    command = [sys.executable, "-m", "flatcake_client.replay", *([str(trace)] if trace.exists() else part.profile)]
    command += [
        *COMMON,
        *part.shaping,
        "--load",
        load,
        "--ssd-dir",
        str(directory),
        "--json",
        str(file),
        "--each-request",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="on the disk to use")
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"), help="a directory with the traces")
    parser.add_argument("--load", default="1,4", help="loads of the replay")
    parser.add_argument("--parts", default="heavy,shared,chat", help="of bench/replay_report.py")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    args = parser.parse_args()
    report = Report("restores of a replay / the same reads alone, in GB/s while one is under way")
    with disk_directory(args.dir, 10 * GIB) as directory:
        for part in PARTS:
            for load in args.load.split(",") if part.name in args.parts.split(",") else ():
                say(f"{part.name} at load {load}")
                document = replayed(part, args.traces, directory, load)
                (run,) = document["runs"]
                raw = Replayed(run["records"], document["budget"]["block_bytes"], directory)
                for name, writes in (("the same reads alone", False), ("the same reads and writes alone", True)):
                    intervals = raw.run(writes=writes)
                    there = run["ssd_bytes"] / covered_s(intervals)
                    here_ms, there_ms = (
                        1e3 * run["prefetch_mean_s"],
                        1e3 * mean([end - begin for begin, end in intervals]),
                    )
                    detail = f"{run['ssd_bytes_per_s'] / 1e9:.2f} of {there / 1e9:.2f} GB/s; {here_ms:.1f} and {there_ms:.1f} ms each"
                    what = f"{part.name}: SSD bandwidth while restoring / {name}, load {load}"
                    report.add(what, run["ssd_bytes_per_s"] / there, detail=detail)
                raw.close()
    report.show(as_json=args.json)


if __name__ == "__main__":
    main()
