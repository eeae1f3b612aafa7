"""Several SSD paths, each a failure domain: a dead one costs its own sessions. And one daemon a path."""

from __future__ import annotations

import contextlib
import shutil

import pytest
from daemon import Daemon
from faults import broken, files_of, switched
from kv import Kv, connect

import flatcake_client as fc
from flatcake_server import offline

PATHS = 3

# While it is broken, whatever writes or syncs below ssd1 fails.
DEAD_PATH = """
    real = os.fdatasync
    def failing(fd):
        if broken() and "/ssd1/" in os.readlink(f"/proc/self/fd/{fd}"): raise OSError(errno.EIO, "dead")
        return real(fd)
    os.fdatasync = failing
    import flatcake_server.journal as journal
    from flatcake_transport.errors import Unavailable
    write = journal.RocksRecords.write
    def failing_write(self, *a, **k):
        if broken() and "/ssd1/" in str(self._path): raise Unavailable("the test broke it")
        return write(self, *a, **k)
    journal.RocksRecords.write = failing_write
"""


@pytest.fixture
def node(tmp_path):
    paths = ",".join(str(tmp_path / f"ssd{n}") for n in range(PATHS))
    with Daemon(
        tmp_path, ssd_paths=paths, ssd_bytes=PATHS * (32 << 20), wrapper=switched(tmp_path, DEAD_PATH)
    ) as daemon:
        yield daemon


def on_paths(daemon):
    """Session names by the path they are on."""
    with daemon.admin() as admin:
        return {row["name"]: row["path"].rsplit("/", 1)[1] for row in admin.sessions()}


def store(kv, seeds, blocks=8):
    for seed in seeds:
        kv.store(kv.tokens(seed, blocks), session=f"s{seed}")


def hits(kv, seeds, blocks=8):
    return [seed for seed in seeds if kv.hit(kv.tokens(seed, blocks)) == blocks]


def test_sessions_spread_over_the_paths(node):
    with connect(node) as client:
        store(Kv(client), range(9))
        assert sorted(on_paths(node).values()) == ["ssd0"] * 3 + ["ssd1"] * 3 + ["ssd2"] * 3
        assert [len(files_of(path)) for path in node.ssd_paths] == [3, 3, 3]
        node.check()


def test_a_path_that_dies_while_it_is_used(node, tmp_path):
    with connect(node) as client:
        kv = Kv(client)
        store(kv, range(9))
        homes = on_paths(node)
        with broken(tmp_path):
            refused = 0
            for seed in range(100, 112):
                try:
                    store(kv, [seed])
                except fc.Unavailable:
                    refused += 1
            assert 1 <= refused <= 2, "a path whose journal failed is not tried again"
            lost = [seed for seed in range(9) if homes[f"s{seed}"] == "ssd1"]
            assert hits(kv, range(9)) == [seed for seed in range(9) if seed not in lost]
            status = node.status()
            assert [bool(pool["failure"]) for pool in status["pools"] if pool["medium"] == "ssd"] == [
                False,
                True,
                False,
            ]
            assert status["counters"]["disk_failures_total"] == 1
            assert set(on_paths(node).values()) == {"ssd0", "ssd2"}
            node.check()
        store(kv, lost)
        assert hits(kv, range(9)) == list(range(9))
        # Healed and started again, what was committed on it is there; of what is stored twice one copy stands.
        node.kill()
        node.start()
        assert hits(kv, range(9)) == list(range(9))
        node.check()
        assert not any(pool["failure"] for pool in node.status()["pools"])


@pytest.mark.parametrize("how", ["journal", "no directory"])
def test_a_path_that_is_dead_at_the_start(node, how):
    with connect(node) as client:
        kv = Kv(client)
        store(kv, range(6))
        homes = on_paths(node)
        node.stop()
        dead, kept = node.ssd_paths[1], node.root / "kept"
        if how == "journal":
            (dead / "journal" / "CURRENT").write_bytes(b"nonsense\n")
        else:
            (dead / "sessions").rename(kept)
            (dead / "sessions").write_bytes(b"")
        node.start()
        assert hits(kv, range(6)) == [seed for seed in range(6) if homes[f"s{seed}"] != "ssd1"]
        node.check()
        store(kv, range(6))
        assert hits(kv, range(6)) == list(range(6))
        node.check()


