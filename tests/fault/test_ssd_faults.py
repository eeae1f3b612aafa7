"""A disk that is full, fails, refuses or lies: a turn is refused or lost, a block is a miss, and the law holds all the time."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
from daemon import Daemon
from faults import broken, files_of, immutable, small_disk, switched
from kv import Kv, connect

import flatcake_client as fc
from flatcake_transport.movers import posix


def stored(kv, seeds, **options):
    """Those seeds whose turn was stored."""
    done = []
    for seed in seeds:
        try:
            kv.store(kv.tokens(seed, 8), session=f"s{seed}", **options)
        except (fc.Overloaded, fc.Unavailable):
            continue
        done.append(seed)
    return done


@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
def test_a_disk_full_of_somebody_elses_bytes(tmp_path, kind):
    """ENOSPC long before the quota: turns are refused, what is stored stays, and room that is made is used."""
    with (
        small_disk(tmp_path, 96 << 20, kind=kind) as disk,
        Daemon(tmp_path, ssd_paths=disk / "ours", ssd_bytes=72 << 20) as daemon,
        connect(daemon) as client,
    ):
        with (disk / "theirs").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 48 << 20)
        kv = Kv(client, plane_bytes=128 << 10)  # 3 MiB a turn
        done = stored(kv, range(24))
        assert 6 <= len(done) < 20
        assert daemon.status()["counters"]["turns_refused_total"] == 24 - len(done)
        assert daemon.pool("ssd")["full"]
        assert "takes no file" in daemon.log_tail()
        assert all(kv.hit(kv.tokens(seed, 8)) == 8 for seed in done)
        daemon.check()
        with daemon.admin() as admin:
            assert len(admin.drop([f"s{seed}" for seed in done[:4]])["dropped"]) == 4
        assert stored(kv, range(100, 103)) == [100, 101, 102]
        assert not daemon.pool("ssd")["full"]
        daemon.check()
        daemon.kill()
        daemon.start()
        assert all(kv.hit(kv.tokens(seed, 8)) == 8 for seed in [*done[4:], 100, 101, 102])
        daemon.check()


@pytest.mark.parametrize("call", ["fdatasync", "pwrite"])
def test_a_footer_that_cannot_be_written(tmp_path, call):
    """EIO: the turn is not stored, its file takes no more, the session goes on in another one."""
    code = f"""
        real = os.{call}
        def failing(*a):
            if broken(): raise OSError(errno.EIO, "the test broke {call}")
            return real(*a)
        os.{call} = failing
    """
    with Daemon(tmp_path, wrapper=switched(tmp_path, code)) as daemon, connect(daemon) as client:
        kv = Kv(client)
        first, longer = kv.tokens(1, 8), kv.tokens(2, 1, after=kv.tokens(1, 8))
        kv.store(first)
        with broken(tmp_path), pytest.raises(fc.Unavailable, match="not stored"):
            kv.store(longer)
        assert kv.hit(longer) == 8
        assert daemon.status()["counters"]["files_sealed_total"] == 1
        daemon.check()
        kv.store(longer)
        assert kv.hit(longer) == 9
        with daemon.admin() as admin:
            assert admin.session("s")["files"] == 2
        daemon.check()
        daemon.kill()
        daemon.start()
        assert kv.hit(longer) == 9
        daemon.check()


def test_short_footer_writes_are_continued(tmp_path):
    code = """
        real = os.pwrite
        os.pwrite = lambda fd, data, offset: real(fd, data[:-(-len(data) // 3)], offset)
    """
    with Daemon(tmp_path, verify="all", wrapper=switched(tmp_path, code)) as daemon, connect(daemon) as client:
        kv = Kv(client)
        kv.store(kv.tokens(1, 8))
        assert kv.hit(kv.tokens(1, 8)) == 8
        with daemon.admin() as admin:
            assert [step.report for step in admin.check(data=True)][-1]["ok"]


def test_a_client_whose_writes_are_short(daemon, monkeypatch):
    """Page by page, and in odd pieces: all of it arrives."""
    real = posix._pwritev, posix._preadv
    monkeypatch.setattr(
        posix, "_pwritev", lambda fd, data, offset: real[0](fd, data[: max(4096, len(data) // 2)], offset)
    )
    monkeypatch.setattr(
        posix, "_preadv", lambda fd, data, offset: real[1](fd, data[: max(4096, len(data) // 2)], offset)
    )
    with connect(daemon) as client:
        kv = Kv(client, plane_bytes=33_000)
        kv.store(kv.tokens(1, 8))
        assert kv.hit(kv.tokens(1, 8)) == 8


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_client_whose_writes_fail(daemon, monkeypatch, code):
    """A sparse file on a full disk, or a bad sector: nothing of the turn shows, its space comes back, the file is sealed."""
    real, calls = posix._pwritev, []

    def failing(fd, data, offset):
        calls.append(offset)
        if len(calls) > 1:
            raise OSError(code, os.strerror(code))
        return real(fd, data, offset)

    with connect(daemon) as client:
        kv = Kv(client)
        kv.store(kv.tokens(1, 8))
        calls.append(0)
        monkeypatch.setattr(posix, "_pwritev", failing)
        longer = kv.tokens(2, 4, after=kv.tokens(1, 8))
        with pytest.raises(fc.Unavailable, match="not stored"):
            kv.store(longer)
        monkeypatch.undo()
        assert kv.hit(longer) == 8
        status = daemon.until(lambda status: status["open_turns"] == 0)
        assert status["counters"]["files_sealed_total"] == 1
        daemon.check()
        kv.store(longer)
        assert kv.hit(longer) == 12


def test_a_client_whose_reads_fail(daemon, monkeypatch):
    """EIO in the second segment: the first is usable; nothing is called corrupt for it, and later it is there again."""
    with connect(daemon) as client:
        kv = Kv(client)
        kv.store(kv.tokens(1, 8))
        longer = kv.tokens(2, 4, after=kv.tokens(1, 8))
        kv.store(longer)
        run = kv.space.lookup(kv.space.keys(longer), pin=False).runs[1]
        bad = next(path.stat().st_ino for path in files_of(daemon.root / "ssd") if int(path.stem, 16) == run.file_id)
        real = posix._preadv

        def failing(fd, data, offset):
            if os.fstat(fd).st_ino == bad and offset + len(data) > run.file_offset:
                raise OSError(errno.EIO, "the test broke it")
            return real(fd, data, offset)

        monkeypatch.setattr(posix, "_preadv", failing)
        assert kv.hit(longer) == 8
        monkeypatch.undo()
        assert kv.hit(longer) == 12
        assert client.stats().corrupt_segments == 0


def test_truncated_and_deleted_files(tmp_path):
    """Somebody cuts one file and deletes another: those blocks miss, the law says so; a start forgets them.

    Who wrote them has them open, and so has what was deleted, and not what was cut.
    """
    with Daemon(tmp_path) as daemon, connect(daemon) as client, connect(daemon) as other:
        kv, reader = Kv(client), Kv(other)
        assert stored(kv, range(4)) == [0, 1, 2, 3]
        cut, deleted, emptied, _whole = files_of(tmp_path / "ssd")
        os.truncate(cut, 3 * 8 * kv.plane_bytes - 4096)
        deleted.unlink()
        os.truncate(emptied, 0)
        assert kv.hit(kv.tokens(0, 8)) < 8
        assert [kv.hit(kv.tokens(seed, 8)) for seed in (1, 2, 3)] == [8, 0, 8]
        assert [reader.hit(kv.tokens(seed, 8)) for seed in (1, 2, 3)] == [0, 0, 8]
        assert kv.hit(kv.tokens(1, 8)) == 0
        with pytest.raises(AssertionError, match="bytes on disk"):
            daemon.check()
        daemon.kill()
        daemon.start()
        assert [kv.hit(kv.tokens(seed, 8)) for seed in range(4)] == [0, 0, 0, 8]
        report = daemon.check()
        assert (report["sessions"], report["segments"]) == (1, 1)
        assert len(files_of(tmp_path / "ssd")) == 1
        assert stored(kv, range(4)) == [0, 1, 2, 3]
        assert [kv.hit(kv.tokens(seed, 8)) for seed in range(4)] == [8] * 4
        daemon.check()


def test_files_that_are_gone_can_still_be_dropped(daemon):
    with connect(daemon) as client:
        kv = Kv(client)
        stored(kv, range(2))
        files_of(daemon.root / "ssd")[0].unlink()
        with daemon.admin() as admin:
            assert admin.drop(["s0"])["dropped"] == ["s0"]
        assert [kv.hit(kv.tokens(seed, 8)) for seed in range(2)] == [0, 8]
        assert daemon.pool("ssd")["releasing_bytes"] == 0


def test_an_undeletable_file(tmp_path):
    """Its session is gone for readers; its bytes stay counted until it can be deleted, also over a restart."""
    with Daemon(tmp_path) as daemon, connect(daemon) as client:
        kv = Kv(client)
        assert stored(kv, range(2)) == [0, 1]
        before = daemon.pool("ssd")
        stuck = files_of(tmp_path / "ssd")[0]
        size = stuck.stat().st_size
        with immutable(stuck):
            with daemon.admin() as admin:
                assert admin.drop(["s0"])["dropped"] == ["s0"]
            assert kv.hit(kv.tokens(0, 8)) == 0
            pool = daemon.pool("ssd")
            assert (pool["releasing_bytes"], pool["free_bytes"]) == (size, before["free_bytes"])
            daemon.check()
            daemon.kill()
            daemon.start()
            pool = daemon.pool("ssd")
            assert pool["releasing_bytes"] == size
            assert [kv.hit(kv.tokens(seed, 8)) for seed in range(2)] == [0, 8]
            daemon.check()
            assert stored(kv, [5]) == [5], "its number is not used again"
        daemon.until(lambda status: not any(pool["releasing_bytes"] for pool in status["pools"]))
        assert not stuck.exists()
        daemon.check()


REFUSALS = {
    "O_DIRECT": """
        real = os.open
        def refusing(path, flags, *a, **k):
            if flags & os.O_DIRECT: raise OSError(errno.EINVAL, "no O_DIRECT here")
            return real(path, flags, *a, **k)
        os.open = refusing
    """,
    "fallocate": """
        import flatcake_server.session as session
        def refusing(fd, size): raise OSError(errno.EOPNOTSUPP, "no fallocate here")
        session.fallocate = refusing
    """,
}


@pytest.mark.parametrize("what", REFUSALS)
def test_a_file_system_that_refuses(tmp_path, what):
    with (
        Daemon(tmp_path, verify="all", wrapper=switched(tmp_path, REFUSALS[what])) as daemon,
        connect(daemon) as client,
    ):
        kv = Kv(client, plane_bytes=5000)
        assert stored(kv, range(3)) == [0, 1, 2]
        assert all(kv.hit(kv.tokens(seed, 8)) == 8 for seed in range(3))
        assert daemon.pool("ssd")["direct"] is (what != "O_DIRECT")
        assert client.stats().movers["files"].path == ("posix+buffered" if what == "O_DIRECT" else "posix+direct")
        daemon.check()
        daemon.kill()
        daemon.start()
        assert all(kv.hit(kv.tokens(seed, 8)) == 8 for seed in range(3))
        daemon.check()


def test_nothing_is_written_into_slots_that_were_not_asked_for(daemon):
    """The file ends inside a plane: slots before it are right, no slot that was not asked for is touched."""
    with connect(daemon) as client:
        kv = Kv(client, layers=1)
        kv.store(kv.tokens(1, 8))
        (path,) = files_of(daemon.root / "ssd")
        size = path.stat().st_size
        with kv.space.lookup(kv.space.keys(kv.tokens(1, 8))) as hit:
            os.truncate(path, 3 * kv.plane_bytes)
            pages = [np.full((20, kv.plane_bytes), 7, np.uint8)]
            usable = hit.restore(pages, np.arange(0, 16, 2)).wait()
        assert usable <= 3
        assert np.array_equal(pages[0][0 : 2 * usable : 2], kv.bytes_of(hit.keys[:usable], 0))
        assert (pages[0][1::2] == 7).all()
        assert (pages[0][16:] == 7).all()
        os.truncate(path, size)
