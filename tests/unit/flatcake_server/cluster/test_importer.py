"""Exported files from a lookup to a descriptor: two nodes in this process, kernels that are not there."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from cluster import Wire, keys_of, store
from cluster_nodes import nodes, run, soon

from flatcake_server.cluster import exporter as exporter_module
from flatcake_server.cluster.borrowed import Exports
from flatcake_server.cluster.exporter import Exporter
from flatcake_server.cluster.importer import Importer
from flatcake_server.cluster.nvmet import NvmePort, host_nqn, subsystem_nqn
from flatcake_transport.errors import Unavailable

NQN = subsystem_nqn("flatcake", 2)
HOST = host_nqn("flatcake", 1)


class Kernel:
    """Target and initiator in one: a namespace is the file."""

    nqn = NQN

    def __init__(self) -> None:
        self.files: dict[UUID, Path] = {}
        self.connected: list[tuple[str, NvmePort]] = []
        self.refusal = ""
        self.answers = threading.Event()
        self.answers.set()
        self._uuids: list[UUID] = []

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def export(self, path: Path, uuid: UUID) -> int:
        self.files[uuid] = path
        self._uuids.append(uuid)
        return len(self._uuids)

    def withdraw(self, nsid: int) -> None:
        del self.files[self._uuids[nsid - 1]]

    def connect(self, nqn: str, port: NvmePort, timeout_s: float) -> None:
        assert timeout_s > 0
        if self.refusal:
            raise Unavailable(self.refusal)
        self.connected.append((nqn, port))

    def open(self, nqn: str, uuid: UUID, timeout_s: float) -> int:
        assert nqn == NQN
        assert self.answers.wait(30)
        if uuid not in self.files:
            raise Unavailable("it did not appear")
        return os.open(self.files[uuid], os.O_RDONLY)

    def close(self, timeout_s: float) -> None: ...


def test_a_lookup_names_exported_files_and_they_are_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(exporter_module, "WAIT_S", 20.0)

    async def work() -> None:
        async with nodes(tmp_path, disks=True) as (one, two):
            kernel = Kernel()
            exporter = two.cluster.service.exporter = Exporter(two.node.store, kernel, [HOST])
            await exporter.start()
            two.cluster._fabric.nvme = NQN, "tcp://10.0.0.2:4420"
            remote = one.cluster.remote
            remote.nvme_host, remote.importer = HOST, Importer(kernel)
            keys = keys_of(16)
            await asyncio.to_thread(store, two, keys)
            wire = await asyncio.to_thread(Wire, one.endpoint)
            reply = await asyncio.to_thread(wire.lookup, keys, remote=True)
            (there,) = reply.nodes
            (file_id,) = there.exported_files
            assert file_id == reply.runs[0].file_id
            client = wire.welcome.client_id
            (fd,) = (await remote.exported_files(client, reply.lease_id)).values()
            assert os.fstat(fd).st_ino == next(iter(kernel.files.values())).stat().st_ino
            os.close(fd)
            assert kernel.connected == [(NQN, NvmePort("tcp", "10.0.0.2", 4420))]
            with pytest.raises(LookupError):
                await remote.exported_files(client + 1, reply.lease_id)
            kernel.refusal = "nobody there"
            assert await remote.exported_files(client, reply.lease_id) == {}
            assert remote.importer.failure == "nobody there"
            one.node.store.release(client, [reply.lease_id])
            remote.released([reply.lease_id])
            await asyncio.to_thread(wire.__exit__, None, None, None)
            await soon(lambda: not kernel.files and exporter.counts["withdrawals"] == 1)

    run(work())


def test_what_does_not_come_in_time_is_left_out_and_closed(tmp_path):
    async def work() -> None:
        (tmp_path / "file").write_bytes(b"x")
        kernel, uuid = Kernel(), uuid4()
        kernel.files[uuid] = tmp_path / "file"
        importer = Importer(kernel)
        exports = Exports(NQN, "tcp://10.0.0.2:4420", {1: uuid, 2: uuid4()})
        opened = await importer.open(exports, 5.0)
        assert list(opened) == [1], "one that is not there costs itself only"
        os.close(opened[1])
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        kernel.answers.clear()
        assert await importer.open(exports, 0.05) == {}
        assert "in time" in importer.failure
        kernel.answers.set()
        await importer.close()
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
        assert importer.counts == {"opened": 1, "failures": 4}

    asyncio.run(work())
