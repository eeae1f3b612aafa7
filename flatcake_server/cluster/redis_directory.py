"""The directory in Redis or Valkey, also in Cluster mode; the operator runs it.

    fc:{<cluster>}:members    a hash: id -> incarnation and record
    fc:{<cluster>}:until      a sorted set: when each id is free again, by the server's clock
    fc:{<cluster>}:version    counts who came and went, from the time of its making on: an unchanged list is not sent
    fc:<cluster>:b:<bucket>   a sorted set: entries of the anchors that fall into this bucket, see `_Place`

The first three share a slot, so a beat is one script, atomic on one server. Buckets are spread over the cluster and go in
pipelines, a command an anchor. Entries do not expire: they count while their writer is a member, and are swept after that.
All scores are 0, so a set is in the order of its entries' bytes, and those of one anchor are a range of it.

Faults survived: a server that is gone, hangs or is loading (`Unavailable` within the deadline; the pool reconnects with the
next call); one that lost its data (a beat says FRESH); a failover (the same, if the replica had not heard of us).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, cast

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import MaxConnectionsError, RedisClusterException, RedisError

from flatcake_server.cluster.directory import BUCKETS, TAG_BYTES, Holder
from flatcake_server.cluster.members import INCARNATION_BYTES, Beat, Member, Verdict, decode_member
from flatcake_server.cluster.publisher import Batch
from flatcake_transport.errors import Unavailable

CONNECTIONS_MAX: Final = 64

# KEYS: members, until, version. ARGV: incarnation, takeover, record, ttl in ms, id, version known.
# Replies: verdict (0 renewed, 1 fresh, 2 taken), the holder's record, version, and the records of all unless unchanged.
_BEAT: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if redis.call('EXISTS', KEYS[3]) == 0 then
  redis.call('SET', KEYS[3], string.format('%.0f', now))
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)) do
  redis.call('HDEL', KEYS[1], id)
  redis.call('ZREM', KEYS[2], id)
  redis.call('INCR', KEYS[3])
end
local held = redis.call('HGET', KEYS[1], ARGV[5])
local holder = held and string.sub(held, 1, 16) or ''
local verdict = 0
if held and holder ~= ARGV[1] and holder ~= ARGV[2] then
  verdict = 2
else
  if holder ~= ARGV[1] then
    verdict = 1
    redis.call('INCR', KEYS[3])
  end
  redis.call('HSET', KEYS[1], ARGV[5], ARGV[3])
  redis.call('ZADD', KEYS[2], now + ARGV[4], ARGV[5])
  for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ARGV[4] * 10) end
end
local version = redis.call('GET', KEYS[3])
local reply = {verdict, held or '', version}
if verdict == 1 or version ~= ARGV[6] then
  for _, record in ipairs(redis.call('HVALS', KEYS[1])) do table.insert(reply, record) end
end
return reply
"""
_LEAVE: Final = """
local held = redis.call('HGET', KEYS[1], ARGV[2])
if held and string.sub(held, 1, 16) == ARGV[1] then
  redis.call('HDEL', KEYS[1], ARGV[2])
  redis.call('ZREM', KEYS[2], ARGV[2])
  redis.call('INCR', KEYS[3])
end
return 0
"""
_VERDICTS: Final = (Verdict.RENEWED, Verdict.FRESH, Verdict.TAKEN)


# An entry: so many bytes of the anchor, of its node's number, and of that node's incarnation. With the 22 bits of the bucket
# 62 of an anchor are known: of a billion anchors none is taken for another in a billion lookups.
_SUFFIX: Final = slice(4, 9)
_SUFFIX_BYTES: Final = 5
_NODE_BYTES: Final = 2
_LAST: Final = b"\xff" * (_NODE_BYTES + TAG_BYTES)


class _Place(NamedTuple):
    """Where the entries of an anchor lie: in this bucket, and how they begin."""

    bucket: str
    suffix: bytes


def _holder(entry: bytes) -> Holder:
    node = entry[_SUFFIX_BYTES : _SUFFIX_BYTES + _NODE_BYTES]
    return Holder(int.from_bytes(node, "big"), entry[_SUFFIX_BYTES + _NODE_BYTES :])


