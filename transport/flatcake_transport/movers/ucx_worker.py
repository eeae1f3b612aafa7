"""One UCX context with one worker, and the one thread that touches them.

Everybody else leaves a command in a queue and an eventfd wakes the thread: no lock of UCX's is needed, and no call of ours can
meet a worker that is gone. The thread sleeps in `poll` on UCX's own descriptor when nothing moves, also on the serving side,
where UCX answers gets over TCP by progress: no Python runs for a byte.

Options are set through `ucp_config_modify`, never in the process's environment; a UCX_* that the user has set wins.

Invariants: memory that was mapped is unmapped after the worker that could use it is gone, or on request; `close` comes back
within twice the peer timeout and some, and then nothing of ours touches memory any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from ctypes import byref, c_int, c_size_t, c_void_p
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from flatcake_transport.errors import Unavailable
from flatcake_transport.movers.ucx_endpoint import Counts, Endpoint, Piece
from flatcake_transport.movers.ucx_lib import (
    FLAGS,
    ContextAttributes,
    ContextParams,
    MapParams,
    OnEndpointError,
    UcxLibrary,
    WorkerAttributes,
    WorkerParams,
)

Result = TypeVar("Result")

ENDPOINTS_MAX: Final = 256  # peers at once; the one used longest ago is closed for the next
PEER_TIMEOUT_S: Final = 5.0
_CALL_TIMEOUT_S: Final = 60.0  # registering a large arena with a card pins every page of it
_PROGRESS_ROUNDS_MAX: Final = 64  # before completions and deadlines are looked at again
_LOCAL: Final = FLAGS["UCP_MEM_MAP_PROT_LOCAL_READ"] | FLAGS["UCP_MEM_MAP_PROT_LOCAL_WRITE"]
READABLE: Final = _LOCAL | FLAGS["UCP_MEM_MAP_PROT_REMOTE_READ"]
WRITABLE: Final = READABLE | FLAGS["UCP_MEM_MAP_PROT_REMOTE_WRITE"]


def default_options(peer_timeout_s: float) -> dict[str, str]:
    """What UCX does better with than by itself.

    Segments of 256 KiB: over loopback TCP 5-7 GB/s instead of 1.5. Connecting without blocking: else one peer that is gone
    holds up all others for as long as the kernel goes on trying.
    """
    return {
        "TCP_TX_SEG_SIZE": "256k",
        "TCP_RX_SEG_SIZE": "256k",
        "TCP_CONN_NB": "y",
        "KEEPALIVE_INTERVAL": f"{max(0.1, peer_timeout_s):.3f}s",
    }


@dataclass(frozen=True, slots=True)
class Mapped:
    """Registered memory: UCX's handle and the packed key for peers."""

    handle: int
    rkey: bytes


class UcxWorker:
    """Thread-safe. Owned by its mover or server, which close it.

    Args:
        options: UCX options without the prefix, over the defaults, e.g. {"TLS": "tcp", "NET_DEVICES": "eth0"}.
        peer_timeout_s: a peer that answers nothing for so long has failed.
    """

    def __init__(
        self, library: UcxLibrary, *, options: Mapping[str, str] | None = None, peer_timeout_s: float = PEER_TIMEOUT_S
    ) -> None:
        """Raises: Unavailable: UCX does not start with these options."""
        self.library = library
        loop = self._loop = _Loop(library, options or {}, peer_timeout_s)
        self._end = weakref.finalize(self, _Loop.end, loop)
        loop.started.result(_CALL_TIMEOUT_S)
        self.address = loop.address
        self.memory_types = loop.memory_types

    @property
    def closed(self) -> bool:
        return self._loop.stopping

    def send(self, address: bytes, pieces: list[Piece], told_s: float = float("inf")) -> None:
        """Begin the pieces on the endpoint to a peer; each comes to rest. Raises: Unavailable: closed.

        Args:
            told_s: when we were told of the address; they fail if the peer was lost later.
        """
        self._loop.put(lambda: self._loop.begin(address, pieces, told_s))

    def map(self, address: int, size_bytes: int, *, protection: int = _LOCAL, device: str = "cpu") -> Mapped:
        """Register memory; it must stay mapped until `unmap` or `close`. Raises: Unavailable."""
        return self._call(lambda loop: loop.map(address, size_bytes, protection, device.startswith("cuda")))

    def unmap(self, mapped: Mapped) -> None:
        """Takes no lock and does not wait: finalizers call it. Nothing may be moving there."""
        loop = self._loop
        loop.put_late(lambda: loop.unmap(mapped.handle))

    def forget(self, address: bytes, reason: str) -> None:
        """Close the endpoint to a peer that is known to be gone: what moves there fails at once."""
        loop = self._loop
        loop.put_late(lambda: loop.forget(address, reason))

    def transports(self) -> list[str]:
        """Transport and device of each way that UCX has here, e.g. "tcp/eth0"."""
        return self._call(lambda loop: loop.transports())

    def counts(self) -> Counts:
        return replace(self._loop.counts)

    def endpoints(self) -> int:
        return self._loop.endpoints_open

    def close(self) -> None:
        """Land or fail what moves, then give all back. Twice is fine."""
        self._end()

    def _call(self, function: Callable[[_Loop], Result]) -> Result:
        future: Future[Result] = Future()
        loop = self._loop

        def run() -> None:
            try:
                future.set_result(function(loop))
            except Unavailable as error:
                future.set_exception(error)

        loop.put(run)
        return future.result(_CALL_TIMEOUT_S)


