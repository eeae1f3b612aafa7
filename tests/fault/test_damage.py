"""Flipped bits in data, footers and journal: never other bytes than were stored; a miss, once, and for good."""

from __future__ import annotations

import numpy as np
import pytest
from daemon import Daemon
from faults import files_of, flip
from kv import Kv, connect

import flatcake_client as fc
from flatcake_server import offline


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("damage"), verify="all") as daemon:
        yield daemon


@pytest.fixture
def kv(node, request):
    """A space of the test's own, with two turns in it: the first 6 blocks, then 2."""
    with connect(node) as client:
        kv = Kv(client, layers=2, plane_bytes=70_000, model=request.node.name)
        kv.name = f"{request.node.name}"
        kv.first = kv.tokens(1, 6)
        kv.longer = kv.tokens(2, 2, after=kv.first)
        yield kv
    node.check()


def corrupt_segments(node):
    return node.status()["counters"]["corrupt_segments_total"]


def checked(node):
    with node.admin() as admin:
        return [step.report for step in admin.check(data=True) if step.report][-1]


def place(kv, tokens):
    """Of a context's last segment: its run, and its file if it is on SSD."""
    return kv.space.lookup(kv.space.keys(tokens), pin=False).runs[-1]


def file_of(node, run):
    return next(path for path in files_of(node.root / "ssd") if int(path.stem, 16) == run.file_id)


@pytest.mark.parametrize("where", ["first plane", "last plane", "footer head", "footer tail"])
def test_ssd(node, kv, where):
    """A flip anywhere in the second segment: the first one's blocks come back, the second's never again."""
    kv.store(kv.first, session=kv.name)
    kv.store(kv.longer, session=kv.name)
    run = place(kv, kv.longer)
    layout = kv.space.layout_of(run.blocks)
    at = {
        "first plane": 0,
        "last plane": layout.chunk(1, run.blocks) - 1,
        "footer head": layout.data_bytes + 100,
        "footer tail": run.segment_bytes - 1,
    }[where]
    before = corrupt_segments(node)
    flip(file_of(node, run), run.file_offset + at, bit=at % 8)
    findings = checked(node)["findings"]
    assert len(findings) == 1
    assert kv.name in findings[0]
    assert kv.hit(kv.longer) == 6
    assert corrupt_segments(node) == before + 1
    assert checked(node)["ok"], "the damaged segment is out of the store"
    assert place(kv, kv.longer).segment != run.segment
    assert kv.space.lookup(kv.space.keys(kv.longer), pin=False).blocks == 6
    kv.store(kv.longer, session=kv.name)
    assert kv.hit(kv.longer) == 8


@pytest.mark.parametrize("where", ["data", "footer"])
def test_memory(node, kv, where):
    """The arena is writable by every local client: one that runs wild is found out."""
    counts = [2] * 6
    kv.store(kv.first, session=kv.name, share_counts=counts)
    run = place(kv, kv.first)
    assert run.segment.medium.name == "MEMORY"
    with kv.space.lookup(kv.space.keys(kv.first)) as hit:
        arena = hit.arena(5.0)
        layout = kv.space.layout_of(run.blocks)
        arena[run.segment.offset + (layout.chunk(0, 3) if where == "data" else layout.data_bytes + 40)] ^= 4
    assert len(checked(node)["findings"]) == 1
    assert kv.hit(kv.first) < 6
    assert checked(node)["ok"]
    kv.store(kv.first, session=kv.name, share_counts=counts)
    assert kv.hit(kv.first) == 6


def test_bytes_of_another_segment(node, kv):
    """A whole segment, valid in itself, in another's place: its footer says whose it is."""
    kv.store(kv.first, session=kv.name)
    other = kv.tokens(3, 6)
    kv.store(other, session=kv.name + "2")
    one, two = place(kv, kv.first), place(kv, other)
    bytes_of_one = file_of(node, one).read_bytes()[: one.segment_bytes]
    with file_of(node, two).open("r+b") as file:
        file.write(bytes_of_one)
    assert kv.hit(other) == 0
    assert kv.hit(kv.first) == 6
    assert checked(node)["ok"]


def test_quarantine_holds_over_a_restart(tmp_path):
    with Daemon(tmp_path, verify="all") as daemon, connect(daemon) as client:
        kv = Kv(client)
        first = kv.tokens(1, 6)
        longer = kv.tokens(2, 3, after=first)
        kv.store(first)
        kv.store(longer)
        run = place(kv, longer)
        flip(file_of(daemon, run), run.file_offset + 77)
        assert kv.hit(longer) == 6
        assert client.stats().corrupt_segments == 1
        daemon.kill()
        daemon.start()
        assert daemon.check()["segments"] == 1
        assert kv.hit(longer) == 6
        assert client.stats().corrupt_segments == 1, "what was quarantined is not even tried"
        kv.store(longer)
        assert kv.hit(longer) == 9
        assert checked(daemon)["ok"]


