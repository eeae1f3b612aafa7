"""Serves shared memory to peers, in a process that may die.

    daemon --memfds--> child: maps them, registers them, sleeps in UCX --one line--> daemon: what peers need to read them

Why not in the daemon. Over TCP, UCX answers a get in the serving process, and when the peer dies between its request and our
answer UCX calls abort() (`ucp_get_req_handler`: seen in 1.13.1 and 1.22.0, at 7 of 99 peers killed with gets under way;
tests/fault/test_ucx_process.py). And it reads, and writes, whatever address the request names: no key is compared. So the process
that answers has nothing but the memory that peers may read, mapped read-only where the card allows it, and an environment of
UCX's variables only. When it dies it is started again, with a new worker address: gets under way are misses, and whoever asks
the daemon next is told the new one.

The child ends when its standard input does, so with the daemon, however that ends.
"""

from __future__ import annotations

import json
import logging
import select
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Final

from flatcake_transport.errors import Unavailable
from flatcake_transport.movers import ucx_child
from flatcake_transport.movers.ucx_worker import PEER_TIMEOUT_S
from flatcake_transport.remote import RemoteMemory, unseal_memory

START_TIMEOUT_S: Final = 60.0  # registering a large arena with a card pins every page of it
RESTART_S: Final = 0.1  # before a child that died at once is started again; doubled up to RESTART_S_MAX
RESTART_S_MAX: Final = 10.0
STARTED: Final = b"serving: "
_MODULE: Final = "flatcake_transport.movers.ucx_server"

log = logging.getLogger(__name__)


class UcxProcess:
    """A child that serves memory by file descriptor. Thread-safe.

    Args:
        regions: (descriptor of a memfd, size in bytes), e.g. the arena and the bounce windows; borrowed until `close`.
        options: UCX options without the prefix, e.g. {"NET_DEVICES": "eth0", "TCP_PORT_RANGE": "7452-7460"}.
    """

    def __init__(
        self,
        regions: Sequence[tuple[int, int]],
        *,
        options: Mapping[str, str] | None = None,
        peer_timeout_s: float = PEER_TIMEOUT_S,
    ) -> None:
        """Raises: Unavailable: the child does not start; the message has what it said."""
        self._regions = list(regions)
        self._order = json.dumps([self._regions, dict(options or {}), peer_timeout_s])
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._memories: tuple[RemoteMemory, ...] = ()
        self._restarts = 0
        self._child = self._start()
        self._watcher = threading.Thread(target=self._watch, name="flatcake-ucx-process", daemon=True)
        self._watcher.start()

    @property
    def restarts(self) -> int:
        return self._restarts

    def memories(self) -> tuple[RemoteMemory, ...]:
        """What peers are to be told, in the order of `regions`. Raises: Unavailable: the child is being started again."""
        with self._lock:
            if not self._memories:
                raise Unavailable("the process that serves memory to peers is not running")
            return self._memories

    def close(self) -> None:
        """End the child. Peers get errors from here on. Twice is fine."""
        with self._lock:
            self._closed.set()
            child, self._memories = self._child, ()
        child.kill()
        self._watcher.join()

    def _start(self) -> subprocess.Popen[bytes]:
        child = ucx_child.spawn(_MODULE, self._order, [fd for fd, _ in self._regions])
        said = b""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        assert child.stdout is not None
        hearing = select.poll()  # not select: a daemon with many files has descriptors beyond its 1024
        hearing.register(child.stdout, select.POLLIN)
        while hearing.poll(max(0.0, deadline_s - time.monotonic()) * 1e3):
            heard = child.stdout.read(4096)
            said += heard
            line = next((line for line in said.splitlines(keepends=True) if line.startswith(STARTED)), b"")
            if line.endswith(b"\n"):
                words = line.removeprefix(STARTED).decode().split()
                with self._lock:
                    self._memories = tuple(unseal_memory(bytes.fromhex(word)) for word in words)
                return child
            if not heard:
                break
        ucx_child.end(child)
        raise Unavailable(
            f"the process that serves memory to peers does not start: {said.decode(errors='replace').strip()[-500:]}"
        )

    def _watch(self) -> None:
        """Start the child again when it dies."""
        wait_s = RESTART_S
        while True:
            child, started_s = self._child, time.monotonic()
            assert child.stdout is not None
            last = b""
            for line in child.stdout:  # until it ends; read, so that it never waits for a full pipe
                last = line.strip() or last
            ucx_child.end(child)
            with self._lock:
                self._memories = ()
                if self._closed.is_set():
                    return
            log.warning(
                f"the process that serves memory to peers ended with {child.returncode}, last words: {ucx_child.last_line(last)}"
            )
            wait_s = RESTART_S if time.monotonic() - started_s > RESTART_S_MAX else min(2 * wait_s, RESTART_S_MAX)
            while not self._revived(wait_s):
                wait_s = min(2 * wait_s, RESTART_S_MAX)
                if self._closed.is_set():
                    return

    def _revived(self, wait_s: float) -> bool:
        if self._closed.wait(wait_s):
            return False
        try:
            child = self._start()
        except (Unavailable, OSError):
            return False
        with self._lock:
            self._child = child
            self._restarts += 1
            if self._closed.is_set():
                child.kill()
        return True
