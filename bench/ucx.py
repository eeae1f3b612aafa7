"""One-sided gets of another process's memory over loopback, against `ucx_perftest` and a plain socket in the same run.

    python bench/ucx.py                        64 and 512 MiB in pieces of a plane's range, over TCP and over what UCX chooses
    FLATCAKE_UCX_LIB=system python bench/ucx.py

`get` is `UcxMover` with `UcxProcess` serving, into a window that was touched: the process that gets is a third one. `within` is
the same get by the same code inside this process, which waits for nothing else: what a process of its own costs.
`socket` is `sendall` and `recv_into` between two processes.

`ucx_perftest` is UCX's own ucp_get with the same transport and options, which spins on both sides. It has one buffer of a message's
size on each side and gets into it again and again. So with messages of a piece both buffers stay in the processor's caches, while a
restore's bytes come from memory and go to memory; and private buffers are never written, so that what is read is one page of zeros.
The figure is against one message of the whole size in shared memory, whose pages exist: the same bytes between as much memory.
Beside it: `get` of one piece again and again against messages of that piece, and the whole against those, which compares two things.

They take turns; bests are compared. Each turn starts its processes anew, ours as perftest's, because where a process' memory lies and
how its connection grew makes a difference for as long as it lives. Whoever serves is held on one core and whoever reads
on another: with two cores the process that gave the order makes the two change places, which slows them down, and which those
that spin never do. Two spinning sides need these two cores to themselves: where others work, as root, `chrt -r 1 python bench/ucx.py`
comes before them; else look at the ratios only, over many rounds.
"""

from __future__ import annotations

import contextlib
import importlib.util
import mmap
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from _support import MIB, Bytes, Compared, Report, arguments, say, take_turns

from flatcake_transport.mover import MemorySpan, Move
from flatcake_transport.movers.ucx import UcxMover
from flatcake_transport.movers.ucx_endpoint import CHUNK_BYTES, Order, Piece
from flatcake_transport.movers.ucx_lib import UcxLibrary, load_ucx
from flatcake_transport.movers.ucx_process import UcxProcess
from flatcake_transport.movers.ucx_worker import UcxWorker, default_options
from flatcake_transport.remote import RemoteMemory
from flatcake_transport.window import aligned_buffer

TRANSPORTS = {"tcp": {"TLS": "tcp", "NET_DEVICES": "lo"}, "any": {}}
OUTSTANDING = 16
SERVING, READING = (sorted(os.sched_getaffinity(0)) * 2)[:2]  # cores
WARM_UP = 2  # gets before the one that counts, as ucx_perftest makes them
SOCKET_CHUNK = MIB


def get_s(
    mover: UcxMover, memory: RemoteMemory, target: Bytes, piece: int, _: int = 0, *, warm_up: int = WARM_UP
) -> float:
    """All of it, piece by piece. `warm_up`: so often before, which does not count."""
    return moved_s(mover, memory, target, piece, range(0, len(target), piece), warm_up)


