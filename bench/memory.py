"""Copies beside their limits: restore from and store to memory beside one memcpy, store to SSD beside raw pwritev.

    restore, memory   lookup, restore and wait from the arena into shuffled slots   / one numpy copy of the same bytes
    store, memory     begin_turn, write_layer x 32, commit                          / one numpy copy of the same bytes
    store, SSD        the same, with the file's making, footer and fdatasync        / fallocate, best pwritev, fdatasync

Each with `verify=remote`, the default: writers compute checksums (xxh3) of what goes to files, readers of this node compare
nothing; and with `verify=all`: checksums of all that is stored, compared in all that is restored. The difference chose the
default. All pages are touched before. Run: python bench/memory.py [--dir DIR]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from _session import BLOCK_BYTES, LAYERS, Pages, open_space, restore, same, session_keys
from _support import (
    GIB,
    MIB,
    Bytes,
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
)

import flatcake_client as fc
from flatcake_server.rpc_admin import AdminClient
from flatcake_transport.window import aligned_buffer

VERIFY = ("remote", "all")
MEMORY = {"turn": 2, "context_tokens": 1, "previous_reply_tokens": 1}  # hints of a short agent step: stays in memory
SSD = {"turn": 1}
DROP_TIMEOUT_S = 30.0


class Memcpy:
    """One numpy copy of so many bytes, between buffers touched before."""

    def __init__(self, size_bytes: int) -> None:
        self._source, self._target = aligned_buffer(size_bytes), aligned_buffer(size_bytes)
        self._source[:] = 1

    def run_s(self, _: int) -> float:
        return timed_s(lambda: np.copyto(self._target, self._source))


class Engine:
    """One daemon, one client, one context; what is stored is dropped between."""

    def __init__(self, node: Node, client: fc.Client, blocks: int, medium: str, hints: dict[str, Any]) -> None:
        self._node = node
        self._space = open_space(client)
        self._medium, self._hints = medium, hints
        self._blocks, self._seed = blocks, 0
        self.pages, self.back = Pages(blocks, seed=1), Pages(blocks, seed=2)
        self.pages.fill(1)

    def store_s(self, _: int) -> float:
        """Store a context nobody has stored, in one turn; drop the last one before, and wait until its space is back."""
        self.drop()
        self._seed += 1
        self.keys = session_keys(self._space, self._seed, self._blocks)
        return timed_s(self._store)

    def _store(self) -> None:
        with self._space.begin_turn(self.keys, session="bench", **self._hints) as turn:
            assert {part.medium for part in turn.parts} == {self._medium}, f"{turn.parts} is not all on {self._medium}"
            for layer, source in enumerate(self.pages.layers):
                turn.write_layer(layer, source, self.pages.slots)
            turn.commit()

    def restore_s(self, _: int) -> float:
        return timed_s(lambda: restore(self._space, self.keys, self.back))

    def drop(self) -> None:
        with AdminClient(self._node.endpoint) as admin:
            if self._seed:
                admin.drop(["bench"])
        deadline_s = time.monotonic() + DROP_TIMEOUT_S
        while any(pool["releasing_bytes"] or pool["committed_bytes"] for pool in self._node.status()["pools"]):
            assert time.monotonic() < deadline_s, "what was dropped is still there"
            time.sleep(0.01)


def in_memory(args: argparse.Namespace, directory: Path, report: Report) -> None:
    blocks = args.memory_mib * MIB // BLOCK_BYTES
    size_bytes = blocks * BLOCK_BYTES
    memcpy = Memcpy(size_bytes)
    for verify in VERIFY:
        say(f"taking turns: memcpy, store to memory, restore from memory; verify={verify}")
        must = 0.9 if verify == "remote" else None
        home = directory / f"memory-{verify}"
        home.mkdir()
        with Node(home, memory_bytes=size_bytes + 64 * MIB, verify=verify) as node, fc.connect(node.endpoint) as client:
            engine = Engine(node, client, blocks, "memory", MEMORY)
            engine.store_s(0)  # maps and touches the arena
            engine.restore_s(0)
            assert same(engine.pages, engine.back), "other bytes came back than were stored"
            copies = [memcpy.run_s, engine.store_s, engine.restore_s]
            limit_s, store_s, restore_s = take_turns(args.rounds, *copies)
            stored, restored = Compared.of(size_bytes, limit_s, store_s), Compared.of(size_bytes, limit_s, restore_s)
        report.add(f"restore from memory / memcpy, verify={verify}", restored.ratio, must, detail=restored)
        report.add(f"store to memory / memcpy, verify={verify}", stored.ratio, must, detail=stored)


def on_ssd(args: argparse.Namespace, directory: Path, report: Report) -> None:
    blocks = args.ssd_mib * MIB // BLOCK_BYTES
    size_bytes = blocks * BLOCK_BYTES
    raw, raw_path = Raw(), directory / "raw"

    source = aligned_buffer(size_bytes)
    source[:] = 1

    def raw_s(setting: Setting, memory: Bytes | None = None) -> float:
        return raw.write_s(raw_path, size_bytes, setting, memory)

    say("sweeping raw writes")
    raw_s(Setting(4 * MIB, 4))
    best = Contenders(raw_s, commands=(256 << 10, MIB, 4 * MIB, 8 * MIB), count=2)
    report.more["raw_write_sweep_gb_s"] = best.rates(size_bytes)
    for verify in VERIFY:
        say(f"taking turns: raw {best}, store to SSD, restore; verify={verify}")
        home = directory / f"ssd-{verify}"
        home.mkdir()
        with Node(home, verify=verify, ssd_bytes=4 * size_bytes + GIB) as node, fc.connect(node.endpoint) as client:
            engine = Engine(node, client, blocks, "ssd", SSD)
            engine.store_s(0)
            engine.restore_s(0)
            assert same(engine.pages, engine.back), "other bytes came back than were stored"
            limit_s, from_s, store_s, restore_s = take_turns(
                args.rounds,
                best.run_s,
                lambda number: raw_s(best.setting(number), source),
                engine.store_s,
                engine.restore_s,
            )
            engine.drop()
        raw_path.unlink()
        compared = Compared.of(size_bytes, limit_s, store_s)
        report.add(
            f"store to SSD / raw pwritev, verify={verify}", compared.ratio, 0.9 if verify == "remote" else None,
            detail=compared,
        )  # fmt: skip
        landed = Compared.of(size_bytes, from_s, store_s)
        report.add(f"store to SSD / raw pwritev from memory of that size, verify={verify}", landed.ratio, detail=landed)
        report.add(f"restore from SSD, GB/s, verify={verify}", size_bytes / min(restore_s) / 1e9)


def main() -> None:
    args = arguments(
        __doc__,
        memory_mib=(1024, "bytes copied at once"),
        ssd_mib=(1024, "bytes stored on SSD at once"),
        rounds=(7, "how often each takes its turn"),
    )
    report = Report(f"Copies and stores, {LAYERS} layers")
    with disk_directory(args.dir, 4 * args.ssd_mib * MIB) as directory:
        in_memory(args, directory, report)
        on_ssd(args, directory, report)
    report.show(as_json=args.json)


if __name__ == "__main__":
    main()
