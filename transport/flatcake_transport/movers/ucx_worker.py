"""One UCX context with one worker, in a process of its own that may die: the one that serves (ucx_server.py), or reads (ucx_reader.py).

One thread, so no lock of UCX's is needed. It sleeps in `poll` on UCX's own descriptor when nothing moves, also on the serving
side, where UCX answers gets over TCP by progress: no Python runs for a byte.

Options are set through `ucp_config_modify`, never in the process's environment; a UCX_* that the user has set wins.

Invariant: memory that was mapped is unmapped after the worker that could use it is gone, or on request.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import select
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from ctypes import byref, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flatcake_transport.errors import Unavailable
from flatcake_transport.movers.ucx_child import mmap_near, unmap_shared
from flatcake_transport.movers.ucx_endpoint import Counts, Endpoint, Piece
from flatcake_transport.movers.ucx_lib import (
    FLAGS,
    ContextParams,
    MapParams,
    OnEndpointError,
    UcxLibrary,
    WorkerAttributes,
    WorkerParams,
)
from flatcake_transport.remote import MARK_BYTES, Server

ENDPOINTS_MAX: Final = 256  # peers at once; the one used longest ago is closed for the next
PEER_TIMEOUT_S: Final = 5.0
# Where every process that serves has its mark, if the place is free: whoever comes with the words of an earlier process reads the
# mark of this one, and not an address that is not there, which would end it.
MARK_AT: Final = 0x4643_0000_0000
_PROGRESS_ROUNDS_MAX: Final = 64  # before completions and deadlines are looked at again
_LOCAL: Final = FLAGS["UCP_MEM_MAP_PROT_LOCAL_READ"] | FLAGS["UCP_MEM_MAP_PROT_LOCAL_WRITE"]
READABLE: Final = _LOCAL | FLAGS["UCP_MEM_MAP_PROT_REMOTE_READ"]
WRITABLE: Final = READABLE | FLAGS["UCP_MEM_MAP_PROT_REMOTE_WRITE"]


def default_options(peer_timeout_s: float) -> dict[str, str]:
    """What UCX does better with than by itself.

    Segments of 256 KiB: over loopback TCP 5-7 GB/s instead of 1.5. Connecting without blocking: else one peer that is gone
    holds up all others for as long as the kernel goes on trying. Bridges, which later versions leave out: a machine with virtual
    ones has its address there.
    """
    return {
        "TCP_TX_SEG_SIZE": "256k",
        "TCP_RX_SEG_SIZE": "256k",
        "TCP_CONN_NB": "y",
        "TCP_BRIDGE_ENABLE": "y",
        "KEEPALIVE_INTERVAL": f"{max(0.1, peer_timeout_s):.3f}s",
    }


def routes() -> frozenset[tuple[str, ...]]:
    """Which networks this machine reaches by which device."""
    known: set[tuple[str, ...]] = set()
    # Network, mask and device: the other columns count uses.
    for table, columns in (("route", (1, 7, 0)), ("ipv6_route", (0, 1, 9))):
        with contextlib.suppress(OSError):  # a kernel without IPv6
            for words in map(str.split, Path(f"/proc/net/{table}").read_text().splitlines()):
                known.add(tuple(words[column] for column in columns))
    return frozenset(known)


@dataclass(frozen=True, slots=True)
class Mapped:
    """Registered memory: UCX's handle and the packed key for peers."""

    handle: int
    rkey: bytes


