"""The directory's client, without a server: made once, and let go of by whom it failed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from core import Yield

redis = pytest.importorskip("redis.asyncio")

from redis.exceptions import MaxConnectionsError, RedisClusterException  # noqa: E402

from flatcake_server.cluster import redis_directory  # noqa: E402
from flatcake_server.cluster.redis_directory import RedisDirectory  # noqa: E402
from flatcake_transport.errors import Unavailable  # noqa: E402


class Clustered(redis.RedisCluster):
    """A client of a Redis Cluster that connects to nobody."""

    def __init__(self) -> None:
        self.closes = 0

    def __del__(self) -> None:
        pass

    async def aclose(self) -> None:
        self.closes += 1


class Single:
    """Says that it is of no cluster, when it is let."""

    def __init__(self) -> None:
        self.closes = 0
        self.answers = asyncio.Event()

    async def info(self, _: str) -> dict[str, int]:
        await self.answers.wait()
        return {"cluster_enabled": 0}

    async def aclose(self) -> None:
        self.closes += 1


@pytest.fixture
def singles(monkeypatch):
    made: list[Single] = []

    def from_url(*_: Any, **__: Any) -> Single:
        made.append(Single())
        return made[-1]

    monkeypatch.setattr(redis_directory.redis.Redis, "from_url", from_url)
    return made


def directory(timeout_s: float = 30.0) -> RedisDirectory:
    return RedisDirectory("redis://nobody", "c", timeout_s=timeout_s)


def raising(error: Exception) -> Callable[[Any], Awaitable[Any]]:
    async def commands(_: Any) -> None:
        raise error

    return commands


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (RedisClusterException("not all slots are covered"), False),
        (ConnectionError("refused"), False),
        (MaxConnectionsError("too many"), True),  # a caller too many takes no connection from the others
    ],
    ids=["no slots", "nobody there", "too many callers"],
)
def test_who_is_primary_of_what_is_asked_again_after_an_error(error, kept):
    async def work() -> None:
        asked, client = directory(), Clustered()
        asked._client = client
        with pytest.raises(Unavailable, match=f"the directory does not answer: {error}"):
            await asked._ask(raising(error), tries=1)
        assert ((asked._client is client), client.closes) == (kept, 0 if kept else 1)

    asyncio.run(work())


def test_a_call_that_fails_late_takes_no_newer_client_away():
    async def work() -> None:
        asked, old, new = directory(), Clustered(), Clustered()

        async def commands(_: Any) -> None:
            asked._client = new  # another call failed before, and the next one connected again
            raise RedisClusterException("closed under it")

        asked._client = old
        with pytest.raises(Unavailable):
            await asked._ask(commands)
        assert (asked._client, old.closes, new.closes) == (new, 1, 0)

    asyncio.run(work())


def test_callers_that_come_together_share_one_client(singles):
    async def work() -> None:
        asked, clients = directory(), []

        async def commands(client: Any) -> None:
            clients.append(client)

        calls = [asyncio.ensure_future(asked._ask(commands)) for _ in range(5)]
        while not singles:
            await Yield()
        singles[0].answers.set()
        await asyncio.gather(*calls)
        assert (len(singles), clients) == (1, singles * 5)
        await asked.close()
        assert singles[0].closes == 1

    asyncio.run(work())


def test_a_server_that_does_not_say_what_it_is_is_let_go_of(singles):
    async def work() -> None:
        asked = directory(timeout_s=0.01)
        with pytest.raises(Unavailable):
            await asked._ask(raising(ValueError()))
        assert ([single.closes for single in singles], asked._client) == ([1], None)

    asyncio.run(work())
