"""A daemon that lives in the test's process: the real wire and the real handover socket over a store of a few lines.

It is there for what a real daemon does not do when asked: stall, refuse, answer nonsense, die between two calls. Its stored
bytes lie in one arena and in one file a session, by the rules of the real one. `tests/e2e` runs the client on a real daemon.
"""

from __future__ import annotations

import array
import contextlib
import os
import secrets
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc
import numpy as np

from flatcake_proto.v1 import store_pb2, store_pb2_grpc
from flatcake_transport.address import Address, Medium
from flatcake_transport.footer import Footer, encode_footer, footer_bytes
from flatcake_transport.handoff import (
    MESSAGE_BYTES_MAX,
    Reply,
    Status,
    Verb,
    decode_attach,
    decode_request,
    encode_reply,
)
from flatcake_transport.layout import segment_layout
from flatcake_transport.space import SpaceSpec

FILE_BYTES = 64 << 20


@dataclass
class Turn:
    client_id: int
    spec: SpaceSpec
    keys: bytes
    parts: list[Any]
    sums: dict[int, list[Any]] = field(default_factory=dict)


class FakeDaemon(store_pb2_grpc.StoreServicer):
    """`fail[verb]` makes a verb fail: a gRPC status, or an Event to wait for (a stall). `calls` counts verbs."""

    def __init__(
        self, root: Path, *, arena_bytes: int = 8 << 20, verify: str = "all", lease_ttl_s: float = 30.0
    ) -> None:
        self.root, self.verify, self.lease_ttl_s = root, verify, lease_ttl_s
        self.endpoint = f"unix://{root}/fake.sock"
        self.arena_bytes = arena_bytes
        self.boot_id = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
        self.fail: dict[str, Any] = {}
        self.calls: dict[str, int] = {}
        self.medium = Medium.SSD
        self.part_blocks = 1000
        self.fds_a_message = 200
        self.index: dict[bytes, tuple[Any, int]] = {}
        self.turns: dict[int, Turn] = {}
        self.leases: set[int] = set()
        self.attached: set[int] = set()
        self.handing = threading.Lock()  # who has it finds no descriptor here that is handed over already
        self.released: list[int] = []
        self.aborted: list[str] = []
        self.unheard: list[int] = []
        self.corrupt: list[int] = []
        self.renew_answers = True
        self.memory_tail = 0
        self.files: dict[int, int] = {}
        self.next = 1
        self.arena = os.memfd_create("fake-arena")
        os.ftruncate(self.arena, max(arena_bytes, 4096))

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        self.incarnation = secrets.token_bytes(16)
        self.clients: dict[int, bytes] = {}
        self.spaces: dict[bytes, SpaceSpec] = {}
        self._pool = ThreadPoolExecutor(8)
        self._server = grpc.server(self._pool)
        store_pb2_grpc.add_StoreServicer_to_server(self, self._server)
        assert self._server.add_insecure_port(f"unix:{self.root}/fake.sock")
        self._server.start()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connections: list[socket.socket] = []
        with contextlib.suppress(FileNotFoundError):
            Path(f"{self.root}/fake.sock.fds").unlink()
        self._listener.bind(f"{self.root}/fake.sock.fds")
        self._listener.listen()
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()
        return self

    def stop(self) -> None:
        """As a kill: connections end, nothing is said."""
        for stall in self.fail.values():
            if isinstance(stall, threading.Event):
                stall.set()
        self._server.stop(0).wait(5)
        for connection in [self._listener, *self._connections]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._acceptor.join(5)
        self._pool.shutdown()
        self.leases.clear()
        self.turns.clear()

    def drop_connections(self) -> None:
        """As who takes its clients for dead, and lives on."""
        for connection in self._connections:
            connection.shutdown(socket.SHUT_RDWR)

    def stored_bytes(self, medium: Medium) -> bytes:
        """All that is in the arena, or in the files."""
        if medium is Medium.MEMORY:
            return os.pread(self.arena, self.arena_bytes, 0)
        return b"".join(self.path(file_id).read_bytes() for file_id in sorted(self.files))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- descriptors -----------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            attach = decode_attach(connection.recv(MESSAGE_BYTES_MAX))
            if self.clients.get(attach.client_id) != attach.token or "attach" in self.fail:
                connection.send(encode_reply(Reply(Status.REFUSED, text="unknown client")))
                return
            self.attached.add(attach.client_id)
            connection.send(encode_reply(Reply()))
            while message := connection.recv(MESSAGE_BYTES_MAX):
                reply, fds = self._hand(decode_request(message))
                stall = self.fail.get("hand")
                if isinstance(stall, threading.Event):
                    stall.wait(10)
                elif stall is not None:
                    reply, fds = Reply(Status.FAILED, text="no such file"), []
                with self.handing:
                    connection.sendmsg(
                        [encode_reply(reply)],
                        [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [],
                    )
                    for fd in fds:
                        os.close(fd)
            self.attached.discard(attach.client_id)

    def _hand(self, request: Any) -> tuple[Reply, list[int]]:
        if request.verb is Verb.ARENA:
            return Reply(file_ids=(0,), direct=(False,)), [os.dup(self.arena)]
        if request.verb is Verb.LEASE and request.subject_id not in self.leases:
            return Reply(Status.GONE, text="the lease has ended"), []
        modes = [os.O_RDONLY] if request.verb is Verb.LEASE else [os.O_RDWR, os.O_RDONLY]
        ids = sorted(self.files)
        page = ids[request.start : request.start + self.fds_a_message]
        fds = [os.open(self.path(file_id), mode) for file_id in page for mode in modes]
        more = request.start + len(page) < len(ids)
        page = [file_id for file_id in page for _ in modes]
        return Reply(file_ids=tuple(page), direct=(False,) * len(page), more=more), fds

    def path(self, file_id: int) -> Path:
        return self.root / f"{file_id}.kv"

    # -- verbs -----------------------------------------------------------------------------------------------------

    def _enter(self, verb: str, request: Any, context: Any, *, known: bool = True) -> None:
        self.calls[verb] = self.calls.get(verb, 0) + 1
        failure = self.fail.get(verb)
        if isinstance(failure, threading.Event):
            failure.wait(10)
        elif failure is not None:
            context.abort(failure, f"told to fail {verb}")
        if known and (request.incarnation != self.incarnation or request.client_id not in self.clients):
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "stale: say Hello again")

    def Hello(self, request: Any, context: Any) -> Any:
        self._enter("hello", request, context, known=False)
        client_id, token = secrets.randbits(63) | 1, secrets.token_bytes(16)
        self.clients[client_id] = token
        return store_pb2.HelloReply(
            protocol=1, version="fake", incarnation=self.incarnation, node_id=3, client_id=client_id, token=token,
            handover_path=f"{self.root}/fake.sock.fds", boot_id=self.boot_id, arena_bytes=self.arena_bytes,
            lease_ttl_ms=int(self.lease_ttl_s * 1000), verify=self.verify,
        )  # fmt: skip

    def OpenSpace(self, request: Any, context: Any) -> Any:
        self._enter("open_space", request, context)
        spec = SpaceSpec(
            request.model, request.dtype, request.block_tokens, tuple(request.plane_bytes), request.shards,
            request.weights, request.layout,
        )  # fmt: skip
        assert spec.fingerprint == request.fingerprint
        self.spaces[request.fingerprint] = spec
        return store_pb2.OpenSpaceReply(fingerprint=request.fingerprint)

    def _spec(self, request: Any, context: Any) -> SpaceSpec:
        if request.fingerprint not in self.spaces:
            context.abort(grpc.StatusCode.NOT_FOUND, "space is not open")
        return self.spaces[request.fingerprint]

    def Lookup(self, request: Any, context: Any) -> Any:
        self._enter("lookup", request, context)
        self._spec(request, context)
        runs: list[Any] = []
        keys = request.keys
        for at in range(0, len(keys), 16):
            part, block = self.index.get(keys[at : at + 16], (None, 0))
            if part is None:
                break
            if runs and runs[-1].segment == part.segment and runs[-1].first_block + runs[-1].blocks == block:
                runs[-1].blocks += 1
                continue
            runs.append(
                store_pb2.Run(
                    segment=part.segment,
                    segment_blocks=part.blocks,
                    first_block=block,
                    blocks=1,
                    segment_bytes=part.segment_bytes,
                    file_id=part.file_id,
                    file_offset=part.file_offset,
                )
            )
        lease_id = 0
        if request.pin and runs:
            self.next += 1
            lease_id = self.next
            self.leases.add(lease_id)
        return store_pb2.LookupReply(runs=runs, lease_id=lease_id, incarnation=self.incarnation)

    def Renew(self, request: Any, context: Any) -> Any:
        self._enter("renew", request, context)
        alive = [lease_id for lease_id in request.lease_ids if lease_id in self.leases and self.renew_answers]
        return store_pb2.RenewReply(alive=alive)

    def Release(self, request: Any, context: Any) -> Any:
        self._enter("release", request, context)
        self.released += request.lease_ids
        self.leases -= set(request.lease_ids)
        return store_pb2.ReleaseReply()

    def BeginTurn(self, request: Any, context: Any) -> Any:
        self._enter("begin_turn", request, context)
        spec = self._spec(request, context)
        self.last_begin = request
        for turn_id, turn in self.turns.items():  # another shard joins
            if turn.keys == request.keys and spec.shards > 1:
                return store_pb2.BeginTurnReply(
                    turn_id=turn_id, parts=turn.parts, session="s", incarnation=self.incarnation
                )
        keys = [request.keys[at : at + 16] for at in range(0, len(request.keys), 16)]
        missing = [position for position, key in enumerate(keys) if key not in self.index]
        parts: list[Any] = []
        for position in missing:
            last = parts[-1] if parts else None
            if last is not None and last.first_block + last.blocks == position and last.blocks < self.part_blocks:
                last.blocks += 1
            else:
                parts.append(store_pb2.Part(first_block=position, blocks=1, reason="told"))
        for part in parts:
            self._reserve(spec, part)
        self.next += 1
        if parts:
            self.turns[self.next] = Turn(request.client_id, spec, request.keys, parts)
        return store_pb2.BeginTurnReply(
            turn_id=self.next if parts else 0,
            parts=parts,
            session=request.session or "inferred",
            incarnation=self.incarnation,
        )

    def _reserve(self, spec: SpaceSpec, part: Any) -> None:
        part.segment_bytes = segment_layout(spec, part.blocks).data_bytes + footer_bytes(spec, "s", part.blocks)
        if self.medium is Medium.MEMORY:
            part.segment = int(Address.of(Medium.MEMORY, 3, self.memory_tail))
            self.memory_tail += part.segment_bytes
            return
        file_id = 1
        if file_id not in self.files:
            self.files[file_id] = 0
            with self.path(file_id).open("wb") as file:
                file.truncate(FILE_BYTES)
        part.file_id, part.file_offset = file_id, self.files[file_id]
        part.segment = int(Address.of(Medium.SSD, 3, (file_id << 32) + part.file_offset))
        self.files[file_id] += part.segment_bytes

    def CommitTurn(self, request: Any, context: Any) -> Any:
        self._enter("commit_turn", request, context)
        turn = self.turns.get(request.turn_id)
        if turn is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such turn")
        turn.sums[request.shard] = list(request.parts)
        if len(turn.sums) < turn.spec.shards:
            return store_pb2.CommitTurnReply(visible=False)
        for index, part in enumerate(turn.parts):
            self._publish(turn, index, part)
        del self.turns[request.turn_id]
        return store_pb2.CommitTurnReply(visible=True)

    def _publish(self, turn: Turn, index: int, part: Any) -> None:
        keys = turn.keys[16 * part.first_block : 16 * (part.first_block + part.blocks)]
        sums = [turn.sums[shard][index] for shard in range(turn.spec.shards)]
        footer = Footer(
            spec=turn.spec, session="s", turn=1, generation=1, file_id=part.file_id,
            file_offset=part.file_offset if part.file_id else Address(part.segment).offset, first_block=part.first_block,
            parent_key=bytes(16), keys=np.frombuffer(keys, np.uint8).reshape(-1, 16),
            algorithms=bytes(entry.algorithm for entry in sums),
            checksums=np.frombuffer(b"".join(entry.checksums for entry in sums), "<u8")
            if all(entry.algorithm for entry in sums)
            else np.zeros(segment_layout(turn.spec, part.blocks).granules, np.uint64),
        )  # fmt: skip
        data_bytes = segment_layout(turn.spec, part.blocks).data_bytes
        if part.file_id:
            with self.path(part.file_id).open("r+b") as file:
                os.pwrite(file.fileno(), encode_footer(footer), part.file_offset + data_bytes)
        else:
            os.pwrite(self.arena, encode_footer(footer), Address(part.segment).offset + data_bytes)
        for block in range(part.blocks):
            self.index.setdefault(keys[16 * block : 16 * block + 16], (part, block))

    def AbortTurn(self, request: Any, context: Any) -> Any:
        self._enter("abort_turn", request, context)
        if not request.turn_id:  # whatever that call began
            self.unheard.append(request.request_id)
            return store_pb2.AbortTurnReply()
        self.aborted.append(request.failure)
        self.turns.pop(request.turn_id, None)
        return store_pb2.AbortTurnReply()

    def ReportCorrupt(self, request: Any, context: Any) -> Any:
        self._enter("report_corrupt", request, context)
        segments = [each.segment for each in request.segments]
        self.corrupt += segments
        for key in [key for key, (part, _) in self.index.items() if part.segment in segments]:
            del self.index[key]
        return store_pb2.ReportCorruptReply()
