"""A restore against a naive copy: any runs, slots, media, shards, layouts and windows; and with a fault anywhere."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hits import FakeHit, Movers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from images import FAR, PAGES, Chain, paged
from layouts import bytes_of
from waiting import until

from flatcake_client.records import Run
from flatcake_client.restore import Restore
from flatcake_transport.errors import Corrupt, Unavailable
from flatcake_transport.space import SpaceSpec

EXTRA, JOBS, PARTS = (
    st.sampled_from(each) for each in ((0, 4096, 1 << 20), (1, 10000, 1 << 20), (4096, 128 << 10, 4 << 20))
)
PLANE_BYTES = st.sampled_from([1, 7, 1000, 4096, 5000, 64 << 10, 128 << 10])


@st.composite
def chains(draw: st.DrawFn) -> tuple[SpaceSpec, list[dict[str, int]], int]:
    layers = draw(st.integers(1, 3))
    sizes = tuple(draw(st.lists(PLANE_BYTES, min_size=layers, max_size=layers)))
    shards = draw(st.integers(1, 2))
    spec = SpaceSpec("m", "u8", 4, sizes, shards=shards)
    segments = draw(
        st.lists(
            st.fixed_dictionaries(
                {
                    "file_id": st.integers(FAR, 2),
                    "before": st.integers(0, 3),
                    "blocks": st.integers(1, 6),
                    "behind": st.integers(0, 3),
                    "algorithm": st.sampled_from([1, 1, 0]),
                }
            ),
            min_size=1,
            max_size=5,
        )
    )
    return spec, segments, draw(st.integers(0, shards - 1))


class Late:
    """A transfer that moves nothing before it is waited for: what is used too early is not there."""

    def __init__(self, mover: Any, moves: Any) -> None:
        self._begin, self._landed = lambda: mover.submit(moves), False

    def done(self) -> bool:
        return self._landed

    def wait(self, timeout_s: float | None = None) -> None:
        if not self._landed:
            self._begin().wait(timeout_s)
        self._landed = True


class LateMover:
    def __init__(self, mover: Any) -> None:
        self._mover = mover
        self.close = mover.close

    def submit(self, moves: Any) -> Late:
        return Late(self._mover, moves)


def check(
    hit: FakeHit, restore: Restore, pages: list, before: list, slots: np.ndarray, first: int, usable: int
) -> None:
    """What is usable is right in all layers, and no slot changed that was not asked for."""
    asked = slots[first : min(len(slots), hit.blocks)]
    for layer in range(hit.spec.layers):
        expected = before[layer].copy()
        now = bytes_of(pages[layer])
        kv = hit.chain.kv[hit.shard * hit.spec.layers + layer]
        good = np.arange(first, usable)
        assert np.array_equal(now[slots[good]], kv[good]), f"layer {layer}: wrong bytes in usable blocks"
        untouched = np.setdiff1d(np.arange(len(expected)), asked)
        assert np.array_equal(now[untouched], expected[untouched]), f"layer {layer}: a slot changed nobody asked for"


@settings(max_examples=60)
@given(chains(), st.data())
def test_restore_is_a_copy(drawn, data: st.DataObject) -> None:
    spec, segments, shard = drawn
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    with tempfile.TemporaryDirectory() as root:
        chain = Chain(spec, Path(root), rng)
        for segment in segments:
            chain.add(**segment)
        hit = FakeHit(chain, shard, verify=data.draw(st.booleans(), "verify"))
        movers = Movers()
        movers.files = LateMover(movers.files)
        try:
            first = data.draw(st.integers(0, hit.blocks), "first")
            count = data.draw(st.integers(0, hit.blocks + 2), "slots")
            slots = rng.permutation(hit.blocks + 5)[:count]
            kinds = data.draw(st.lists(st.sampled_from(PAGES), min_size=3, max_size=3), "kinds")
            filled = [paged(kinds[i], hit.blocks + 5, size, rng) for i, size in enumerate(spec.plane_bytes)]
            pages, before = [pair[0] for pair in filled], [pair[1] for pair in filled]
            sizes = {"job_bytes": data.draw(JOBS, "job"), "part_bytes": data.draw(PARTS, "part")}
            tools = movers.reading(hit, extra_bytes=data.draw(EXTRA, "extra buffer bytes"), **sizes)
            with Restore(hit, tools, pages, slots.tolist(), first, 10.0, now_s=hit.clock) as restore:
                for layer in data.draw(st.permutations(range(spec.layers)), "layers")[:2]:
                    restore.wait_layer(layer)
                    for done in range(layer + 1):
                        asked = np.arange(first, min(count, hit.blocks))
                        kv = chain.kv[shard * spec.layers + done]
                        assert np.array_equal(bytes_of(pages[done])[slots[asked]], kv[asked])
                usable = restore.wait()
            assert usable == max(first, min(count, hit.blocks))
            check(hit, restore, pages, before, slots, first, usable)
            assert not hit.reported
            assert tools.staging.stats().windows_out == 0, "the window was not given back"
        finally:
            hit.close()
            movers.close()


def starts(hit: FakeHit) -> list[tuple[int, Run]]:
    """The position in the hit at which each run begins."""
    return list(zip(itertools.accumulate((run.blocks for run in hit.runs), initial=0), hit.runs, strict=False))


@settings(max_examples=60)
@given(chains(), st.data())
def test_a_fault_costs_only_what_lies_behind(drawn, data: st.DataObject) -> None:
    """One block is damaged or cannot be read: everything before it is usable, nothing from it on."""
    spec, segments, shard = drawn
    rng = np.random.default_rng(5)
    with tempfile.TemporaryDirectory() as root:
        chain = Chain(spec, Path(root), rng)
        for segment in segments:
            chain.add(**{**segment, "algorithm": 1})
        truncate = data.draw(st.booleans(), "truncate")
        hit = FakeHit(chain, shard, verify=not truncate or data.draw(st.booleans(), "verify"))
        movers = Movers()
        try:
            first = data.draw(st.integers(0, hit.blocks - 1), "first")
            bad = data.draw(st.integers(first, hit.blocks - 1), "bad block")
            plane = shard * spec.layers + data.draw(st.integers(0, spec.layers - 1), "bad layer")
            file_id, at = chain.place(bad, plane)
            truncate = truncate and file_id > 0
            assume(truncate or hit.verify)
            if truncate:
                os.truncate(chain.path(file_id), at)
            else:
                chain.flip(bad, plane)
            slots = rng.permutation(hit.blocks + 5)[: hit.blocks]
            filled = [paged("plain", hit.blocks + 5, size, rng) for size in spec.plane_bytes]
            pages, before = [pair[0] for pair in filled], [pair[1] for pair in filled]
            tools = movers.reading(hit, extra_bytes=data.draw(EXTRA), part_bytes=data.draw(PARTS))
            restore = Restore(hit, tools, pages, slots, first, 10.0, now_s=hit.clock)
            usable = restore.wait()
            check(hit, restore, pages, before, slots, first, usable)
            assert usable <= bad, "a damaged block was called usable"
            # A granule is lost with its damaged block, a run with its file: never more.
            start, run = next((at, run) for at, run in starts(hit) if at <= bad < at + run.blocks)
            granule = max(1, -(-(256 << 10) // spec.plane_bytes[plane % spec.layers]))
            whole = (run.first_block + bad - start) // granule * granule
            lost = start if truncate else start + max(0, whole - run.first_block)
            assert usable >= max(first, lost), "more was given up than the fault took"
            assert bool(hit.reported) == (not truncate), "damage is reported, a read that fails is not"
            with pytest.raises(Unavailable if truncate else Corrupt) as raised:
                restore.wait_layer(spec.layers - 1)
            assert raised.value.usable_blocks == usable
        finally:
            hit.close()
            movers.close()


class Ends:
    """Movers of a restore; at one of their submits, counted over both, something ends it. `late`: submits after that."""

    def __init__(self, at: int, end: Callable[[], None]) -> None:
        self.at, self.end = at, end
        self.ended = False
        self.late: list[Any] = []

    def watch(self, mover: Any) -> Any:
        real = mover.submit

        def submit(moves: Any) -> Any:
            self.at -= 1
            if self.at == 0:
                self.end()
                self.ended = True
            elif self.ended:
                self.late.append(mover)
            return real(moves)

        mover.submit = submit
        return mover


def spoil(chain: Chain) -> None:
    """Other bytes stand where the chain's were, as after a reclaim."""
    chain.arena[:] ^= 0xFF
    for file_id in {run.file_id for run in chain.runs} - {0}:
        path = chain.path(file_id)
        data = bytes(np.frombuffer(path.read_bytes(), np.uint8) ^ 0xFF)
        with path.open("r+b") as file:
            file.write(data)


