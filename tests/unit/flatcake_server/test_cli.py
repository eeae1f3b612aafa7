"""The command line against a daemon that answers from a script; real daemons are in tests/e2e."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import grpc
import pytest
import typer
from rich.console import Console
from some_stats import some_stats

from flatcake_proto.v1 import admin_pb2, admin_pb2_grpc
from flatcake_server import cli, cli_replay
from flatcake_server.cli_output import fields_table, show_rows
from flatcake_server.config import NodeConfig
from flatcake_transport.errors import Corrupt, Overloaded, Unavailable

SESSIONS = [{"name": f"agent-{i}[bold]", "turns": i, "ssd_bytes": i << 30, "last_used_s": 1.7e9} for i in (3, 2)]
SPACES = [
    {"model": "a model " * 20, "weights": "w" * 100, "plane_bytes": [4096] * 32, "fingerprint": "ab" * 16, "blocks": 7}
]


class ScriptedAdmin(admin_pb2_grpc.AdminServicer):
    def __init__(self):
        self.asked = []
        self.check = {"ok": True, "findings": [], "blocks": 7}
        self.drop = {"dropped": ["a"], "busy": [], "needed": [], "unknown": []}

    def Status(self, request, context):
        return admin_pb2.JsonReply(json=json.dumps(dataclasses.asdict(some_stats())))

    def ListSpaces(self, request, context):
        return admin_pb2.JsonReply(json=json.dumps(SPACES))

    def ListSessions(self, request, context):
        self.asked.append((request.fingerprint.hex(), request.limit))
        return admin_pb2.JsonReply(json=json.dumps(SESSIONS))

    def ListNodes(self, request, context):
        return admin_pb2.JsonReply(json="[]")

    def ShowSession(self, request, context):
        if request.session != "agent-3":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"no session is named {request.session}")
        return admin_pb2.JsonReply(
            json=json.dumps(SESSIONS[0] | {"segments": [{"address": "ssd@0+0x1000", "blocks": 7}]})
        )

    def DropSessions(self, request, context):
        self.asked.append(list(request.sessions))
        return admin_pb2.JsonReply(json=json.dumps(self.drop))

    def Check(self, request, context):
        self.asked.append(request.data)
        yield admin_pb2.CheckProgress(done=1, total=2)
        yield admin_pb2.CheckProgress(done=2, total=2, json=json.dumps(self.check))


@pytest.fixture
def admin(tmp_path, monkeypatch):
    scripted = ScriptedAdmin()
    server = grpc.server(ThreadPoolExecutor(2))
    admin_pb2_grpc.add_AdminServicer_to_server(scripted, server)
    (tmp_path / "node #1 100%").mkdir()
    server.add_insecure_port(f"unix:{tmp_path}/node #1 100%/fc.sock")
    server.start()
    monkeypatch.setenv("FLATCAKE_ENDPOINT", f"unix://{tmp_path}/node #1 100%/fc.sock")
    yield scripted
    server.stop(None).wait()


@pytest.fixture
def serves(monkeypatch):
    """Sets what stands in for the daemon."""

    def stand_in(serve):
        module = SimpleNamespace(serve=serve)
        monkeypatch.setitem(sys.modules, "flatcake_server.app", module)
        monkeypatch.setattr("flatcake_server.app", module, raising=False)

    return stand_in


@pytest.fixture
def flatcake(capsys, monkeypatch, tmp_path_factory):
    monkeypatch.chdir(tmp_path_factory.mktemp("nowhere"))

    def run(*arguments):
        code = cli._exit_code(list(arguments))
        written = capsys.readouterr()
        return code, written.out, written.err

    return run


def test_every_printing_command_prints_one_json_document(flatcake, admin):
    stats = json.loads(json.dumps(dataclasses.asdict(some_stats())))
    for arguments, document in (
        (["status"], stats),
        (["spaces"], SPACES),
        (["sessions"], SESSIONS),
        (["sessions", "list"], SESSIONS),
        (["sessions", "show", "agent-3"], SESSIONS[0] | {"segments": [{"address": "ssd@0+0x1000", "blocks": 7}]}),
        (["sessions", "drop", "a"], admin.drop),
        (["check"], admin.check),
    ):
        code, out, err = flatcake(*arguments, "--json")
        assert (code, json.loads(out), err) == (0, document, "")


def test_tables_show_units_and_leave_markup_alone(flatcake, admin):
    code, out, err = flatcake("sessions")
    assert (code, err) == (0, "")
    assert "agent-3[bold]" in out
    assert "3 GiB" in out
    assert "ago" in out
    assert "there may be more" in flatcake("sessions", "list", "--limit", str(len(SESSIONS)))[2]
    table = flatcake("spaces")[1]
    assert "32 x 4096" in table
    assert "ab" * 16 in table, "what is to be copied is in one piece"
    assert "1 of 1" not in table, "a pipe has room"
    assert "ssd@0+0x1000" in flatcake("sessions", "show", "agent-3")[1]


def test_a_socket_of_others_is_no_daemon_that_is_down(flatcake, admin, monkeypatch, tmp_path):
    with socket.socket(socket.AF_UNIX) as closed:  # nobody listens there
        closed.bind(str(tmp_path / "closed.sock"))
        monkeypatch.setattr(os, "access", lambda *_: False)
        code, _, err = flatcake("status", "--endpoint", str(tmp_path / "closed.sock"))
    assert code == 3
    assert "may not connect to" in err
    assert "join the group" in err


def test_a_table_that_does_not_fit_the_terminal_is_one_a_row():
    rows = [
        {"model": "m" * 60, "fingerprint": "ab" * 16, "blocks": 7},
        {"model": "n", "fingerprint": "cd" * 16, "blocks": 8},
    ]
    for columns, tables in ((120, 1), (80, 2)):
        out = Console(width=columns, file=io.StringIO(), force_terminal=True, color_system=None)
        show_rows("spaces", rows, out=out)
        said = out.file.getvalue()
        assert all(row["fingerprint"] in said for row in rows)
        assert said.count("spaces") == tables
    assert "spaces, 2 of 2" in said


def test_no_two_fields_have_one_name():
    out = Console(width=80, file=io.StringIO())
    out.print(fields_table("cluster", {"anchors_published": 1, "anchors_published_total": 2, "staged_bytes": 3}))
    assert [line.split("│")[1].strip() for line in out.file.getvalue().splitlines() if "│" in line] == [
        "anchors published",
        "anchors published total",
        "staged",
    ]


def test_nothing_stored_is_said_in_words(flatcake, admin, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "SESSIONS", [])
    assert flatcake("sessions") == (0, "sessions: none\n", "")
    assert json.loads(flatcake("sessions", "--json")[1]) == []


def test_a_node_by_itself_says_so(flatcake, admin):
    assert flatcake("nodes") == (1, "nodes: none\n", "flatcake: this node is by itself: its option directory is none\n")
    assert flatcake("nodes", "--json")[:2] == (1, "[]\n")


def test_status_says_on_stderr_which_disk_is_out(flatcake, admin):
    code, out, err = flatcake("status")
    assert code == 0
    assert "/mnt/a/b is out of service: disk died" in err
    assert "1,001" in out
    assert "bytes 1 KiB" in out  # the index, a document in the document
    assert "per_block" not in out


def test_arguments_reach_the_daemon(flatcake, admin):
    flatcake("sessions", "list", "--space", "ab" * 16, "--limit", "5")
    flatcake("sessions", "drop", "a", "b")
    flatcake("check", "--data")
    assert admin.asked == [("ab" * 16, 5), ["a", "b"], True]


def test_a_session_that_stays_and_a_broken_law_are_exit_code_1(flatcake, admin):
    assert flatcake("sessions", "drop", "a", "busy")[0] == 1
    admin.check = {"ok": False, "findings": ["arena: bytes at 0x1000 have two owners"]}
    code, _, err = flatcake("check")
    assert (code, err) == (1, "flatcake: arena: bytes at 0x1000 have two owners\n")
    assert flatcake("check", "--json")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["status", "--endpoint", "/nowhere/fc.sock"], 3, "flatcake serve"),
        (["status", "--endpoint", "nonsense"], 2, "host:port"),
        (["status", "--endpoint", "http://x:1"], 2, "host:port"),
        (["sessions", "show", "nobody"], 2, "no session is named nobody"),
        (["sessions", "list", "--space", "xyz"], 2, "flatcake spaces"),
        (["sessions", "list", "--limit", "0"], 2, "--limit"),
        (["sessions", "--json", "list"], 2, "after the command"),
        (["frobnicate"], 2, "frobnicate"),
        (["serve", "--memory-byte", "1"], 2, "--memory-bytes"),
        (["serve", "--memory-bytes", "lots"], 2, "4GiB"),
        (["serve", "--ssd-paths", "/a,/a/b"], 2, "directory of its own"),
        (["serve", "--config", "/nowhere.toml"], 2, "--config"),
        (["check", "--rebuild"], 2, "--ssd-paths"),
    ],
)
def test_an_error_is_one_line_that_says_what_to_do(flatcake, admin, arguments, code, said):
    got, out, err = flatcake(*arguments)
    assert (got, out) == (code, "")
    assert err.startswith("flatcake: ")
    assert err.count("\n") == 1
    assert said in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Unavailable("x"), 3),
        (Overloaded("x"), 3),
        (Corrupt("x"), 3),
        (ValueError("x"), 2),
        (OSError(98, "taken", "p"), 3),
        (KeyboardInterrupt(), 130),
    ],
)
def test_what_the_daemon_raises_becomes_an_exit_code(flatcake, serves, error, code):
    def serve(_):
        raise error

    serves(serve)
    assert flatcake("serve")[0] == code


def test_a_command_that_is_interrupted_while_it_loads_says_nothing():
    code = """if 1:
        import os, signal, sys

        signal.signal(signal.SIGINT, signal.default_int_handler)  # who started the tests may have it ignored

        class Interrupted:
            def find_spec(self, name, *_):
                if name == "typer":
                    os.kill(os.getpid(), signal.SIGINT)

        sys.meta_path.insert(0, Interrupted())
        from flatcake_server.__main__ import main
        main()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_what_the_command_becomes_says_nothing_either(tmp_path):
    (tmp_path / "loads.py").write_text("raise KeyboardInterrupt")
    code = "from flatcake_server import cli_replay; cli_replay.become('loads', [])"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=False,
        timeout=100,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_serve_takes_every_option_as_a_flag_and_returns_the_daemon_s_code(flatcake, serves, tmp_path):
    seen = []
    serves(lambda config: seen.append(config) or 7)
    given = dict(NodeConfig()) | {
        "memory_bytes": 2 << 20,
        "ssd_paths": (tmp_path,),
        "lease_ttl": 7.0,
        "sync_commits": False,
    }
    flags = []
    for name, value in given.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        flags += [f"--{name.replace('_', '-')}", text] if text else []
    assert flatcake("serve", *flags)[0] == 7
    assert seen == [NodeConfig.model_validate(given)]


