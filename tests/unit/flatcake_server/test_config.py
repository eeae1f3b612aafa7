from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from flatcake_server.cli_serve import config_toml
from flatcake_server.config import (
    ClusterConfig,
    ConfigError,
    NodeConfig,
    default_socket,
    find_config,
    load_config,
)
from flatcake_server.config_checks import refuse_too_much_memory, ssd_path_refusal
from flatcake_transport.errors import Unavailable

DESIGN_KEYS = [
    "socket",
    "grpc_listen",
    "http_listen",
    "memory_bytes",
    "ssd_paths",
    "ssd_bytes",
    "memory_high_watermark",
    "memory_low_watermark",
    "ssd_high_watermark",
    "ssd_low_watermark",
    "session_trim_after",
    "agent_context_tokens",
    "short_reply_tokens",
    "lease_ttl",
    "verify",
    "node_id",
    "directory",
    "peers",
    "redis_url",
    "peer_timeout",
    "ucx_listen",
    "nvmeof",
]


def refused(file=None, environ=None, **flags) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(file, environ, flags)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_every_key_of_the_design_has_a_default_that_works():
    config = load_config()
    assert set(DESIGN_KEYS) <= set(NodeConfig.model_fields)
    assert config.memory_bytes >= 1 << 20
    assert config.lease_ttl == 30
    assert config.session_trim_after == 600
    assert config.ssd_path_bytes == 0


def test_flags_go_over_environment_over_file(tmp_path):
    file = tmp_path / "flatcake.toml"
    file.write_text('memory_bytes = "1GiB"\nnode_id = 1\nlease_ttl = "1m"\n')
    environ = {"FLATCAKE_NODE_ID": "2", "FLATCAKE_LEASE_TTL": "5m", "HOME": "/root"}
    config = load_config(file, environ, {"lease_ttl": "7s", "verify": None})
    assert (config.memory_bytes, config.node_id, config.lease_ttl, config.verify) == (1 << 30, 2, 7.0, "remote")


def test_it_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        load_config().node_id = 3


def test_an_unknown_option_names_its_source_the_nearest_and_all_known(tmp_path):
    file = tmp_path / "flatcake.toml"
    file.write_text("memory_byte = 1\n")
    for message in (
        refused(file),
        refused(environ={"FLATCAKE_MEMORY_BYTE": "1"}),
        refused(memory_byte="1"),
    ):
        assert "did you mean memory_bytes?" in message
        assert all(name in message for name in DESIGN_KEYS)
    assert str(file) in refused(file)
    assert "environment" in refused(environ={"FLATCAKE_X": "1"})


def test_variables_that_are_no_options_do_not_stop_the_daemon():
    environ = {
        "FLATCAKE_ENDPOINT": "unix:///x",
        "FLATCAKE_CONFIG": "x.toml",
        # What Kubernetes sets beside Services "flatcake" and "flatcake-store".
        "FLATCAKE_SERVICE_HOST": "10.0.0.1",
        "FLATCAKE_SERVICE_PORT_GRPC": "7450",
        "FLATCAKE_PORT": "tcp://10.0.0.1:7450",
        "FLATCAKE_PORT_7450_TCP_ADDR": "10.0.0.1",
        "FLATCAKE_STORE_PORT_7450_TCP": "tcp://10.0.0.1:7450",
    }
    assert load_config(None, environ) == load_config()


def test_every_variable_that_something_of_ours_reads_is_known():
    """An engine's host sets them for all commands: one that is no option must not stop the daemon."""
    root = Path(__file__).parents[3]
    rooms = ("flatcake_server", "flatcake_client", "transport", "bench", "docs", "deploy")
    files = [path for room in rooms for path in (root / room).rglob("*") if path.suffix in (".py", ".md", ".yaml")]
    named = {name for file in files for name in re.findall(r"\bFLATCAKE_[A-Z][A-Z_]*[A-Z]\b", file.read_text("utf-8"))}
    assert {"FLATCAKE_UCX_LIB", "FLATCAKE_ENDPOINT"} <= named
    for name in sorted(named):
        with contextlib.suppress(ConfigError):
            load_config(None, {name: "x"})
            continue
        assert name.removeprefix("FLATCAKE_").lower() in NodeConfig.model_fields, name


