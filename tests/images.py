"""Segments built byte by byte, by the rules of DESIGN and nothing of the code under test: what restores are measured against."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from layouts import LAYOUTS, fill, layout_pages, numpy_zeros, torch_zeros

from flatcake_client.records import Run
from flatcake_transport.address import Address, Medium
from flatcake_transport.footer import Footer, encode_footer
from flatcake_transport.space import SpaceSpec

PAGE = 4096
FAR = -1  # a "file": the memory of another node
HERE_ID, FAR_ID = 3, 4  # nodes


def up(size: int) -> int:
    return (size + PAGE - 1) // PAGE * PAGE


def plane_starts(spec: SpaceSpec, blocks: int) -> list[int]:
    """Where each plane begins, shard-major, and where the data end."""
    starts, at = [], 0
    for size in list(spec.plane_bytes) * spec.shards:
        starts.append(at)
        at = up(at + blocks * size)
    return [*starts, at]


def granule_sums(spec: SpaceSpec, planes: list[np.ndarray]) -> np.ndarray:
    """xxh3 of every granule; `planes[p]` is (blocks, plane_bytes) uint8."""
    sums = []
    for plane in planes:
        step = max(1, -(-(256 << 10) // plane.shape[1]))
        sums += [xxhash.xxh3_64_intdigest(plane[at : at + step].tobytes()) for at in range(0, len(plane), step)]
    return np.asarray(sums, np.uint64)


def image(
    spec: SpaceSpec, keys: np.ndarray, planes: list[np.ndarray], *, file_id: int, offset: int, algorithm: int = 1
) -> bytes:
    """A whole segment with its footer."""
    starts = plane_starts(spec, len(keys))
    data = bytearray(starts[-1])
    for start, plane in zip(starts, planes, strict=False):
        data[start : start + plane.size] = plane.tobytes()
    sums = granule_sums(spec, planes)
    footer = Footer(
        spec=spec,
        session="s",
        turn=1,
        generation=1,
        file_id=file_id,
        file_offset=offset,
        first_block=0,
        parent_key=bytes(16),
        keys=keys,
        algorithms=bytes([algorithm]) * spec.shards,
        checksums=sums,
    )
    return bytes(data) + encode_footer(footer)


@dataclass
class Chain:
    """A key chain stored in segments, in an arena and in files, and its KV: `kv[p]` is (blocks, plane_bytes) uint8."""

    spec: SpaceSpec
    root: Path
    rng: np.random.Generator
    arena: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    far_arena: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    runs: list[Run] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)
    keys: np.ndarray = field(default_factory=lambda: np.zeros((0, 16), np.uint8))
    kv: list[np.ndarray] = field(default_factory=list)

    def path(self, file_id: int) -> Path:
        return self.root / f"{file_id}.kv"

    def add(self, *, file_id: int, before: int, blocks: int, behind: int, algorithm: int = 1) -> Run:
        """A segment of before + blocks + behind blocks, of which the middle ones continue the chain.

        File 0: the arena. `FAR`: that of another node.
        """
        spec, total = self.spec, before + blocks + behind
        keys = self.rng.integers(0, 256, (total, 16), np.uint8)
        sizes = list(spec.plane_bytes) * spec.shards
        planes = [self.rng.integers(0, 256, (total, size), np.uint8) for size in sizes]
        at = self.ends.get(file_id, 0)
        data = image(spec, keys, planes, file_id=max(0, file_id), offset=at, algorithm=algorithm)
        self.ends[file_id] = at + len(data)
        if file_id == FAR:
            self.far_arena = np.concatenate([self.far_arena, np.frombuffer(data, np.uint8)])
        elif file_id:
            with self.path(file_id).open("ab") as file:
                file.write(data)
        else:
            self.arena = np.concatenate([self.arena, np.frombuffer(data, np.uint8)])
        on_file = file_id > 0
        node = FAR_ID if file_id == FAR else HERE_ID
        address = Address.of(Medium(on_file), node, (file_id << 32) + at if on_file else at)
        run = Run(address, total, before, blocks, len(data), max(0, file_id), at if on_file else 0)
        self.runs.append(run)
        self.keys = np.concatenate([self.keys, keys[before : before + blocks]])
        mine = [plane[before : before + blocks] for plane in planes]
        self.kv = mine if not self.kv else [np.concatenate(pair) for pair in zip(self.kv, mine, strict=True)]
        return run

    def place(self, position: int, plane: int) -> tuple[int, int]:
        """File and offset of one block of the chain; file 0 is the arena, `FAR` another node's."""
        for run in self.runs:
            if position < run.blocks:
                base = run.file_offset if run.file_id else run.segment.offset
                size = (list(self.spec.plane_bytes) * self.spec.shards)[plane]
                start = plane_starts(self.spec, run.segment_blocks)[plane]
                file_id = FAR if run.segment.node == FAR_ID else run.file_id
                return file_id, base + start + (run.first_block + position) * size
            position -= run.blocks
        raise AssertionError("no such block")

    def flip(self, position: int, plane: int) -> None:
        """Damage one byte of a block."""
        file_id, at = self.place(position, plane)
        if file_id <= 0:
            (self.arena if file_id == 0 else self.far_arena)[at] ^= 0xFF
            return
        with self.path(file_id).open("r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 0xFF]))


PAGES = ("plain", "strided", "torch", *LAYOUTS, *(f"torch {name}" for name in LAYOUTS))


def paged(kind: str, slots: int, plane_bytes: int, rng: np.random.Generator) -> tuple[Any, np.ndarray]:
    """Pages of some layout (one of PAGES) filled with noise, and their bytes as (slots, plane_bytes), a copy."""
    noise = rng.integers(0, 256, (slots, plane_bytes), np.uint8)
    if kind == "strided":
        wide = np.zeros((slots, 2, plane_bytes), np.uint8)
        wide[:, 1] = noise
        return wide[:, 1], noise.copy()
    if kind.removeprefix("torch ") in LAYOUTS:
        zeros = torch_zeros if kind.startswith("torch ") else numpy_zeros
        pages = layout_pages(kind.removeprefix("torch "), slots, plane_bytes, zeros)
        if pages is not None:
            fill(pages, range(slots), noise)
            return pages, noise
    if kind.startswith("torch"):
        import torch

        return torch.from_numpy(noise.copy()), noise.copy()
    return noise.copy(), noise.copy()
