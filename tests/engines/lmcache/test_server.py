"""LMCache's server as a process, driven by LMCache's own client: killed, the daemon restarted, and every checksum the same."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from ports import free_port
from waiting import until

LMCACHE = str(Path(sys.executable).parent / "lmcache")


class Server:
    def __init__(self, daemon, root):
        self.port, self.http_port = free_port(), free_port()
        spec = {"type": "plugin", "module_path": "flatcake_client.engines.lmcache_l2", "class_name": "FlatCakeL2Adapter",
                "adapter_params": {"endpoint": daemon.endpoint}}  # fmt: skip
        self.log = (root / "lmcache.log").open("ab")
        self.process = subprocess.Popen(
            [
                LMCACHE, "server", "--host", "127.0.0.1", "--port", str(self.port),
                "--http-host", "127.0.0.1", "--http-port", str(self.http_port),
                "--l1-size-gb", "0.125", "--no-l1-use-lazy", "--eviction-policy", "LRU", "--chunk-size", "64",
                "--supported-transfer-mode", "auto", "--l2-adapter", json.dumps(spec),
            ],
            stdout=self.log, stderr=self.log, cwd=root,
        )  # fmt: skip
        until(self.answers, 60)

    def answers(self):
        assert self.process.poll() is None, "LMCache's server ended"
        try:
            self.status()
        except OSError:
            return False
        return True

    def status(self):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}/status", timeout=5) as reply:
            return json.load(reply)

    def chunks(self, what):
        return self.status()["storage_manager"]["l2_adapters"][0][what]

    def requests(self, *options):
        """LMCache's client: each of three prompts cold, then warm. Its lines."""
        done = subprocess.run(
            [
                LMCACHE, "bench", "server", "--mode", "cpu", "--rpc-url", f"tcp://127.0.0.1:{self.port}",
                "--url", f"http://127.0.0.1:{self.http_port}", "--num-tokens", "256", "--num-blocks", "64",
                "--kvcache-shape-spec", "(2,64,16,2,16):bfloat16:4", "--start", "0", "--end", "3", "--interval", "0.05",
                *options,
            ],
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        return done.stdout


@contextmanager
def serving(daemon, root):
    server = Server(daemon, root)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()
        server.log.close()


def checksums(lines, kind):
    return dict(re.findall(rf"\[seq (\d)/{kind}\] CHECKSUM: (\w+)", lines))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_that_was_killed_has_everything_again(daemon, tmp_path):
    with serving(daemon, tmp_path) as server:
        lines = server.requests("--tp-size", "2")
        assert lines.count("CHECKSUM MATCH OK") == 3, lines
        until(lambda: server.chunks("chunks_stored") == 3 * 4 * 2)
    daemon.restart()
    with serving(daemon, tmp_path) as server:
        again = server.requests("--tp-size", "2")
        assert again.count("4/4 chunks hit") == 6, again
        assert server.chunks("chunks_loaded") >= 3 * 4 * 2
        assert server.chunks("chunks_load_failed") == 0
        assert checksums(again, "warm") == checksums(lines, "warm") != {}
        daemon.kill()
        lost = server.requests("--start", "7", "--end", "8")
        assert "0/4 chunks hit" in lost, "a miss, and the server serves on"
        assert server.process.poll() is None
