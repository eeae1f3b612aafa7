"""A space as an engine uses it: keys, lookup, turns.

A lookup never raises for the daemon's sake: what cannot be had now is a miss, with its reason in `Hit.failure`.
"""

from __future__ import annotations

import contextlib
import secrets
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from flatcake_client.connection import Connection
from flatcake_client.handover import Descriptors
from flatcake_client.hit import Hit
from flatcake_client.keys import KeyArray, chain_keys, check_keys, foreign_keys, host_integers, root_key
from flatcake_client.records import Found, Grant, TurnHints
from flatcake_client.rpc import Stale, Unknown, Unsent
from flatcake_client.worth import worth_fetching
from flatcake_client.writer import Turn
from flatcake_transport.errors import FlatCakeError, Overloaded, Unavailable
from flatcake_transport.handoff import Verb
from flatcake_transport.layout import SegmentLayout, segment_layout
from flatcake_transport.mover import Transfer
from flatcake_transport.space import SpaceSpec
from flatcake_transport.window import OpenFile

if TYPE_CHECKING:
    from flatcake_client.client import Client

LAYOUTS_KEPT: Final = 1024  # geometries of segments by block count: some 3 KB each for 80 layers
REPORT_TIMEOUT_S: Final = 1.0
ABORT_AGAIN_S: Final = 2.0  # longer than a silent daemon is left alone


