"""The GDS mover without a GPU: kvikio is played by a stand-in with its documented API. Real hardware: tests/gpu."""

from __future__ import annotations

import dataclasses
import errno
import os
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conformance.movers import Setting, check_mover, random_bytes
from opened import open_below
from waiting import pause, until

from flatcake_transport.address import Medium
from flatcake_transport.errors import Hangs, Unavailable
from flatcake_transport.mover import FileSpan, MemorySpan, Move
from flatcake_transport.movers import gds, mover_for, pool
from flatcake_transport.movers.gds import HANDLES_MAX, GdsMover, gds_available
from flatcake_transport.movers.memory import MemoryMover
from flatcake_transport.movers.posix import PosixMover

PAGE = 4096


class DeviceArray:
    """Host bytes that say they are on a device."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data
        self.__cuda_array_interface__ = data.__array_interface__

    def __len__(self) -> int:
        return len(self.data)


class IOFuture:
    def __init__(self, future: Future) -> None:
        self.future = future

    def done(self) -> bool:
        return self.future.done()

    def get(self) -> int:
        return self.future.result()


class Kvikio:
    """What GdsMover uses of kvikio 25.8 to 26.10."""

    def __init__(self, *, gds: bool | None = True, compat: bool = False) -> None:
        self.pool = ThreadPoolExecutor(2)
        self.opened: list[tuple[str, str]] = []
        self.settings = {"num_threads": 1}
        self.registered: list[object] = []
        self.short = 0
        self.defaults = SimpleNamespace(
            get=self.settings.__getitem__, set=self.settings.__setitem__, is_compat_mode_preferred=lambda: compat
        )
        self.cufile_driver = SimpleNamespace(get=self.driver_get)
        self.buffer = SimpleNamespace(memory_register=self.registered.append)
        self.gds = gds
        kvikio = self

        class CuFile:
            def __init__(self, file: str, flags: str = "r") -> None:
                self.fd = os.open(file, os.O_RDWR if "+" in flags else os.O_RDONLY)
                kvikio.opened.append((str(Path(file).readlink()), flags))

            def __del__(self) -> None:
                if hasattr(self, "fd"):
                    os.close(self.fd)

            def pread(self, buf, size=None, file_offset=0, task_size=None) -> IOFuture:
                return IOFuture(kvikio.pool.submit(self.run, os.preadv, buf, size, file_offset))

            def pwrite(self, buf, size=None, file_offset=0, task_size=None) -> IOFuture:
                return IOFuture(kvikio.pool.submit(self.run, os.pwritev, buf, size, file_offset))

            def run(self, command, buf: DeviceArray, size: int, offset: int) -> int:
                return command(self.fd, [buf.data[: size - kvikio.short]], offset)

        self.CuFile = CuFile

    def driver_get(self, name: str) -> bool:
        assert name == "is_gds_available"
        if self.gds is None:
            raise RuntimeError("no cuFile")
        return self.gds


@pytest.fixture
def kvikio():
    made = Kvikio()
    yield made
    made.pool.shutdown()


def span_of(path: Path, size: int) -> tuple[int, FileSpan, np.ndarray]:
    content = random_bytes(sum(str(path).encode()), size)
    path.write_bytes(content.tobytes())
    fd = os.open(path, os.O_RDWR)
    return fd, FileSpan(fd, 0, size), content


def test_all_that_holds_for_every_mover(kvikio: Kvikio, tmp_path: Path) -> None:
    check_mover(Setting(lambda: GdsMover(kvikio), DeviceArray, lambda a: a.data), tmp_path)


def test_reads_never_open_for_writing(kvikio: Kvikio, tmp_path: Path) -> None:
    mover = GdsMover(kvikio)
    fd, span, content = span_of(tmp_path / "a", PAGE)
    out = DeviceArray(np.zeros(PAGE, np.uint8))
    for _ in range(3):
        mover.submit([Move(span, MemorySpan(out))]).wait(30)
    assert np.array_equal(out.data, content)
    mover.submit([Move(MemorySpan(out), span)]).wait(30)
    assert kvikio.opened == [(str(tmp_path / "a"), "r"), (str(tmp_path / "a"), "r+")], "one handle a file and way"
    mover.close()
    os.close(fd)


def test_a_descriptor_number_used_again_is_another_file(kvikio: Kvikio, tmp_path: Path) -> None:
    mover = GdsMover(kvikio)
    numbers = set()
    for name in "abc":
        fd, span, content = span_of(tmp_path / name, PAGE)
        numbers.add(fd)
        out = DeviceArray(np.zeros(PAGE, np.uint8))
        mover.submit([Move(span, MemorySpan(out))]).wait(30)
        assert np.array_equal(out.data, content)
        os.close(fd)
    assert len(numbers) < 3 or len(kvikio.opened) == 3
    mover.close()


def test_handles_are_bounded(kvikio: Kvikio, tmp_path: Path) -> None:
    mover = GdsMover(kvikio)
    for i in range(HANDLES_MAX + 20):
        fd, span, _ = span_of(tmp_path / str(i), PAGE)
        mover.submit([Move(span, MemorySpan(DeviceArray(np.zeros(PAGE, np.uint8))))]).wait(30)
        os.close(fd)
    assert open_below(tmp_path) <= HANDLES_MAX
    mover.close()
    assert not open_below(tmp_path)


def test_fewer_bytes_than_asked_for_are_a_failure(kvikio: Kvikio, tmp_path: Path) -> None:
    mover = GdsMover(kvikio)
    fd, span, _ = span_of(tmp_path / "a", PAGE)
    kvikio.short = 1
    with pytest.raises(Unavailable, match="4095 of 4096"):
        mover.submit([Move(span, MemorySpan(DeviceArray(np.zeros(PAGE, np.uint8))))]).wait(30)
    assert mover.stats().failures == 1
    os.close(fd)


class Hanging:
    """Reads of one file of kvikio's never end until they are told to."""

    def __init__(self, kvikio: Kvikio, path: Path) -> None:
        self.begun: list[Future] = []
        real = kvikio.CuFile.pread

        def pread(file, buf, size=None, file_offset=0, task_size=None):
            if Path(f"/proc/self/fd/{file.fd}").readlink() != path:
                return real(file, buf, size, file_offset)
            self.begun.append(Future())
            return IOFuture(self.begun[-1])

        kvikio.CuFile.pread = pread

    def end(self) -> None:
        for future in self.begun:
            if not future.done():
                future.set_result(PAGE)