class _Wake:
    """An eventfd that is closed with its last user: a number that was closed too early may be somebody else's file."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self) -> None:
        os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def __del__(self) -> None:
        os.close(self.descriptor)


class _Loop:
    """What the thread runs, and what it owns. It does not hold the `UcxWorker`: one that is lost ends its thread."""

    def __init__(self, library: UcxLibrary, options: Mapping[str, str], peer_timeout_s: float) -> None:
        self._ucp = library.ucp
        self._version = library.version
        self._options = options
        self._peer_timeout_s = peer_timeout_s
        self._commands: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._wake = _Wake()
        self._endpoints: OrderedDict[bytes, Endpoint] = OrderedDict()
        self._names: dict[int, Endpoint] = {}  # also those that are being closed
        self._names_given = 0
        self._lost: dict[bytes, tuple[float, float]] = {}  # peer -> when, and until when it is shunned; oldest first
        self._errors: deque[tuple[int, int]] = deque()
        self._on_error = OnEndpointError(self._note_error)
        self._mapped: set[int] = set()
        self._context, self._worker = c_void_p(), c_void_p()
        self.address = b""
        self.memory_types = 0
        self.counts = Counts()
        self.endpoints_open = 0
        self.stopping = False
        self.started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="flatcake-ucx", daemon=True)
        self._thread.start()

    # Any thread.

    def put(self, command: Callable[[], None]) -> None:
        """Raises: Unavailable: closed."""
        with self._lock:
            if self.stopping:
                raise Unavailable("the UCX mover is closed")
            self._commands.append(command)
        self._wake.set()

    def put_late(self, command: Callable[[], None]) -> None:
        """Without a lock, and without effect after the end: `close` gives everything back anyway."""
        self._commands.append(command)
        self._wake.set()

    def end(self) -> None:
        with self._lock:
            first, self.stopping = not self.stopping, True
        if first:
            self._wake.set()
        self._thread.join()

    # The thread.

    def _run(self) -> None:
        try:
            try:
                descriptor = self._start()
            except Unavailable as error:
                self.started.set_exception(error)
                return
            self.started.set_result(None)
            self._serve(descriptor)
        finally:
            with self._lock:
                self.stopping = True
            self._finish()

    def _serve(self, descriptor: int) -> None:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        poller.register(self._wake.descriptor, select.POLLIN)
        give_up_s: float | None = None
        while True:
            self._turn()
            if self.stopping and not self._commands:
                now_s = time.monotonic()
                give_up_s = give_up_s or now_s + 2 * self._peer_timeout_s + 1.0
                if self._close_endpoints() or now_s > give_up_s:
                    return
            if not self._commands and not self._ucp.arm(self._worker):
                poller.poll(self._sleep_ms())
                self._wake.clear()

    def _turn(self) -> None:
        """Commands, progress, completions, deadlines."""
        for _ in range(len(self._commands)):
            self._commands.popleft()()
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
                self._lose(self._names[name].address, time.monotonic())
        now_s = time.monotonic()
        for endpoint in self._names.values():
            endpoint.reap(now_s)
            if endpoint.silent(now_s, self._peer_timeout_s):
                endpoint.fail(f"the peer answered nothing for {self._peer_timeout_s:g} s")
                # For one more timeout: whoever tries again what failed must not wait for the same silence again.
                self._lose(endpoint.address, now_s, self._peer_timeout_s)
            endpoint.post(now_s)
        self._forget_ended()

    def _lose(self, address: bytes, now_s: float, shun_s: float = 0.0) -> None:
        """What was told of the peer up to now holds no more, and for `shun_s` nothing that is told of it."""
        self._lost.pop(address, None)
        self._lost[address] = now_s, now_s + shun_s
        if len(self._lost) > ENDPOINTS_MAX:
            del self._lost[next(iter(self._lost))]

    def _forget_ended(self) -> None:
        for name in [name for name, endpoint in self._names.items() if endpoint.failure]:
            endpoint = self._names[name]
            if self._endpoints.get(endpoint.address) is endpoint:
                del self._endpoints[endpoint.address]
            if endpoint.ended:
                del self._names[name]
        self.endpoints_open = len(self._names)

    def _sleep_ms(self) -> int | None:
        due = [
            due_s for endpoint in self._names.values() if (due_s := endpoint.due_s(self._peer_timeout_s)) is not None
        ]
        if self.stopping or any(endpoint.failure for endpoint in self._names.values()):
            return 10
        return max(0, int((min(due) - time.monotonic()) * 1e3) + 1) if due else None

    def _note_error(self, name: int | None, _endpoint: int | None, status: int) -> None:
        """UCX calls it within progress: only remember."""
        self._errors.append((name or 0, status))

    def begin(self, address: bytes, pieces: list[Piece], told_s: float) -> None:
        try:
            lost_s, shunned_until_s = self._lost.get(address, (float("-inf"), 0.0))
            if time.monotonic() < shunned_until_s:
                raise Unavailable("the peer answered nothing a moment ago")  # noqa: TRY301
            if told_s <= lost_s:
                raise Unavailable("the peer was lost since it was found: another one may be there")  # noqa: TRY301
            endpoint = self._endpoint(address)
        except Unavailable as error:
            for piece in pieces:
                self.counts.failures += 1
                piece.transfer.rest_piece(str(error))
            return
        endpoint.add(pieces)

    def _endpoint(self, address: bytes) -> Endpoint:
        endpoint = self._endpoints.get(address)
        if endpoint is None or endpoint.failure:
            if len(self._endpoints) >= ENDPOINTS_MAX:
                idle = next((e for e in self._endpoints.values() if e.idle), None)
                if idle is None:
                    raise Unavailable(f"{ENDPOINTS_MAX} peers are being read from at once")
                self.fail(idle.address, "closed for another peer")
            self._names_given += 1
            endpoint = Endpoint(self._ucp, self._worker, self._names_given, address, self._on_error, self.counts)
            self._names[self._names_given] = self._endpoints[address] = endpoint
        self._endpoints.move_to_end(address)
        return endpoint

    def forget(self, address: bytes, reason: str) -> None:
        self.fail(address, reason)
        self._lose(address, time.monotonic())

    def fail(self, address: bytes, reason: str) -> None:
        endpoint = self._endpoints.pop(address, None)
        if endpoint is not None:
            endpoint.fail(reason)

    def map(self, address: int, size_bytes: int, protection: int, on_device: bool) -> Mapped:
        ucp = self._ucp
        params = MapParams(
            field_mask=FLAGS["UCP_MEM_MAP_PARAM_FIELD_ADDRESS"]
            | FLAGS["UCP_MEM_MAP_PARAM_FIELD_LENGTH"]
            | FLAGS["UCP_MEM_MAP_PARAM_FIELD_PROT"]
            | FLAGS["UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE"],
            address=address,
            length=size_bytes,
            prot=protection,
            memory_type=FLAGS["UCS_MEMORY_TYPE_CUDA" if on_device else "UCS_MEMORY_TYPE_HOST"],
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

    def unmap(self, handle: int) -> None:
        if handle in self._mapped:
            self._mapped.remove(handle)
            self._ucp.mem_unmap(self._context, handle)

    def transports(self) -> list[str]:
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
        attributes = ContextAttributes(field_mask=FLAGS["UCP_ATTR_FIELD_MEMORY_TYPES"])
        ucp.check(ucp.context_query(self._context, attributes), "asking for memory types")
        self.memory_types = attributes.memory_types
        ucp.check(ucp.worker_create(self._context, WorkerParams(), byref(self._worker)), "making a worker")
        worker = WorkerAttributes(field_mask=FLAGS["UCP_WORKER_ATTR_FIELD_ADDRESS"])
        ucp.check(ucp.worker_query(self._worker, worker), "asking for the worker's address")
        self.address = ctypes.string_at(worker.address, worker.address_length)
        ucp.release_address(self._worker, worker.address)
        descriptor = c_int()
        ucp.check(ucp.get_efd(self._worker, byref(descriptor)), "the worker's descriptor")
        return descriptor.value

    def _configure(self, config: c_void_p) -> None:
        options = {**default_options(self._peer_timeout_s), **self._options}
        for key, value in options.items():
            if f"UCX_{key}" in os.environ:
                continue
            # 1.13 knows a transport's options by their last part only.
            name = key.removeprefix("TCP_") if self._version < (1, 14) else key
            status = self._ucp.config_modify(config, name.encode(), value.encode())
            if key in self._options:  # a default that this build does not know is a loss of speed, not a reason to fail
                self._ucp.check(status, f"option {key}={value}")

    def _close_endpoints(self) -> bool:
        """Close what is idle; what moves may land. True: none is left."""
        for endpoint in list(self._endpoints.values()):
            if endpoint.idle:
                self.fail(endpoint.address, "the mover was closed")
        return not self._names

    def _finish(self) -> None:
        """Give all back. When the worker is gone nothing can touch memory any more, whatever UCX still owed us."""
        for endpoint in self._names.values():
            endpoint.fail("the mover was closed")
        if self._worker:
            self._ucp.worker_destroy(self._worker)
        for endpoint in self._names.values():
            endpoint.abandon()
        self._names.clear()
        self._endpoints.clear()
        self.endpoints_open = 0
        for handle in self._mapped:
            self._ucp.mem_unmap(self._context, handle)
        self._mapped.clear()
        if self._context:
            self._ucp.cleanup(self._context)