def test_a_file_that_cannot_be_read_says_so(tmp_path):
    assert "--config" in refused(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("memory_bytes = 4GiB\n")
    assert "quotes" in refused(broken)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"memory_bytes": "4 apples"}, "memory_bytes: '4 apples' is no size: write bytes, or a number with a unit"),
        ({"memory_bytes": "1"}, "memory_bytes: is at least 1MiB (given: 1)"),
        ({"lease_ttl": "soon"}, "lease_ttl: 'soon' is no duration"),
        ({"memory_low_watermark": "0.96"}, "set the low one below the high one"),
        ({"ssd_low_watermark": "0.95"}, "set the low one below the high one"),
        ({"ssd_high_watermark": "1.5"}, "ssd_high_watermark: is at most 1"),
        ({"lease_ttl": "2h"}, "lease_ttl: is at most 1h"),
        ({"index_blocks_max": str(1 << 40)}, "index_blocks_max: is at most 68719476736"),
        ({"grpc_listen": "::1:7450"}, "grpc_listen: '::1:7450': an IPv6 address stands in brackets"),
        ({"verify": "sometimes"}, "'off', 'remote' or 'all'"),
        ({"node_id": "4096"}, "node_id: is below 4096 (given: '4096')"),
        (
            {"node_id": "x", "lease_ttl": "y"},
            "lease_ttl: 'y' is no duration: write seconds, or a number with a unit, like 500ms, 30s, 5m or 1h; node_id",
        ),
        ({"socket": "/" + "x" * 104}, "choose a shorter path"),
        ({"socket": "/run/a,b/fc.sock"}, "choose a path without"),
        ({"socket_mode": "0999"}, "socket_mode: is three octal digits"),
        ({"ssd_paths": "/a,/a/b"}, "lie in each other"),
        ({"ssd_paths": "/a,/b,/a"}, "lie in each other"),
        ({"ssd_paths": "/a,/b", "ssd_bytes": "16MiB"}, "give at least 16MiB a path"),
        ({"directory": "etcd"}, "'none', 'static' or 'redis'"),
        ({"directory": "redis"}, "needs redis_url"),
        ({"directory": "static"}, "needs peers"),
        ({"directory": "redis", "redis_url": "redis://a,b:6379"}, "'b:6379' is no URL of Redis"),
        ({"directory": "static", "peers": "a:1", "grpc_listen": "off"}, "peers must reach this node"),
        ({"directory": "static", "peers": "a"}, "peers: 'a'"),
        ({"advertise": "a"}, "advertise: 'a'"),
        ({"ucx_listen": "a"}, "ucx_listen: 'a'"),
        (
            {"directory": "static", "peers": "a:1", "grpc_listen": "0.0.0.0:7450"},
            "anybody there could read every block",
        ),
        ({"tls_cert_file": "/x"}, "give all three"),
        ({"cluster_name": "{a}"}, "cluster_name: is up to 64 letters"),
    ],
)
def test_what_is_wrong_is_refused_and_says_what_to_do(flags, said):
    assert said in refused(**flags)


def test_exports_have_an_address_and_readers():
    assert "write tcp://ADDRESS:4420" in refused(nvmeof="tcp")
    assert "nvmeof_allowed_hosts" in refused(nvmeof="tcp://10.0.0.7:4420")
    assert load_config(
        None, None, {"nvmeof": "tcp://10.0.0.7:4420", "nvmeof_allowed_hosts": "2,3"}
    ).nvmeof_allowed_hosts == ("2", "3")


def test_where_peers_read_is_an_address():
    assert "write host:port" in refused(ucx_listen="somewhere")


def test_a_node_that_others_reach_has_a_token_or_tls():
    flags = {"directory": "static", "peers": "a:1,b:2", "grpc_listen": "[::]:7450"}
    assert load_config(flags=flags | {"cluster_token_file": "/t"}).peers == ("a:1", "b:2")
    tls = {f"tls_{name}_file": f"/{name}" for name in ("cert", "key", "ca")}
    assert load_config(flags=flags | tls).tls_ca_file == "/ca"


def test_relative_paths_start_where_the_user_stands_but_only_as_flags(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = load_config(None, None, {"ssd_paths": "a,b", "socket": "s.sock"})
    assert config.ssd_paths == (tmp_path / "a", tmp_path / "b")
    assert config.socket == tmp_path / "s.sock"
    assert config.handover_path == tmp_path / "s.sock.fds"
    assert "write it from the root" in refused(environ={"FLATCAKE_SSD_PATHS": "a"})


def test_the_quota_is_split_evenly_in_whole_pages():
    config = load_config(None, None, {"ssd_paths": "/a,/b,/c", "ssd_bytes": "100MB"})
    assert config.ssd_path_bytes % 4096 == 0
    assert 100_000_000 - 3 * 4096 - 4096 < 3 * config.ssd_path_bytes <= 100_000_000


def test_sizes_are_whole_pages():
    assert load_config(None, None, {"memory_bytes": (1 << 20) + 1}).memory_bytes == 1 << 20


def test_a_missing_disk_is_not_made_on_the_root_file_system(tmp_path):
    missing, file = tmp_path / "unmounted", tmp_path / "file"
    file.touch()
    assert "mkdir -p" in ssd_path_refusal(missing, 1)
    assert "is no directory" in ssd_path_refusal(file, 1)
    assert not missing.exists()
    assert ssd_path_refusal(tmp_path, 1) == ""


def test_a_disk_that_is_dead_is_refused(monkeypatch, tmp_path):
    def fails(_path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        assert "change its owner" in ssd_path_refusal(tmp_path, 1)
        patch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
        assert "ReadWritePaths" in ssd_path_refusal(tmp_path, 1)
    monkeypatch.setattr(shutil, "disk_usage", fails)
    assert "cannot be examined: Input/output error" in ssd_path_refusal(tmp_path, 1)


def test_a_quota_that_no_disk_there_can_hold_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=(1 << 30) - 1))
    assert "lower ssd_bytes" in ssd_path_refusal(tmp_path, 1 << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=1 << 30))
    assert ssd_path_refusal(tmp_path, 1 << 30) == ""


