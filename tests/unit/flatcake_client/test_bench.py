"""`flatcake bench` against a daemon of the test's; with a real one it is a command that people run."""

from __future__ import annotations

import json
import signal

import pytest

import flatcake_client as fc
from flatcake_client import bench
from flatcake_client.bench import Figure, Measured, WrongBytes, main, measure
from flatcake_transport.address import Medium


@pytest.fixture
def one_medium(monkeypatch):
    monkeypatch.setattr(bench, "HINTS", {"ssd": {"turn": 1}})
    monkeypatch.setattr(bench, "LOOKUPS", 3)


@pytest.fixture
def stops():
    """As the test's process had them."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("one_medium")
def test_what_is_stored_comes_back_and_is_timed(daemon, client):
    found = measure(client, 1, 2)
    assert found.blocks == 1
    assert list(found.store) == list(found.restore) == ["ssd"]
    assert min(found.store["ssd"], found.restore["ssd"], found.memcpy_bytes_per_s, found.lookup_s) > 0
    assert daemon.calls["lookup"] == 2 + 3


@pytest.mark.usefixtures("one_medium")
def test_other_bytes_are_no_figure(client, monkeypatch):
    restored_s = bench._restored_s

    def one_bit_off(space, keys, target):
        took_s = restored_s(space, keys, target)
        target.layers[-1][target.slots[-1], -1] ^= 1
        return took_s

    monkeypatch.setattr(bench, "_restored_s", one_bit_off)
    with pytest.raises(WrongBytes, match="ssd"):
        measure(client, 1, 1)


@pytest.mark.usefixtures("one_medium")
def test_another_home_is_another_figure(daemon, client):
    daemon.medium = Medium.MEMORY
    with pytest.raises(fc.Unavailable, match="puts on memory what is meant for ssd"):
        measure(client, 1, 1)


@pytest.mark.usefixtures("stops")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--size", "1MiB"], "--size is 4MiB or more, not 1 MiB"),
        (["--size", "much"], "is no size"),
        (["--rounds", "0"], "--rounds is 1 or more"),
        (["--dir", "/nope"], "--dir /nope is no directory"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, said, capsys):
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert said in err


@pytest.mark.usefixtures("stops")
def test_each_figure_stands_beside_what_the_machine_does(tmp_path, monkeypatch, capsys):
    class NoNode:
        endpoint = "unix:///nobody"

        def __init__(self, *_):
            pass

        def close(self):
            pass

    monkeypatch.setattr(bench, "Node", NoNode)
    monkeypatch.setattr(bench, "raw_read_rates", lambda *_: iter([("a", 1e9), ("b", 4e9), ("c", 2e9)]))
    rates = {"ssd": 2e9, "memory": 6e9}
    monkeypatch.setattr(bench, "measure", lambda *_: Measured(rates, rates, 8e9, 0.001, 2))
    assert main(["--dir", str(tmp_path), "--size", "8MiB", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    shares = {figure["name"]: figure["share"] for figure in document["figures"]}
    assert shares == {
        "restore from ssd": 0.5,
        "restore from memory": 0.75,
        "first store to memory": 0.75,
        "first store to ssd, synced": None,
    }
    assert (document["lookup_ms"], document["size_bytes"]) == (1.0, 8 << 20)
    assert list(tmp_path.iterdir()) == []
    assert main(["--dir", str(tmp_path), "--size", "8MiB"]) == 0
    assert "4.00: raw reads, b" in capsys.readouterr().out
    assert Figure("x", 1.0).share is None
