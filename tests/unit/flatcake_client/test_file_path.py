"""What a restore asks of the disk: how many commands, as the mover, its own figures and its bytes say, and what it does meanwhile."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
from hits import FakeHit, Movers, hit_buffer_bytes_min
from homes import Gate
from images import Chain
from waiting import until

from flatcake_client.restore import Restore
from flatcake_transport.space import SpaceSpec
from flatcake_transport.window import StagingPool

LAYERS, PLANE, BLOCKS = 12, 64 << 10, 4


@pytest.mark.parametrize(("half_planes", "commands"), [(1, 24), (2, 12), (4, 6), (12, 2)])
def test_small_planes_share_a_command_when_the_window_holds_them(tmp_path, half_planes, commands):
    """Two turns in files of their own: a command a layer and turn, or one for as many layers as a half holds."""
    chain = Chain(SpaceSpec("m", "u8", 4, (PLANE,) * LAYERS), tmp_path, np.random.default_rng(0))
    for file_id in (1, 2):
        chain.add(file_id=file_id, before=0, blocks=BLOCKS, behind=0)
    hit, movers = FakeHit(chain), Movers()
    pages = [np.zeros((2 * BLOCKS, PLANE), np.uint8) for _ in range(LAYERS)]
    half = 2 * half_planes * BLOCKS * PLANE
    tools = movers.reading(hit, extra_bytes=half - hit_buffer_bytes_min(hit), part_bytes=half)  # none cut between parts
    restore = Restore(hit, tools, pages, np.arange(2 * BLOCKS), 0, 10.0, now_s=hit.clock)
    assert restore.wait() == 2 * BLOCKS
    assert all(np.array_equal(page, kv) for page, kv in zip(pages, chain.kv, strict=True))
    assert restore.stats.read_commands == movers.files.stats().moves == commands
    assert restore.stats.bytes_read == 2 * BLOCKS * PLANE * LAYERS, "no byte more for it"
    hit.close()
    movers.close()


def test_a_mover_that_was_closed_is_a_miss(tmp_path):
    chain = Chain(SpaceSpec("m", "u8", 4, (PLANE,) * LAYERS), tmp_path, np.random.default_rng(0))
    chain.add(file_id=1, before=0, blocks=BLOCKS, behind=0)
    hit, movers = FakeHit(chain), Movers()
    pages = [np.zeros((BLOCKS, PLANE), np.uint8) for _ in range(LAYERS)]
    tools = movers.reading(hit)
    movers.close()
    restore = Restore(hit, tools, pages, np.arange(BLOCKS), 0, 10.0, now_s=hit.clock)
    assert restore.wait() == 0
    hit.close()
    assert tools.staging.stats().windows_out == 0


class Late(Gate):
    """The gate is shut behind the first command, which has landed at once."""

    def submit(self, moves):
        if self.submitted:
            return super().submit(moves)
        self.submitted.append([])
        transfer = self.mover.submit(moves)
        transfer.wait()
        return transfer


@pytest.mark.parametrize(("gate", "buffers"), [(Gate, 2), (Late, 1)], ids=["at once", "window of one"])
def test_what_is_in_memory_is_copied_while_the_disk_reads(tmp_path, gate, buffers):
    """Also where nothing is read while a buffer is scattered: then the next read is begun before anything else."""
    chain = Chain(SpaceSpec("m", "u8", 4, (PLANE,) * LAYERS), tmp_path, np.random.default_rng(0))
    for file_id in (0, 1):
        chain.add(file_id=file_id, before=0, blocks=BLOCKS, behind=0)
    hit, movers = FakeHit(chain), Movers()
    movers.files = gate(movers.files)
    movers.files.open.clear()
    pages = [np.zeros((2 * BLOCKS, PLANE), np.uint8) for _ in range(LAYERS)]
    tools = movers.reading(hit)
    buffer_bytes = BLOCKS * PLANE  # of one layer
    staging = StagingPool(buffers * buffer_bytes, buffer_bytes, buffers)
    tools = dataclasses.replace(tools, staging=staging, part_bytes=buffer_bytes)
    restore = Restore(hit, tools, pages, np.arange(2 * BLOCKS), 0, 60.0, now_s=hit.clock)
    copies, submit = [], movers.memory.submit  # how many reads when one began, and how long they were waited for

    def copying(moves):
        copies.append((len(movers.files.submitted), restore._files._stalled_s))
        return submit(moves)

    movers.memory.submit = copying
    waiting = threading.Thread(target=restore.wait)
    waiting.start()
    try:
        until(lambda: all(np.array_equal(page[:BLOCKS], kv[:BLOCKS]) for page, kv in zip(pages, chain.kv, strict=True)))
        assert copies[-1] == (2, 0.0), "the disk is asked first, and not waited for"
    finally:
        movers.files.open.set()
        waiting.join()
    assert restore.wait() == 2 * BLOCKS
    assert all(np.array_equal(page, kv) for page, kv in zip(pages, chain.kv, strict=True))
    hit.close()
    movers.close()
