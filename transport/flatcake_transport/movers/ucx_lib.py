"""libucp by ctypes: which library, its structs, its functions. Thin: what is done with them is in `ucx_worker.py`.

    system   Debian's libucx0, MOFED: with verbs where the card's libraries are; found by the loader
    wheel    libucx-cu12, libucx-cu13: newer, without verbs; `pip install 'flatcake[ucx]'`

None is ever loaded into an engine or a daemon, which may have one of their own: two in one process share half of their symbols and
crash. FLATCAKE_UCX_LIB chooses: `system`, `wheel`, or the path of a libucp.so.0. Otherwise the system's comes first where there
is an RDMA card, which the wheel cannot use, and the wheel comes first elsewhere.

Structs are those of UCX 1.13, the oldest that is taken; later ones only append fields, and every struct says in its mask which
fields it has. tests/unit/flatcake_transport/test_ucx_lib.py compares sizes, offsets and flags with the C headers.
A status is one byte: the enum is packed, and the upper bytes of the register are anything.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_int,
    c_int8,
    c_size_t,
    c_uint,
    c_uint32,
    c_uint64,
    c_ulong,
    c_void_p,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flatcake_transport.errors import Unavailable

CHOICE: Final = "FLATCAKE_UCX_LIB"
VERSION_MIN: Final = (1, 13)  # the oldest that was tried; the memory handle of an operation came shortly before
_SONAME: Final = "libucp.so.0"
# In the order in which one needs the other: loaded by path, so that none is looked for elsewhere.
_WHEEL_LIBRARIES: Final = ("libucs.so.0", "libuct.so.0", _SONAME)
_CARDS: Final = Path("/sys/class/infiniband")

OK: Final = 0
IN_PROGRESS: Final = 1
ERR_CANCELED: Final = -16
# A pointer at the top of the address space is a status: UCS_PTR_IS_ERR.
_STATUS_POINTERS: Final = (1 << 64) - 100

# What the structs' masks and flags mean. The names are those of ucp.h, so that a test can compare them.
FLAGS: Final[Mapping[str, int]] = {
    "UCP_PARAM_FIELD_FEATURES": 1 << 0,
    "UCP_PARAM_FIELD_NAME": 1 << 8,
    "UCP_FEATURE_RMA": 1 << 1,
    "UCP_FEATURE_WAKEUP": 1 << 4,
    "UCP_WORKER_PARAM_FIELD_THREAD_MODE": 1 << 0,
    "UCS_THREAD_MODE_SERIALIZED": 1,
    "UCP_WORKER_ATTR_FIELD_ADDRESS": 1 << 1,
    "UCP_EP_PARAM_FIELD_REMOTE_ADDRESS": 1 << 0,
    "UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE": 1 << 1,
    "UCP_EP_PARAM_FIELD_ERR_HANDLER": 1 << 2,
    "UCP_ERR_HANDLING_MODE_PEER": 1,
    "UCP_EP_CLOSE_FLAG_FORCE": 1 << 0,
    "UCP_MEM_MAP_PARAM_FIELD_ADDRESS": 1 << 0,
    "UCP_MEM_MAP_PARAM_FIELD_LENGTH": 1 << 1,
    "UCP_MEM_MAP_PARAM_FIELD_PROT": 1 << 3,
    "UCP_MEM_MAP_PROT_LOCAL_READ": 1 << 0,
    "UCP_MEM_MAP_PROT_LOCAL_WRITE": 1 << 1,
    "UCP_MEM_MAP_PROT_REMOTE_READ": 1 << 8,
    "UCP_MEM_MAP_PROT_REMOTE_WRITE": 1 << 9,
    "UCP_OP_ATTR_FIELD_FLAGS": 1 << 4,
    "UCP_OP_ATTR_FIELD_MEMORY_TYPE": 1 << 6,
    "UCP_OP_ATTR_FIELD_MEMH": 1 << 8,
    "UCS_MEMORY_TYPE_HOST": 0,
    "UCS_OK": OK,
    "UCS_INPROGRESS": IN_PROGRESS,
    "UCS_ERR_CANCELED": ERR_CANCELED,
    "UCS_ERR_LAST": -100,
}


class ContextParams(Structure):
    _fields_ = (
        ("field_mask", c_uint64),
        ("features", c_uint64),
        ("request_size", c_size_t),
        ("request_init", c_void_p),
        ("request_cleanup", c_void_p),
        ("tag_sender_mask", c_uint64),
        ("mt_workers_shared", c_int),
        ("estimated_num_eps", c_size_t),
        ("estimated_num_ppn", c_size_t),
        ("name", c_char_p),
    )


class WorkerParams(Structure):
    _fields_ = (
        ("field_mask", c_uint64),
        ("thread_mode", c_int),
        ("cpu_mask", c_ulong * 16),
        ("events", c_uint),
        ("user_data", c_void_p),
        ("event_fd", c_int),
        ("flags", c_uint64),
        ("name", c_char_p),
        ("am_alignment", c_size_t),
        ("client_id", c_uint64),
    )


class WorkerAttributes(Structure):
    _fields_ = (
        ("field_mask", c_uint64),
        ("thread_mode", c_int),
        ("address_flags", c_uint32),
        ("address", c_void_p),
        ("address_length", c_size_t),
        ("max_am_header", c_size_t),
        ("name", c_char * 32),
        ("max_debug_string", c_size_t),
    )


class MapParams(Structure):
    _fields_ = (
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("length", c_size_t),
        ("flags", c_uint),
        ("prot", c_uint),
        ("memory_type", c_int),
    )


OnEndpointError = CFUNCTYPE(None, c_void_p, c_void_p, c_int8)  # argument, endpoint, status


class EndpointParams(Structure):
    _fields_ = (
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("err_mode", c_int),
        ("err_handler_cb", OnEndpointError),
        ("err_handler_arg", c_void_p),
        ("user_data", c_void_p),
        ("flags", c_uint),
        ("sockaddr_addr", c_void_p),
        ("sockaddr_addrlen", c_uint32),
        ("conn_request", c_void_p),
        ("name", c_char_p),
        ("local_sockaddr_addr", c_void_p),
        ("local_sockaddr_addrlen", c_uint32),
    )


class RequestParams(Structure):
    _fields_ = (
        ("op_attr_mask", c_uint32),
        ("flags", c_uint32),
        ("request", c_void_p),
        ("cb", c_void_p),
        ("datatype", c_uint64),
        ("user_data", c_void_p),
        ("reply_buffer", c_void_p),
        ("memory_type", c_int),
        ("recv_info", c_void_p),
        ("memh", c_void_p),
    )


Call = Callable[..., int]


class Ucp:
    """The functions of one libucp, with the types of their arguments.

    Those that return a status return it as an int; see `check`. Those that start something return a pointer: None or 0 when
    it is done already, a status near the top of the address space, or a request; see `status_of`.
    """

    def __init__(self, ucp: ctypes.CDLL, ucs: ctypes.CDLL) -> None:
        p, out = c_void_p, POINTER(c_void_p)
        params = POINTER(RequestParams)

        def bind(name: str, result: Any, *arguments: Any) -> Call:
            function = getattr(ucp, name)
            function.restype, function.argtypes = result, arguments
            return function  # type: ignore[no-any-return]

        self.get_version = bind("ucp_get_version", None, *[POINTER(c_uint)] * 3)
        self.config_read = bind("ucp_config_read", c_int8, c_char_p, c_char_p, out)
        self.config_modify = bind("ucp_config_modify", c_int8, p, c_char_p, c_char_p)
        self.config_release = bind("ucp_config_release", None, p)
        self.init = bind("ucp_init_version", c_int8, c_uint, c_uint, POINTER(ContextParams), p, out)
        self.cleanup = bind("ucp_cleanup", None, p)
        self.context_print = bind("ucp_context_print_info", None, p, p)
        self.worker_create = bind("ucp_worker_create", c_int8, p, POINTER(WorkerParams), out)
        self.worker_destroy = bind("ucp_worker_destroy", None, p)
        self.worker_query = bind("ucp_worker_query", c_int8, p, POINTER(WorkerAttributes))
        self.release_address = bind("ucp_worker_release_address", None, p, p)
        self.get_efd = bind("ucp_worker_get_efd", c_int8, p, POINTER(c_int))
        self.arm = bind("ucp_worker_arm", c_int8, p)
        self.progress = bind("ucp_worker_progress", c_uint, p)
        self.mem_map = bind("ucp_mem_map", c_int8, p, POINTER(MapParams), out)
        self.mem_unmap = bind("ucp_mem_unmap", c_int8, p, p)
        self.rkey_pack = bind("ucp_rkey_pack", c_int8, p, p, out, POINTER(c_size_t))
        self.rkey_buffer_release = bind("ucp_rkey_buffer_release", None, p)
        self.rkey_unpack = bind("ucp_ep_rkey_unpack", c_int8, p, c_char_p, out)
        self.rkey_destroy = bind("ucp_rkey_destroy", None, p)
        self.ep_create = bind("ucp_ep_create", c_int8, p, POINTER(EndpointParams), out)
        self.ep_close = bind("ucp_ep_close_nbx", p, p, params)
        self.ep_flush = bind("ucp_ep_flush_nbx", p, p, params)
        self.get = bind("ucp_get_nbx", p, p, p, c_size_t, c_uint64, p, params)
        self.put = bind("ucp_put_nbx", p, p, p, c_size_t, c_uint64, p, params)
        self.request_status = bind("ucp_request_check_status", c_int8, p)
        self.request_free = bind("ucp_request_free", None, p)
        ucs.ucs_status_string.restype, ucs.ucs_status_string.argtypes = c_char_p, (c_int8,)
        self._status_string = ucs.ucs_status_string

    def text(self, status: int) -> str:
        return f"{self._status_string(status).decode(errors='replace')} ({status})"

    def check(self, status: int, what: str) -> None:
        """Raises: Unavailable: the status is an error."""
        if status:
            raise Unavailable(f"UCX: {what}: {self.text(status)}")


def status_of(pointer: int | None) -> int:
    """Of what a starting function returned: OK, IN_PROGRESS (it is a request), or an error."""
    if not pointer:
        return OK
    return pointer - (1 << 64) if pointer >= _STATUS_POINTERS else IN_PROGRESS


@dataclass(frozen=True, slots=True, eq=False)
class UcxLibrary:
    """A libucp that is loaded. `origin`: system, wheel or path."""

    origin: str
    path: str
    version: tuple[int, int, int]
    ucp: Ucp

    @property
    def named(self) -> str:
        return f"UCX {'.'.join(map(str, self.version))} ({self.origin}, {self.path})"


def load_ucx() -> UcxLibrary:
    """Load the library that FLATCAKE_UCX_LIB, else the search order names. Again: the same one.

    Raises: Unavailable: none loads, or it is older than 1.13; the message says what was tried.
    """
    tried = []
    for origin, load in _candidates(os.environ.get(CHOICE, "")):
        try:
            ucp = load()
            ucs = ctypes.CDLL("libucs.so.0", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        except OSError as error:
            tried.append(f"{origin}: {error}")
            continue
        found = Ucp(ucp, ucs)
        major, minor, release = c_uint(), c_uint(), c_uint()
        found.get_version(major, minor, release)
        version = (major.value, minor.value, release.value)
        if version[0] != VERSION_MIN[0] or version[:2] < VERSION_MIN:
            raise Unavailable(f"UCX {version} of {_path_of()} ({origin}): FlatCake takes 1.13 and later 1.x")
        return UcxLibrary(origin, _path_of(), version, found)
    raise Unavailable(f"no UCX can be loaded: {'; '.join(tried)}")


def _candidates(choice: str) -> Iterator[tuple[str, Callable[[], ctypes.CDLL]]]:
    ways: dict[str, Callable[[], ctypes.CDLL]] = {"system": lambda: ctypes.CDLL(_SONAME), "wheel": _load_wheel}
    if choice in ways:
        yield choice, ways[choice]
    elif choice:
        yield "path", lambda: _load_folder(Path(choice))
    else:
        order = ("system", "wheel") if rdma_cards() else ("wheel", "system")
        for origin in order:
            yield origin, ways[origin]


def rdma_cards(folder: Path = _CARDS) -> list[str]:
    """The RDMA devices of this machine's kernel."""
    return sorted(entry.name for entry in folder.glob("*"))


def _load_wheel() -> ctypes.CDLL:
    spec = importlib.util.find_spec("libucx")
    if spec is None or spec.origin is None:
        raise OSError("the libucx wheel is not installed: pip install 'flatcake[ucx]'")
    return _load_folder(Path(spec.origin).parent / "lib" / _SONAME)


def _load_folder(library: Path) -> ctypes.CDLL:
    """Load a libucp with the libraries beside it."""
    for name in _WHEEL_LIBRARIES[:-1]:
        if (library.parent / name).exists():
            ctypes.CDLL(str(library.parent / name))
    return ctypes.CDLL(str(library))


def _path_of() -> str:
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return _SONAME
    return next((line.split(maxsplit=5)[5] for line in lines if "/libucp.so" in line), _SONAME)