def test_without_verification_the_check_finds_it_still(tmp_path):
    """verify=off: no checksums are written, footers are."""
    with Daemon(tmp_path, verify="off") as daemon, connect(daemon) as client:
        kv = Kv(client)
        kv.store(kv.tokens(1, 6))
        assert checked(daemon)["ok"]
        run = place(kv, kv.tokens(1, 6))
        flip(file_of(daemon, run), run.file_offset + run.segment_bytes - 1)
        assert "footer differs" in checked(daemon)["findings"][0]


def damaged_journal_files(path):
    """One file of each kind that holds a journal's state: table, log, manifest. The newest that has something in it."""
    files = sorted(file for file in (path / "journal").iterdir() if file.stat().st_size)
    tables, logs = ([file for file in files if file.suffix == suffix] for suffix in (".sst", ".log"))
    return [tables[-1], logs[-1], next(file for file in files if "MANIFEST" in file.name)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_journal(tmp_path):
    """A bit anywhere in any of its files: a start gives a part of what was there, or refuses and names the cure."""
    contexts = 5
    with Daemon(tmp_path, verify="all") as daemon, connect(daemon) as client:
        kv = Kv(client)
        for seed in range(contexts):
            kv.store(kv.tokens(seed, 4), session=f"s{seed}")
        daemon.restart()  # a clean stop and start: some of it is in tables now, some in the log
        for seed in range(contexts, 2 * contexts):
            kv.store(kv.tokens(seed, 4), session=f"s{seed}")
        daemon.kill()
        files = damaged_journal_files(tmp_path / "ssd")
        refused = 0
        for file in files:
            good = {path: path.read_bytes() for path in sorted((tmp_path / "ssd" / "journal").iterdir())}
            flip(file, file.stat().st_size // 2, bit=3)
            refused += starts_or_is_rebuilt(daemon, kv, 2 * contexts)
            for path in (tmp_path / "ssd" / "journal").iterdir():
                path.unlink()
            for path, data in good.items():
                path.write_bytes(data)
        assert refused < len(files), "a damaged log is cut, it does not keep the daemon from starting"


def starts_or_is_rebuilt(daemon, kv, contexts):
    """Start on a damaged journal; whether it was refused. Either way all that shows is right."""
    ssd = daemon.root / "ssd"
    refused = False
    files = {file: file.read_bytes() for file in files_of(ssd)}
    try:
        daemon.start()
    except AssertionError:
        refused = True
        assert "--rebuild" in daemon.log_tail()
        offline.rebuild(ssd)
        assert offline.check(ssd, data=True).ok
        daemon.start()
        assert [kv.hit(kv.tokens(seed, 4)) for seed in range(contexts)] == [4] * contexts, "not all was rebuilt"
    for seed in range(contexts):
        assert kv.hit(kv.tokens(seed, 4)) in (0, 4)
    assert checked(daemon)["ok"]
    daemon.kill()
    for file, data in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return refused


def test_a_lost_journal_costs_no_file(tmp_path):
    """The journal's directory is gone: the daemon refuses rather than delete what it does not know; rebuilt, all is there."""
    with Daemon(tmp_path, verify="all") as daemon, connect(daemon) as client:
        kv = Kv(client)
        kv.store(kv.tokens(1, 4), session="s")
        kv.store(kv.tokens(2, 2, after=kv.tokens(1, 4)), session="s")
        daemon.stop()
        (tmp_path / "ssd" / "journal").rename(tmp_path / "gone")
        with pytest.raises(AssertionError, match="--rebuild"):
            daemon.start()
        offline.rebuild(tmp_path / "ssd")
        daemon.start()
        assert kv.hit(kv.tokens(2, 2, after=kv.tokens(1, 4))) == 6
        assert checked(daemon)["ok"]


def test_damage_under_a_restore_that_is_under_way(node, kv):
    """Layer 0 is in place, layer 1 is damaged: the caller learns it before it computes on it."""
    kv.store(kv.first, session=kv.name)
    run = place(kv, kv.first)
    layout = kv.space.layout_of(run.blocks)
    flip(file_of(node, run), run.file_offset + layout.chunk(1, 4))
    with kv.space.lookup(kv.space.keys(kv.first)) as hit:
        pages = [np.zeros((6, kv.plane_bytes), np.uint8) for _ in range(2)]
        restore = hit.restore(pages, np.arange(6))
        with pytest.raises(fc.Corrupt) as raised:
            restore.wait_layer(1)
        assert raised.value.usable_blocks == 4, "granules of 4 blocks: the first one is whole"
        for layer in range(2):
            assert np.array_equal(pages[layer][:4], kv.bytes_of(hit.keys[:4], layer))
