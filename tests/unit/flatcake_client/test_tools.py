"""Which mover and which staging a restore gets. The device is a stand-in: windows in host memory under its name."""

from __future__ import annotations

import numpy as np
import pytest

from flatcake_client import tools as tools_module
from flatcake_client.tools import Tools
from flatcake_transport.address import Medium
from flatcake_transport.movers.posix import PosixMover
from flatcake_transport.space import SpaceSpec
from flatcake_transport.window import aligned_buffer

BUFFER = 64 << 10


class Device(PosixMover):
    """A GDS mover's place is taken by one that reads into host memory; it notes what was registered."""

    def __init__(self):
        super().__init__()
        self.regions, self.closed = [], 0

    def register(self, region):
        self.regions.append(region)

    def close(self):
        self.closed += 1
        super().close()


class Buffer(np.ndarray):
    def data_ptr(self):
        return self.ctypes.data


@pytest.fixture
def device(monkeypatch):
    """A machine with GDS on cuda:0. Yields the movers that were made for it."""
    made = []

    def mover_for(medium, device="cpu"):
        if medium is Medium.SSD and device == "cuda:0":
            made.append(Device())
            return made[-1]
        return real(medium, device)

    real = tools_module.mover_for
    monkeypatch.setattr(tools_module, "mover_for", mover_for)
    monkeypatch.setattr(tools_module, "PosixMover", type("Plain", (), {}))
    monkeypatch.setattr(tools_module, "device_buffer", lambda size, _: aligned_buffer(size).view(Buffer))
    return made


def test_files_go_straight_to_a_device_that_can_have_them(device):
    tools = Tools(BUFFER, 16 << 20)
    host, direct = tools.reading(), tools.reading("cuda:0")
    assert direct.files is device[0]
    assert direct.files is not host.files
    assert direct.staging is not host.staging
    assert tools.reading("cuda:0").files is direct.files, "made once"
    assert [region.device for region in device[0].regions] == ["cuda:0"], "a window is one piece"
    movers, staging = tools.stats()
    assert {"files to cuda:0", "files"} <= set(movers)
    assert staging["reads to cuda:0"].bytes_made == 2 * BUFFER
    tools.close()
    assert device[0].closed == 1


def test_what_is_verified_passes_through_the_host(device):
    tools = Tools(BUFFER, 16 << 20)
    assert tools.reading("cuda:0", verify=True).files is tools.reading().files
    assert device == []
    tools.close()


def test_without_gds_a_device_gets_the_hosts_windows():
    tools = Tools(BUFFER, 16 << 20)
    assert tools.reading("cuda:0").staging is tools.reading().staging
    tools.close()


def test_a_full_device_gets_the_hosts_windows_and_a_log_line(device, monkeypatch, caplog):
    def full(size_bytes, name):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(tools_module, "device_buffer", full)
    tools = Tools(BUFFER, 16 << 20)
    assert tools.reading("cuda:0").staging is tools.reading().staging
    assert "out of memory" in caplog.text
    assert device[0].closed == 1
    assert tools.reading("cuda:0").staging is tools.reading().staging, "it is not tried again for every request"
    assert len(device) == 1
    tools.close()


def test_windows_grow_with_the_planes_of_a_space(device):
    tools = Tools(BUFFER, 64 << 20)
    assert tools.reading("cuda:0").staging.buffer_bytes == BUFFER
    tools.fit(SpaceSpec("m", "uint8", 16, (1 << 20,)))
    assert tools.reading().staging.buffer_bytes >= 1 << 20
    assert tools.reading("cuda:0").staging.buffer_bytes >= 1 << 20
    with pytest.raises(ValueError, match="raise staging_bytes"):
        tools.fit(SpaceSpec("m", "uint8", 16, (256 << 20,)))
    tools.close()
