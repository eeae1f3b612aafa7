"""How near the movers come to the machine, without a daemon: each figure beside the raw one it is measured against, in the same run.

    read      ReadStream (two buffers) + scatter into shuffled paged slots   / best raw O_DIRECT preadv of a sweep
    write     gather + plan_writes + posix writes into a fresh file         / best raw O_DIRECT pwritev into a fresh file
    memory    arena -> shuffled paged slots                                 / one memcpy of the same bytes
    checksum  GB/s of both algorithms on one thread

They take turns; the ratio of the bests is the figure, that of the medians and both rates stand beside it.
Run: python bench/mover.py [--dir DIR] [--json]
"""

from __future__ import annotations

import argparse
import mmap
import os
from pathlib import Path

import numpy as np
from _support import (
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
    timed_s,
)

from flatcake_client.tools import BUFFER_BYTES, BUFFERS
from flatcake_transport.checksum import granule_checksums
from flatcake_transport.footer import CHECKSUM_WORDSUM, CHECKSUM_XXH3
from flatcake_transport.layout import segment_layout
from flatcake_transport.mover import FileSpan, MemorySpan, Move, PagedSpan, Transfer
from flatcake_transport.movers.memory import MemoryMover
from flatcake_transport.movers.posix import COMMAND_BYTES_MAX, THREADS, PosixMover
from flatcake_transport.plan import FileRun, plan_restore, plan_writes
from flatcake_transport.space import SpaceSpec
from flatcake_transport.window import OpenFile, ReadStream, StagingPool, aligned_buffer

LAYERS = 32
PLANE_BYTES = 256 << 10  # 8 KV heads x 128 x K and V x 64 tokens x 2 bytes
SPEC = SpaceSpec("llama-3.1-8b", "bfloat16", 64, (PLANE_BYTES,) * LAYERS)
MEMORY_BYTES = 512 * MIB  # copied within memory at once