def test_all_paths_dead_is_a_node_of_memory(tmp_path):
    code = DEAD_PATH.replace('"/ssd1/"', '"/ssd"')
    with Daemon(tmp_path, wrapper=switched(tmp_path, code)) as daemon, connect(daemon) as client:
        kv = Kv(client)
        shared = kv.tokens(1, 4)
        kv.store(shared, session="s", share_counts=[2] * 4)
        with broken(tmp_path):
            for seed in (5, 6):
                with pytest.raises(fc.Unavailable):
                    store(kv, [seed])
            assert kv.hit(shared) == 4
            kv.store(kv.tokens(2, 3), session="t", share_counts=[2] * 3)
            assert kv.hit(kv.tokens(2, 3)) == 3
            daemon.check()


def test_a_second_daemon_on_a_path_is_refused(node, tmp_path):
    """It says who has it, ends, and the first one notices nothing; so it is with its socket."""
    second = tmp_path / "second"
    second.mkdir()
    assert node.process is not None
    with connect(node) as client:
        kv = Kv(client)
        store(kv, range(2))
        for options, words in (
            ({"ssd_paths": node.ssd_paths[2]}, f"in use by process {node.process.pid}"),
            ({"socket": node.options["socket"]}, "another daemon answers"),
        ):
            other = Daemon(second, **options)
            with contextlib.suppress(AssertionError):
                other.start()
            assert other.wait(10)
            assert words in other.log_tail()
            assert "Traceback" not in other.log_tail()
            assert other.process is not None
            assert other.process.returncode == 3
        assert hits(kv, range(2)) == [0, 1]
        store(kv, range(2, 5))
        node.check()


def test_the_socket_of_a_killed_daemon_is_taken_over(daemon):
    daemon.kill()
    assert daemon.root.joinpath("fc.sock").exists()
    daemon.start()


def test_paths_that_served_in_turn_serve_together_again(node):
    """Disks that are out for repair one after the other: what each was given meanwhile, the other did not see."""
    with connect(node) as client:
        kv = Kv(client)
        paths = str(node.options["ssd_paths"]).split(",")
        for turn in range(PATHS):
            node.stop()
            node.options["ssd_paths"] = paths[turn]
            node.start()
            store(kv, range(3 * turn, 3 * turn + 3), blocks=4 + turn)
        node.stop()
        node.options["ssd_paths"] = ",".join(paths)
        node.start()
        assert not any(pool["failure"] for pool in node.status()["pools"])
        for turn in range(PATHS):
            assert len(hits(kv, range(3 * turn, 3 * turn + 3), blocks=4 + turn)) == 3
        assert node.check()["sessions"] == 9, "they have counted the same generations"


def test_a_path_can_move_to_another_node_and_beside_another_path_but_not_beside_its_copy(tmp_path):
    """A directory describes itself, addresses and all; of a file there can be one only."""
    with Daemon(tmp_path) as daemon, connect(daemon) as client:
        kv = Kv(client)
        store(kv, range(3))
        daemon.stop()
        (tmp_path / "ssd").rename(tmp_path / "moved")
        daemon.options |= {"ssd_paths": tmp_path / "moved", "node_id": 7}
        daemon.start()
        assert hits(kv, range(3)) == [0, 1, 2]
        with kv.space.lookup(kv.space.keys(kv.tokens(1, 8))) as hit:
            assert hit.runs[0].segment.node == 7
        daemon.check()
        daemon.stop()
        daemon.options["ssd_paths"] = tmp_path / "other"
        daemon.start()
        store(kv, range(10, 12))
        daemon.stop()
        daemon.options["ssd_paths"] = f"{tmp_path / 'other'},{tmp_path / 'moved'}"
        daemon.start()
        assert hits(kv, [*range(3), 10, 11]) == [*range(3), 10, 11]
        daemon.check()
        daemon.stop()
        shutil.copytree(tmp_path / "other", tmp_path / "copy")
        daemon.options["ssd_paths"] = f"{tmp_path / 'other'},{tmp_path / 'copy'}"
        daemon.start()
        assert "has session files with the numbers of another path's" in daemon.log_tail()
        assert hits(kv, [*range(3), 10, 11]) == [10, 11]
        daemon.check()


def test_a_path_whose_journal_was_rebuilt_keeps_to_its_own(node):
    """A rebuilt journal numbers sessions anew; the other paths' have those numbers."""
    with connect(node) as client:
        kv = Kv(client)
        store(kv, range(6))
        for _ in range(2):
            node.stop()
            (node.ssd_paths[1] / "journal").rename(node.root / f"gone{len(list(node.root.iterdir()))}")
            offline.rebuild(node.ssd_paths[1])
            for _ in range(2):
                node.kill()
                node.start()
                assert hits(kv, range(6)) == list(range(6))
                assert node.check()["sessions"] == 6
