from __future__ import annotations

import os
from pathlib import Path

from flatcake_transport.endpoint import grpc_target
from flatcake_transport.reach import unreached


def test_what_can_be_seen_of_a_socket_that_does_not_answer(tmp_path, monkeypatch):
    there = tmp_path / "a b#1.sock"
    assert "start one with `flatcake serve`" in unreached(grpc_target(str(there)))
    there.touch()
    assert unreached(grpc_target(str(there))) == ""
    assert unreached(grpc_target("localhost:7450")) == ""
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert f"may not connect to {there}: join the group" in unreached(grpc_target(str(there)))


def test_a_directory_that_is_closed_to_us_closes_the_socket(monkeypatch):
    def closed(_path):
        raise PermissionError

    monkeypatch.setattr(Path, "stat", closed)
    said = unreached("unix:/run/flatcake/flatcake.sock")
    monkeypatch.undo()
    assert "join the group" in said
