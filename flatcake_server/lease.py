"""Who is reading what. Pure: the clock is an argument.

A lease pins sessions for one client: nothing of them is reclaimed while it lives. It ends by release, by expiry, or with
its client. Past its end the reader gets an error, never other data: the client compares its own deadline, taken from
before it asked, so it always stops before the daemon does.

All leases live equally long from grant or renewal, so the order of their ends is the order of their last grant or
renewal: one ordered dict, renewed ones moved to its end. `now_s` may not go back; if it does, the latest one counts.

Invariants, held by `check`: a session's pins are the leases that name it; a client's leases are those granted to it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from flatcake_transport.errors import Overloaded


@dataclass(frozen=True, slots=True)
class Lease:
    """`expires_s` is on the clock of `now_s`. `sessions` has no session twice."""

    lease_id: int  # from 1, never reused: 0 means "nothing pinned" on the wire
    client_id: int
    sessions: tuple[int, ...]
    expires_s: float


@dataclass(frozen=True, slots=True)
class LeaseStats:
    leases: int
    clients: int
    pinned_sessions: int
    granted_total: int
    released_total: int  # by the client's word
    expired_total: int
    orphaned_total: int  # ended with their client
    refused_total: int  # beyond leases_max; granted == released + expired + orphaned + leases


class LeaseTable:
    """Raises: ValueError: a ttl or bound that lets no lease live."""

    def __init__(self, ttl_s: float, leases_max: int) -> None:
        if ttl_s <= 0 or leases_max < 1:
            raise ValueError(f"leases need a ttl above 0 s and a bound above 0, not {ttl_s} s and {leases_max}")
        self._ttl_s = ttl_s
        self._leases_max = leases_max
        self._now_s = float("-inf")
        self._leases: OrderedDict[int, Lease] = OrderedDict()  # by expiry
        self._of_client: dict[int, set[int]] = {}
        self._pins: Counter[int] = Counter()
        self._granted = self._released = self._expired = self._orphaned = self._refused = 0

    def grant(self, client: int, sessions: Iterable[int], now_s: float) -> Lease:
        """Pin `sessions` until now + ttl. Raises: Overloaded: `leases_max` leases are alive."""
        self.expire(now_s)
        if len(self._leases) >= self._leases_max:
            self._refused += 1
            raise Overloaded(f"{self._leases_max} leases are alive already: nothing was pinned")
        self._granted += 1
        lease = Lease(self._granted, client, tuple(dict.fromkeys(sessions)), self._now_s + self._ttl_s)
        self._leases[lease.lease_id] = lease
        self._of_client.setdefault(client, set()).add(lease.lease_id)
        self._pins.update(lease.sessions)
        return lease

    def renew(self, client: int, ids: Iterable[int], now_s: float) -> list[int]:
        """Let each live on until now + ttl; the ids still alive, in the order given. The others have ended, or are another's."""
        self.expire(now_s)
        alive = []
        for lease_id in ids:
            lease = self._leases.get(lease_id)
            if lease is not None and lease.client_id == client:
                self._leases[lease_id] = replace(lease, expires_s=self._now_s + self._ttl_s)
                self._leases.move_to_end(lease_id)
                alive.append(lease_id)
        return alive

    def release(self, client: int, ids: Iterable[int]) -> int:
        """End leases by their client's word; how many. One that has ended, or is another's, is left as it is."""
        mine = self._of_client.get(client, set())
        ended = [lease_id for lease_id in dict.fromkeys(ids) if lease_id in mine]
        self._end(ended)
        self._released += len(ended)
        return len(ended)

    def held_by(self, client: int) -> list[int]:
        return list(self._of_client.get(client, ()))

    def release_client(self, client: int) -> int:
        """End all leases of a client that is gone; how many."""
        ended = self.held_by(client)
        self._end(ended)
        self._orphaned += len(ended)
        return len(ended)

    def expire(self, now_s: float) -> int:
        """End what has lapsed (`expires_s <= now_s`); how many."""
        self._now_s = max(self._now_s, now_s)
        ended = []
        for lease in self._leases.values():
            if lease.expires_s > self._now_s:
                break
            ended.append(lease.lease_id)
        self._end(ended)
        self._expired += len(ended)
        return len(ended)

    def get(self, lease_id: int) -> Lease | None:
        """The lease if it has not ended (as of the last `now_s` seen)."""
        return self._leases.get(lease_id)

    def pins(self, session: int) -> int:
        """Leases that hold the session. Lapsed ones count until `expire` has seen their end."""
        return self._pins.get(session, 0)

    def stats(self) -> LeaseStats:
        return LeaseStats(
            leases=len(self._leases),
            clients=len(self._of_client),
            pinned_sessions=len(self._pins),
            granted_total=self._granted,
            released_total=self._released,
            expired_total=self._expired,
            orphaned_total=self._orphaned,
            refused_total=self._refused,
        )

    def check(self) -> None:
        """Raises: AssertionError: an invariant of this module is broken."""
        pins = Counter(session for lease in self._leases.values() for session in lease.sessions)
        assert pins == self._pins, "pins differ from the leases that hold them"
        assert all(count > 0 for count in self._pins.values()), "a pin count is not positive"
        held = {(lease.client_id, lease.lease_id) for lease in self._leases.values()}
        listed = {(client, lease_id) for client, ids in self._of_client.items() for lease_id in ids}
        assert held == listed, "clients' leases differ from the leases"
        assert all(self._of_client.values()), "a client without leases is kept"
        ends = [lease.expires_s for lease in self._leases.values()]
        assert ends == sorted(ends), "leases are not in the order of their ends"
        counts = self._released + self._expired + self._orphaned + len(self._leases)
        assert counts == self._granted, "the counts of leases do not add up"

    def _end(self, ids: list[int]) -> None:
        for lease_id in ids:
            lease = self._leases.pop(lease_id)
            mine = self._of_client[lease.client_id]
            mine.discard(lease_id)
            if not mine:
                del self._of_client[lease.client_id]
            for session in lease.sessions:
                self._pins[session] -= 1
                if not self._pins[session]:
                    del self._pins[session]
