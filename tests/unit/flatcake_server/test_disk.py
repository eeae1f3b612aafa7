"""A path that hangs: what begins on it, and what does not."""

from __future__ import annotations

import asyncio
import threading

import pytest
from core import Core

from flatcake_server import disk as disk_module
from flatcake_server.disk import Disk
from flatcake_transport.errors import Overloaded
from flatcake_transport.space import SpaceSpec

ONE = SpaceSpec("one", "u8", 16, (4096,))


def test_a_path_that_hangs_takes_nothing_new_and_then_goes_on(tmp_path, monkeypatch):
    disk, hang = Disk(tmp_path, 1, 1 << 20, 8), threading.Event()

    async def story() -> None:
        assert disk.waited_s == 0
        reading = asyncio.ensure_future(disk.read(hang.wait))
        disk.admit()
        monkeypatch.setattr(disk_module, "STUCK_S", 0.0)
        disk.admit()  # a long read says nothing of the disk
        working = asyncio.ensure_future(disk.run(hang.wait))
        while not disk.waited_s:
            await asyncio.wait({working}, timeout=0.001)
        with pytest.raises(Overloaded, match="has not ended its oldest operation"):
            disk.admit()
        hang.set()
        await asyncio.gather(reading, working)
        assert disk.waited_s == 0
        disk.admit()

    asyncio.run(story())
    disk.close()


def test_a_path_that_hangs_takes_none_of_the_others_along(tmp_path, monkeypatch):
    """It has most room, since nothing is stored on it."""
    core = Core(tmp_path, paths=2, open_turns_max=4)
    core.open(ONE)
    slow = core.store.disks[1]
    monkeypatch.setattr(type(slow), "waited_s", property(lambda disk: 5.0 if disk is slow else 0.0))
    for number in range(12):
        core.put(ONE, [number, 0], session=f"s{number}")
    assert {session.pool for session in core.store.catalog.sessions.values()} == {2}
    monkeypatch.setattr(type(slow), "waited_s", property(lambda disk: 60.0 if disk is not slow else 0.0))
    with pytest.raises(Overloaded, match="has not ended"):
        core.put(ONE, [0, 0, 1], session="s0")
    assert not core.store.turns
    core.put(ONE, [99], session="new")
    assert core.store.catalog.find(ONE.fingerprint, "new").pool == 1
    core.check(data=True)
    core.check_rest()
    core.close()
