"""A cluster in one thread, without sockets: seeded time, messages that are late, lost or out of order, nodes that crash.

The decisions are the daemon's own pure parts: membership, publisher, anchors, leases, loans, extents. What is made up here is the
world: a directory with expiries by its own clock, a network, nodes whose clocks start anywhere and differ in pace, arenas whose
blocks are reused as soon as no lease pins them. A reader's bytes come one-sided, past the owner's daemon, also while no message
gets through; what it trusts must be what it asked for.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
from cluster_network import BUCKETS, NODE_TTL_S, Network, SimDirectory, holder_of

from flatcake_server.cluster.anchors import anchors_within, choose, probes
from flatcake_server.cluster.borrowed import Loan, Loans
from flatcake_server.cluster.directory import Holder
from flatcake_server.cluster.members import Beat, Member, Membership, State, Verdict
from flatcake_server.cluster.peer_service import LEASE_SHARE
from flatcake_server.cluster.publisher import Publisher
from flatcake_server.cluster.sweeper import Sweeper
from flatcake_server.extents import ExtentAllocator
from flatcake_server.lease import LeaseTable

SWEEP_PERIOD_S, AUDIT_S, LEASE_TTL_S, TIMEOUT_S = 4.0, 2.0, 2.0, 0.5
PACE = LEASE_SHARE
DRIFT = 0.002  # clocks differ by so much in pace: ten times what hardware does
BLOCK = 4096
ARENA_BLOCKS = 48
CHAINS = 5
CHAIN_BLOCKS = 36


def key_of(chain: int, position: int) -> bytes:
    return b"%08d%08d" % (chain, position)


class SimNode:
    """One start of a daemon, from its birth to its crash."""

    def __init__(self, world: World, node_id: int, incarnation: bytes) -> None:
        random = world.random
        self.world, self.alive = world, True
        self.start_s, self.pace = random.uniform(-1e6, 1e6), 1 + random.uniform(-DRIFT, DRIFT)
        self.me = Member(node_id, incarnation, f"{node_id}:{incarnation.hex()}")
        self.membership = Membership(self.me, NODE_TTL_S)
        self.publisher = Publisher(rate_max=400, batch_max=16, audit_s=AUDIT_S, audit_keys=4)
        self.sweeper = Sweeper(SWEEP_PERIOD_S, 2 * NODE_TTL_S, buckets=BUCKETS)
        self.leases, self.loans = LeaseTable(LEASE_TTL_S, 64), Loans(64)
        self.arena = ExtentAllocator(ARENA_BLOCKS * BLOCK)
        self.content: dict[int, bytes] = {}  # what a one-sided read of an offset gets
        self.links: dict[bytes, int] = {}  # by incarnation of the owner: how often it was attached to
        self.broken: set[bytes] = set()  # owners that did not let us attach yet
        self.attached: dict[int, int] = {}  # by peer: the last time it attached, as it counts them
        self.index: dict[bytes, int] = {}
        self.chains: dict[int, int] = {}  # blocks held of each, the least recently used first
        self.next_lease = itertools.count(1)
        self._beat(), self._publish(), self._sweep(), self._tick(), self._work()

    def now_s(self) -> float:
        return self.start_s + self.world.network.now_s * self.pace

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        """By its own clock, if it lives then."""
        self.world.network.later(max(0.0, delay_s) / self.pace, lambda: act() if self.alive else None)

    def ask(
        self, server: Any, verb: Callable[[], Any], then: Callable[[Any], None], failed: Callable[[], None]
    ) -> None:
        """A call with a deadline. `server`: a node, or None for the directory."""
        network, open_call = self.world.network, [True]
        ends = (self.me.node_id,) if server is None else (self.me.node_id, server.me.node_id)

        def finish(act: Callable[[], None]) -> None:
            if open_call and self.alive:
                open_call.clear()
                act()

        def serve() -> None:
            if network.directory_up if server is None else server.alive:
                value = verb()
                network.send(ends, lambda: finish(lambda: then(value)))

        network.send(ends, serve)
        self.after(TIMEOUT_S, lambda: finish(failed))

    # -- membership and publishing -----------------------------------------------------------------------------------

    def _beat(self) -> None:
        asked_s, directory, membership = self.now_s(), self.world.directory, self.membership

        def answered(beat: Beat) -> None:
            if membership.answered(beat, asked_s):
                self.publisher.publish_again()
            self.sweeper.listed((*(beat.members or ()), self.me))
            if beat.verdict is Verdict.TAKEN and beat.holder is not None:
                holder = beat.holder
                if not any(n.alive and n.me.incarnation == holder.incarnation for n in self.world.nodes):
                    membership.holder_is_dead(holder.incarnation)  # its port answers nobody
            self.after(membership.wait_s(self.now_s()) + 0.001, self._beat)

        def failed() -> None:
            membership.failed(self.now_s(), self.world.random.random())
            self.after(membership.wait_s(self.now_s()), self._beat)

        self.ask(None, lambda: directory.beat(self.me, membership.takeover), answered, failed)

    def _sure(self) -> bool:
        return self.membership.state(self.now_s()) is State.JOINED and not self.membership.beats_failed

    def _publish(self) -> None:
        batch = self.publisher.take(self.now_s()) if self._sure() else None
        if batch is None:
            self._audit()
            return

        def arrived(_: Any) -> None:
            self.publisher.arrived()
            self._publish()

        def lost() -> None:
            self.publisher.lost()
            self.after(0.3, self._publish)

        self.ask(None, lambda: self.world.directory.tell(self.me, batch.puts, batch.withdrawn), arrived, lost)

    def _audit(self) -> None:
        keys = list(self.publisher.audit(self.now_s())) if self._sure() else []
        if not keys:
            self.after(0.1, self._publish)
            return

        def probed(found: list[list[Holder]]) -> None:
            mine = holder_of(self.me)
            self.publisher.audited([key for key, each in zip(keys, found, strict=True) if mine not in each])
            self._publish()

        self.ask(None, lambda: self.world.directory.probe(keys), probed, lambda: self.after(0.3, self._publish))

    def _sweep(self) -> None:
        directory = self.world.directory
        buckets = self.sweeper.take(self.now_s(), self.me.node_id) if self._sure() else range(0)

        def read(entries: list[tuple[bytes, Holder]]) -> None:
            dead = self.sweeper.dead([holder for _, holder in entries], self.now_s())
            stale = {entry for entry in entries if entry[1] in dead}
            self.world.counts["entries swept"] += len(stale)
            self.ask(None, lambda: directory.remove(stale), lambda _: None, lambda: None)

        for bucket in buckets:
            self.ask(None, lambda bucket=bucket: directory.bucket(bucket), read, lambda: None)  # type: ignore[misc]
        self.after(0.2, self._sweep)

    def _tick(self) -> None:
        self.leases.expire(self.now_s())
        self.leases.check()
        for loan in self.loans.orphans(lambda lease: self.loans.get(lease, self.now_s()) is not None):
            self.give_back(loan)
        self.after(0.25, self._tick)

    # -- what it stores ----------------------------------------------------------------------------------------------

    def store(self, chain: int, blocks: int) -> None:
        """As an engine does: what is missing of a chain, dropping others that nobody reads."""
        for position in range(self.chains.get(chain, 0), blocks):
            offset = self.arena.allocate(BLOCK)
            while offset is None:
                self.leases.expire(self.now_s())
                victim = next((c for c in self.chains if c != chain and not self.leases.pins(c)), None)
                if victim is None:
                    return
                self.drop(victim)
                offset = self.arena.allocate(BLOCK)
            key = key_of(chain, position)
            self.content[offset], self.index[key] = key, offset
            self.chains.pop(chain, None)
            self.chains[chain] = position + 1
            if len(anchors_within(position, 1)):
                self.publisher.add([key])

    def drop(self, chain: int) -> None:
        keys = [key_of(chain, position) for position in range(self.chains.pop(chain))]
        self.publisher.remove(keys)
        for key in keys:
            self.arena.free(self.index.pop(key), BLOCK)

    def find(self, peer: int, keys: list[bytes]) -> tuple[int, list[int], float]:
        """For another node: (lease, offsets, ttl)."""
        offsets = list(itertools.takewhile(lambda offset: offset is not None, map(self.index.get, keys)))
        if not offsets:
            return 0, [], 0.0
        lease = self.leases.grant(peer, [int(keys[0][:8])], self.now_s())
        return lease.lease_id, [offset for offset in offsets if offset is not None], LEASE_TTL_S * PACE

    # -- what it reads elsewhere ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        random = self.world.random
        chain, blocks = random.randrange(CHAINS), random.randint(1, CHAIN_BLOCKS)
        if random.random() < 0.5:
            self.store(chain, blocks)
        else:
            self.lookup(chain, blocks)
        self.after(random.uniform(0.01, 0.4), self._work)

    def lookup(self, chain: int, blocks: int) -> None:
        held = min(self.chains.get(chain, 0), blocks)
        keys = [key_of(chain, position) for position in range(blocks)]
        lengths = probes(held, blocks, 4).tolist()
        if not lengths or self.membership.state(self.now_s()) is not State.JOINED:
            return

        def probed(found: list[list[Holder]]) -> None:
            live = [{n for n, tag in holders if self.membership.live(n, tag)} for holders in found]
            node_id = choose(live, self.me.node_id)
            member = self.membership.known.get(-1 if node_id is None else node_id)
            owner = next((n for n in self.world.nodes if member and n.me.incarnation == member.incarnation), None)
            if owner is not None and owner.me.incarnation not in self.broken:
                theirs = holder_of(owner.me)
                named = [key for key, holders in zip(anchors, found, strict=True) if theirs in holders]
                self._borrow(owner, keys[held:], named)

        anchors = [keys[n - 1] for n in lengths]
        self.ask(None, lambda: self.world.directory.probe(anchors), probed, lambda: None)

    def _disown(self, owner: SimNode, named: list[bytes]) -> None:
        """What the owner does not hold of what the directory names it for is taken out."""
        directory = self.world.directory
        remove = lambda gone: self.ask(  # noqa: E731
            None, lambda: directory.tell(owner.me, (), gone), lambda _: None, lambda: None
        )
        self.ask(owner, lambda: tuple(key for key in named if key not in owner.index), remove, lambda: None)

    def _borrow(self, owner: SimNode, keys: list[bytes], named: list[bytes]) -> None:
        asked_s, world = self.now_s(), self.world

        link = self.links.get(owner.me.incarnation, 0)

        def found(reply: tuple[int, list[int], float]) -> None:
            lease_id, offsets, ttl_s = reply
            if self.links.get(owner.me.incarnation, 0) != link:
                return  # it came by a link that ended
            world.counts["stale hints" if not offsets else "remote hits"] += 1
            if not offsets:
                self._disown(owner, named)
            else:
                local = next(self.next_lease)
                loan = Loan(owner.me.node_id, owner.me.incarnation, lease_id, ttl_s, asked_s + ttl_s)
                self.loans.add(local, loan)
                self._read(owner, local, loan, list(zip(offsets, keys, strict=False)))

        self.ask(owner, lambda: owner.find(self.world.peer_id(self), keys), found, lambda: None)

    def _read(self, owner: SimNode, local: int, loan: Loan, left: list[tuple[int, bytes]]) -> None:
        """Block by block, each in its own time; a lease is renewed when half of it is gone."""
        if self.loans.get(local, self.now_s()) is None:
            self.world.counts["reads given up"] += 1
            return
        if not left:
            for ended in self.loans.end([local]):
                self.give_back(ended)
            return
        (offset, key), rest = left[0], left[1:]

        def landed() -> None:
            if not owner.alive:  # the get is an error
                self.world.counts["reads given up"] += 1
                self.loans.end([local])
                return
            got = owner.content.get(offset)
            if self.loans.get(local, self.now_s()) is not None and got is not None:
                self.world.counts["blocks read"] += 1
                assert got == key, f"trusted {got!r} where {key!r} was asked for"
            asked_s, held = self.now_s(), self.loans.get(local, self.now_s())
            if held is not None and held.expires_s - asked_s < held.ttl_s / 2:
                renew = lambda: owner.leases.renew(self.world.peer_id(self), [loan.lease_id], owner.now_s())  # noqa: E731
                alive = lambda ids: self.loans.renewed(local, loan, asked_s) if ids else self.loans.end([local])  # noqa: E731
                self.ask(owner, renew, alive, lambda: None)
            self._read(owner, local, loan, rest)

        self.after(self.world.random.choice((0.002, 0.02, 0.3)), landed)

    def give_back(self, loan: Loan) -> None:
        owner = next((n for n in self.world.nodes if n.me.incarnation == loan.incarnation), None)
        if owner is not None:
            self.ask(
                owner, lambda: owner.leases.release(self.world.peer_id(self), [loan.lease_id]),
                lambda _: None, lambda: None,
            )  # fmt: skip

    def attach(self, owner: SimNode) -> None:
        """The link broke and is made again: the owner hears what is held of it, and ends all else that it lent."""
        name, peer = owner.me.incarnation, self.world.peer_id(self)
        link = self.links[name] = self.links.get(name, 0) + 1
        held = self.loans.of_node(owner.me.node_id, name)
        self.broken.add(name)

        def hear() -> None:
            if link > owner.attached.get(peer, 0):  # one that comes late is refused
                owner.attached[peer] = link
                owner.leases.release(peer, set(owner.leases.held_by(peer)).difference(held))

        def stands(_: None) -> None:
            if link == self.links[name]:
                self.broken.discard(name)

        self.ask(owner, hear, stands, lambda: self.attach(owner) if link == self.links[name] else None)

    def crash(self) -> None:
        self.alive = False


class World:
    """`run` makes trouble and heals; `settled` says what did not come right."""

    def __init__(self, seed: int, ids: int = 4) -> None:
        self.random = Random(seed)
        self.network = Network(self.random)
        self.directory = SimDirectory(
            self.network, self.random.uniform(-1e6, 1e6), 1 + self.random.uniform(-DRIFT, DRIFT)
        )
        self.counts: Counter[str] = Counter()
        self.nodes: list[SimNode] = []
        self._ids = ids
        for node_id in range(ids):
            self.born(node_id)

    def born(self, node_id: int) -> SimNode:
        node = SimNode(self, node_id, self.random.randbytes(16))
        self.nodes.append(node)
        return node

    @staticmethod
    def peer_id(node: SimNode) -> int:
        return int.from_bytes(node.me.incarnation[:7], "little")

    @property
    def living(self) -> list[SimNode]:
        return [node for node in self.nodes if node.alive]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.network.run(self.network.now_s + self.random.uniform(0.2, 2.0))
            self._trouble()
        self.network.cut.clear()
        self.network.drop, self.network.directory_up = 0.0, True
        missing = set(range(self._ids)) - {node.me.node_id for node in self.living}
        for node_id in missing:
            self.born(node_id)
        self.network.run(self.network.now_s + 4 * NODE_TTL_S)

    def _trouble(self) -> None:
        random, network = self.random, self.network
        match random.randrange(10):
            case 0 if len(self.living) > 1:
                random.choice(self.living).crash()
            case 1:
                self.born(random.randrange(self._ids))  # back, or a twin of one that lives
            case 2:
                network.cut ^= {random.randrange(self._ids)}
            case 3:
                network.directory_up = not network.directory_up
            case 4:
                random.choice((self.directory.lose_everything, self.directory.lose_some))()
            case 5:
                network.drop = random.choice((0.0, 0.05, 0.4))
            case 6 if self.living:
                random.choice(self.living).attach(random.choice(self.nodes))
            case _:
                network.cut.clear()

    def settled(self) -> list[str]:
        """What is wrong in a world at peace, a sentence each."""
        wrong = []
        holders: dict[int, SimNode] = {}
        for node in self.living:
            state = node.membership.state(node.now_s())
            if state is State.JOINED:
                if node.me.node_id in holders:
                    wrong.append(f"two nodes believe to be node {node.me.node_id}")
                holders[node.me.node_id] = node
            elif state is not State.REFUSED:
                wrong.append(f"node {node.me.node_id} is {state.value}")
        if set(holders) != set(range(self._ids)):
            wrong.append(f"only {sorted(holders)} are joined")
        for node in holders.values():
            others = {n.me.incarnation for n in holders.values() if n is not node}
            if {member.incarnation for member in node.membership.known.values()} != others:
                wrong.append(f"node {node.me.node_id} knows others than there are")
            anchors = {k for k in node.index if len(anchors_within(int(k[8:]), 1))}
            if node.publisher.wants() != anchors:
                wrong.append(f"node {node.me.node_id} publishes other anchors than it holds")
        for node in self.living:
            if node.arena.used_bytes != BLOCK * len(node.index):
                wrong.append(f"node {node.me.node_id} has lost space")
            offsets = np.array(sorted(node.index.values()))
            if len(offsets) and (np.diff(offsets) < BLOCK).any():
                wrong.append(f"node {node.me.node_id} gave space out twice")
        return wrong