def read(span: FileSpan, device: int) -> Move:
    return Move(dataclasses.replace(span, device=device), MemorySpan(DeviceArray(np.zeros(PAGE, np.uint8))))


def test_a_file_that_cannot_be_opened_fails_its_transfer_after_the_others_rest(kvikio: Kvikio, tmp_path: Path) -> None:
    mover, real = GdsMover(kvikio), kvikio.CuFile
    (fd, span, _), (bad, gone, _) = (span_of(tmp_path / name, PAGE) for name in ("a", "bad"))
    others = Hanging(kvikio, tmp_path / "a")

    def opened(file: str, flags: str) -> object:
        if Path(file).readlink() == tmp_path / "bad":
            until(lambda: others.begun)
            raise OSError(errno.EACCES, "Permission denied")
        return real(file, flags)

    kvikio.CuFile = opened  # type: ignore[assignment]
    transfer = mover.submit([read(span, 1), read(gone, 1)])
    until(lambda: mover.stats().failures == 1)
    with pytest.raises(TimeoutError):
        transfer.wait(0.01)
    others.end()
    with pytest.raises(Unavailable, match="Permission denied"):
        transfer.wait(30)
    mover.close()
    os.close(fd)
    os.close(bad)


def test_a_device_that_hangs_holds_up_no_other_and_leaves_kvikio_threads(kvikio: Kvikio, tmp_path: Path) -> None:
    mover = GdsMover(kvikio)
    (bad, stuck, _), (good, healthy, content) = (span_of(tmp_path / name, PAGE) for name in ("bad", "good"))
    hanging = Hanging(kvikio, tmp_path / "bad")
    hung = mover.submit([read(stuck, 1)] * 3 * gds.COMMANDS_MAX)
    until(lambda: len(hanging.begun) == gds.COMMANDS_MAX)
    move = read(healthy, 2)
    mover.submit([move]).wait(30)
    assert np.array_equal(move.target.data.data, content)
    assert len(hanging.begun) == gds.COMMANDS_MAX < kvikio.settings["num_threads"]
    until(lambda: hanging.end() or hung.done())
    hung.wait(0)
    mover.close()
    os.close(bad)
    os.close(good)