class UcxWorker:
    """One context and worker. Belongs to one thread, which calls `turn` and `sleep` in a loop until `close`.

    Args:
        options: UCX options without the prefix, over the defaults, e.g. {"TLS": "tcp", "NET_DEVICES": "eth0"}.
        peer_timeout_s: a peer that answers nothing for so long has failed.
        bridges: use network bridges, too.
    """

    def __init__(
        self,
        library: UcxLibrary,
        *,
        options: Mapping[str, str] | None = None,
        peer_timeout_s: float = PEER_TIMEOUT_S,
        bridges: bool = True,
    ) -> None:
        """Raises: Unavailable: UCX does not start with these options."""
        self._ucp = library.ucp
        self._version = library.version
        self._options = options or {}
        self._bridges = bridges
        self._peer_timeout_s = peer_timeout_s
        self._endpoints: OrderedDict[bytes, Endpoint] = OrderedDict()
        self._names: dict[int, Endpoint] = {}  # also those that are being closed
        self._names_given = 0
        self._shunned: dict[bytes, float] = {}  # peer -> until when; oldest first
        self._errors: deque[tuple[int, int]] = deque()
        self._on_error = OnEndpointError(self._note_error)
        self._mapped: set[int] = set()
        self._context, self._worker = c_void_p(), c_void_p()
        self._routes = routes()
        self.outdated = False  # a peer was not reached, and the routes have changed since
        self._address = b""
        self._server: Server | None = None
        self._mark = 0
        self.counts = Counts()
        self._poller = select.poll()
        try:
            self._poller.register(self._start(), select.POLLIN)
        except Unavailable:
            self.close()
            raise

    @property
    def endpoints(self) -> int:
        """Connections that are open, or being closed."""
        return len(self._names)

    def watch(self, descriptor: int) -> None:
        """`sleep` ends also when there is something to read from it."""
        self._poller.register(descriptor, select.POLLIN)

    def sleep(self) -> None:
        """Until UCX or what is watched has something to do, or a deadline is over; at once if UCX has it already."""
        if not self._ucp.arm(self._worker):
            self._poller.poll(self._sleep_ms())

    def turn(self) -> None:
        """Progress, completions, deadlines. Raises: Unavailable: UCX does not complete what it was told to cancel."""
        now_s = time.monotonic()
        for endpoint in self._names.values():
            endpoint.post(now_s)
        progress, worker = self._ucp.progress, self._worker
        for _ in range(_PROGRESS_ROUNDS_MAX):
            if not progress(worker):
                break
        while self._errors:
            name, status = self._errors.popleft()
            if name in self._names:
                self._names[name].fail(f"the peer is gone: UCX: {self._ucp.text(status)}")
        now_s = time.monotonic()
        for endpoint in self._names.values():
            endpoint.reap(now_s)
            if endpoint.silent(now_s, self._peer_timeout_s):
                endpoint.fail(f"the peer answered nothing for {self._peer_timeout_s:g} s")
                # For one more timeout: whoever tries again what failed must not wait for the same silence again.
                self._shun(endpoint.server, now_s + self._peer_timeout_s)
            elif endpoint.hung(now_s, self._peer_timeout_s):
                raise Unavailable("UCX does not complete what it was told to cancel")
            endpoint.post(now_s)
        self._forget_ended()

    def _look_at_routes(self) -> None:
        """A peer was not reached. UCX chooses the device for it by the routes that it found when it first looked."""
        self.outdated = self.outdated or routes() != self._routes

    def _shun(self, server: bytes, until_s: float) -> None:
        self._shunned.pop(server, None)
        self._shunned[server] = until_s
        if len(self._shunned) > ENDPOINTS_MAX:
            del self._shunned[next(iter(self._shunned))]

    def _forget_ended(self) -> None:
        for name in [name for name, endpoint in self._names.items() if endpoint.failure]:
            endpoint = self._names[name]
            if self._endpoints.get(endpoint.server) is endpoint:
                del self._endpoints[endpoint.server]
            if endpoint.ended:
                del self._names[name]
                if not endpoint.proved:
                    self._look_at_routes()

    def _sleep_ms(self) -> int | None:
        due = [
            due_s for endpoint in self._names.values() if (due_s := endpoint.due_s(self._peer_timeout_s)) is not None
        ]
        if any(endpoint.failure for endpoint in self._names.values()):
            return 10
        return max(0, int((min(due) - time.monotonic()) * 1e3) + 1) if due else None

    def _note_error(self, name: int | None, _endpoint: int | None, status: int) -> None:
        """UCX calls it within progress: only remember."""
        self._errors.append((name or 0, status))

    def send(self, server: bytes, pieces: list[Piece]) -> None:
        """Begin the pieces on the endpoint to a peer, a `Server`; each comes to rest."""
        try:
            if time.monotonic() < self._shunned.get(server, 0.0):
                raise Unavailable("the peer answered nothing a moment ago")  # noqa: TRY301
            endpoint = self._endpoint(server)
        except Unavailable as error:
            for piece in pieces:
                self.counts.failures += 1
                piece.order.rest_piece(str(error))
            return
        endpoint.add(pieces)

    def _endpoint(self, server: bytes) -> Endpoint:
        endpoint = self._endpoints.get(server)
        if endpoint is None or endpoint.failure:
            if len(self._endpoints) >= ENDPOINTS_MAX:
                idle = next((e for e in self._endpoints.values() if e.idle), None)
                if idle is None:
                    raise Unavailable(f"{ENDPOINTS_MAX} peers are being read from at once")
                self._fail(idle.server, "closed for another peer")
            self._names_given += 1
            try:
                endpoint = Endpoint(self._ucp, self._worker, self._names_given, server, self._on_error, self.counts)
            except Unavailable:
                self._look_at_routes()
                raise
            self._names[self._names_given] = self._endpoints[server] = endpoint
        self._endpoints.move_to_end(server)
        return endpoint

    def _fail(self, server: bytes, reason: str) -> None:
        endpoint = self._endpoints.pop(server, None)
        if endpoint is not None:
            endpoint.fail(reason)

    def map(self, address: int, size_bytes: int, *, protection: int = _LOCAL) -> Mapped:
        """Register host memory; it must stay mapped until `unmap` or `close`. Raises: Unavailable."""
        ucp = self._ucp
        params = MapParams(
            field_mask=FLAGS["UCP_MEM_MAP_PARAM_FIELD_ADDRESS"]
            | FLAGS["UCP_MEM_MAP_PARAM_FIELD_LENGTH"]
            | FLAGS["UCP_MEM_MAP_PARAM_FIELD_PROT"],
            address=address,
            length=size_bytes,
            prot=protection,
        )
        handle, buffer, size = c_void_p(), c_void_p(), c_size_t()
        ucp.check(ucp.mem_map(self._context, params, byref(handle)), f"registering {size_bytes} bytes")
        status = ucp.rkey_pack(self._context, handle, byref(buffer), byref(size))
        if status or handle.value is None:
            ucp.mem_unmap(self._context, handle)
            ucp.check(status, "packing a key")
        assert buffer.value is not None
        assert handle.value is not None
        rkey = ctypes.string_at(buffer.value, size.value)
        ucp.rkey_buffer_release(buffer)
        self._mapped.add(handle.value)
        return Mapped(handle.value, rkey)

    def unmap(self, mapped: Mapped) -> None:
        """Nothing may be moving there."""
        self._mapped.remove(mapped.handle)
        self._ucp.mem_unmap(self._context, mapped.handle)

    def server(self) -> Server:
        """How peers name us. Raises: Unavailable: our mark cannot be registered."""
        if self._server is None:
            self._mark = mmap_near(MARK_AT, mmap.PAGESIZE)
            value = os.urandom(MARK_BYTES)
            ctypes.memmove(self._mark, value, MARK_BYTES)
            rkey = self.map(self._mark, mmap.PAGESIZE, protection=READABLE).rkey
            self._server = Server(self._address, value, self._mark, rkey)
        return self._server

    def transports(self) -> list[str]:
        """Transport and device of each way that UCX has here, e.g. "tcp/eth0"."""
        libc = ctypes.CDLL(None)
        libc.open_memstream.restype, libc.open_memstream.argtypes = c_void_p, (c_void_p, c_void_p)
        libc.fclose.argtypes, libc.free.argtypes = (c_void_p,), (c_void_p,)
        text, size = c_void_p(), c_size_t()
        stream = libc.open_memstream(byref(text), byref(size))
        self._ucp.context_print(self._context, stream)
        libc.fclose(stream)
        printed = ctypes.string_at(text.value or 0, size.value).decode(errors="replace")
        libc.free(text)
        return re.findall(r"resource\s+\d+\s*:.*?--\s+(\S+)", printed)

    def _start(self) -> int:
        """Make context and worker. Returns: the descriptor to sleep on."""
        ucp = self._ucp
        config = c_void_p()
        ucp.check(ucp.config_read(None, None, byref(config)), "reading its configuration")
        try:
            self._configure(config)
            params = ContextParams(
                field_mask=FLAGS["UCP_PARAM_FIELD_FEATURES"] | FLAGS["UCP_PARAM_FIELD_NAME"],
                features=FLAGS["UCP_FEATURE_RMA"] | FLAGS["UCP_FEATURE_WAKEUP"],
                name=b"flatcake",
            )
            ucp.check(ucp.init(1, 13, params, config, byref(self._context)), "starting")
        finally:
            ucp.config_release(config)
        ucp.check(ucp.worker_create(self._context, WorkerParams(), byref(self._worker)), "making a worker")
        worker = WorkerAttributes(field_mask=FLAGS["UCP_WORKER_ATTR_FIELD_ADDRESS"])
        ucp.check(ucp.worker_query(self._worker, worker), "asking for the worker's address")
        self._address = ctypes.string_at(worker.address, worker.address_length)
        ucp.release_address(self._worker, worker.address)
        descriptor = c_int()
        ucp.check(ucp.get_efd(self._worker, byref(descriptor)), "the worker's descriptor")
        return descriptor.value

    def _configure(self, config: c_void_p) -> None:
        options = {**default_options(self._peer_timeout_s), **self._options}
        for key, value in options.items():
            if f"UCX_{key}" in os.environ or (key == "TCP_BRIDGE_ENABLE" and not self._bridges):
                continue
            # 1.13 knows a transport's options by their last part only.
            name = key.removeprefix("TCP_") if self._version < (1, 14) else key
            status = self._ucp.config_modify(config, name.encode(), value.encode())
            if key in self._options:  # a default that this build does not know is a loss of speed, not a reason to fail
                self._ucp.check(status, f"option {key}={value}")

    def close(self) -> None:
        """Give all back. When the worker is gone nothing can touch memory any more, whatever UCX still owed us. Twice is fine."""
        for endpoint in self._names.values():
            endpoint.fail("the worker was closed")
        if self._worker:
            self._ucp.worker_destroy(self._worker)
        for endpoint in self._names.values():
            endpoint.abandon()
        self._names.clear()
        self._endpoints.clear()
        for handle in self._mapped:
            self._ucp.mem_unmap(self._context, handle)
        self._mapped.clear()
        if self._context:
            self._ucp.cleanup(self._context)
        if self._mark:
            unmap_shared(self._mark, mmap.PAGESIZE)
        self._mark, self._server = 0, None
        self._context, self._worker = c_void_p(), c_void_p()
