"""Leases that other nodes gave us for our clients' lookups. Pure: the clock is an argument.

A lookup that goes on at another node has two leases: ours, which the client knows, and the owner's, which we hold for it. The
owner's ends by release or by expiry, which is seen here as "not alive" before the owner sees it, because its end is counted
from before it was asked. While our connection to the owner is broken the loan cannot be renewed; it stays ours, since a client that
does not know yet reads on until its time is over, and the owner is told of it when we are connected again. A loan belongs to
one incarnation of its owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from uuid import UUID

from flatcake_transport.errors import Overloaded


@dataclass(frozen=True, slots=True)
class Exports:
    """Files of the loan that can be read over NVMe-oF: the owner's subsystem, and the namespace's UUID of each file."""

    subsystem: str
    port: str
    uuids: dict[int, UUID]


@dataclass(frozen=True, slots=True)
class Loan:
    """`lease_id` is the owner's; `expires_s` on the clock of `now_s`."""

    node_id: int
    incarnation: bytes
    lease_id: int
    ttl_s: float
    expires_s: float
    exports: Exports | None = None


class Loans:
    """By the id of the local lease they hang on; one each. Belongs to the event loop."""

    def __init__(self, loans_max: int) -> None:
        self._loans: dict[int, Loan] = {}
        self._loans_max = loans_max

    def __len__(self) -> int:
        return len(self._loans)

    def add(self, local_lease: int, loan: Loan) -> None:
        """Raises: Overloaded: `loans_max` are held."""
        if len(self._loans) >= self._loans_max:
            raise Overloaded(f"{self._loans_max} leases of other nodes are held already")
        self._loans[local_lease] = loan

    def get(self, local_lease: int, now_s: float) -> Loan | None:
        """The loan if it is alive."""
        loan = self._loans.get(local_lease)
        return loan if loan is not None and now_s < loan.expires_s else None

    def renewed(self, local_lease: int, loan: Loan, asked_s: float) -> None:
        """The owner let it live on for a ttl from when it was asked. Another one that took its place is left alone."""
        held = self._loans.get(local_lease)
        if held is not None and held.lease_id == loan.lease_id and held.incarnation == loan.incarnation:
            self._loans[local_lease] = replace(held, expires_s=max(held.expires_s, asked_s + held.ttl_s))

    def end(self, local_leases: Iterable[int]) -> list[Loan]:
        """Give them up; those the owner should be told of."""
        return [loan for lease in local_leases if (loan := self._loans.pop(lease, None)) is not None]

    def of_node(self, node_id: int, incarnation: bytes) -> list[int]:
        """The owner's ids of what it lent us and is in use, if it is still that incarnation."""
        owner = (node_id, incarnation)
        return [loan.lease_id for loan in self._loans.values() if (loan.node_id, loan.incarnation) == owner]

    def orphans(self, alive: Callable[[int], bool]) -> list[Loan]:
        """Those whose local lease ended without a word (its client died, it expired); given up."""
        return self.end([lease for lease in self._loans if not alive(lease)])
