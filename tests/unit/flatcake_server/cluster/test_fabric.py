from __future__ import annotations

import asyncio
import os
import shutil
import subprocess

import pytest
from ucx_peer import ucx_here

from flatcake_server.arena import Arena
from flatcake_server.cluster import fabric
from flatcake_server.cluster.fabric import Fabric, device_of_address, rdma_ports, ucx_options
from flatcake_transport.errors import Unavailable
from flatcake_transport.remote import unseal_memory
from flatcake_transport.units import Listen


def test_an_address_is_found_on_its_device():
    assert device_of_address("127.0.0.1") == device_of_address("localhost") == device_of_address("lo") == "lo"
    assert device_of_address("::1") == "lo"
    assert device_of_address("192.0.2.7") is None
    assert device_of_address("no such device") is None


@pytest.fixture
def second():
    """A second address of loopback, with a label of its own."""
    address = f"198.18.{os.getpid() % 256}.7"
    words = ["ip", "addr", "add", f"{address}/32", "dev", "lo", "label", "lo:fc"]
    if os.geteuid() or not shutil.which("ip") or subprocess.run(words, check=False, capture_output=True).returncode:
        pytest.skip("a second address needs root and iproute2")
    yield address
    words[2] = "del"
    subprocess.run(words[:6], check=True)


def test_so_is_a_second_one(second):
    assert device_of_address(second) == "lo"


def test_where_to_listen_in_ucxs_words(monkeypatch):
    assert ucx_options(Listen("127.0.0.1", 7452)) == {"TCP_PORT_RANGE": "7452-7459", "NET_DEVICES": "lo"}
    assert ucx_options(Listen("0.0.0.0", 0)) == {}
    with pytest.raises(Unavailable, match=r"no network device has the address 192\.0\.2\.7"):
        ucx_options(Listen("192.0.2.7", 7452))
    monkeypatch.setattr(fabric, "rdma_ports", {"lo": ["mlx5_0:1"]}.get)
    assert ucx_options(Listen("127.0.0.1", 0)) == {"NET_DEVICES": "lo,mlx5_0:1"}


def test_the_card_of_an_address_is_listened_at_too(tmp_path):
    """UCX takes no port of a card that is not named, whatever network device it is of: a node with RDMA would be read over TCP."""

    def put(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    put("class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/0", "eth2\n")
    put("class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/1", "eth2\n")
    put("class/infiniband/mlx5_1/ports/1/gid_attrs/ndevs/0", "eth3\n")
    (tmp_path / "class/infiniband/mlx5_1/ports/1/gid_attrs/ndevs/1").mkdir()  # unreadable, as a free place is
    put("class/infiniband/mlx4_0/ports/2/gid_attrs/ndevs/0", "\n")
    put("class/net/ib1/dev_port", "1\n")
    put("class/net/ib1/device/infiniband/mlx4_0/x", "")
    devices = ("eth2", "eth3", "ib1", "eth0")
    assert [rdma_ports(each, tmp_path) for each in devices] == [["mlx5_0:1"], ["mlx5_1:1"], ["mlx4_0:2"], []]


def test_a_node_that_does_not_listen_serves_nothing():
    arena = Arena(1 << 20, "off")

    async def words() -> bytes:
        fabric = Fabric(None, arena, 1.0)
        await fabric.start()
        try:
            return fabric.words().arena
        finally:
            await fabric.close()

    assert asyncio.run(words()) == b""
    arena.close()


def test_the_arena_is_served_and_no_longer():
    ucx_here()
    arena = Arena(1 << 20, "off")

    async def work() -> None:
        fabric = Fabric(Listen("127.0.0.1", 0), arena, 1.0)
        await fabric.start()
        assert unseal_memory(fabric.words().arena).size_bytes == arena.size_bytes
        await fabric.close()
        await fabric.close()
        assert fabric.words().arena == b""

    asyncio.run(work())
    arena.close()
