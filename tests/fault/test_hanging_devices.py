"""A device that hangs: a disk, a file server, an NVMe-oF peer. It costs what lies on it, and nothing else."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hits import FakeHit, Movers
from homes import FakeHome
from images import Chain
from waiting import pause, until

from flatcake_client import file_path
from flatcake_client.file_path import ReadTools
from flatcake_client.lease import Lease
from flatcake_client.restore import Restore
from flatcake_client.writer import Turn, WriteTools
from flatcake_transport.movers import pool, posix
from flatcake_transport.space import SpaceSpec
from flatcake_transport.window import StagingPool, Window, device_number

SPEC = SpaceSpec("m", "u8", 4, (64 << 10, 64 << 10))
HANGING, HEALTHY = 1, 2
GRANULE = 256 << 10


class Gate:
    """Commands on these descriptors wait until it opens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.fds: set[int] = set()
        self.failing = False
        self.waiting = 0
        for name in ("_preadv", "_pwritev"):
            monkeypatch.setattr(posix, name, self._gated(getattr(posix, name)))

    def _gated(self, real):
        def command(fd, memory, offset):
            if fd in self.fds:
                self.waiting += 1
                self.open.wait()
                if self.failing:
                    raise OSError(errno.EIO, "told to fail")
            return real(fd, memory, offset)

        return command


@pytest.fixture
def gate(monkeypatch):
    made = Gate(monkeypatch)
    yield made
    made.open.set()


@pytest.fixture
def movers(gate):
    made = Movers()
    yield made
    gate.open.set()
    made.close()


def hit_on(gate: Gate, root: Path, devices: dict[int, int]) -> FakeHit:
    """Blocks 0..3 in memory, then 4 in each file; `devices` says where the files lie."""
    root.mkdir()
    chain = Chain(SPEC, root, np.random.default_rng(0))
    chain.add(file_id=0, before=0, blocks=4, behind=0)
    for file_id in devices:
        chain.add(file_id=file_id, before=0, blocks=4, behind=0)
    hit = FakeHit(chain)
    for file_id, file in hit.files(1.0).items():
        hit.opened[file_id] = dataclasses.replace(file, device=devices[file_id])
        if devices[file_id] == HANGING:
            gate.fds.add(file.fd)
    return hit


def begin(hit: FakeHit, tools: ReadTools, timeout_s: float, **options) -> tuple[Restore, list[np.ndarray]]:
    pages = [np.zeros((hit.blocks, size), np.uint8) for size in SPEC.plane_bytes]
    return Restore(hit, tools, pages, np.arange(hit.blocks), 0, timeout_s, **options), pages


