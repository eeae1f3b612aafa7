"""What the journal costs: bytes on the disk, microseconds a commit, and seconds from opening to everything loaded.

    python bench/journal.py --dir /somewhere/on/a/disk [--thousands 10000] [--json]

Segments of 20 blocks, ten to a session, are committed one by one as the daemon does; in the large journal, to save time, a
session at a time. The writer ends by kill -9, and a new process opens and loads: once with the log to replay, then twice
as after a stop, of which the better counts: other work on the machine only ever adds. CPU seconds stand beside.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from _support import Report, arguments, disk_directory

from flatcake_server.journal import Journal
from flatcake_server.records import FileId, FileRecord, Generation, SegmentRecord, SessionNo, SessionRecord
from flatcake_transport.address import Address, Medium
from flatcake_transport.space import SpaceSpec

BLOCKS, TURNS = 20, 10
SEGMENT_BYTES = 1 << 20
SPACE = SpaceSpec(model="llama-3.1-8b", dtype="bfloat16", block_tokens=64, plane_bytes=(262_144,) * 32)
LOAD = """
import sys, time
from pathlib import Path
from flatcake_server.journal import Journal
begun, cpu = time.perf_counter(), time.process_time()
journal = Journal(Path(sys.argv[1]))
opened = time.perf_counter()
image = journal.load()
print(image.blocks, opened - begun, time.perf_counter() - begun, time.process_time() - cpu)
journal.close()
"""


def fill(path: Path, segments: int, batch: int) -> None:
    """Commit `batch` turns of a session at a time, print seconds, and die."""
    journal = Journal(path)
    journal.load()
    fingerprint = SPACE.fingerprint
    rng = np.random.default_rng(0)
    begun_s = time.perf_counter()
    pending: list[SegmentRecord] = []
    for n in range(segments):
        no, turn = n // TURNS + 1, n % TURNS
        session = SessionRecord(SessionNo(no), f"agent-{no}", fingerprint, turn + 1, 0.0, float(n))
        base = no * TURNS * SEGMENT_BYTES
        file = FileRecord(FileId(no), SessionNo(no), base, TURNS * SEGMENT_BYTES, (turn + 1) * SEGMENT_BYTES)
        segment = SegmentRecord(
            generation=Generation(n + 1),
            session_no=SessionNo(no),
            address=Address.of(Medium.SSD, 0, base + turn * SEGMENT_BYTES),
            total_bytes=SEGMENT_BYTES,
            turn=turn + 1,
            first_block=turn * BLOCKS,
            reason="long-context",
            keys=rng.integers(0, 256, (BLOCKS, 16), dtype=np.uint8),
            parent_key=bytes(16),
            file_id=FileId(no),
            file_offset=turn * SEGMENT_BYTES,
        )
        pending.append(segment)
        if len(pending) == batch:
            journal.commit(session, file, pending, {fingerprint: SPACE})
            pending = []
    print(time.perf_counter() - begun_s, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def run(*arguments_: str) -> list[float]:
    done = subprocess.run([sys.executable, *arguments_], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, -signal.SIGKILL):
        sys.exit(f"a process of this script ended with {done.returncode}")
    return [float(word) for word in done.stdout.split()]


def measure(directory: Path, thousands: int, report: Report) -> None:
    segments = thousands * 1000 // BLOCKS
    name = f"{thousands / 1000:g} M blocks"
    batch = 1 if thousands == 1000 else TURNS
    must_s = 1.0 if thousands == 1000 else None
    path = directory / str(thousands)
    (seconds,) = run(__file__, "--fill", str(path), str(segments), str(batch))
    if batch == 1:
        report.add(f"{name}: commit, us", seconds / segments * 1e6, detail=f"{segments} batches, not synced")
    loads = [run("-c", LOAD, str(path)) for _ in range(3)]
    assert all(load[0] == thousands * 1000 for load in loads), "blocks were lost"
    size_bytes = sum(file.stat().st_size for file in path.iterdir())
    report.add(
        f"{name}: bytes a block", size_bytes / thousands / 1000, detail=f"{size_bytes / 1e6:.1f} MB; 16 are the key"
    )
    (_, opened_s, killed_s, _), *closed = loads
    report.add(f"{name}: after kill -9, s", killed_s, detail=f"opening {opened_s:.3f} s, with the log replayed")
    _, opened_s, best_s, _ = min(closed, key=lambda load: load[2])
    report.add(f"{name}: open and load, s", best_s, must_s, at_most=True, detail=f"opening {opened_s:.3f} s")
    report.add(
        f"{name}: of it CPU, s", min(load[3] for load in closed), detail="other work on the machine adds little to it"
    )
    shutil.rmtree(path)


def main() -> None:
    if sys.argv[1:2] == ["--fill"]:
        fill(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
        return
    args = arguments(__doc__, thousands=(10_000, "blocks in the large journal"))
    report = Report("The journal")
    with disk_directory(args.dir, args.thousands * 1000 * 200) as directory:
        for thousands in dict.fromkeys((1000, args.thousands)):
            measure(directory, thousands, report)
    report.show(as_json=args.json)


if __name__ == "__main__":
    main()
