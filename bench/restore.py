"""Restore from local SSD, beside the best raw O_DIRECT preadv of a sweep on a file of the same size and file system.

    one session       2 GiB in 20 turns, through lookup, restore and wait, into shuffled slots
    short sessions    8, 16 and 64 MiB in 2 turns, each after a pause, beside raw reads of as many bytes after such a pause
    many sessions     16 of 256 MiB: one reader brings them one after the other, or 16 at once: threads of one engine, then
                      processes of their own

Raw reads go into one buffer a thread, used again and again: so small that it stays in the processor's cache, which a
session does not. Where the disk is a host's copy (a virtual machine) that alone makes them faster, so two more limits stand beside
them: raw reads into touched memory of the session's size, and into such buffers with a copy out of them into that memory,
which is what a restore does. All take turns; bests are compared.

Read amplification is what the kernel counts as fetched from storage for this process (/proc/self/io), so that nobody
else's reads are in it. Every byte is compared with what was stored once, before times are taken. Run: python bench/restore.py [--dir DIR]
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from _session import BLOCK_BYTES, LAYERS, Pages, open_space, restore, same, session_keys, turn_ends, write_session
from _support import (
    GIB,
    MIB,
    Compared,
    Contenders,
    Node,
    Raw,
    Report,
    Setting,
    arguments,
    disk_directory,
    say,
    take_turns,
    timed_s,
    together_s,
)

import flatcake_client as fc
from flatcake_server.rpc_admin import AdminClient

READERS_SEED = 100
SHORT_MIB = (8, 16, 64)
PAUSE_S = 0.02
VERIFY = "remote"  # the default: local reads are not compared with their checksums; what that costs: bench/memory.py


def read_bytes() -> int:
    """What this process has had fetched from storage."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