class Space:
    """One model in one layout, for one tensor-parallel shard. Thread-safe. Made by `Client.open_space`."""

    def __init__(self, client: Client, spec: SpaceSpec, shard: int) -> None:
        """Raises: ValueError: the space has no such shard."""
        if not 0 <= shard < spec.shards:
            raise ValueError(f"shard {shard} of a space with {spec.shards}")
        self.spec = spec
        self.shard = shard
        self.client = client
        self.layout_of: Callable[[int], SegmentLayout] = lru_cache(LAYOUTS_KEPT)(partial(segment_layout, spec))

    def keys(self, token_ids: Any, salt: bytes = b"", extra: bytes | Sequence[bytes] | None = None) -> KeyArray:
        """Chained keys of the full blocks of a context, (n, 16) uint8.

        Args:
            token_ids: of the whole context from its first token: list, numpy array or torch tensor of integers, 1-d.
            salt: whatever must not share blocks: tenant, LoRA adapter. The same at `begin_turn`.
            extra: what token ids do not say, e.g. hashes of images: one for all blocks, or one a full block.

        Raises:
            ValueError: an id is negative or beyond 32 bits, or the shapes are wrong.
        """
        return chain_keys(token_ids, self.spec.block_tokens, root_key(self.spec.fingerprint, salt), extra)

    def keys_of_hashes(self, hashes: Sequence[bytes], salt: bytes = b"") -> KeyArray:
        """Keys from an engine's own chained block hashes, one a block, each naming its whole prefix.

        Raises: ValueError: a hash is not bytes.
        """
        return foreign_keys(hashes, root_key(self.spec.fingerprint, salt))

    def lookup(self, keys: KeyArray, pin: bool = True, timeout_s: float | None = None) -> Hit:
        """The longest stored prefix of a chain. A daemon that cannot be asked is an empty hit.

        Args:
            keys: of `keys`, from the context's first block.
            pin: keep what is found until the hit is released, so that it can be restored.
            timeout_s: default the client's.

        Raises:
            ValueError: not (n, 16) uint8.
        """
        self.client.guard()
        keys = check_keys(keys)
        if not len(keys):
            return Hit(self, keys)
        try:
            return self.client.ask(self.spec, timeout_s, partial(self._lookup, keys, pin))
        except FlatCakeError as error:
            self.client.counts.add("lookups_failed")
            return Hit(self, keys, failure=error)

    def _lookup(self, keys: KeyArray, pin: bool, connection: Connection, timeout_s: float) -> Hit:
        asked_s = time.monotonic()
        welcome = connection.welcome
        remote = welcome.peers and self.client.tools.reads_peers
        found = connection.rpc.lookup(welcome, self.spec.fingerprint, keys, pin=pin, remote=remote, timeout_s=timeout_s)
        found = self._worth_fetching(found, welcome.node_id)
        hit = Hit(self, keys, found=found, connection=connection, asked_s=asked_s)
        self.client.counts.add("lookups")
        self.client.counts.add("lookup_blocks", len(keys))
        self.client.counts.add("hit_blocks", hit.blocks)
        return hit

    def _worth_fetching(self, found: Found, near_node: int) -> Found:
        """Without what other nodes have and the engine computes sooner."""
        speed = self.client.prefill_tokens_per_s
        if not found.nodes or speed is None:
            return found
        now_s = time.monotonic()
        kept = worth_fetching(
            found.runs,
            near_node,
            block_bytes=sum(self.spec.plane_bytes),
            block_tokens=self.spec.block_tokens,
            prefill_tokens_per_s=speed,
            bandwidth=lambda place: self.client.bandwidths.of(place, now_s),
        )
        self.client.counts.add("declined_blocks", sum(run.blocks for run in found.runs[kept:]))
        return replace(found, runs=found.runs[:kept])

    def begin_turn(
        self,
        keys: KeyArray,
        session: str | None = None,
        context_tokens: int | None = None,
        previous_reply_tokens: int | None = None,
        share_counts: Sequence[int] | None = None,
        turn: int | None = None,
        salt: bytes = b"",
        timeout_s: float | None = None,
    ) -> Turn:
        """Reserve space for those blocks of a context that are not stored yet.

        Args:
            keys: of the whole context, from its first block.
            session: the engine's name of the conversation; None: the daemon infers it from the chain.
            context_tokens: length of the context, full blocks or not. Default: that of the keys.
            previous_reply_tokens: length of the last reply in this conversation; None: not known.
            share_counts: one a key: requests that share the block in the engine's prefix tree.
            turn: number of the turn in its conversation, from 1. Default: one more than the session has.
            salt: as it was given to `keys`.
            timeout_s: default the client's.

        Raises:
            ValueError: shapes, or counts, are wrong. Overloaded: no room, or too many turns. Unavailable: the daemon cannot be asked.
        """
        self.client.guard()
        keys = check_keys(keys)
        counts = None if share_counts is None else tuple(host_integers(share_counts, "share counts").tolist())
        if counts is not None and len(counts) != len(keys):
            raise ValueError(f"{len(counts)} share counts for {len(keys)} keys: expected one a key")
        if not isinstance(session, str | None):
            raise ValueError(f"a session is a name, a str, not {type(session).__name__}")  # noqa: TRY004 - a caller's bug
        hints = TurnHints(context_tokens, previous_reply_tokens, counts, turn)
        root = root_key(self.spec.fingerprint, salt)
        try:
            return self.client.ask(self.spec, timeout_s, partial(self._begin, keys, session or "", root, hints))
        except FlatCakeError:
            self.client.counts.add("turns_refused")
            raise

    def begin_copy(self, keys: KeyArray, timeout_s: float) -> Turn:
        """As `begin_turn`, of a prefix that another node holds and this one wants. Its salt is not known, and not needed."""
        root = root_key(self.spec.fingerprint, b"")
        return self.client.ask(self.spec, timeout_s, partial(self._begin, keys, "", root, TurnHints(copy=True)))

    def _begin(
        self, keys: KeyArray, session: str, root: bytes, hints: TurnHints, connection: Connection, timeout_s: float
    ) -> Turn:
        grant = Grant(0, (), session)
        request_id = secrets.randbits(63) | 1
        connection.turn_begins()
        try:
            if len(keys):
                grant = connection.rpc.begin_turn(
                    connection.welcome, self.spec.fingerprint, self.shard, keys, root, session, hints, request_id,
                    timeout_s,
                )  # fmt: skip
        except BaseException as error:
            if not isinstance(error, Overloaded | Unsent | ValueError):  # refused: then there is no turn
                self._disown(connection, request_id)
            connection.turn_ended()
            raise
        self.client.counts.add("turns_begun")
        home = _Home(self, connection)
        turn = Turn(
            home,
            grant,
            self.spec,
            self.shard,
            self.client.tools.writing(),
            checksums=connection.welcome.verify != "off",
            # With "remote", what peers read is checked: a node without peers needs none of memory.
            memory_checksums=connection.welcome.verify == "all" or connection.welcome.memory_checksums,
            timeout_s=self.client.transfer_timeout_s,
            guard=self.client.guard,
            forked=self.client.forked,
        )
        self.client.turns.add(turn)
        home.watch(turn, grant.turn_id)
        return turn

    def _disown(self, connection: Connection, request_id: int) -> None:
        """Whether a turn was begun is not known here: should it have been, its grant would last as long as the connection."""

        def tell() -> None:
            if connection.lost() or self.client.closed:
                return
            try:
                connection.rpc.abort_unheard(connection.welcome, request_id, REPORT_TIMEOUT_S)
            except (Stale, Unknown):
                return
            except FlatCakeError:
                self._disown(connection, request_id)

        self.client.linger.leave([], tell, ABORT_AGAIN_S)