class RedisDirectory:
    """Belongs to the event loop.

    Args:
        url: redis://, rediss:// or unix://; several, separated by commas, are seeds of one Redis Cluster.
        timeout_s: of each round trip, connecting included.
        buckets: the same at all nodes; others are for measuring.
    """

    def __init__(self, url: str, cluster: str, *, timeout_s: float, buckets: int = BUCKETS) -> None:
        self._urls = [word.strip() for word in url.split(",") if word.strip()]
        self._timeout_s = timeout_s
        self._buckets = buckets
        self._membership = [f"fc:{{{cluster}}}:{name}" for name in ("members", "until", "version")]
        self._bucket = f"fc:{cluster}:b:"
        self._version = b""
        self._client: Any = None  # redis.Redis or redis.RedisCluster: their types do not meet
        self._connecting = asyncio.Lock()

    async def beat(self, me: Member, ttl_s: float, takeover: bytes, *, members: bool) -> Beat:
        known = b"" if members else self._version
        arguments = [*self._membership, me.incarnation, takeover, me.encode(), int(ttl_s * 1000), me.node_id, known]
        # Never asked twice by itself: the second answer would be RENEWED where the lost first one was FRESH.
        reply = await self._ask(lambda client: client.eval(_BEAT, 3, *arguments), tries=1)
        verdict, held, version, *records = reply
        self._version = version
        holder = decode_member(held) if _VERDICTS[verdict] is Verdict.TAKEN else None
        if holder is None and _VERDICTS[verdict] is Verdict.TAKEN:
            holder = Member(me.node_id, held[:INCARNATION_BYTES], "")  # of another format: somebody all the same
        everyone = tuple(member for record in records if (member := decode_member(record)) is not None)
        return Beat(_VERDICTS[verdict], holder, everyone if records else None)

    async def leave(self, me: Member) -> None:
        await self._ask(lambda client: client.eval(_LEAVE, 3, *self._membership, me.incarnation, me.node_id))

    async def tell(self, me: Member, batch: Batch) -> None:
        mine = me.node_id.to_bytes(_NODE_BYTES, "big") + me.incarnation[:TAG_BYTES]
        puts, withdrawn = (list(map(self.place, keys)) for keys in (batch.puts, batch.withdrawn))

        def commands(client: Any) -> Awaitable[Any]:
            pipeline = client.pipeline(transaction=False)
            for place in puts:
                pipeline.zadd(place.bucket, {place.suffix + mine: 0})
            for place in withdrawn:
                pipeline.zrem(place.bucket, place.suffix + mine)
            return cast("Awaitable[Any]", pipeline.execute())

        await self._ask(commands)

    async def probe(self, keys: Sequence[bytes], *, peer_time_s: float = 0.0) -> list[list[Holder]]:  # noqa: ARG002
        places = list(map(self.place, keys))

        def commands(client: Any) -> Awaitable[Any]:
            pipeline = client.pipeline(transaction=False)
            for bucket, suffix in places:
                pipeline.zrangebylex(bucket, b"[" + suffix, b"[" + suffix + _LAST)
            return cast("Awaitable[Any]", pipeline.execute())

        return [list(map(_holder, entries)) for entries in await self._ask(commands)]

    async def sweep(self, buckets: range, dead: Callable[[Iterable[Holder]], set[Holder]]) -> int:
        names = [f"{self._bucket}{bucket:x}" for bucket in buckets]

        def read(client: Any) -> Awaitable[Any]:
            pipeline = client.pipeline(transaction=False)
            for name in names:
                pipeline.zrange(name, 0, -1)
            return cast("Awaitable[Any]", pipeline.execute())

        found = await self._ask(read)
        gone = dead({_holder(entry) for entries in found for entry in entries})
        stale = {
            name: entries
            for name, each in zip(names, found, strict=True)
            if (entries := [entry for entry in each if _holder(entry) in gone])
        }

        def remove(client: Any) -> Awaitable[Any]:
            pipeline = client.pipeline(transaction=False)
            for name, entries in stale.items():
                pipeline.zrem(name, *entries)
            return cast("Awaitable[Any]", pipeline.execute())

        if stale:
            await self._ask(remove)
        return sum(map(len, stale.values()))

    async def close(self) -> None:
        if self._client is not None:
            await self._let_go(self._client)

    async def _let_go(self, client: Any) -> None:
        """Also of one that others let go of before: a call that was under way may have connected it again."""
        if self._client is client:
            self._client = None
        with contextlib.suppress(RedisError, RedisClusterException, OSError):
            await client.aclose()

    def place(self, key: bytes) -> _Place:
        return _Place(f"{self._bucket}{int.from_bytes(key[:4], 'big') * self._buckets >> 32:x}", key[_SUFFIX])

    async def _connected(self) -> Any:
        """The client, one for all who ask meanwhile."""
        if self._client is not None:
            return self._client
        async with self._connecting:
            if self._client is None:
                self._client = await self._connect()
            return self._client

    async def _connect(self) -> Any:
        """A client of the first server that answers: which kind it must be, that one says."""
        error: Exception = ValueError("redis_url names no server")
        for url in self._urls:
            single = redis.Redis.from_url(url, **self._options())
            taken = False
            try:
                clustered = (await single.info("cluster")).get("cluster_enabled") == 1
                taken = not clustered
                return redis.RedisCluster.from_url(url, **self._options()) if clustered else single
            except (RedisError, RedisClusterException, OSError, TimeoutError) as failure:
                error = failure
            finally:  # also where the caller's time was over
                if not taken:
                    await single.aclose()
        raise error

    def _options(self) -> dict[str, Any]:
        return {
            "socket_timeout": self._timeout_s,
            "socket_connect_timeout": self._timeout_s,
            "retry": Retry(NoBackoff(), 0),
            "max_connections": CONNECTIONS_MAX,
        }

    async def _ask(self, commands: Callable[[Any], Awaitable[Any]], *, tries: int = 2) -> Any:
        """One round trip; a second one where a connection of the pool had been closed by a restarted server."""
        client = None
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    tries -= 1
                    client = await self._connected()
                    try:
                        return await commands(client)
                    except ConnectionLost:
                        if not tries:
                            raise
        except (RedisError, RedisClusterException, OSError, TimeoutError, ValueError, EOFError) as error:
            if isinstance(client, redis.RedisCluster) and not isinstance(error, MaxConnectionsError):
                await self._let_go(client)  # who is primary of what may have changed: the next call asks again
            raise Unavailable(f"the directory does not answer: {error or type(error).__name__}") from error
