from __future__ import annotations

import pytest

from flatcake_server.clients import Clients, StaleClient
from flatcake_transport.errors import Overloaded


def test_a_client_is_known_from_hello_to_its_end():
    clients = Clients(2, 10.0)
    client = clients.hello("engine", 0.0)
    assert clients.get(client.client_id, 1.0) is client
    assert clients.attach(client.client_id, client.token, 2.0).attached
    clients.remove(client.client_id)
    clients.remove(client.client_id)
    with pytest.raises(StaleClient, match="stale:"):
        clients.get(client.client_id, 3.0)
    assert len(clients) == 0


def test_only_its_token_attaches_it_and_only_once():
    clients = Clients(2, 10.0)
    client, other = clients.hello("one", 0.0), clients.hello("other", 0.0)
    with pytest.raises(StaleClient, match="wrong token"):
        clients.attach(client.client_id, other.token, 0.0)
    clients.attach(client.client_id, client.token, 0.0)
    with pytest.raises(StaleClient, match="already"):
        clients.attach(client.client_id, client.token, 0.0)
    assert client.client_id != other.client_id


def test_as_many_as_there_may_be():
    clients = Clients(2, 10.0)
    first = clients.hello("one", 0.0)
    clients.hello("other", 0.0)
    with pytest.raises(Overloaded, match="clients_max is 2"):
        clients.hello("third", 0.0)
    clients.remove(first.client_id)
    clients.hello("third", 0.0)


def test_the_silent_without_a_connection_are_forgotten():
    clients = Clients(9, 10.0)
    silent, attached, talks = (clients.hello(name, 0.0) for name in ("silent", "attached", "talks"))
    clients.attach(attached.client_id, attached.token, 0.0)
    clients.get(talks.client_id, 5.0)
    assert clients.silent(10.0) == []
    assert clients.silent(10.5) == [silent]
    assert clients.silent(16.0) == [silent, talks]