def test_more_memory_than_the_machine_has_is_refused_at_the_start(tmp_path):
    """The kernel would give it, and end an engine when it is used."""
    pages = tmp_path / "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"
    limit = tmp_path / "sys/fs/cgroup/memory.max"
    for file, text in ((tmp_path / "proc/meminfo", "MemTotal: 8388608 kB\n"), (limit, "max\n"), (pages, "0\n")):
        file.parent.mkdir(parents=True)
        file.write_text(text)
    refuse_too_much_memory(8 << 30, "auto", tmp_path)
    with pytest.raises(ValueError, match="memory_bytes is 8 GiB, but there are 8 GiB of memory here in all: lower it"):
        refuse_too_much_memory((8 << 30) + 4096, "auto", tmp_path)
    limit.write_text(f"{1 << 30}\n")
    with pytest.raises(ValueError, match="lower it"):
        refuse_too_much_memory(2 << 30, "auto", tmp_path)
    pages.write_text("1024\n")  # a container's limit does not count them
    refuse_too_much_memory(2 << 30, "auto", tmp_path)
    with pytest.raises(ValueError, match="lower it"):
        refuse_too_much_memory(2 << 30, "off", tmp_path)
    refuse_too_much_memory(2 << 30, "on", tmp_path)
    refuse_too_much_memory(1 << 40, "auto", tmp_path / "nothing to be known")
    pages.write_text("512\n")
    (pages.parent / "nr_hugepages").write_text("1024\n")
    with pytest.raises(Unavailable, match="1 GiB of huge pages are free: end who has the others"):
        refuse_too_much_memory(2 << 30, "auto", tmp_path)
    limit.write_text("max\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 8388608 kB\nHugetlb: 2097152 kB\n")
    with pytest.raises(
        ValueError, match="there are 6 GiB of memory here"
    ):  # what is reserved as huge pages is no other's
        refuse_too_much_memory(8 << 30, "auto", tmp_path)


def test_the_socket_is_under_the_runtime_directory_where_run_cannot_be_written(monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert default_socket({"XDG_RUNTIME_DIR": "/run/user/7"}) == Path("/run/user/7/flatcake/flatcake.sock")
    assert default_socket({}).name == "flatcake.sock"
    monkeypatch.setattr(os, "access", lambda *_: True)
    assert default_socket({"XDG_RUNTIME_DIR": "/run/user/7"}) == Path("/run/flatcake/flatcake.sock")


def test_the_file_is_the_told_one_then_the_variable_s_then_the_one_here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    here = Path("flatcake.toml")
    here.touch()
    assert find_config(Path("a"), {"FLATCAKE_CONFIG": "b"}) == Path("a")
    assert find_config(None, {"FLATCAKE_CONFIG": "b"}) == Path("b")
    assert find_config(None, {}) == here


def test_the_cluster_fingerprint_is_that_of_every_process_and_follows_each_field():
    ours = ClusterConfig().fingerprint
    program = "from flatcake_server.config import ClusterConfig; print(ClusterConfig().fingerprint.hex())"
    theirs = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    assert len(ours) == 16
    assert theirs.stdout.strip() == ours.hex()
    changed = {"format": 2, "key": "md5", "address": "x", "align_bytes": 512, "granule_bytes_min": 1}
    assert set(changed) == set(ClusterConfig.model_fields)
    assert all(ClusterConfig.model_validate({name: value}).fingerprint != ours for name, value in changed.items())


def test_a_printed_configuration_reads_back(tmp_path):
    config = load_config(
        None,
        None,
        {
            "ssd_paths": "/mnt/a,/mnt/b",
            "ssd_bytes": "3GB",
            "lease_ttl": "1500ms",
            "sync_commits": "false",
            "socket": '/x/"y',
        },
    )
    file = tmp_path / "flatcake.toml"
    file.write_text(config_toml(config))
    assert load_config(file) == config
