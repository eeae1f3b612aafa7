"""A session file read as a namespace of the kernel's NVMe-oF target, beside the same file read where it lies.

    local   O_DIRECT preadv of the file, the best of a few settings
    tcp     the same settings, through nvmet over NVMe/TCP, loopback
    rdma    the same over NVMe/RDMA, where --rdma names the address of an RDMA device

Owner and reader are one kernel here, so both ends of the wire share its processors. In the guest these are emulated and its disk is not: there
it shows that the way is whole, and what it costs a processor. Needs root, nvme-cli and the kernel's modules: tests/fabric/run has them all (`make bench-fabric`).

Run: python bench/nvmeof.py --dir DIR [--rdma ADDRESS] [--size-mib 64] [--rounds 5] [--json]
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path
from uuid import uuid4

import numpy as np
from _support import KIB, MIB, Compared, Contenders, Raw, Report, Setting, say, take_turns

from flatcake_server.cluster.nvme_host import NvmeHost
from flatcake_server.cluster.nvmet import NvmePort, NvmeTarget
from flatcake_transport.window import aligned_buffer

NQN = "nqn.2026-11.flatcake:bench:target"
HOST = "nqn.2026-11.flatcake:bench:host"
COMMANDS = (512 * KIB, 4 * MIB)
ONE = Setting(4 * MIB, 1)
TIMEOUT_S = 60.0


def measure(report: Report, raw: Raw, path: Path, port: NvmePort, rounds: int) -> None:
    size_bytes = path.stat().st_size
    target, host = NvmeTarget(NQN, [port], [HOST]), NvmeHost(HOST)
    target.start()
    try:
        uuid = uuid4()
        nsid = target.export(path, uuid)
        host.connect(NQN, port, TIMEOUT_S)
        fd = host.open(NQN, uuid, TIMEOUT_S)
        try:
            here, there = aligned_buffer(size_bytes), aligned_buffer(size_bytes)
            raw.read_s(path, ONE, here)
            raw.read_open_s(fd, size_bytes, ONE, there)
            assert np.array_equal(here, there), "other bytes came than are in the file"
            say(f"taking turns: {port.transport} and local")
            local = Contenders(lambda setting: raw.read_s(path, setting), commands=COMMANDS)
            far = Contenders(partial(raw.read_open_s, fd, size_bytes), commands=COMMANDS)
            local_s, far_s = take_turns(rounds, local.run_s, far.run_s)
        finally:
            os.close(fd)
            target.withdraw(nsid)
        compared = Compared.of(size_bytes, local_s, far_s)
        report.add(f"NVMe/{port.transport}: namespace / the file where it lies", compared.ratio, detail=compared)
    finally:
        host.close(TIMEOUT_S)
        target.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="on the disk to read")
    parser.add_argument("--rdma", default="", help="address of an RDMA device of this machine")
    parser.add_argument("--size-mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    told = parser.parse_args()
    raw, path = Raw(), told.dir / "session"
    raw.write_s(path, told.size_mib * MIB, ONE)
    ports = [NvmePort("tcp", "127.0.0.1", 4420)]
    if told.rdma:
        ports.append(NvmePort("rdma", told.rdma, 4421))
    report = Report("a session file over NVMe-oF, owner and reader in one kernel")
    try:
        for port in ports:
            measure(report, raw, path, port, told.rounds)
    finally:
        path.unlink()
    report.show(as_json=told.json)


if __name__ == "__main__":
    main()
