"""`flatcake` as a user runs it: processes, a real daemon, exit codes."""

from __future__ import annotations

import json
import os
from urllib.request import urlopen

import pytest
from command import flatcake
from daemon import Daemon
from prometheus_client.parser import text_string_to_metric_families


def test_a_running_node_answers_every_question(daemon):
    for arguments in (["status"], ["spaces"], ["sessions", "list"], ["check"]):
        run = flatcake(*arguments, "--json", endpoint=daemon.endpoint)
        assert (run.returncode, run.stderr) == (0, "")
        json.loads(run.stdout)
    run = flatcake("status", endpoint=daemon.endpoint)
    assert (run.returncode, run.stderr) == (0, "")
    assert str(daemon.ssd_paths[0]) in run.stdout
    status = json.loads(flatcake("status", "--json", endpoint=daemon.endpoint).stdout)
    assert [pool["quota_bytes"] for pool in status["pools"]] == [64 << 20, 512 << 20]
    run = flatcake("sessions", "show", "nobody", endpoint=daemon.endpoint)
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert flatcake("sessions", "drop", "nobody", endpoint=daemon.endpoint).returncode == 1


def test_its_page_and_metrics_say_what_status_says(tmp_path):
    # The whole of 127/8 is this machine: an address of this process's own leaves no port to others.
    site = f"127.{os.getpid() >> 16 & 255}.{os.getpid() >> 8 & 255}.{os.getpid() & 255 or 1}:7451"
    with Daemon(tmp_path, http_listen=site) as daemon:
        with urlopen(f"http://{site}/healthz", timeout=10) as reply:
            assert reply.read() == b"ok\n"
        with urlopen(f"http://{site}/status", timeout=10) as reply:
            assert json.load(reply)["incarnation"] == daemon.status()["incarnation"]
        with urlopen(f"http://{site}/metrics", timeout=10) as reply:
            samples = {
                s.name: s.value for f in text_string_to_metric_families(reply.read().decode()) for s in f.samples
            }
        assert samples["flatcake_uptime_seconds"] > 0


def test_sigterm_ends_it_well_and_then_nobody_answers(daemon):
    assert daemon.stop() == 0
    run = flatcake("status", endpoint=daemon.endpoint)
    assert run.returncode == 3
    assert run.stderr.startswith("flatcake: no daemon answers")
    assert run.stderr.count("\n") == 1


def test_a_second_daemon_on_the_same_disk_is_refused_in_one_line(daemon, tmp_path):
    run = flatcake("serve", "--ssd-paths", daemon.ssd_paths[0], "--ssd-bytes", "64MiB", "--memory-bytes", "1MiB",
                   "--socket", tmp_path / "second.sock", "--grpc-listen", "off", "--http-listen", "off")  # fmt: skip
    assert run.returncode != 0
    assert str(daemon.process.pid) in run.stderr
    assert run.stderr.count("\n") == 1
    assert daemon.status()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--ssd-paths", "/nowhere"], 3), (["--directory", "redis"], 2), (["--memory-bytes", "1"], 2)],
)
def test_what_cannot_be_served_is_refused_before_anything_is_made(arguments, code, tmp_path):
    run = flatcake("serve", *arguments, "--socket", tmp_path / "fc.sock")
    assert (run.returncode, run.stderr.count("\n")) == (code, 1)
    assert list(tmp_path.iterdir()) == []