def test_who_waits_for_a_device_that_hangs_is_told_and_what_has_not_begun_is_given_up(
    kvikio: Kvikio, tmp_path: Path, monkeypatch
) -> None:
    mover = GdsMover(kvikio)
    fd, span, _ = span_of(tmp_path / "bad", PAGE)
    hanging = Hanging(kvikio, tmp_path / "bad")
    stuck = mover.submit([read(span, 1)] * gds.COMMANDS_MAX)
    waits = mover.submit([read(span, 1)])
    until(lambda: len(hanging.begun) == gds.COMMANDS_MAX)
    with pytest.raises(TimeoutError) as error:
        stuck.wait(0.001)
    assert not isinstance(error.value, Hangs), "10 s are not over"
    monkeypatch.setattr(pool, "HANGS_S", 0.0)
    with pytest.raises(Hangs):
        stuck.wait(0.001)
    for given_up in (waits, mover.submit([read(span, 1)])):
        with pytest.raises(Unavailable, match="not answered"):
            given_up.wait(30)
    hanging.end()
    stuck.wait(30)
    mover.close()
    os.close(fd)


def test_reads_go_before_writes(kvikio: Kvikio, tmp_path: Path) -> None:
    mover = GdsMover(kvikio)
    fd, span, _ = span_of(tmp_path / "bad", PAGE)
    hanging = Hanging(kvikio, tmp_path / "bad")
    reads = mover.submit([read(span, 1)])
    write = mover.submit([Move(MemorySpan(DeviceArray(np.ones(PAGE, np.uint8))), dataclasses.replace(span, device=1))])
    until(lambda: hanging.begun)
    pause(0.02)
    assert not write.done()
    assert not any("+" in flags for _, flags in kvikio.opened)
    hanging.end()
    reads.wait(30)
    write.wait(30)
    mover.close()
    os.close(fd)


def test_a_file_that_hangs_while_it_is_opened_holds_up_no_other_device(kvikio: Kvikio, tmp_path: Path) -> None:
    mover, real, gate = GdsMover(kvikio), kvikio.CuFile, threading.Event()
    (bad, stuck, _), (good, healthy, _) = (span_of(tmp_path / name, PAGE) for name in ("bad", "good"))

    def opened(file: str, flags: str) -> object:
        if Path(file).readlink() == tmp_path / "bad":
            gate.wait(30)
        return real(file, flags)

    kvikio.CuFile = opened  # type: ignore[assignment]
    hung = mover.submit([read(stuck, 1)])
    mover.submit([read(healthy, 2)]).wait(20)
    assert not hung.done()
    gate.set()
    hung.wait(30)
    mover.close()
    os.close(bad)
    os.close(good)


def test_what_cufile_raises_is_a_failed_move(kvikio: Kvikio, tmp_path: Path) -> None:
    mover = GdsMover(kvikio)
    fd, span, _ = span_of(tmp_path / "a", PAGE)
    failed: Future = Future()
    failed.set_exception(RuntimeError("cuFile error 5030"))
    kvikio.CuFile.pread = lambda *_: IOFuture(failed)
    with pytest.raises(Unavailable, match="by cuFile: cuFile error 5030"):
        mover.submit([read(span, 1)]).wait(30)
    assert mover.stats().failures == 1
    mover.close()
    os.close(fd)


