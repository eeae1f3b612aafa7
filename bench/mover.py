"""How near the movers come to the machine: each figure beside the raw one it is measured against, in the same run.

    read      ReadStream (two halves) + scatter into shuffled paged slots   / best raw O_DIRECT preadv of a sweep
    write     gather + plan_writes + posix writes into a fresh file         / best raw O_DIRECT pwritev into a fresh file
    memory    arena -> shuffled paged slots                                 / one memcpy of the same bytes
    checksum  GB/s of both algorithms on one thread

Disks of virtual machines are noisy, so after the sweep the best raw settings and ours take turns, `--rounds` times, and the
ratio is that of the medians. All buffers are touched before. Run: python bench/mover.py --dir DIR [--json]
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from flatcake_transport.checksum import granule_checksums
from flatcake_transport.footer import CHECKSUM_WORDSUM, CHECKSUM_XXH3
from flatcake_transport.layout import SegmentLayout, segment_layout
from flatcake_transport.mover import FileSpan, MemorySpan, Move, PagedSpan, Transfer
from flatcake_transport.movers.memory import MemoryMover
from flatcake_transport.movers.posix import COMMAND_BYTES_MAX, THREADS, PosixMover
from flatcake_transport.plan import FileRun, plan_restore, plan_writes
from flatcake_transport.space import SpaceSpec
from flatcake_transport.window import OpenFile, ReadStream, StagingPool, aligned_buffer

MIB = 1 << 20
LAYERS = 32
SPEC = SpaceSpec(
    "llama-3.1-8b", "bfloat16", 64, (256 << 10,) * LAYERS
)  # 8 KV heads x 128 x K and V x 64 tokens x 2 bytes


def parallel(threads: int, work: Callable[[int], None]) -> float:
    """Seconds until all threads are done."""
    pool = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    start = time.perf_counter()
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    return time.perf_counter() - start


class Raw:
    """preadv or pwritev of a whole file, nothing else."""

    def __init__(self) -> None:
        self.buffers = [aligned_buffer(8 * MIB) for _ in range(16)]

    def run(self, command: Callable[..., int], fd: int, size: int, block: int, threads: int) -> float:
        offsets = iter(range(0, size, block))

        def work(i: int) -> None:
            buffer = self.buffers[i][:block]
            for offset in offsets:
                command(fd, [buffer], offset)

        return size / parallel(threads, work) / 1e9

    def sweep(self, command: Callable[..., int], fd: int, size: int) -> dict[tuple[int, int], float]:
        blocks = [256 << 10, MIB, 2 * MIB, 4 * MIB, 8 * MIB]
        return {(b, t): self.run(command, fd, size, b, t) for t in (1, 4, 16) for b in blocks}


class Bench:
    def __init__(self, directory: Path, size: int, half: int, threads: int, command_bytes: int) -> None:
        self.path, self.half = directory / "bench-mover.kv", half
        self.layout: SegmentLayout = segment_layout(SPEC, size // SPEC.block_bytes)
        self.size = self.layout.data_bytes
        blocks = self.layout.blocks
        rng = np.random.default_rng(0)
        self.slots = rng.permutation(blocks)
        pages = aligned_buffer(self.size).reshape(LAYERS, blocks, SPEC.plane_bytes[0])
        pages[:] = rng.integers(0, 256, SPEC.plane_bytes[0], dtype=np.uint8)
        self.pages = list(pages)
        self.posix = PosixMover(threads=threads, command_bytes_max=command_bytes, in_flight_bytes_max=half)
        self.memory = MemoryMover()
        self.staging = StagingPool(2 * half, half)
        self.staging.open_window(0).close()  # touch it
        self.raw = Raw()

    def fresh(self, size: int) -> int:
        self.path.unlink(missing_ok=True)
        fd = os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600)
        os.posix_fallocate(fd, 0, size)
        return fd

    def read(self, fd: int) -> float:
        start = time.perf_counter()
        steps = plan_restore(
            [FileRun(1, 0, self.layout, 0, self.layout.blocks, 0)], range(LAYERS), window_half_bytes=self.half
        )
        stream = ReadStream(steps, {1: OpenFile(fd, True)}, self.posix, self.staging.open_window(0))
        while (got := stream.advance()) is not None:
            step, half = got
            self.memory.submit(
                [
                    Move(
                        MemorySpan(half[p.offset : p.offset + p.size_bytes]),
                        PagedSpan(self.pages[p.layer], self.slots[p.position : p.position + p.blocks], p.plane_bytes),
                    )
                    for p in step.pieces
                ]
            ).wait()
        stream.close()
        return self.size / (time.perf_counter() - start) / 1e9

    def write(self, fd: int) -> float:
        start = time.perf_counter()
        flying: list[Transfer | None] = [None, None]
        with self.staging.open_window(0) as window:
            turn = 0
            for layer in range(LAYERS):
                for step in plan_writes(self.layout, layer, window_half_bytes=self.half):
                    before = flying[turn]
                    if before is not None:
                        before.wait()
                    half = window.halves[turn]
                    slots = self.slots[step.first_block : step.first_block + step.blocks]
                    pages = PagedSpan(self.pages[layer], slots, SPEC.plane_bytes[layer])
                    end = step.gather_offset + pages.size_bytes
                    self.memory.submit([Move(pages, MemorySpan(half[step.gather_offset : end]))]).wait()
                    half[end : end + step.zero_bytes] = 0
                    source = MemorySpan(half[step.source_offset : step.source_offset + step.size_bytes])
                    flying[turn] = self.posix.submit(
                        [Move(source, FileSpan(fd, step.offset, step.size_bytes, direct=True))]
                    )
                    turn ^= 1
            for transfer in flying:
                if transfer is not None:
                    transfer.wait()
        return self.size / (time.perf_counter() - start) / 1e9


def take_turns(rounds: int, raw: Callable[[], float], ours: Callable[[], float]) -> tuple[list[float], list[float]]:
    raws: list[float] = []
    all_ours: list[float] = []
    for i in range(rounds):
        for mine in (i % 2 == 0, i % 2 == 1):
            (all_ours if mine else raws).append(ours() if mine else raw())
    return raws, all_ours


def disk_figures(bench: Bench, rounds: int) -> dict[str, dict[str, Any]]:
    figures: dict[str, dict[str, Any]] = {}
    fd = bench.fresh(bench.size)
    bench.raw.run(os.pwritev, fd, bench.size, 8 * MIB, 16)  # unwritten space would read as zeros, without the disk
    sweep = bench.raw.sweep(os.preadv, fd, bench.size)
    block, threads = max(sweep, key=sweep.__getitem__)
    raws, ours = take_turns(
        rounds, lambda: bench.raw.run(os.preadv, fd, bench.size, block, threads), lambda: bench.read(fd)
    )
    figures["read"] = {
        "raw": statistics.median(raws), "raw_best": max(raws), "ours": statistics.median(ours), "ours_best": max(ours),
        "sweep": {f"{b >> 10}KiBx{t}": round(v, 2) for (b, t), v in sweep.items()}, "at": f"{block >> 10} KiB x {threads}",
    }  # fmt: skip
    os.close(fd)
    size = bench.size

    def fresh_raw(block: int, threads: int) -> float:
        fd = bench.fresh(size)
        try:
            return bench.raw.run(os.pwritev, fd, size, block, threads)
        finally:
            os.close(fd)

    def fresh_ours() -> float:
        fd = bench.fresh(size)
        try:
            return bench.write(fd)
        finally:
            os.close(fd)

    sweep = {(b, t): fresh_raw(b, t) for t in (1, 4, 16) for b in (MIB, 4 * MIB, 8 * MIB)}
    block, threads = max(sweep, key=sweep.__getitem__)
    raws, ours = take_turns(rounds, lambda: fresh_raw(block, threads), fresh_ours)
    figures["write"] = {
        "raw": statistics.median(raws), "raw_best": max(raws), "ours": statistics.median(ours), "ours_best": max(ours),
        "sweep": {f"{b >> 10}KiBx{t}": round(v, 2) for (b, t), v in sweep.items()}, "at": f"{block >> 10} KiB x {threads}",
    }  # fmt: skip
    bench.path.unlink()
    return figures


def memory_figures(bench: Bench, rounds: int) -> dict[str, dict[str, Any]]:
    blocks, plane = bench.layout.blocks, SPEC.plane_bytes[0]
    layers = min(LAYERS, max(1, 512 * MIB // (blocks * plane)))
    arena_fd = os.memfd_create("arena")
    os.ftruncate(arena_fd, layers * blocks * plane)
    arena = np.frombuffer(mmap.mmap(arena_fd, layers * blocks * plane), np.uint8)
    arena[:] = 1
    target = aligned_buffer(len(arena))

    def memcpy() -> float:
        start = time.perf_counter()
        np.copyto(target, arena)
        return len(arena) / (time.perf_counter() - start) / 1e9

    def ours() -> float:
        start = time.perf_counter()
        size = blocks * plane
        bench.memory.submit(
            [
                Move(MemorySpan(arena[i * size : (i + 1) * size]), PagedSpan(bench.pages[i], bench.slots, plane))
                for i in range(layers)
            ]
        ).wait()
        return len(arena) / (time.perf_counter() - start) / 1e9

    memcpy(), ours()
    raws, mine = take_turns(max(5, rounds), memcpy, ours)
    return {
        "memory": {
            "raw": statistics.median(raws), "raw_best": max(raws),
            "ours": statistics.median(mine), "ours_best": max(mine), "at": "one memcpy",
        }
    }  # fmt: skip


def checksum_figures() -> dict[str, float]:
    data = np.random.default_rng(0).integers(0, 256, 256 * MIB, dtype=np.uint8)
    figures = {}
    for name, algorithm in (("xxh3", CHECKSUM_XXH3), ("wordsum", CHECKSUM_WORDSUM)):
        start = time.perf_counter()
        granule_checksums(data, 256 << 10, algorithm)
        figures[name] = len(data) / (time.perf_counter() - start) / 1e9
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dir", type=Path, default=Path.cwd(), help="a directory on the disk to measure (default: the working one)"
    )
    parser.add_argument("--size-mib", type=int, default=2048, help="size of the file")
    parser.add_argument("--half-mib", type=int, default=32, help="one window half")
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--command-kib", type=int, default=COMMAND_BYTES_MAX >> 10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    bench = Bench(args.dir, args.size_mib * MIB, args.half_mib * MIB, args.threads, args.command_kib << 10)
    figures = {**disk_figures(bench, args.rounds), **memory_figures(bench, args.rounds)}
    for figure in figures.values():
        figure["ratio"] = figure["ours"] / figure["raw"]
        figure["ratio_of_bests"] = figure["ours_best"] / figure["raw_best"]
    checksums = checksum_figures()
    if args.json:
        print(json.dumps({**figures, "checksum_gb_s": checksums}))
        return
    table = Table(
        "figure", "raw GB/s", "ours GB/s", "ratio", "ratio of bests", "raw at", title="movers beside the machine"
    )
    for name, f in figures.items():
        table.add_row(
            name, f"{f['raw']:.2f}", f"{f['ours']:.2f}", f"{f['ratio']:.2f}", f"{f['ratio_of_bests']:.2f}", f["at"]
        )
    for name, rate in checksums.items():
        table.add_row(f"checksum {name}", "", f"{rate:.1f}", "", "", "")
    Console().print(table)
    Console().print({name: f["sweep"] for name, f in figures.items() if "sweep" in f})


if __name__ == "__main__":
    main()