class _Home:
    """Where a turn of a space is written to: the seam between writer and connection."""

    def __init__(self, space: Space, connection: Connection) -> None:
        self._space = space
        self._client = space.client
        self._connection = connection
        self._descriptors = Descriptors({})
        self._dropped: weakref.finalize[Any, Turn] | None = None
        self.layout_of = space.layout_of

    def check(self) -> None:
        """Of a daemon that died, files are sealed at its next start and the arena is nobody's; but one that only took us for dead has
        given the space to others. Raises: Unavailable: either.
        """
        if self._connection.handover.ended():
            raise Unavailable("the daemon that gave the turn its space is gone, or takes this client for gone")

    def arena(self, timeout_s: float) -> NDArray[np.uint8]:
        return self._client.arena(self._connection, timeout_s)

    def files(self, turn_id: int, timeout_s: float) -> Mapping[int, OpenFile]:
        self._descriptors = self._connection.handover.files(Verb.TURN, turn_id, timeout_s)
        return self._descriptors.files

    def commit(self, turn_id: int, sums: Sequence[tuple[int, bytes]], timeout_s: float) -> bool:
        connection = self._connection
        return connection.rpc.commit_turn(connection.welcome, turn_id, self._space.shard, sums, timeout_s)

    def abort(self, turn_id: int, failure: str, timeout_s: float) -> None:
        """Said again later, until it was heard: a grant ends by word or with the connection, never by time."""
        connection = self._connection
        try:
            connection.rpc.abort_turn(connection.welcome, turn_id, self._space.shard, failure, timeout_s)
        except (Stale, Unknown):
            raise  # there is no such turn
        except FlatCakeError:
            if not connection.lost() and not self._client.closed:
                self._client.linger.leave([], partial(self._abort_again, turn_id, failure), ABORT_AGAIN_S)
            raise

    def _abort_again(self, turn_id: int, failure: str) -> None:
        with contextlib.suppress(FlatCakeError):
            self.abort(turn_id, failure, REPORT_TIMEOUT_S)

    def when_rested(self, transfers: Sequence[Transfer], act: Callable[[], None]) -> None:
        self._client.linger.when_rested(transfers, act)

    def watch(self, turn: Turn, turn_id: int) -> None:
        """Should the engine lose the turn, neither committed nor aborted, it is aborted by itself.

        Its writes may be on their way then: descriptors closed under them would be other files.
        """
        transfers = turn.transfers

        def give_back() -> None:
            failure = ""
            for transfer in transfers:
                try:
                    transfer.wait(0.0)
                except FlatCakeError as error:
                    failure = str(error)  # the file's state is unknown: it is to be sealed
            with contextlib.suppress(FlatCakeError):
                if turn_id:
                    self.abort(turn_id, failure, REPORT_TIMEOUT_S)
            self.ended("aborted")

        self._dropped = weakref.finalize(turn, self._client.linger.leave, transfers, give_back)
        self._dropped.atexit = False

    def ended(self, outcome: str) -> None:
        if self._dropped is not None:
            self._dropped.detach()
        self._descriptors.close()
        self._connection.turn_ended()
        self._client.counts.add(f"turns_{outcome}")
