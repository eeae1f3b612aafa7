"""What is shown over TCP, from the environment."""

from __future__ import annotations

import pytest

from flatcake_transport.access import CALL_METADATA, Access, Tls, access_of, call_proof
from flatcake_transport.errors import Unavailable

TOKEN = b"sixteen bytes or more"


def test_nothing_is_shown_by_default():
    assert access_of({}) == Access()
    assert access_of({}).metadata == ()


def test_the_token_is_proved_and_never_said(tmp_path):
    (tmp_path / "token").write_bytes(TOKEN + b"\n")
    access = access_of({"FLATCAKE_CLUSTER_TOKEN_FILE": str(tmp_path / "token")})
    ((name, shown),) = access.metadata
    assert (name, shown) == (CALL_METADATA, call_proof(TOKEN))
    assert TOKEN.hex() not in shown
    assert TOKEN.decode() not in shown


def test_tls_is_all_or_nothing(tmp_path):
    names = {}
    for name in ("CERT", "KEY", "CA"):
        (tmp_path / name).write_text(name)
        names[f"FLATCAKE_TLS_{name}_FILE"] = str(tmp_path / name)
    assert access_of(names).tls == Tls(b"CERT", b"KEY", b"CA")
    with pytest.raises(Unavailable, match="needs all of"):
        access_of({"FLATCAKE_TLS_CERT_FILE": str(tmp_path / "CERT")})
    with pytest.raises(Unavailable, match="cannot be read"):
        access_of({"FLATCAKE_CLUSTER_TOKEN_FILE": str(tmp_path / "none")})
