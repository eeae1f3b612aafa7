from __future__ import annotations

import os

import pytest

from flatcake_transport.endpoint import default_endpoint, grpc_target, is_private, socket_candidates


@pytest.mark.parametrize(
    ("endpoint", "target"),
    [
        ("unix:///run/fc.sock", "unix:/run/fc.sock"),
        ("/run/fc.sock", "unix:/run/fc.sock"),
        ("unix:/run/fc.sock", "unix:/run/fc.sock"),
        ("/run/a b#1/100%.sock", "unix:/run/a%20b%231/100%25.sock"),
        ("localhost:7450", "dns:///localhost:7450"),
        ("[::1]:7450", "dns:///[::1]:7450"),
    ],
)
def test_endpoints_as_people_write_them(endpoint, target):
    assert grpc_target(endpoint) == target


@pytest.mark.parametrize(
    "endpoint", ["", "unix:", "unix://", "localhost", "http://x:1", "::1:7450", "host:port", "host:65536", "/a,b"]
)
def test_what_is_no_endpoint_is_refused_with_an_example(endpoint):
    with pytest.raises(ValueError, match="endpoint"):
        grpc_target(endpoint)


def test_the_named_endpoint_wins_then_the_socket_that_is_there(tmp_path):
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    private = socket_candidates(environ, 7)[1]
    assert private == tmp_path / "flatcake" / "flatcake.sock"
    private.parent.mkdir()
    private.touch()
    assert default_endpoint(environ | {"FLATCAKE_ENDPOINT": "h:1"}, 7) == "h:1"
    if not socket_candidates(environ, 7)[0].exists():
        assert default_endpoint(environ, 7) == f"unix://{private}"
    assert socket_candidates({"TMPDIR": "/var/tmp"}, 7)[1].parent.name == "flatcake-7"


@pytest.mark.parametrize(("mode", "found"), [(0o700, True), (0o755, True), (0o770, False), (0o777, False)])
def test_a_socket_counts_where_only_its_user_can_have_put_it(tmp_path, mode, found):
    socket = socket_candidates({"XDG_RUNTIME_DIR": str(tmp_path)}, os.getuid())[1]
    socket.parent.mkdir()
    socket.touch()
    socket.parent.chmod(mode)
    assert is_private(socket.parent, os.getuid()) is found
    if not socket_candidates({}, 7)[0].exists():
        there = default_endpoint({"XDG_RUNTIME_DIR": str(tmp_path)}, os.getuid()) == f"unix://{socket}"
        assert there is found


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make another user's directory")
def test_nor_does_one_in_another_user_s_directory(tmp_path):
    tmp_path.chmod(0o700)
    os.chown(tmp_path, 12345, 12345)
    assert is_private(tmp_path, 12345)
    assert not is_private(tmp_path, 7)
