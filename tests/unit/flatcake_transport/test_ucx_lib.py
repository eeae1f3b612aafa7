"""The structs and flags that ctypes believes in, against what a C compiler says of the header of each UCX that is here."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from flatcake_transport.errors import Unavailable
from flatcake_transport.movers import ucx_lib
from flatcake_transport.movers.ucx_lib import FLAGS, load_ucx, status_of

STRUCTS = {
    "ucp_params_t": ucx_lib.ContextParams,
    "ucp_worker_params_t": ucx_lib.WorkerParams,
    "ucp_worker_attr_t": ucx_lib.WorkerAttributes,
    "ucp_mem_map_params_t": ucx_lib.MapParams,
    "ucp_ep_params_t": ucx_lib.EndpointParams,
    "ucp_request_param_t": ucx_lib.RequestParams,
}
# Structs within structs are written out in ctypes.
NESTED = {
    "err_handler_cb": "err_handler.cb",
    "err_handler_arg": "err_handler.arg",
    "sockaddr_addr": "sockaddr.addr",
    "sockaddr_addrlen": "sockaddr.addrlen",
    "local_sockaddr_addr": "local_sockaddr.addr",
    "local_sockaddr_addrlen": "local_sockaddr.addrlen",
}


def headers() -> dict[str, Path]:
    wheel = importlib.util.find_spec("libucx")
    folders = {"system": Path("/usr/include")}
    if wheel is not None and wheel.origin is not None:
        folders["wheel"] = Path(wheel.origin).parent / "include"
    return {name: folder for name, folder in folders.items() if (folder / "ucp/api/ucp.h").exists()}


def fields() -> list[tuple[str, str, int, int]]:
    """(struct, field in C, offset, size) of every field that ctypes has."""
    return [
        (name, NESTED.get(field[0], field[0]), getattr(struct, field[0]).offset, getattr(struct, field[0]).size)
        for name, struct in STRUCTS.items()
        for field in struct._fields_
    ]


def ask_compiler(include: Path, folder: Path) -> list[int]:
    lines = [
        f'printf("%ld %ld\\n", (long)offsetof({s}, {f}), (long)sizeof((({s} *)0)->{f}));' for s, f, _, _ in fields()
    ]
    lines += [f'printf("%ld\\n", (long){name});' for name in FLAGS]
    lines += ['printf("%ld %d\\n", (long)sizeof(ucs_status_t), (ucs_status_t)-1 < 0);']
    source = folder / "ask.c"
    head = "#include <stddef.h>\n#include <stdio.h>\n#include <ucp/api/ucp.h>\n"
    source.write_text(head + "int main(void) {\n" + "\n".join(lines) + "\nreturn 0; }\n")
    subprocess.run(["gcc", "-I", str(include), "-o", str(folder / "ask"), str(source)], check=True, capture_output=True)
    answer = subprocess.run([str(folder / "ask")], check=True, capture_output=True, text=True)
    return [int(word) for word in answer.stdout.split()]


@pytest.mark.parametrize("which", ["system", "wheel"])
def test_structs_and_flags_are_those_of_the_header(which: str, tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc: the structs of UCX were not compared with its header")
    if which not in headers():
        pytest.skip(f"no header of the {which} UCX (libucx-dev): its structs were not compared")
    answers = ask_compiler(headers()[which], tmp_path)
    for struct, field, offset, size in fields():
        assert (struct, field, answers.pop(0), answers.pop(0)) == (struct, field, offset, size)
    for name, value in FLAGS.items():
        assert (name, answers.pop(0)) == (name, value)
    assert answers == [1, 1], "a status is one signed byte"


def test_no_struct_is_larger_than_what_ucx_may_write() -> None:
    """Attributes are filled in by UCX, and only the fields in the mask: the last of 1.13 must be there."""
    assert ctypes.sizeof(ucx_lib.WorkerAttributes) == 80


@pytest.mark.parametrize(
    ("pointer", "status"), [(None, 0), (0, 0), (4096, 1), ((1 << 64) - 16, -16), ((1 << 64) - 100, -100)]
)
def test_a_pointer_is_nothing_a_request_or_a_status(pointer: int | None, status: int) -> None:
    assert status_of(pointer) == status


def test_a_library_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx_lib, "_SONAME", "libucp-nowhere.so.0")
    monkeypatch.setenv(ucx_lib.CHOICE, "/nowhere/libucp.so.0")
    with pytest.raises(Unavailable, match="/nowhere/libucp"):
        load_ucx()
    monkeypatch.setenv(ucx_lib.CHOICE, "system")
    with pytest.raises(Unavailable, match="system: libucp-nowhere"):
        load_ucx()


@pytest.mark.parametrize("version", [(1, 12, 1), (2, 0, 0)])
def test_a_version_that_was_not_tried_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int]
) -> None:
    class OfThatVersion:
        def __init__(self, *libraries: object) -> None:
            pass

        def get_version(self, *numbers: ctypes.c_uint) -> None:
            for number, value in zip(numbers, version, strict=True):
                number.value = value

    monkeypatch.setattr(ucx_lib, "Ucp", OfThatVersion)
    monkeypatch.setattr(ucx_lib, "_candidates", lambda choice: [("system", lambda: None)])
    monkeypatch.setattr(ucx_lib.ctypes, "CDLL", lambda *_, **__: None)
    with pytest.raises(Unavailable, match=r"takes 1\.13 and later 1\.x"):
        load_ucx()


def test_with_a_card_the_system_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx_lib, "rdma_cards", lambda: ["mlx5_0"])
    assert [origin for origin, _ in ucx_lib._candidates("")] == ["system", "wheel"]
    monkeypatch.setattr(ucx_lib, "rdma_cards", list)
    assert [origin for origin, _ in ucx_lib._candidates("")] == ["wheel", "system"]