@settings(max_examples=60)
@given(chains(), st.sampled_from(["deadline", "lease", "cancel"]), st.integers(0, 24), st.data())
def test_a_restore_ended_at_any_moment_gives_everything_back(drawn, how: str, at: int, data: st.DataObject) -> None:
    """What it reports is right and no less than was in place at the end; other slots are as they were."""
    spec, segments, shard = drawn
    rng = np.random.default_rng(7)
    with tempfile.TemporaryDirectory() as root:
        chain = Chain(spec, Path(root), rng)
        for segment in segments:
            chain.add(**segment)
        hit = FakeHit(chain, shard, verify=data.draw(st.booleans(), "verify"))
        movers = Movers()
        in_place = [0]

        def end() -> None:
            in_place[0] = restore._progress.usable()
            if how == "lease":
                hit.lost = True
                spoil(chain)
            elif how == "deadline":
                hit.clock.now_s += 10.0

        try:
            slots = rng.permutation(hit.blocks + 5)[: hit.blocks]
            filled = [paged("plain", hit.blocks + 5, size, rng) for size in spec.plane_bytes]
            pages, before = [pair[0] for pair in filled], [pair[1] for pair in filled]
            ends = Ends(at, end)
            ends.watch(movers.memory)
            ends.watch(movers.files)
            sizes = {"job_bytes": data.draw(JOBS), "part_bytes": data.draw(PARTS)}
            tools = movers.reading(hit, extra_bytes=data.draw(EXTRA), **sizes)
            restore = Restore(hit, tools, pages, slots, 0, 10.0, now_s=hit.clock)
            for layer in range(min(at, spec.layers - 1) if how == "cancel" else spec.layers):
                with contextlib.suppress(Unavailable, Corrupt):
                    restore.wait_layer(layer)
            if how == "cancel":
                end()
                restore.close()
            usable = restore.wait()
            check(hit, restore, pages, before, slots, 0, usable)
            assert usable >= in_place[0], "less was reported than was in place"
            assert usable == hit.blocks or ends.ended or how == "cancel", "nothing ended it, and it was not whole"
            assert how != "deadline" or movers.memory not in ends.late, "a copy began past the deadline"
            assert not hit.reported, "who ends a restore has found no damage"
            until(lambda: not restore.moving())
            tools.staging.open_window(5.0).close()
            assert tools.staging.stats().windows_out == 0, "the window was not given back"
        finally:
            hit.close()
            movers.close()
