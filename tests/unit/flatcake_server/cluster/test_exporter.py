"""Exports hang on leases, and sessions on exports: with a kernel that is here, and can be slow, refuse, or not let go."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from uuid import UUID

import pytest
from core import Core, Yield, chain

from flatcake_server.cluster import exporter
from flatcake_server.cluster.exporter import Exporter
from flatcake_server.cluster.nvmet import NvmePort, host_nqn, parse_port, subsystem_nqn
from flatcake_transport.errors import Unavailable
from flatcake_transport.space import SpaceSpec

SPEC = SpaceSpec("one", "u8", 16, (4096, 8192))
HOST = host_nqn("c", 1)


class Target:
    """`NvmeTarget`, as far as it is used."""

    nqn = subsystem_nqn("c", 2)

    def __init__(self) -> None:
        self.paths: dict[int, Path] = {}
        self.refuses = self.keeps = self.missing = False
        self.gate = threading.Event()
        self.gate.set()
        self.stopped = 0
        self._last = 0

    def start(self) -> None:
        assert self.gate.wait(10)
        if self.missing:
            raise Unavailable("no configfs")

    def export(self, path: Path, uuid: UUID) -> int:
        assert uuid.version == 4
        assert self.gate.wait(10)
        if self.refuses:
            raise Unavailable("no O_DIRECT")
        self._last += 1
        self.paths[self._last] = path
        return self._last

    def withdraw(self, nsid: int) -> None:
        if self.keeps:
            raise Unavailable("it is being read")
        assert self.paths[nsid].exists(), "the file outlasts its export"
        del self.paths[nsid]

    def stop(self) -> None:
        self.stopped += 1
        self.paths.clear()


class Setting:
    def __init__(self, core: Core) -> None:
        self.core, self.target = core, Target()
        self.exporter = Exporter(core.store, self.target, [HOST])
        core.do(self.exporter.start())

    def lease(self, path: list[int]) -> int:
        return self.core.store.lookup(self.core.clients[1], SPEC.fingerprint, chain(SPEC, path), pin=True).lease_id

    def exported(self, lease: int, host: str = HOST) -> dict[int, UUID]:
        return self.core.do(self.exporter.exported(self.core.clients[1], lease, host))

    def end(self, *leases: int) -> None:
        self.core.store.release(self.core.clients[1], leases)
        self.sweep()

    def sweep(self) -> None:
        async def work() -> None:
            self.exporter.sweep()
            while any(not task.done() for task in list(self.exporter._ending.values())):
                await Yield()

        self.core.do(work())

    def busy(self, name: str) -> bool:
        session = self.core.store.catalog.find(SPEC.fingerprint, name)
        return self.core.node.retirement.busy(session.session_no)


@pytest.fixture
def setting(tmp_path, monkeypatch):
    monkeypatch.setattr(exporter, "WAIT_S", 20.0)
    core = Core(tmp_path)
    core.open(SPEC)
    core.put(SPEC, [1, 2, 3], session="a")
    core.put(SPEC, [7, 8], session="b")
    made = Setting(core)
    yield made
    core.do(made.exporter.stop())
    core.do(made.exporter.stop())
    assert made.target.stopped <= 1
    core.check_rest()
    core.check(data=True)
    core.close()


def test_a_file_is_exported_once_for_all_leases_and_withdrawn_after_the_last(setting):
    first, second = setting.lease([1, 2, 3]), setting.lease([1, 2])
    one, two = setting.exported(first), setting.exported(second)
    assert one == two
    assert len(one) == len(setting.target.paths) == len(setting.exporter) == 1
    setting.end(first)
    assert len(setting.target.paths) == 1
    assert setting.busy("a")
    setting.end(second)
    assert setting.target.paths == {}
    assert not setting.busy("a")
    assert setting.exporter.counts == {"exports": 1, "withdrawals": 1, "refused": 0}
    assert setting.exported(setting.lease([1, 2, 3])) != one, "another UUID with each export"


def test_a_session_is_held_until_its_file_is_withdrawn(setting):
    lease = setting.lease([1, 2, 3])
    assert setting.exported(lease)
    setting.target.keeps = True
    setting.end(lease)
    assert setting.busy("a"), "the kernel still has it"
    setting.sweep()
    assert setting.exporter.counts["stuck"] == 2
    assert setting.exported(setting.lease([1, 2, 3])) == {}, "what is being withdrawn is not given out"
    setting.target.keeps = False
    setting.sweep()
    assert setting.target.paths == {}
    setting.core.store.release(setting.core.clients[1], range(1, 10))
    assert not setting.busy("a")


def test_hosts_that_are_not_allowed_get_nothing(setting):
    assert setting.exported(setting.lease([1, 2]), host_nqn("c", 9)) == {}
    assert setting.target.paths == {}


def test_the_lease_must_be_the_peers(setting):
    with pytest.raises(LookupError):
        setting.exported(99)


def test_a_file_that_the_kernel_refuses_is_held_by_nobody(setting):
    setting.target.refuses = True
    lease = setting.lease([1, 2, 3])
    assert setting.exported(lease) == {}
    setting.end(lease)
    assert not setting.busy("a")
    assert setting.exporter.counts["failures"] == 1
    setting.target.refuses = False
    assert len(setting.exported(setting.lease([1, 2, 3]))) == 1


def test_a_slow_kernel_costs_a_moment_and_the_next_lease_has_it(setting, monkeypatch):
    setting.target.gate.clear()
    lease = setting.lease([7, 8])
    with monkeypatch.context() as patch:
        patch.setattr(exporter, "WAIT_S", 0.05)
        assert setting.exported(lease) == {}
    setting.target.gate.set()
    again = setting.lease([7])
    assert len(setting.exported(again)) == 1
    setting.end(lease, again)
    assert setting.target.paths == {}


def test_a_lease_that_ends_while_its_file_is_exported(setting, monkeypatch):
    monkeypatch.setattr(exporter, "WAIT_S", 0.05)
    setting.target.gate.clear()
    lease = setting.lease([7, 8])
    assert setting.exported(lease) == {}
    setting.core.store.release(setting.core.clients[1], [lease])
    setting.target.gate.set()
    setting.sweep()
    assert setting.target.paths == {}
    assert not setting.busy("b")


def test_a_kernel_without_a_target_is_no_failed_start(tmp_path):
    core = Core(tmp_path)
    target = Target()
    target.missing = True
    without = Exporter(core.store, target, [HOST])
    core.do(without.start())
    assert "no configfs" in without.failure
    assert core.do(without.exported(core.clients[1], 1, HOST)) == {}
    core.do(without.stop())
    assert target.stopped == 0
    core.close()


def test_a_start_that_is_given_up_leaves_nothing_in_the_kernel(tmp_path):
    """SIGTERM meanwhile: the thread goes on, and has made it when the end comes."""
    core = Core(tmp_path)
    target = Target()
    target.gate.clear()
    given_up = Exporter(core.store, target, [HOST])

    async def story() -> None:
        starting = asyncio.ensure_future(given_up.start())
        await Yield()
        starting.cancel()
        await asyncio.wait({starting})
        target.gate.set()
        await given_up.stop()

    core.do(story())
    assert target.stopped == 1
    core.close()


def test_names_and_ports():
    assert parse_port("off") is parse_port("") is None
    assert parse_port("tcp://10.0.0.7:4420") == NvmePort("tcp", "10.0.0.7", 4420)
    assert parse_port("rdma://[fd00::7]:4420") == NvmePort("rdma", "fd00::7", 4420)
    for wrong in ("tcp", "http://a:1", "tcp://:4420", "tcp://10.0.0.7", "tcp://10.0.0.7:port"):
        with pytest.raises(ValueError, match="write tcp"):
            parse_port(wrong)
    assert host_nqn("c", "nqn.2014-08.org:x") == "nqn.2014-08.org:x"
    assert subsystem_nqn("c", 1) != HOST
