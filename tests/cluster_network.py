"""The made-up parts of a simulated cluster: a network that loses, delays and reorders, and a directory with a clock of its own."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from random import Random

from flatcake_server.cluster.directory import Holder
from flatcake_server.cluster.members import Beat, Member, Verdict

NODE_TTL_S = 3.0
BUCKETS = 16


def holder_of(member: Member) -> Holder:
    return Holder(member.node_id, member.incarnation[:4])


class Network:
    def __init__(self, random: Random) -> None:
        self.random = random
        self.now_s = 0.0
        self.drop = 0.05
        self.cut: set[int] = set()  # nodes whose messages do not get through, nor any to them
        self.directory_up = True
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._order), act))

    def run(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, act = heapq.heappop(self._events)
            act()
        self.now_s = until_s

    def send(self, ends: tuple[int, ...], act: Callable[[], None]) -> None:
        """Maybe, and when it likes; once in a while so late that everybody has given up."""
        if self.cut.isdisjoint(ends) and self.random.random() >= self.drop:
            slow = self.drop and self.random.random() < 0.03
            self.later(self.random.uniform(0.5, 4.0) if slow else self.random.uniform(0.001, 0.05), act)


class SimDirectory:
    """By the rules of the Redis one."""

    def __init__(self, network: Network, start_s: float, pace: float) -> None:
        self._network, self._start_s, self._pace = network, start_s, pace
        self.members: dict[int, tuple[Member, float]] = {}
        self.anchors: set[tuple[bytes, Holder]] = set()

    def now_s(self) -> float:
        return self._start_s + self._network.now_s * self._pace

    def lose_everything(self) -> None:
        self.members.clear()
        self.anchors.clear()

    def lose_some(self) -> None:
        """As with a shard that comes back empty: nobody is told."""
        self.anchors = {(key, holder) for key, holder in self.anchors if sum(key) % 2}

    def expire(self) -> None:
        now_s = self.now_s()
        self.members = {node: held for node, held in self.members.items() if held[1] > now_s}

    def beat(self, me: Member, takeover: bytes) -> Beat:
        self.expire()
        held = self.members.get(me.node_id)
        verdict, holder = Verdict.FRESH, None
        if held is not None and held[0].incarnation not in (me.incarnation, takeover):
            verdict, holder = Verdict.TAKEN, held[0]
        else:
            verdict = Verdict.RENEWED if held is not None and held[0].incarnation == me.incarnation else verdict
            self.members[me.node_id] = me, self.now_s() + NODE_TTL_S
        return Beat(verdict, holder, tuple(member for member, _ in self.members.values()))

    def tell(self, me: Member, puts: tuple[bytes, ...], withdrawn: tuple[bytes, ...]) -> None:
        mine = holder_of(me)
        self.anchors |= {(key, mine) for key in puts}
        self.anchors -= {(key, mine) for key in withdrawn}

    def probe(self, keys: list[bytes]) -> list[list[Holder]]:
        return [[holder for held, holder in self.anchors if held == key] for key in keys]

    def bucket(self, number: int) -> list[tuple[bytes, Holder]]:
        return [(key, holder) for key, holder in self.anchors if sum(key) % BUCKETS == number]

    def remove(self, entries: set[tuple[bytes, Holder]]) -> None:
        self.anchors -= entries
