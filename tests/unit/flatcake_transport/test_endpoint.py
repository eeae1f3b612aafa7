from __future__ import annotations

import pytest

from flatcake_transport.endpoint import default_endpoint, grpc_target, socket_candidates


@pytest.mark.parametrize(
    ("endpoint", "target"),
    [
        ("unix:///run/fc.sock", "unix:/run/fc.sock"),
        ("/run/fc.sock", "unix:/run/fc.sock"),
        ("localhost:7450", "dns:///localhost:7450"),
        ("[::1]:7450", "dns:///[::1]:7450"),
    ],
)
def test_endpoints_as_people_write_them(endpoint, target):
    assert grpc_target(endpoint) == target


@pytest.mark.parametrize("endpoint", ["", "unix:", "unix://", "localhost", "http://x:1", "::1:7450", "host:port"])
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
