"""The store of a node beside a model: sets of keys. After every step the law holds, and nothing was lost without a reason.

The model knows which keys a commit was answered for, and which a live lease pins. Keys may leave only when the store counted a
reason (reclaim, drop, corruption, a failed path) or was restarted; none may ever show that was not committed. Bytes
behind every hit are compared.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
from core import FAULTS, Core, chain, suspect
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from flatcake_server.clients import UnknownTurn
from flatcake_transport.address import MISSING, Medium
from flatcake_transport.errors import FlatCakeError
from flatcake_transport.space import SpaceSpec

ONE = SpaceSpec("one", "u8", 4, (4096, 9000))
TWO = SpaceSpec("two", "u8", 4, (700,), shards=2)

paths = st.lists(st.integers(0, 1), min_size=1, max_size=7)
begins = st.fixed_dictionaries(
    {
        "spec": st.sampled_from([ONE, ONE, TWO]),
        "path": paths,
        "client": st.integers(0, 2),
        "shard": st.integers(0, 1),
        "session": st.sampled_from(["", "a", "b", "c", "d"]),
        "shared": st.integers(0, 3),
        "context_tokens": st.sampled_from([None, 100_000]),
        "previous_reply_tokens": st.sampled_from([None, 10, 10_000]),
        "turn": st.sampled_from([None, 1, 2]),
        "copy": st.sampled_from([False, False, False, True]),
    }
)
COPY_SHARE = 0.4
ends = st.tuples(st.integers(0, 30), st.sampled_from(["commit", "commit", "commit", "abort", "fail"]))


class StoreMachine(RuleBasedStateMachine):
    @initialize(nodes=st.sampled_from([0, 1, 2]), memory_pages=st.sampled_from([32, 256]))
    def build(self, nodes: int, memory_pages: int) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="flatcake-machine-", dir="/dev/shm"))
        self.core = Core(
            self.root,
            paths=nodes,
            ssd_bytes=64 << 12,
            memory_bytes=memory_pages << 12,
            sessions_max=6,
            index_blocks_max=40,
            leases_max=8,
            copy_after_hits=1,
            copy_memory_share=COPY_SHARE,
        )
        self.open: list[tuple] = []  # (turn, spec, shard, client)
        self.leases: dict[int, tuple[int, set[bytes]]] = {}  # lease -> client, keys
        self.committed: set[bytes] = set()
        self.present: set[bytes] = set()
        self.opened()

    def opened(self) -> None:
        for spec in (ONE, TWO):
            self.core.open(spec)
        self.reasons = self.reasons_now()

    def teardown(self) -> None:
        if hasattr(self, "core"):
            self.core.close()
            shutil.rmtree(self.root)

    # -- the model -------------------------------------------------------------------------------------------------

    def reasons_now(self) -> Counter:
        """Counts of everything that may take keys away."""
        store, retired, room = self.core.store, self.core.node.retirement, self.core.node.room
        return Counter(
            reclaimed=sum(room.reclaimed.values()),
            corrupt=store.counts["corrupt_segments"],
            failed=retired.counts["disk_failures"],
            dropped=store.counts["sessions_dropped"],
        )

    def known(self) -> set[bytes]:
        """All keys that are stored."""
        index = self.core.store.catalog.index
        keys, _ = index.arrays()
        assert (index.lookup(keys) != np.uint64(MISSING)).all()
        return {key.tobytes() for key in keys}

    def judge(self, written: set[bytes] = frozenset(), *, sure: bool = True) -> None:
        """Compare what is there with the model, after a step that committed `written`."""
        now, reasons = self.known(), self.reasons_now()
        self.committed |= written
        assert now <= self.committed, "keys show that nobody committed"
        if reasons == self.reasons and sure:
            assert now >= self.present | written, "keys are gone without a reason"
        if all(reasons[reason] == self.reasons[reason] for reason in ("corrupt", "failed")):
            for _, keys in self.leases.values():
                assert keys <= now, "pinned keys are gone"
        else:
            self.leases = {lease: (client, keys & now) for lease, (client, keys) in self.leases.items()}
        self.present, self.reasons = now, reasons

    @invariant()
    def law(self) -> None:
        if hasattr(self, "core"):
            self.core.faults.clear()
            self.core.check()
            self.copies_keep_to_their_share()
            if not self.core.store.turns:
                self.core.check_rest()

    def copies_keep_to_their_share(self) -> None:
        store = self.core.store
        being = [part for turn in store.turns.values() for part in turn.parts if part.open and part.reason == "copied"]
        held = [segment for segment in store.catalog.segments if segment.reason == "copied"]
        assert all(each.address.medium is Medium.MEMORY for each in (*being, *held)), "a copy takes room on a disk"
        copied = sum(each.total_bytes for each in held)
        assert store.catalog.copied_bytes == copied
        assert copied + sum(each.total_bytes for each in being) <= COPY_SHARE * self.core.config.memory_bytes

    @rule(path=paths, client=st.integers(0, 2))
    def copy(self, path, client) -> None:
        """Displaces nothing: neither memory nor places in the tables."""
        reasons = self.reasons_now()
        self.core.run(self.begin(ONE, path, client, 0, "", 0, copy=True))
        assert self.reasons_now() == reasons

    # -- writing ---------------------------------------------------------------------------------------------------

    async def begin(self, spec, path, client, shard, session, shared, **hints):
        shard %= spec.shards
        counts = [2] * min(shared, len(path)) + [1] * (len(path) - shared) if shared else None
        turn = await self.core.begin(
            spec, path, client=client, shard=shard, session=session, share_counts=counts, **hints
        )
        if turn is not None:
            self.open.append((turn, spec, shard, client))

    async def end(self, number, how):
        if not self.open:
            return set()
        turn, _, shard, client = self.open.pop(number % len(self.open))
        if how == "commit":
            stored = {key.tobytes() for part in turn.parts for key in part.keys}
            self.committed |= stored if len(turn.committed) == turn.spec.shards - 1 else set()
            return stored if await self.core.commit(turn, shard, client) else set()
        await self.core.abort(turn, shard, client, failure="EIO" if how == "fail" else "")
        return set()

    def together(self, these, those) -> None:
        before = self.core.tripped
        results = self.core.run(*(self.begin(**one) for one in these), *(self.end(*one) for one in those))
        written: set[bytes] = set()
        for result in results:
            if isinstance(result, set):
                written |= result
            elif result is not None:
                assert isinstance(result, FlatCakeError | UnknownTurn), result
        failed = any(isinstance(result, BaseException) for result in results)
        self.judge(written, sure=not failed and self.core.tripped == before)

    @rule(these=st.lists(begins, min_size=1, max_size=3), those=st.lists(ends, max_size=3))
    def write(self, these, those) -> None:
        self.together(these, those)

    @rule(those=st.lists(ends, min_size=1, max_size=3))
    def finish(self, those) -> None:
        self.together([], those)

    @rule(
        these=st.lists(begins, min_size=1, max_size=2), those=st.lists(ends, max_size=2), what=st.sampled_from(FAULTS)
    )
    def write_on_a_bad_disk(self, these, those, what) -> None:
        self.core.fail(what)
        self.together(these, those)

    @rule(client=st.integers(0, 2), these=st.lists(begins, max_size=2))
    def client_dies(self, client, these) -> None:
        """While turns of it and others are begun."""
        core = self.core
        gone = core.clients[client]
        mine = [entry for entry in self.open if entry[3] == client]
        self.open = [entry for entry in self.open if entry[3] != client]
        begun = len(self.open)
        core.run(*(self.begin(**one) for one in these), core.store.client_gone(gone))
        # What it began after it was gone was refused, or given back.
        self.open = self.open[:begun] + [entry for entry in self.open[begun:] if entry[3] != client]
        for turn, _, shard, _ in mine:
            assert turn.writers.get(shard) != gone
        assert not any(gone in turn.writers.values() for turn in core.store.turns.values())
        assert not any(lease.client_id == gone for lease in core.store.leases._leases.values())
        self.leases = {lease: held for lease, held in self.leases.items() if held[0] != client}
        core.clients[client] = core.greet()
        self.judge(sure=False)

    # -- reading ---------------------------------------------------------------------------------------------------

    @rule(spec=st.sampled_from([ONE, TWO]), path=paths, client=st.integers(0, 2), pin=st.booleans())
    def lookup(self, spec, path, client, pin) -> None:
        keys = [key.tobytes() for key in chain(spec, path)]
        expected = next((n for n, key in enumerate(keys) if key not in self.present), len(keys))
        try:
            blocks, lease = self.core.hit(spec, path, client=client, pin=pin)
        except FlatCakeError:
            assert len(self.leases) >= 8
            return
        # A second copy that was stored at the same time serves when the first, which the index names, is gone.
        assert blocks >= expected
        assert set(keys[:blocks]) <= self.committed
        if lease:
            self.leases[lease] = (client, set(keys[:blocks]))

    @precondition(lambda self: self.leases)
    @rule(number=st.integers(0, 7))
    def release(self, number) -> None:
        lease = list(self.leases)[number % len(self.leases)]
        client, _ = self.leases.pop(lease)
        self.core.store.release(self.core.clients[client], [lease])

    @precondition(lambda self: self.leases)
    @rule(number=st.integers(0, 7))
    def renew(self, number) -> None:
        lease = list(self.leases)[number % len(self.leases)]
        client, _ = self.leases[lease]
        assert self.core.store.renew(self.core.clients[client], [lease]) == [lease]

    # -- time and trouble ------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1, 11, 700]), what=st.sampled_from([None, *FAULTS]))
    def time_passes(self, seconds, what) -> None:
        before = self.core.tripped
        if what:
            self.core.fail(what)
        self.core.now_s += seconds
        if seconds > 10:
            self.leases = {}
        self.core.run(self.core.store.tick(600.0))
        assert self.core.store.leases.stats().leases == len(self.leases)
        waiting = {id(turn) for turn in self.core.store.turns.values()}
        self.open = [entry for entry in self.open if id(entry[0]) in waiting]
        self.judge(sure=self.core.tripped == before)

    @precondition(lambda self: len(self.core.store.catalog.segments))
    @rule(number=st.integers(0, 20), what=st.sampled_from([None, None, "journal"]))
    def corrupt(self, number, what) -> None:
        if what:
            self.core.fail(what)
        segments = list(self.core.store.catalog.segments)
        segment = segments[number % len(segments)]
        self.core.run(self.core.store.report_corrupt([suspect(segment)]))
        assert self.core.store.catalog.segments.get(segment.address) is not segment
        self.judge()

    @rule(name=st.sampled_from(["a", "b", "c", "d"]))
    def drop(self, name) -> None:
        store = self.core.store
        for session in [session for session in store.catalog.sessions.values() if session.name == name]:
            if not store.retirement.busy(session.session_no) and not store.catalog.order.dependents(session.session_no):
                self.core.run(store.retirement.drop(session))
                store.counts["sessions_dropped"] += 1
        self.judge()

    @rule()
    def restart(self) -> None:
        """Killed and started: what was committed on paths that live is there; twice gives the same."""
        core = self.core
        kept = {
            key.tobytes()
            for session in core.store.catalog.sessions.values()
            for segment in session.segments
            if segment.file_id
            for key in segment.keys
        }
        failed = any(disk.failure for disk in core.node.disks.values())
        self.open, self.leases = [], {}
        core.restart()
        first = self.known()
        core.restart()
        assert self.known() == first, "a second start gives another store"
        assert first <= self.committed
        # A path that failed comes back with what its journal knows: more than before, never less.
        assert first >= kept if failed else first == kept
        self.present = first
        self.opened()


def test_the_store_keeps_its_word():
    """Some 8 ms a step, on one core: ten seconds; under `make soak` a quarter of an hour."""
    soak = settings().max_examples > 1000
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=1000 if soak else 60,
            stateful_step_count=100 if soak else 30,
            suppress_health_check=list(HealthCheck),
        ),
    )