def again_s(mover: UcxMover, memory: RemoteMemory, target: Bytes, piece: int) -> float:
    """The first piece, as often as there are pieces."""
    return moved_s(mover, memory, target, piece, [0] * (len(target) // piece))


def moved_s(
    mover: UcxMover, memory: RemoteMemory, target: Bytes, piece: int, places: Iterable[int], warm_up: int = WARM_UP
) -> float:
    moves = [Move(memory.span(at, piece), MemorySpan(target[at : at + piece])) for at in places]
    for _ in range(warm_up):
        mover.submit(moves).wait(120)
    start_s = time.perf_counter()
    mover.submit(moves).wait(120)
    return time.perf_counter() - start_s


def round_trip_us(mover: UcxMover, memory: RemoteMemory, target: Bytes) -> float:
    """The median of many small gets, one after the other."""
    took = sorted(get_s(mover, memory, target[:4096], 4096) for _ in range(1000))
    return took[len(took) // 2] * 1e6


@contextlib.contextmanager
def held_on(core: int) -> Iterator[None]:
    """This thread, and the processes and threads that it starts meanwhile, whose they stay."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def anew_s(
    source: Source, options: dict[str, str], act: Callable[[UcxMover, RemoteMemory, Bytes], float], _: int
) -> float:
    """What `act` takes with a mover and a serving process that were just started."""
    with contextlib.ExitStack() as stack:
        memory = stack.enter_context(served(source, options))
        mover = UcxMover(options=options)
        stack.callback(mover.close)
        target = mover.window(len(source.data))
        with held_on(READING):  # where its process will be
            mover.submit([Move(memory.span(0, 1), MemorySpan(target[:1]))]).wait(120)
        with held_on(SERVING):  # out of that one's way
            took_s = act(mover, memory, target)
        assert np.array_equal(target[:4096], source.data[:4096])
        return took_s


@contextlib.contextmanager
def served(source: Source, options: dict[str, str]) -> Iterator[RemoteMemory]:
    with held_on(SERVING):
        process = UcxProcess([(source.fd, len(source.data))], options=options)
    try:
        yield process.memories()[0]
    finally:
        process.close()


class Source:
    """Shared memory with a pattern in it."""

    def __init__(self, size: int) -> None:
        self.fd = os.memfd_create("bench-ucx")
        os.ftruncate(self.fd, size)
        self.data = np.frombuffer(mmap.mmap(self.fd, size), np.uint8)
        self.data[:] = np.resize(np.arange(251, dtype=np.uint8), size)

    def close(self) -> None:
        os.close(self.fd)


def within_s(library: UcxLibrary, source: Source, options: dict[str, str], piece: int, _: int) -> float:
    """The endpoint of the process that reads, in ours."""
    with served(source, options) as memory, held_on(READING):
        within = Within(library, options, aligned_buffer(len(source.data)))
        for _ in range(WARM_UP):
            within.get_s(memory, piece)
        took_s = within.get_s(memory, piece)
        within.close()
        return took_s


class Within:
    """An endpoint here, and memory to get into."""

    def __init__(self, library: UcxLibrary, options: dict[str, str], target: Bytes) -> None:
        self._worker = UcxWorker(library, options=options)
        self._target = target
        self._mapped = self._worker.map(target.ctypes.data, len(target))

    def get_s(self, memory: RemoteMemory, piece: int) -> float:
        rested: list[str] = []
        size = len(self._target)
        start_s = time.perf_counter()
        cut = [
            (at + step, min(CHUNK_BYTES, piece - step))
            for at in range(0, size, piece)
            for step in range(0, piece, CHUNK_BYTES)
        ]
        order = Order(len(cut), rested.append)
        local, memh = self._target.ctypes.data, self._mapped.handle
        pieces = [Piece(order, local + at, part, memory.base + at, memory.rkey, memh, False) for at, part in cut]
        self._worker.send(memory.worker, pieces)
        self._worker.turn()
        while not rested:
            self._worker.sleep()
            self._worker.turn()
        took_s = time.perf_counter() - start_s
        assert rested == [""], rested
        return took_s

    def close(self) -> None:
        self._worker.close()


def perftest(library: UcxLibrary, folder: Path) -> tuple[str, dict[str, str]] | None:
    """The benchmark of the same UCX, and the environment it needs. The wheel's comes without the right to run it."""
    if library.origin == "system":
        found = shutil.which("ucx_perftest")
        return (found, {}) if found else None
    spec = importlib.util.find_spec("libucx")
    if spec is None or spec.origin is None:
        return None
    home = Path(spec.origin).parent
    copy = folder / "ucx_perftest"
    shutil.copy(home / "bin/ucx_perftest", copy)
    copy.chmod(0o755)
    beside = (str(folder) for folder in home.parent.glob("libucx_*.libs"))
    return str(copy), {"LD_LIBRARY_PATH": os.pathsep.join([str(home / "lib"), *beside])}


def perftest_s(tool: tuple[str, dict[str, str]], options: dict[str, str], size: int, message: int, _: int) -> float:
    port = free_port()
    settings = {f"UCX_{name}": value for name, value in (default_options(5.0) | options).items()}
    if "UCX_TLS" in settings:
        settings["UCX_TLS"] += ",sysv"  # not to move by, which it cannot with -e: its buffers are shared memory then
    env = {**os.environ, **tool[1], **settings}
    test = f"-t ucp_get -s {message} -n {size // message} -w {WARM_UP} -O {OUTSTANDING} -e -f".split()
    command = [tool[0], "-p", str(port)]
    with held_on(SERVING):
        server = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(50):
            time.sleep(0.1)
            with held_on(READING):
                run = subprocess.run(
                    [*command, "127.0.0.1", *test], env=env, capture_output=True, text=True, timeout=120, check=False
                )
            if run.returncode == 0:
                break
        numbers = [float(word) for word in run.stdout.strip().splitlines()[-1].split()]
        return size / (numbers[5] * MIB)  # iterations, three latencies, bandwidth average and overall in MiB/s
    finally:
        server.kill()
        server.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve_socket(port: int, size: int) -> None:
    """The child of `socket_s`: sends `size` bytes for each byte it receives."""
    data = memoryview(bytes(SOCKET_CHUNK))
    listener = socket.create_server(("127.0.0.1", port))
    peer, _ = listener.accept()
    while peer.recv(1):
        for _ in range(size // SOCKET_CHUNK):
            peer.sendall(data)


class PlainSocket:
    """A child that sends, and what it sends received into `target`."""

    def __init__(self, size: int) -> None:
        port = free_port()
        with held_on(SERVING):
            self._child = subprocess.Popen([sys.executable, __file__, "--serve", str(port), str(size)])
        for _ in range(100):
            try:
                self._socket = socket.create_connection(("127.0.0.1", port))
                break
            except ConnectionRefusedError:
                time.sleep(0.05)

    def receive_s(self, target: Bytes, _: int) -> float:
        view, got = memoryview(target), 0  # type: ignore[arg-type]
        with held_on(READING):
            start_s = time.perf_counter()
            self._socket.sendall(b"x")
            while got < len(target):
                got += self._socket.recv_into(view[got:])
            return time.perf_counter() - start_s

    def close(self) -> None:
        self._socket.close()
        self._child.wait()


def measure(report: Report, size: int, pieces: list[int], rounds: int, library: UcxLibrary, folder: Path) -> None:
    source, socket_target = Source(size), aligned_buffer(size)
    tool, plain = perftest(library, folder), PlainSocket(size)
    for transport, options in TRANSPORTS.items():
        for piece in pieces:
            name = f"{transport}, {size // MIB} MiB in pieces of {piece // MIB}"
            say(name)
            runs = [
                partial(anew_s, source, options, partial(get_s, piece=piece)),
                partial(plain.receive_s, socket_target),
                partial(within_s, library, source, options, piece),
                partial(anew_s, source, options, partial(again_s, piece=piece)),
            ]
            if tool is not None:
                runs += [partial(perftest_s, tool, options, size, message) for message in (size, piece)]
            ours, sockets, inside, again, *theirs = take_turns(rounds, *runs)
            compare = partial(compared, report, size)
            compare(f"{name}: get / the same within one process", ours, inside)
            compare(f"{name}: get / plain socket", ours, sockets)
            if theirs:
                whole, piecewise = theirs
                compare(f"{name}: get / ucx_perftest, as much memory", ours, whole, 0.9)
                compare(f"{name}: one piece again and again / ucx_perftest", again, piecewise)
                compare(f"{name}: get / ucx_perftest, one piece again and again", ours, piecewise)
        say(f"{transport}, 4 KiB: {anew_s(source, options, round_trip_us, 0):.0f} us a round trip")
    plain.close()
    source.close()


def compared(
    report: Report, size: int, name: str, ours_s: list[float], limit_s: list[float], must: float | None = None
) -> None:
    beside = Compared.of(size, limit_s, ours_s)
    report.add(name, beside.ratio, must, detail=beside)


def main() -> None:
    if "--serve" in sys.argv:
        serve_socket(*map(int, sys.argv[-2:]))
        return
    args = arguments(__doc__, rounds=(3, "turns of each"), mib=(512, "largest total in MiB"))
    library = load_ucx()
    report = Report(f"gets over loopback, {library.named}")
    with tempfile.TemporaryDirectory() as folder:
        for size in sorted({64 * MIB, args.mib * MIB}):
            measure(report, size, [2 * MIB, 8 * MIB], args.rounds, library, Path(folder))
    report.show(as_json=args.json)


if __name__ == "__main__":
    main()
