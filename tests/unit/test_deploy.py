"""What is deployed says what the code says."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

from flatcake_server.cli_serve import config_toml
from flatcake_server.config import NodeConfig, load_config

ROOT = Path(__file__).parents[2]
SOCKET = "/run/flatcake/flatcake.sock"


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_commented_configuration_is_the_model_s():
    assert text_of("deploy/flatcake.toml") == config_toml(load_config(None, None, {"socket": SOCKET})), (
        "run: touch flatcake_server/config.py && make deploy/flatcake.toml"
    )
    assert set(tomllib.loads(text_of("deploy/flatcake.toml"))) == set(NodeConfig.model_fields)
    assert load_config(ROOT / "deploy/flatcake.toml") == load_config(None, None, {"socket": SOCKET})


def test_every_option_says_its_reason():
    for name, field in NodeConfig.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name


def test_no_option_is_ignored():
    """Each is read by the daemon."""
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "flatcake_server").rglob("*.py"))
    code = code.replace("ssd_path_bytes", "ssd_bytes")
    unread = {name for name in NodeConfig.model_fields if not re.search(rf"\b(config|node)\.{name}\b", code)}
    assert not unread


def test_the_unit_starts_a_command_that_exists_and_waits_for_the_drain():
    unit = text_of("deploy/systemd/flatcake.service")
    (start,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    assert shlex.split(start) == ["/opt/flatcake/bin/flatcake", "serve", "--config", "/etc/flatcake/flatcake.toml"]
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(stop_s) > 2 * load_config().drain_timeout
    assert "LimitMEMLOCK=infinity" in unit
    assert "RuntimeDirectory=flatcake\n" in unit


def test_the_image_copies_what_is_there_and_its_variables_are_options():
    dockerfile = text_of("deploy/Dockerfile")
    for line in re.findall(r"^COPY (?!--from)(.*)$", dockerfile, re.MULTILINE):
        assert all((ROOT / source).exists() for source in line.split()[:-1]), line
    variables = dict(re.findall(r"(FLATCAKE_\w+)=(\S+)", dockerfile))
    config = load_config(None, variables)
    assert str(config.socket) == SOCKET
    assert config.ssd_paths == (Path("/data"),)
    packages = re.findall(
        r'^\s+"([\w.]+)",$', text_of("pyproject.toml").split("packages = [")[1].split("]")[0], re.MULTILINE
    )
    assert {package.split(".")[0] for package in packages} == {
        "flatcake_transport",
        "flatcake_proto",
        "flatcake_server",
        "flatcake_client",
    }


@pytest.fixture
def documents():
    return {document["kind"]: document for document in yaml.safe_load_all(text_of("deploy/k8s/daemonset.yaml"))}


def test_the_daemon_set_serves_its_own_configuration(documents, tmp_path):
    file = tmp_path / "flatcake.toml"
    file.write_text(documents["ConfigMap"]["data"]["flatcake.toml"])
    config = load_config(file, {"FLATCAKE_SOCKET": SOCKET})
    pod = documents["DaemonSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["hugepages-2Mi"] == f"{config.memory_bytes >> 30}Gi"
    assert pod["terminationGracePeriodSeconds"] > 2 * config.drain_timeout
    assert config.http_listen.endswith(f":{container['ports'][0]['containerPort']}")
    assert pod["enableServiceLinks"] is False
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {str(path) for path in config.ssd_paths} | {str(config.socket.parent)} <= mounts
    # The memory limit holds the index at its bound with room for the rest.
    assert int(container["resources"]["limits"]["memory"].removesuffix("Gi")) << 30 > 2 * 50 * config.index_blocks_max


def test_the_example_engine_reaches_the_daemon_s_socket(documents):
    daemon, engine = documents["DaemonSet"]["spec"]["template"]["spec"], documents["Pod"]["spec"]
    paths = {
        volume["hostPath"]["path"] for pod in (daemon, engine) for volume in pod["volumes"] if volume.get("hostPath")
    }
    assert "/run/flatcake" in paths
    assert engine["containers"][0]["env"][0] == {"name": "FLATCAKE_ENDPOINT", "value": f"unix://{SOCKET}"}
    group = daemon["containers"][0]["securityContext"]["runAsGroup"]
    assert engine["containers"][0]["securityContext"]["runAsGroup"] == group


def test_make_and_ci_have_their_targets():
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    assert {"demo", "demo-cluster", "test", "check", "bench", "proto", "gpu", "soak", "venv"} <= targets
    assert {"make check", "make test"} <= set(text_of(".ci/run").splitlines())
    for repository in yaml.safe_load(text_of(".pre-commit-config.yaml"))["repos"]:
        assert repository["repo"] == "local"