def hangs_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command to the one device hangs soon; to the other one never, however busy this machine is."""
    hangs = pool._Lines._hangs
    monkeypatch.setattr(pool, "HANGS_S", 0.1)
    monkeypatch.setattr(pool._Lines, "_hangs", lambda self, device: device != HEALTHY and hangs(self, device))


def right(hit: FakeHit, pages: list[np.ndarray], blocks: int) -> bool:
    return all(np.array_equal(kv[:blocks], page[:blocks]) for kv, page in zip(hit.chain.kv, pages, strict=True))


def test_it_stops_no_read_and_no_write_of_another(tmp_path, gate, movers) -> None:
    hanging, healthy = (hit_on(gate, tmp_path / str(device), {1: device}) for device in (HANGING, HEALTHY))
    tools = movers.reading(healthy, windows=8)
    brought: list[int] = []
    stuck = [begin(hanging, tools, 600.0)[0] for _ in range(4)]
    threads = [threading.Thread(target=lambda each=each: brought.append(each.wait()), daemon=True) for each in stuck]
    for thread in threads:
        thread.start()
    until(lambda: gate.waiting == 2 and tools.staging.stats().windows_out == 4)  # the mover has two threads a device
    restore, pages = begin(healthy, tools, 60.0)
    assert restore.wait() == 8
    assert right(healthy, pages, 8)

    (tmp_path / "home").mkdir()
    home = FakeHome(SPEC, tmp_path / "home")
    files = home.files
    home.files = lambda *_: {key: dataclasses.replace(file, device=HEALTHY) for key, file in files(1, 1.0).items()}
    writing = WriteTools(movers.files, movers.memory, StagingPool(2 * GRANULE, GRANULE))
    grant = home.grant([(0, 4, False)])
    turn = Turn(home, grant, SPEC, 0, writing, checksums=True, timeout_s=60.0)
    for layer in range(SPEC.layers):
        turn.write_layer(layer, healthy.chain.kv[layer], np.arange(4))
    assert turn.commit()

    assert not brought
    gate.open.set()
    for thread in threads:
        thread.join(30)
    assert brought == [8] * 4
    for hit in (hanging, healthy):
        hit.close()


def test_what_lies_elsewhere_is_brought_long_before_the_deadline(tmp_path, gate, movers, monkeypatch) -> None:
    hangs_soon(monkeypatch)
    hit = hit_on(gate, tmp_path / "hit", {1: HEALTHY, 2: HANGING})
    tools = movers.reading(hit, windows=3)
    restore, pages = begin(hit, tools, 600.0)
    assert restore.wait() == 8
    assert right(hit, pages, 8)
    assert (tools.staging.stats().windows_lingering, bool(restore.moving())) == (1, True)
    again, _ = begin(hit, tools, 600.0)  # refused at once, and takes no window along
    assert again.wait() == 8
    assert tools.staging.stats().windows_out == 1

    gate.open.set()
    until(lambda: not restore.moving())
    whole, pages = begin(hit, tools, 600.0)
    assert whole.wait() == 12
    assert right(hit, pages, 12)
    hit.close()


@pytest.mark.parametrize("verify", [False, True])
def test_a_footer_that_does_not_come_is_no_part_of_a_window_that_is_used(
    tmp_path, gate, movers, monkeypatch, verify
) -> None:
    """Its read may land at any time: in memory that nobody else has."""
    hangs_soon(monkeypatch)
    hit = hit_on(gate, tmp_path / "hit", {1: HANGING, 2: HEALTHY})
    hit.verify = verify
    tools = movers.reading(hit, windows=3)
    restore, pages = begin(hit, tools, 600.0)
    assert restore.wait() == 4
    assert right(hit, pages, 4)
    assert tools.staging.stats().windows_lingering == 1
    gate.open.set()
    until(lambda: not restore.moving())
    hit.close()


def test_the_next_restore_begins_beside_one_that_hangs(tmp_path, gate, movers, monkeypatch) -> None:
    monkeypatch.setattr(file_path, "HUNG_S", 0.1)
    monkeypatch.setattr(file_path, "ENDING_BYTES", -1)
    hit = hit_on(gate, tmp_path / "hit", {1: HANGING})
    tools = movers.reading(hit)
    said = threading.Event()
    restore, pages = begin(hit, tools, 600.0, ending=said.set)
    usable: list[int] = []
    thread = threading.Thread(target=lambda: usable.append(restore.wait()), daemon=True)
    thread.start()
    assert said.wait(30)
    assert not usable
    gate.open.set()
    thread.join(30)
    assert usable == [8]
    assert right(hit, pages, 8)
    hit.close()


def test_a_device_is_known_without_asking_it(tmp_path) -> None:
    with (tmp_path / "file").open("wb") as file, Path("/dev/null").open("rb") as other:
        assert device_number(file.fileno()) == os.fstat(file.fileno()).st_dev
        assert device_number(other.fileno()) == os.fstat(other.fileno()).st_dev
    assert device_number(-1) == 0


def test_a_device_with_a_descriptor_of_its_own_is_itself(monkeypatch) -> None:
    """A namespace over NVMe-oF: all of them lie in one file system, /dev."""
    real = os.open("/dev/null", os.O_RDONLY)
    try:
        status = os.fstat(real)
        monkeypatch.setattr("flatcake_transport.window.stat.S_ISBLK", lambda mode: True)
        assert device_number(real) == status.st_rdev != status.st_dev
    finally:
        os.close(real)


def test_slow_reads_in_a_row_have_one_deadline_together(tmp_path, gate, movers, monkeypatch) -> None:
    """Footers here: each by itself would come in time."""
    hit = hit_on(gate, tmp_path / "hit", dict.fromkeys(range(1, 41), HEALTHY))
    hit.verify = True
    real = posix._preadv

    def slow(fd, memory, offset):
        pause(0.2)
        return real(fd, memory, offset)

    monkeypatch.setattr(posix, "_preadv", slow)
    started_s = time.monotonic()
    restore, _ = begin(hit, movers.reading(hit), 0.3)
    assert restore.wait() <= 4
    assert time.monotonic() - started_s < 4.0, "40 footers take 8 s"
    until(lambda: not restore.moving())
    hit.close()


def test_closing_is_heard_while_a_window_is_waited_for_to_find_out_what_failed(tmp_path, gate, movers) -> None:
    hit = hit_on(gate, tmp_path / "hit", {1: HANGING})
    hit.lease = Lease(7, 1e6, hit.clock(), lambda *_: True, lambda: False, now_s=hit.clock)
    tools = movers.reading(hit)
    restore, _ = begin(hit, tools, 600.0)
    waiting = threading.Thread(target=restore.wait, daemon=True)
    waiting.start()
    until(lambda: gate.waiting)
    other: list[Window] = []
    taking = threading.Thread(target=lambda: other.append(tools.staging.open_window(60.0)), daemon=True)
    taking.start()
    until(lambda: tools.staging.stats().waits)
    gate.failing = True
    gate.open.set()
    taking.join(30)
    until(lambda: tools.staging.stats().waits == 2)  # the read failed; it is to be tried alone, when there is a window
    closing = threading.Thread(target=restore.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    other[0].close()
    waiting.join(30)
    hit.close()