def test_a_read_under_way_is_a_timeout_and_close_lands_it(kvikio: Kvikio, tmp_path: Path) -> None:
    mover = GdsMover(kvikio)
    fd, span, _ = span_of(tmp_path / "a", PAGE)
    pending: Future = Future()
    kvikio.CuFile.pread = lambda *_: IOFuture(pending)
    transfer = mover.submit([Move(span, MemorySpan(DeviceArray(np.zeros(PAGE, np.uint8))))])
    assert not transfer.done()
    with pytest.raises(TimeoutError):
        transfer.wait(0.001)
    pending.set_result(PAGE)
    mover.close()
    transfer.wait(0)
    assert mover.stats().bytes_moved == PAGE
    os.close(fd)


def test_host_memory_is_refused(kvikio: Kvikio) -> None:
    with pytest.raises(ValueError, match="posix"):
        GdsMover(kvikio).submit([Move(FileSpan(0, 0, 8), MemorySpan(np.zeros(8, np.uint8)))])


@pytest.mark.parametrize(
    ("answers", "path"), [((True, False), "gds"), ((True, True), "gds-compat"), ((False, False), "gds-compat"), ((None, False), "gds-compat")]
)  # fmt: skip
def test_stats_say_the_path_really_taken(answers: tuple[bool | None, bool], path: str) -> None:
    kvikio = Kvikio(gds=answers[0], compat=answers[1])
    stats = GdsMover(kvikio).stats()
    assert stats.path == path
    assert bool(stats.fallbacks) == (path != "gds")
    kvikio.pool.shutdown()


def test_threads_of_kvikio_are_raised_unless_the_user_set_them(monkeypatch, kvikio: Kvikio) -> None:
    monkeypatch.setenv("KVIKIO_NTHREADS", "1")
    GdsMover(kvikio)
    assert kvikio.settings["num_threads"] == 1
    monkeypatch.delenv("KVIKIO_NTHREADS")
    GdsMover(kvikio)
    assert kvikio.settings["num_threads"] == gds.THREADS


class Cuda:
    def __init__(self, code: int) -> None:
        self.cuInit = lambda _flags: code


def test_why_not(monkeypatch) -> None:
    def no_library(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(gds.ctypes, "CDLL", no_library)
    assert "no CUDA driver" in gds_available()
    with pytest.raises(Unavailable, match="no CUDA driver"):
        GdsMover()
    monkeypatch.setattr(gds.ctypes, "CDLL", lambda _name: Cuda(100))
    assert "cuInit returned 100" in gds_available()
    monkeypatch.setattr(gds.ctypes, "CDLL", lambda _name: Cuda(0))
    monkeypatch.setitem(sys.modules, "kvikio", None)
    assert "kvikio cannot be imported" in gds_available()
    monkeypatch.setitem(sys.modules, "kvikio", SimpleNamespace())
    assert gds_available() is None


def test_the_choice_of_mover(monkeypatch, kvikio: Kvikio) -> None:
    monkeypatch.setattr(gds, "gds_available", lambda: "no")
    for medium, device, kind in (
        (Medium.MEMORY, "cpu", MemoryMover),
        (Medium.MEMORY, "cuda:0", MemoryMover),
        (Medium.SSD, "cpu", PosixMover),
        (Medium.SSD, "cuda:0", PosixMover),
    ):
        mover = mover_for(medium, device)
        assert type(mover) is kind
        mover.close()
    monkeypatch.setattr(gds, "gds_available", lambda: None)
    monkeypatch.setattr(gds, "_import_kvikio", lambda: kvikio)
    assert type(mover_for(Medium.SSD, "cuda:1")) is GdsMover
    assert type(mover_for(Medium.SSD, "cpu")) is PosixMover
