"""Who is connected. A client is known from its Hello to the end of its handover connection.

A client without that connection can ask but move no bytes; it is forgotten when it has been silent for a while.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from flatcake_transport.errors import Overloaded
from flatcake_transport.handoff import TOKEN_BYTES


class StaleClient(LookupError):
    """Not known here: the daemon restarted, or the client was forgotten. It says Hello again and tries once more."""


class UnknownSpace(LookupError):
    """The space is not open here: the daemon restarted, or forgot it. The client opens it and tries once more."""


class UnknownTurn(LookupError):
    """No such turn of this client: it was finished, aborted, or lost with a restart."""


@dataclass(slots=True, eq=False)
class Client:
    client_id: int
    token: bytes
    name: str
    seen_s: float
    attached: bool = False


class Clients:
    def __init__(self, clients_max: int, silence_max_s: float) -> None:
        self._clients_max = clients_max
        self._silence_max_s = silence_max_s
        self._clients: dict[int, Client] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def hello(self, name: str, now_s: float) -> Client:
        """Raises: Overloaded: as many clients as there may be."""
        if len(self._clients) >= self._clients_max:
            raise Overloaded(f"{len(self._clients)} clients are connected, clients_max is {self._clients_max}")
        # 63 random bits that no earlier daemon used: a stale client never speaks for another one.
        client = Client(secrets.randbits(63) | 1, secrets.token_bytes(TOKEN_BYTES), name, now_s)
        self._clients[client.client_id] = client
        return client

    def get(self, client_id: int, now_s: float) -> Client:
        """Raises: StaleClient."""
        client = self._clients.get(client_id)
        if client is None:
            raise StaleClient("stale: this daemon does not know the client; say Hello again")
        client.seen_s = now_s
        return client

    def attach(self, client_id: int, token: bytes, now_s: float) -> Client:
        """Raises: StaleClient: unknown, wrong token, or attached already."""
        client = self.get(client_id, now_s)
        if client.attached or not secrets.compare_digest(client.token, token):
            raise StaleClient("stale: wrong token, or the client is connected already; say Hello again")
        client.attached = True
        return client

    def remove(self, client_id: int) -> None:
        self._clients.pop(client_id, None)

    def silent(self, now_s: float) -> list[Client]:
        """Those without a handover connection that said nothing for too long."""
        return [
            client
            for client in self._clients.values()
            if not client.attached and now_s - client.seen_s > self._silence_max_s
        ]
