"""Two daemons on a real kernel: session files of one are read by engines at the other as namespaces, for as long as they lease them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

import daemon as daemons
from conftest import CONFIG, until
from daemon import Daemon
from kv import Kv, connect

BLOCKS = 24
SLOW_S = 60.0  # an emulated processor is slow to import and to fork


def namespaces(node: int) -> list[str]:
    parent = CONFIG / f"nvmet/subsystems/nqn.2026-11.flatcake:flatcake:node:{node}/namespaces"
    return [entry.name for entry in parent.iterdir()]


def nvmeof(node: Daemon) -> dict[str, int]:
    return dict(node.status()["cluster"]["nvmeof"])


@pytest.fixture(scope="module")
def pair(disk: Path) -> Iterator[tuple[Daemon, Daemon]]:
    daemons.START_TIMEOUT_S = 2 * SLOW_S
    left = [entry for kind in ("subsystems", "ports", "hosts") for entry in (CONFIG / "nvmet" / kind).iterdir()]
    assert left == []

    def made(number: int, **options: object) -> Daemon:
        folder = disk / f"node{number}"
        folder.mkdir()
        told: dict[str, object] = {
            "node_id": number, "directory": "static", "peers": f"127.0.0.1:{7473 - number}", "grpc_listen": f"127.0.0.1:{7470 + number}",
            "memory_bytes": 16 << 20, "ssd_bytes": 64 << 20, "peer_timeout": "20s", "node_ttl": "60s", "nvmeof_allowed_hosts": "1,2",
            "nvmeof": f"tcp://127.0.0.1:{4420 + number}", "index_blocks_max": 100_000,
        }  # fmt: skip
        return Daemon(folder, **told | options)

    one, two = made(1), made(2, ucx_listen="127.0.0.1:0")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(Daemon.start, (one, two)))
    one.until(lambda status: status["cluster"]["links"] == 1, SLOW_S)
    yield one, two
    for each in (one, two):  # shown where a test failed
        print(each.log_tail())
    assert (one.stop(), two.stop()) == (0, 0)
    left = [entry for kind in ("subsystems", "ports", "hosts") for entry in (CONFIG / "nvmet" / kind).iterdir()]
    assert left == [], "daemons that stop leave nothing"


def carried(client: Any) -> tuple[int, int]:
    """Bytes read of namespaces and files, and bytes that the other node read for us."""
    movers = client.stats().movers
    return tuple(movers[name].bytes_moved if name in movers else 0 for name in ("files", "served"))  # type: ignore[return-value]


def test_files_are_read_as_namespaces_while_they_are_leased(pair: tuple[Daemon, Daemon]) -> None:
    one, two = pair
    with connect(one, timeout_s=SLOW_S) as here, connect(two, timeout_s=SLOW_S) as there, two.admin() as admin:
        kv, far = Kv(here), Kv(there)
        tokens = kv.tokens(1, BLOCKS)
        far.store(tokens, session="a")
        with kv.space.lookup(kv.space.keys(tokens)) as hit:
            assert hit.blocks == BLOCKS, one.log_tail() + two.log_tail()
            until(lambda: len(namespaces(2)) == 1)
            assert admin.drop(["a"])["busy"] == ["a"]
            assert kv.hit(tokens, timeout_s=SLOW_S) == BLOCKS
        before = carried(here)
        assert before[0] >= BLOCKS * 3 * 8192, one.log_tail()
        assert before[1] == 0, "nothing was read for us there"
        assert nvmeof(one)["opened"] == 1
        until(lambda: namespaces(2) == [])
        until(lambda: nvmeof(two)["withdrawals"] == nvmeof(two)["exports"] == 1)
        until(lambda: admin.drop(["a"])["dropped"] == ["a"])


def test_what_cannot_be_connected_is_read_there(pair: tuple[Daemon, Daemon]) -> None:
    one, two = pair
    with connect(one, timeout_s=SLOW_S) as here, connect(two, timeout_s=SLOW_S) as there:
        kv, far = Kv(here), Kv(there)
        tokens = kv.tokens(2, BLOCKS)
        far.store(tokens, session="b")
        port = next(
            port for port in (CONFIG / "nvmet/ports").iterdir() if (port / "addr_trsvcid").read_text().strip() == "4422"
        )
        link = port / "subsystems" / "nqn.2026-11.flatcake:flatcake:node:2"
        link.unlink()  # the kernel ends the connections that came this way
        assert kv.hit(tokens, timeout_s=SLOW_S) == BLOCKS
        assert carried(here)[1] >= BLOCKS * 3 * 8192
        one.until(lambda status: status["cluster"]["nvmeof"]["open_failures"] >= 1, SLOW_S)
        assert "did not appear" in one.status()["cluster"]["nvmeof_failure"]
        link.symlink_to(CONFIG / "nvmet/subsystems/nqn.2026-11.flatcake:flatcake:node:2")


def test_an_owner_that_was_killed_clears_what_it_left(pair: tuple[Daemon, Daemon]) -> None:
    one, two = pair
    with connect(one, timeout_s=SLOW_S) as here, connect(two, timeout_s=SLOW_S) as there:
        kv, far = Kv(here), Kv(there)
        tokens = kv.tokens(3, BLOCKS)
        far.store(tokens, session="c")
        with kv.space.lookup(kv.space.keys(tokens)) as hit:
            assert hit.blocks == BLOCKS
            until(lambda: len(namespaces(2)) == 1)
            two.kill()
            assert len(namespaces(2)) == 1
        two.start()
        until(lambda: namespaces(2) == [], SLOW_S)
        one.until(lambda status: status["cluster"]["links"] == 1, SLOW_S)
        until(lambda: kv.hit(tokens, timeout_s=SLOW_S) == BLOCKS, SLOW_S)
