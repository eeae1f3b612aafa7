"""Quotas hold at every instant while the store is filled three times over, by what the node says and by what the disk says."""

from __future__ import annotations

import threading

import pytest
from daemon import Daemon
from faults import files_of
from kv import Kv, connect

import flatcake_client as fc

MEMORY, SSD = 4 << 20, 16 << 20


class Sampler(threading.Thread):
    """Looks at status and disk as often as it can, until told to end. `worst`: the most it saw of each."""

    def __init__(self, daemon):
        super().__init__()
        self.daemon_under_test, self.over, self.samples = daemon, threading.Event(), 0
        self.worst = {"status ssd": 0, "status memory": 0, "disk": 0, "pools wrong": 0}

    def run(self):
        with self.daemon_under_test.admin() as admin:
            while not self.over.is_set():
                self.samples += 1
                for pool in admin.status()["pools"]:
                    used = sum(pool[f"{part}_bytes"] for part in ("committed", "reserved", "releasing"))
                    self.note(f"status {pool['medium']}", used)
                    self.note("pools wrong", int(used + pool["free_bytes"] != pool["quota_bytes"]))
                self.note("disk", sum(map(blocks_bytes, files_of(self.daemon_under_test.root / "ssd"))))

    def note(self, name, value):
        self.worst[name] = max(self.worst[name], value)


def blocks_bytes(path):
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


@pytest.mark.parametrize("verify", ["remote"])
def test_filled_three_times_over(tmp_path, verify):
    """Four clients, sessions that grow, fork and share; memory and SSD."""
    with Daemon(tmp_path, memory_bytes=MEMORY, ssd_bytes=SSD, verify=verify) as daemon:
        sampler = Sampler(daemon)
        sampler.start()
        written, errors = [0] * 4, []

        def fill(number):
            try:
                with connect(daemon) as client:
                    fill_once(Kv(client, plane_bytes=40_000), number, written)
            except BaseException as error:  # noqa: BLE001 - told to the test's own thread
                errors.append(error)

        try:
            threads = [threading.Thread(target=fill, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sampler.over.set()
            sampler.join()
        assert not errors
        assert sum(written) >= 3 * (MEMORY + SSD)
        assert sampler.samples > 20
        assert sampler.worst["pools wrong"] == 0
        assert sampler.worst["status ssd"] <= SSD
        assert sampler.worst["disk"] <= SSD
        assert sampler.worst["status memory"] <= MEMORY
        assert sampler.worst["disk"] > 0.8 * SSD, "nobody came near the quota"
        status = daemon.until(lambda status: status["open_turns"] == status["clients"] == 0)
        counters = status["counters"]
        assert counters["sessions_reclaimed_total"][str(tmp_path / "ssd")] > 0
        assert counters["sessions_reclaimed_total"]["memory"] > 0
        assert counters["turns_begun_total"] == counters["turns_committed_total"] + counters["turns_aborted_total"]
        daemon.check()
        with daemon.admin() as admin:
            assert [step.report for step in admin.check(data=True)][-1]["ok"]


def fill_once(kv, number, written):
    """Sessions of a shared prompt, a first turn and two more, until a third of three fillings is written."""
    prompt, seed = kv.tokens(0, 3), 1000 * number
    while written[number] < 3 * (MEMORY + SSD) // 4:
        tokens, seed = prompt, seed + 1
        for turn in range(3):
            tokens = kv.tokens(10 * seed + turn, 5, after=tokens)
            blocks = len(tokens) // kv.block_tokens
            hints = {
                "share_counts": [4] * 3 + [1] * (blocks - 3),
                "previous_reply_tokens": 10 if number % 2 else 10_000,
            }
            try:
                done = kv.store(tokens, session=f"s{seed}", **hints)
            except fc.Overloaded:
                continue
            written[number] += len(done.blocks) * 3 * 40_000
            kv.hit(tokens)  # compares what is there


def test_a_turn_larger_than_everything_is_refused_and_drops_nothing(tmp_path):
    with Daemon(tmp_path, memory_bytes=MEMORY, ssd_bytes=SSD) as daemon, connect(daemon) as client:
        kv = Kv(client, plane_bytes=40_000)
        kv.store(kv.tokens(1, 10), session="stays")
        with pytest.raises(fc.Overloaded):
            kv.store(kv.tokens(2, 150), session="large")  # 18 MB
        assert kv.hit(kv.tokens(1, 10)) == 10
        assert daemon.status()["sessions"] == 1
        daemon.check()


def test_a_smaller_quota_holds_from_the_start_on(tmp_path):
    with Daemon(tmp_path, ssd_bytes=32 << 20) as daemon, connect(daemon) as client:
        kv = Kv(client, plane_bytes=40_000)
        for seed in range(20):
            kv.store(kv.tokens(seed, 10), session=f"s{seed}")
        daemon.stop()
        daemon.options["ssd_bytes"] = SSD
        daemon.start()
        assert sum(map(blocks_bytes, files_of(tmp_path / "ssd"))) <= SSD
        daemon.check()
        hits = [seed for seed in range(20) if kv.hit(kv.tokens(seed, 10)) == 10]
        assert hits == list(range(20 - len(hits), 20)), "the least recently used went"
        assert len(hits) >= 8


def test_memory_alone(tmp_path):
    """A node without SSD: everything is placed in memory, and reclaimed there."""
    with Daemon(tmp_path, memory_bytes=MEMORY, ssd_paths="") as daemon, connect(daemon) as client:
        kv = Kv(client, plane_bytes=40_000)
        for seed in range(60):
            kv.store(kv.tokens(seed, 1 + seed % 9), session=f"s{seed}")
            assert kv.hit(kv.tokens(seed, 1 + seed % 9)) == 1 + seed % 9
            assert daemon.pool("memory")["free_bytes"] >= 0
        assert daemon.status()["counters"]["sessions_reclaimed_total"]["memory"] > 20
        daemon.check()
