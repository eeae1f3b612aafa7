"""LeaseTable beside a dict of what was granted."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flatcake_server.lease import LeaseTable
from flatcake_transport.errors import Overloaded

TTL_S = 5
LEASES_MAX = 4
CLIENTS = st.integers(1, 3)
SESSIONS = st.lists(st.integers(1, 4), max_size=4)
BACK = st.lists(st.integers(-1, LEASES_MAX + 1), max_size=4)  # ids, counted back from the last one granted


class Leases(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(TTL_S, LEASES_MAX)
        self.model: dict[int, tuple[int, set[int], int]] = {}  # id -> client, sessions, end
        self.now = 100
        self.granted = 0

    def lapse(self) -> list[int]:
        ended = [lease_id for lease_id, (_, _, end) in self.model.items() if end <= self.now]
        for lease_id in ended:
            del self.model[lease_id]
        return ended

    @rule(step_s=st.integers(0, TTL_S + 1))
    def time_passes(self, step_s: int) -> None:
        self.now += step_s

    @rule(client=CLIENTS, sessions=SESSIONS)
    def grant(self, client: int, sessions: list[int]) -> None:
        self.lapse()
        if len(self.model) == LEASES_MAX:
            with pytest.raises(Overloaded):
                self.table.grant(client, sessions, self.now)
            return
        lease = self.table.grant(client, sessions, self.now)
        self.granted += 1
        assert lease.lease_id == self.granted
        assert (lease.client_id, set(lease.sessions), lease.expires_s) == (client, set(sessions), self.now + TTL_S)
        self.model[lease.lease_id] = (client, set(sessions), self.now + TTL_S)

    @rule(client=CLIENTS, back=BACK)
    def renew(self, client: int, back: list[int]) -> None:
        ids = [self.granted - step for step in back]
        self.lapse()
        mine = [lease_id for lease_id in ids if lease_id in self.model and self.model[lease_id][0] == client]
        assert self.table.renew(client, ids, self.now) == mine
        for lease_id in mine:
            self.model[lease_id] = (client, self.model[lease_id][1], self.now + TTL_S)

    @rule(client=CLIENTS, back=BACK)
    def release(self, client: int, back: list[int]) -> None:
        ids = [self.granted - step for step in back]
        mine = {lease_id for lease_id in ids if lease_id in self.model and self.model[lease_id][0] == client}
        assert self.table.release(client, ids) == len(mine)
        for lease_id in mine:
            del self.model[lease_id]

    @rule(client=CLIENTS)
    def client_dies(self, client: int) -> None:
        mine = [lease_id for lease_id, (owner, _, _) in self.model.items() if owner == client]
        assert self.table.release_client(client) == len(mine)
        for lease_id in mine:
            del self.model[lease_id]

    @rule()
    def expire(self) -> None:
        assert self.table.expire(self.now) == len(self.lapse())

    @invariant()
    def agrees(self) -> None:
        self.table.check()
        for session in range(6):
            assert self.table.pins(session) == sum(session in pinned for _, pinned, _ in self.model.values())
        stats = self.table.stats()
        assert stats.leases == len(self.model)
        assert stats.pinned_sessions == len(set().union(*(pinned for _, pinned, _ in self.model.values())))
        assert stats.granted_total == self.granted
        for lease_id in range(self.granted + 2):
            assert (self.table.get(lease_id) is not None) == (lease_id in self.model)


TestLeases = Leases.TestCase
