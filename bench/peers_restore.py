"""Restore beside peers: raw preadv, FlatCake, Mooncake Store and LMCache in one run, from SSD and from memory, as ratios.

    one session    1 GiB, restored by one reader
    readers        the same bytes as 16 sessions, one after the other and all at once
    memory         a session that is kept there, beside one memcpy of as many bytes in the same process

All are driven through the seam of `flatcake replay` (bench/peers/), each in a process of its own, with the same memory and SSD
budget; they take turns, and the bests are compared. A lookup is part of each restore. Every byte is compared, outside the time.
`of SSD` is the part of the bytes that the system said to bring from there: what it still had in memory it read faster.
Needs `make peers`; a peer whose environment is missing is left out, and said. Run: python bench/peers_restore.py [--dir DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from _support import (
    GIB,
    MIB,
    Compared,
    Contenders,
    Raw,
    Report,
    Setting,
    arguments,
    disk_directory,
    say,
    take_turns,
)

ROOT = Path(__file__).resolve().parents[1]
BLOCK_BYTES = 4 * MIB  # as in peers/driven.py
SYSTEMS = {
    "flatcake": {},
    "mooncake": {},
    "mooncake-client": {"FLATCAKE_PEER_MOONCAKE": "client"},
    "lmcache": {},
}
END_TIMEOUT_S = 90.0


class Peer:
    """One of them, in its environment; a context manager. Its words go to a file, of which the end is shown if it fails."""

    def __init__(self, name: str, python: Path, directory: Path, args: argparse.Namespace) -> None:
        self.name = name
        self._log_path = directory / f"{name}.log"
        ssd = directory / name
        ssd.mkdir()
        numbers = [args.size_mib * MIB, args.readers, args.memory_mib * MIB]
        command = [
            str(python),
            "-P",  # else bench/peers/mooncake.py would be what `import mooncake` finds
            str(ROOT / "bench/peers/driven.py"),
            name.split("-", maxsplit=1)[0],
            str(ssd),
            *map(str, numbers),
        ]
        environment = (
            os.environ
            | SYSTEMS[name]
            | {"PYTHONPATH": os.pathsep.join(str(ROOT / p) for p in ("", "transport", "proto"))}
        )
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, text=True
            )
        self.told = self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            end = self._log_path.read_text(errors="replace")[-1500:]
            raise ValueError(f"{self.name} ended:\n{end}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def do(self, what: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(json.dumps({"do": what}), file=self._process.stdin, flush=True)
        return self._reply()

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def peers_of(args: argparse.Namespace, directory: Path) -> Iterator[list[Peer]]:
    """All that can be had here. One that does not start is said and left out."""
    with contextlib.ExitStack() as stack:
        peers: list[Peer] = []
        for name in SYSTEMS:
            family = name.split("-", maxsplit=1)[0]
            python = Path(sys.executable) if family == "flatcake" else ROOT / f".venv-{family}" / "bin" / "python"
            if not python.exists():
                say(f"{name} is left out: no .venv-{family}: run make peers")
                continue
            say(f"{name}: storing {2 * args.size_mib} MiB")
            try:
                peer = Peer(name, python, directory, args)
            except ValueError as error:
                say(f"{name} is left out: {error}")
                continue
            stack.callback(peer.close)
            peers.append(peer)
        yield peers


def from_ssd(args: argparse.Namespace, directory: Path, peers: list[Peer], report: Report) -> None:
    size_bytes = args.size_mib * MIB // BLOCK_BYTES // args.readers * args.readers * BLOCK_BYTES
    raw, path = Raw(), directory / "raw"
    raw.write_s(path, size_bytes, Setting(4 * MIB, 4))
    memory = np.ones(size_bytes, np.uint8)
    aligned = memory[-memory.ctypes.data % 4096 :][: (size_bytes - 4096) // (8 * MIB) * 8 * MIB]
    os.truncate(path, len(aligned))
    say("sweeping raw reads into as much memory as the session takes")
    best = Contenders(lambda setting: raw.read_s(path, setting, aligned), commands=(MIB, 4 * MIB, 8 * MIB))
    for what, text in (
        ("one", "1 session"),
        ("in_turn", f"{args.readers} sessions in turn"),
        ("at_once", f"{args.readers} at once"),
    ):
        say(f"taking turns: {text}")
        replies: dict[str, list[dict[str, Any]]] = {peer.name: [] for peer in peers}
        limit_s, *_ = take_turns(
            args.rounds,
            lambda number: best.run_s(number) * size_bytes / len(aligned),
            *(partial(turn, peer, what, replies[peer.name]) for peer in peers),
        )
        for name, each in replies.items():
            compared = Compared.of(size_bytes, limit_s, [reply["s"] for reply in each])
            of_ssd = each[-1]["media"].get("ssd", 0) / each[-1]["bytes"]
            report.add(f"SSD, {text}: {name} / raw", compared.ratio, detail=f"{compared}; {of_ssd:.0%} of SSD")
    path.unlink()


def from_memory(args: argparse.Namespace, peers: list[Peer], report: Report) -> None:
    say("taking turns: from memory")
    for peer in peers:
        copies: list[dict[str, Any]] = []
        replies: list[dict[str, Any]] = []
        take_turns(
            args.rounds,
            partial(turn, peer, "copy", copies),
            partial(turn, peer, "memory", replies),
        )
        compared = Compared.of(replies[0]["bytes"], [one["s"] for one in copies], [one["s"] for one in replies])
        in_memory = replies[-1]["media"].get("memory", 0) / replies[-1]["bytes"]
        report.add(f"memory: {peer.name} / memcpy", compared.ratio, detail=f"{compared}; {in_memory:.0%} of memory")


def turn(peer: Peer, what: str, replies: list[dict[str, Any]], number: int) -> float:
    """Seconds, and the whole reply to `replies`."""
    del number
    replies.append(peer.do(what))
    return float(replies[-1]["s"])


def main() -> None:
    args = arguments(
        __doc__,
        size_mib=(1024, "size of the session"),
        readers=(16, "concurrent readers"),
        memory_mib=(512, "memory budget of each system"),
        rounds=(5, "how often each takes its turn"),
    )
    report = Report("Restore beside peers")
    need_bytes = len(SYSTEMS) * (2 * args.size_mib + 4 * args.memory_mib) * MIB + args.size_mib * MIB + GIB
    with disk_directory(args.dir, need_bytes) as directory, peers_of(args, directory) as peers:
        from_memory(args, peers, report)
        from_ssd(args, directory, peers, report)
        for peer in peers:
            report.add(
                f"store: {peer.name}, GB/s", peer.told["store_gb_s"], detail="one session, until the system takes it"
            )
        report.more["settings"] = {peer.name: peer.told["settings"] for peer in peers}
    report.show(as_json=args.json)


if __name__ == "__main__":
    main()
