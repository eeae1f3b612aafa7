"""What is shown over TCP, from the environment."""

from __future__ import annotations

import subprocess

import pytest
from certificates import certificates

from flatcake_transport.access import CALL_METADATA, Access, Tls, access_of, call_proof, read_tls
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
    names = {f"FLATCAKE_{name.upper()}": file for name, file in certificates(tmp_path).items()}
    files = [(tmp_path / name).read_bytes() for name in ("node.pem", "node.key", "ca.pem")]
    assert access_of(names).tls == Tls(*files)
    with pytest.raises(Unavailable, match="needs all of"):
        access_of({"FLATCAKE_TLS_CERT_FILE": str(tmp_path / "node.pem")})
    with pytest.raises(Unavailable, match="cannot be read"):
        access_of({"FLATCAKE_CLUSTER_TOKEN_FILE": str(tmp_path / "none")})


def test_a_wrong_file_of_tls_is_named(tmp_path):
    certificates(tmp_path)
    node, key, ca = (str(tmp_path / name) for name in ("node.pem", "node.key", "ca.pem"))
    other = str(tmp_path / "ca.key")
    (tmp_path / "none.pem").write_bytes(b"not PEM")
    text = (tmp_path / "node.pem").read_text()
    (tmp_path / "torn.pem").write_text(text[: len(text) // 2])
    locked = str(tmp_path / "locked.key")
    openssl = ["openssl", "ec", "-in", key, "-aes256", "-passout", "pass:secret", "-out", locked]
    subprocess.run(openssl, check=True, capture_output=True)
    for name in ("none.pem", "torn.pem"):
        wrong = str(tmp_path / name)
        for files, what in (((wrong, key, ca), "no certificate in PEM"), ((node, key, wrong), "no certificate in PEM")):
            with pytest.raises(Unavailable, match=f"{wrong} holds {what}: write"):
                read_tls(*files)
        with pytest.raises(
            Unavailable, match=f"{wrong} holds no private key in PEM without a password: write the key of {node}"
        ):
            read_tls(node, wrong, ca)
    with pytest.raises(Unavailable, match=f"{locked} holds no private key in PEM without a password"):
        read_tls(node, locked, ca)
    with pytest.raises(Unavailable, match=f"{other} is not the key of {node}: give the two"):
        read_tls(node, other, ca)
    with pytest.raises(Unavailable, match="missing cannot be read: No such file"):
        read_tls(node, str(tmp_path / "missing"), ca)