def test_more_memory_than_there_is_starts_no_daemon(flatcake, serves):
    serves(lambda _: 7)
    code, _, err = flatcake("serve", "--memory-bytes", "200TiB")
    assert (code, err.count("\n")) == (2, 1)
    assert "lower it" in err


def test_a_list_is_repeated_or_separated_by_commas(flatcake, serves, tmp_path):
    seen = []
    serves(lambda config: seen.append(config.ssd_paths) or 0)
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir(), b.mkdir()
    flatcake("serve", "--ssd-paths", f"{a},{b}")
    flatcake("serve", "--ssd-paths", f"{a}", "--ssd-paths", f"{b}")
    assert seen == [(a, b), (a, b)]
    seen.clear()
    serves(lambda config: seen.append(config.nvmeof_allowed_hosts) or 0)
    flatcake("serve", "--nvmeof-allowed-hosts", "2", "--nvmeof-allowed-hosts", "3,4")
    assert seen == [("2", "3", "4")]


def test_variables_and_files_reach_the_daemon(flatcake, serves, monkeypatch, tmp_path):
    seen = []
    serves(lambda config: seen.append((config.node_id, config.verify)) or 0)
    file = tmp_path / "some.toml"
    file.write_text('node_id = 5\nverify = "all"\n')
    monkeypatch.setenv("FLATCAKE_NODE_ID", "6")
    flatcake("serve", "--config", str(file))
    monkeypatch.setenv("FLATCAKE_CONFIG", str(file))
    flatcake("serve", "--verify", "off")
    assert seen == [(6, "all"), (6, "off")]