class Movers:
    """One segment, an engine's pages for it, and what brings bytes between them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._buffer_bytes = args.buffer_mib * MIB
        self.layout = segment_layout(SPEC, args.size_mib * MIB // SPEC.block_bytes)
        self.size_bytes = self.layout.data_bytes
        blocks, rng = self.layout.blocks, np.random.default_rng(0)
        self.slots = rng.permutation(blocks)
        pages = aligned_buffer(self.size_bytes).reshape(LAYERS, blocks, PLANE_BYTES)
        pages[:] = rng.integers(0, 256, PLANE_BYTES, dtype=np.uint8)
        self.pages = list(pages)
        self.posix = PosixMover(threads=args.threads, command_bytes_max=args.command_kib << 10)
        self.memory = MemoryMover()
        self.staging = StagingPool(BUFFERS * self._buffer_bytes, self._buffer_bytes, BUFFERS)
        self.staging.open_window(0).close()  # touch it

    def read(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        run = FileRun(1, 0, self.layout, 0, self.layout.blocks, 0)
        steps = plan_restore([run], range(LAYERS), buffer_bytes=self._buffer_bytes)
        stream = ReadStream(steps, {1: OpenFile(fd, True)}, self.posix, self.staging.open_window(0))
        while (got := stream.advance()) is not None:
            step, buffer, end = got
            if end < step.size_bytes:
                continue
            self.memory.submit(
                [
                    Move(
                        MemorySpan(buffer[p.offset : p.offset + p.size_bytes]),
                        PagedSpan(self.pages[p.layer], self.slots[p.position : p.position + p.blocks], p.plane_bytes),
                    )
                    for p in step.pieces
                ]
            ).wait()
        stream.close()
        os.close(fd)

    def write(self, path: Path) -> None:
        """Into a fresh file, up to and with fdatasync, as the raw ones."""
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600)
        os.posix_fallocate(fd, 0, self.size_bytes)
        flying: list[Transfer | None] = [None, None]
        with self.staging.open_window(0) as window:
            turn = 0
            for layer in range(LAYERS):
                for step in plan_writes(self.layout, layer, buffer_bytes=self._buffer_bytes):
                    before = flying[turn]
                    if before is not None:
                        before.wait()
                    buffer = window.buffers[turn]
                    slots = self.slots[step.first_block : step.first_block + step.blocks]
                    pages = PagedSpan(self.pages[layer], slots, PLANE_BYTES)
                    end = step.gather_offset + pages.size_bytes
                    self.memory.submit([Move(pages, MemorySpan(buffer[step.gather_offset : end]))]).wait()
                    buffer[end : end + step.zero_bytes] = 0
                    source = MemorySpan(buffer[step.source_offset : step.source_offset + step.size_bytes])
                    target = FileSpan(fd, step.offset, step.size_bytes, direct=True)
                    flying[turn] = self.posix.submit([Move(source, target)])
                    turn ^= 1
            for transfer in flying:
                if transfer is not None:
                    transfer.wait()
        os.fdatasync(fd)
        os.close(fd)


def on_disk(args: argparse.Namespace, directory: Path, movers: Movers, report: Report) -> None:
    raw, raw_path, path = Raw(), directory / "raw", directory / "ours"
    size_bytes = movers.size_bytes
    say("sweeping raw writes and reads")
    writes = Contenders(lambda setting: raw.write_s(raw_path, size_bytes, setting), commands=(MIB, 4 * MIB, 8 * MIB))
    raw.write_s(raw_path, size_bytes, Setting(8 * MIB, 16))  # unwritten space would read as zeros, without the disk
    reads = Contenders(lambda setting: raw.read_s(raw_path, setting))
    say(f"taking turns: raw {reads}, and read")
    movers.write(path)
    limit_s, ours_s = take_turns(args.rounds, reads.run_s, lambda _: timed_s(lambda: movers.read(path)))
    compared = Compared.of(size_bytes, limit_s, ours_s)
    report.add("read / raw preadv", compared.ratio, detail=compared)
    say(f"taking turns: raw {writes}, and write")
    limit_s, ours_s = take_turns(args.rounds, writes.run_s, lambda _: timed_s(lambda: movers.write(path)))
    compared = Compared.of(size_bytes, limit_s, ours_s)
    report.add("write / raw pwritev", compared.ratio, detail=compared)
    report.more |= {"read_sweep_gb_s": reads.rates(size_bytes), "write_sweep_gb_s": writes.rates(size_bytes)}


def in_memory(args: argparse.Namespace, movers: Movers, report: Report) -> None:
    layer_bytes = movers.layout.blocks * PLANE_BYTES
    layers = min(LAYERS, max(1, MEMORY_BYTES // layer_bytes))
    arena_fd = os.memfd_create("arena")
    os.ftruncate(arena_fd, layers * layer_bytes)
    arena = np.frombuffer(mmap.mmap(arena_fd, layers * layer_bytes), np.uint8)
    arena[:] = 1
    target = aligned_buffer(len(arena))
    moves = [
        Move(
            MemorySpan(arena[i * layer_bytes : (i + 1) * layer_bytes]),
            PagedSpan(movers.pages[i], movers.slots, PLANE_BYTES),
        )
        for i in range(layers)
    ]
    say("taking turns: memcpy, and arena to slots")
    limit_s, ours_s = take_turns(
        max(5, args.rounds),
        lambda _: timed_s(lambda: np.copyto(target, arena)),
        lambda _: timed_s(lambda: movers.memory.submit(moves).wait()),
    )
    compared = Compared.of(len(arena), limit_s, ours_s)
    report.add("memory / memcpy", compared.ratio, detail=compared)


def checksums(report: Report) -> None:
    data = np.random.default_rng(0).integers(0, 256, 256 * MIB, dtype=np.uint8)
    for name, algorithm in (("xxh3", CHECKSUM_XXH3), ("wordsum", CHECKSUM_WORDSUM)):
        seconds = timed_s(lambda algorithm=algorithm: granule_checksums(data, 256 << 10, algorithm))  # type: ignore[misc]
        report.add(f"checksum {name}, GB/s", len(data) / seconds / 1e9)


def main() -> None:
    args = arguments(
        __doc__,
        size_mib=(2048, "size of the file"),
        buffer_mib=(BUFFER_BYTES // MIB, "one buffer of a window"),
        threads=(THREADS, "of the posix mover"),
        command_kib=(COMMAND_BYTES_MAX >> 10, "its longest command"),
        rounds=(5, "how often each takes its turn"),
    )
    report = Report("movers beside the machine")
    with disk_directory(args.dir, 2 * args.size_mib * MIB) as directory:
        movers = Movers(args)
        on_disk(args, directory, movers, report)
        in_memory(args, movers, report)
    checksums(report)
    report.show(as_json=args.json)


if __name__ == "__main__":
    main()