def one_session(args: argparse.Namespace, directory: Path, node: Node, client: fc.Client, report: Report) -> None:
    blocks = args.size_mib * MIB // BLOCK_BYTES
    space, ends = open_space(client), turn_ends(args.size_mib * MIB // BLOCK_BYTES, args.turns)
    keys = session_keys(space, 1, blocks)
    stored, pages = Pages(blocks, seed=1), Pages(blocks, seed=2)
    stored.fill(1)
    say(f"writing {args.size_mib} MiB in {args.turns} turns, and a raw file of the same size")
    write_session(space, keys, "one", stored, ends)
    raw, raw_path = Raw(), directory / "raw"
    size_bytes = stored.size_bytes
    raw.write_s(raw_path, size_bytes, Setting(4 * MIB, 4))
    pages.clear()
    before = read_bytes()
    stats = restore(space, keys, pages)
    amplification = (read_bytes() - before) / size_bytes
    assert same(stored, pages), "other bytes came back than were stored"
    say("sweeping raw reads: into buffers, into as much memory as the session takes, and with a copy between the two")
    best = Contenders(lambda setting: raw.read_s(raw_path, setting))
    commands = (MIB, 4 * MIB, 8 * MIB)
    into = Contenders(lambda setting: raw.read_s(raw_path, setting, pages.memory), commands)
    copied = Contenders(lambda setting: raw.read_s(raw_path, setting, pages.memory, copied=True), commands)
    say(f"taking turns: raw {best}, and restore")
    *limits_s, ours_s = take_turns(
        args.rounds, best.run_s, into.run_s, copied.run_s, lambda _: timed_s(lambda: restore(space, keys, pages))
    )
    raw_path.unlink()
    for name, must, limit_s in zip(
        ("raw preadv", "raw preadv into memory of that size", "raw preadv and a copy into memory of that size"),
        (0.95, None, None),
        limits_s,
        strict=True,
    ):
        compared = Compared.of(size_bytes, limit_s, ours_s)
        report.add(f"restore / {name}", compared.ratio, must, detail=compared)
    report.add(
        "read amplification", amplification, 1.02, at_most=True, detail="bytes fetched from storage / useful bytes"
    )
    detail = f"{LAYERS} layers x {len(ends)} segments"
    report.add("read commands", stats.read_commands, LAYERS * len(ends), at_most=True, detail=detail)
    report.more["raw_sweep_gb_s"] = best.rates(size_bytes)
    report.more["raw_into_memory_gb_s"] = into.rates(size_bytes)
    report.more["raw_copied_gb_s"] = copied.rates(size_bytes)
    with AdminClient(node.endpoint) as admin:
        admin.drop(["one"])


def short_sessions(args: argparse.Namespace, directory: Path, client: fc.Client, report: Report) -> None:
    space, raw, raw_path = open_space(client), Raw(), directory / "raw"
    for mib in SHORT_MIB:
        blocks = mib * MIB // BLOCK_BYTES
        keys, pages, stored = session_keys(space, mib, blocks), Pages(blocks, seed=mib), Pages(blocks, seed=0)
        stored.fill(mib)
        write_session(space, keys, f"short-{mib}", stored, turn_ends(blocks, 2))
        restore(space, keys, pages)
        assert same(stored, pages), "other bytes came back than were stored"
        raw.write_s(raw_path, pages.size_bytes, Setting(4 * MIB, 4))

        def after_a_pause(work: Callable[[], object]) -> float:
            time.sleep(PAUSE_S)
            return timed_s(work)

        say(f"taking turns: restore of {mib} MiB, and raw reads of as much")
        read = partial(raw.read_s, raw_path, Setting(4 * MIB, 4), pages.memory)
        limit_s, ours_s = take_turns(
            4 * args.rounds,
            lambda _, read=read: after_a_pause(read),  # type: ignore[misc]
            lambda _, keys=keys, pages=pages: after_a_pause(partial(restore, space, keys, pages)),  # type: ignore[misc]
        )
        compared = Compared.of(pages.size_bytes, limit_s, ours_s)
        report.add(
            f"{mib} MiB after a pause, lookup to release / raw preadv into as much memory",
            compared.ratio,
            detail=compared,
        )


def many_sessions(args: argparse.Namespace, node: Node, client: fc.Client, report: Report) -> None:
    blocks = args.reader_mib * MIB // BLOCK_BYTES
    space, ends = open_space(client), turn_ends(blocks, 4)
    keys = [session_keys(space, READERS_SEED + i, blocks) for i in range(args.readers)]
    pages = [Pages(blocks, seed=i, spare=4) for i in range(args.readers)]
    say(f"writing {args.readers} sessions of {args.reader_mib} MiB")
    for i, mine in enumerate(pages):
        mine.fill(i)
        write_session(space, keys[i], f"reader-{i}", mine, ends)
    tasks = [partial(restore, space, keys[i], pages[i]) for i in range(args.readers)]
    rounds = max(3, args.rounds // 2)
    say("taking turns: one reader, and all at once in threads")
    size_bytes = args.readers * blocks * BLOCK_BYTES
    together_s(tasks)  # staging is made
    one_s, threads_s = take_turns(
        rounds, lambda _: timed_s(lambda: [task() for task in tasks]), lambda _: together_s(tasks)
    )
    compared = Compared.of(size_bytes, one_s, threads_s)
    report.add(f"{args.readers} readers / 1 (threads)", compared.ratio, 1.0, detail=compared)
    pages.clear()
    tasks.clear()
    say("taking turns: one reader, and all at once in processes")
    with Readers(node.endpoint, args.readers, blocks) as readers:
        readers.restore_s(range(args.readers), at_once=True)
        one_s, processes_s = take_turns(
            rounds,
            lambda _: readers.restore_s(range(args.readers), at_once=False),
            lambda _: readers.restore_s(range(args.readers), at_once=True),
        )
    compared = Compared.of(size_bytes, one_s, processes_s)
    report.add(f"{args.readers} readers / 1 (processes)", compared.ratio, 1.0, detail=compared)


class Readers:
    """Engines in processes of their own, each with its session and its slots, that restore when they are told to."""

    def __init__(self, endpoint: str, count: int, blocks: int) -> None:
        context = mp.get_context("spawn")
        self._pipes: list[Any] = []
        self._processes = []
        for i in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=reader, args=(endpoint, READERS_SEED + i, blocks, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            assert pipe.recv() == "ready"

    def restore_s(self, which: range, *, at_once: bool) -> float:
        start_s = time.perf_counter()
        for i in which:
            self._pipes[i].send("restore")
            if not at_once:
                assert self._pipes[i].recv() == "done"
        for i in which if at_once else ():
            assert self._pipes[i].recv() == "done"
        return time.perf_counter() - start_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.send("end")
        for process in self._processes:
            process.join(10)


def reader(endpoint: str, seed: int, blocks: int, pipe: Connection) -> None:
    """One engine: pages are touched before it says that it is ready."""
    with fc.connect(endpoint, staging_bytes=128 * MIB) as client:
        space = open_space(client)
        keys, pages = session_keys(space, seed, blocks), Pages(blocks, seed=seed, spare=4)
        pipe.send("ready")
        while pipe.recv() == "restore":
            restore(space, keys, pages)
            pipe.send("done")


def main() -> None:
    args = arguments(
        __doc__,
        size_mib=(2048, "size of the one session"),
        turns=(20, "turns it is written in"),
        readers=(16, "concurrent readers"),
        reader_mib=(256, "size of each reader's session"),
        rounds=(8, "how often each takes its turn"),
    )
    report = Report(f"Restore from local SSD, verify={VERIFY}")
    one, many = args.size_mib * MIB, args.readers * args.reader_mib * MIB
    with (
        disk_directory(args.dir, max(int(2.3 * one), int(1.3 * many))) as directory,
        Node(directory, ssd_bytes=2 * (one + many) + GIB, verify=VERIFY) as node,
        fc.connect(node.endpoint) as client,
    ):
        one_session(args, directory, node, client, report)
        short_sessions(args, directory, client, report)
        many_sessions(args, node, client, report)
    report.show(as_json=args.json)


if __name__ == "__main__":
    main()