def test_the_configured_socket_is_asked_when_nobody_says_where(flatcake, monkeypatch):
    monkeypatch.delenv("FLATCAKE_ENDPOINT", raising=False)
    monkeypatch.setenv("FLATCAKE_SOCKET", "/nowhere/configured.sock")
    assert "/nowhere/configured.sock" in flatcake("status")[2]
    monkeypatch.setenv("FLATCAKE_ENDPOINT", "/nowhere/told.sock")
    assert "/nowhere/told.sock" in flatcake("status")[2]


def test_doctor_finds_and_exits_1_where_a_daemon_could_not_run(flatcake, tmp_path):
    code, out, _ = flatcake("doctor", "--ssd-paths", str(tmp_path), "--json")
    assert code == 0
    assert {finding["state"] for finding in json.loads(out)} <= {"yes", "no"}
    assert list(tmp_path.iterdir()) == []
    code, out, _ = flatcake("doctor", "--ssd-paths", "/nowhere")
    assert code == 1
    assert "fails" in out


def test_demo_is_a_process_of_its_own_and_its_code_is_ours(flatcake, monkeypatch):
    ran = []

    def become(*told):
        ran.append(told)
        raise typer.Exit(1)

    monkeypatch.setattr(cli_replay, "become", become)
    assert flatcake("demo", "--json")[0] == 1
    assert flatcake("demo", "--cluster")[0] == 1
    assert ran == [("flatcake_client.engines.demo", ["--json"]), ("flatcake_client.engines.demo_cluster", [])]


def test_help_and_version(flatcake):
    code, out, _ = flatcake()
    assert code == 0
    assert all(name in out for name in ("serve", "status", "sessions", "spaces", "check", "doctor", "demo"))
    assert "..." not in out.split("Commands:")[1]  # each says what it is on its line
    assert flatcake("--version")[1].startswith("flatcake ")
    help_text = flatcake("serve", "--help")[1]
    assert all(f"--{name.replace('_', '-')}" in help_text for name in NodeConfig.model_fields)
