"""The directory in Redis or Valkey, also in Cluster mode; the operator runs it.

    fc:{<cluster>}:n:<id>     a member: its incarnation and record; lives for the ttl of the membership
    fc:{<cluster>}:ids        the ids that had a member
    fc:{<cluster>}:v          counts joins and leaves, so that an unchanged list is not sent at each beat
    fc:<cluster>:a:<anchor>   a hash, node id -> first bytes of its incarnation; lives for the ttl of anchors

The first three share a slot, so a beat is one script, atomic on one server. Anchors are spread over the cluster and go
in pipelines. The anchor's key is base64 of its 16 bytes: no braces, so no accidental slots.

Faults survived: a server that is gone, hangs or is loading (`Unavailable` within the deadline; the pool reconnects with the
next call); one that lost its data (a beat says FRESH); a failover (the same, if the replica had not heard of us).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, cast

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import RedisError

from flatcake_server.cluster.directory import TAG_BYTES, Holder
from flatcake_server.cluster.members import INCARNATION_BYTES, Beat, Member, Verdict, decode_member
from flatcake_server.cluster.publisher import Batch
from flatcake_transport.errors import Unavailable

CONNECTIONS_MAX: Final = 64

# KEYS: ids, version, the member. ARGV: incarnation, takeover, record, ttl in ms, id, version known, prefix of members.
# Replies: verdict (0 renewed, 1 fresh, 2 taken), the holder's record, version, and the records of all unless unchanged.
_BEAT: Final = """
local held = redis.call('GET', KEYS[3])
local holder = held and string.sub(held, 1, 16) or ''
local verdict = 0
if held and holder ~= ARGV[1] and holder ~= ARGV[2] then
  verdict = 2
else
  if holder ~= ARGV[1] then
    verdict = 1
    redis.call('SADD', KEYS[1], ARGV[5])
    redis.call('INCR', KEYS[2])
  end
  redis.call('SET', KEYS[3], ARGV[3], 'PX', ARGV[4])
end
local version = redis.call('GET', KEYS[2]) or '0'
local reply = {verdict, held or '', version}
if version ~= ARGV[6] then
  for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
    local record = redis.call('GET', ARGV[7] .. id)
    if record then table.insert(reply, record) else redis.call('SREM', KEYS[1], id) end
  end
end
return reply
"""
_LEAVE: Final = """
local held = redis.call('GET', KEYS[3])
if held and string.sub(held, 1, 16) == ARGV[1] then
  redis.call('DEL', KEYS[3])
  redis.call('SREM', KEYS[1], ARGV[2])
  redis.call('INCR', KEYS[2])
end
return 0
"""
_VERDICTS: Final = (Verdict.RENEWED, Verdict.FRESH, Verdict.TAKEN)


class RedisDirectory:
    """Belongs to the event loop.

    Args:
        url: redis://, rediss:// or unix://; several, separated by commas, are seeds of one Redis Cluster.
        timeout_s: of each round trip, connecting included.
        anchor_ttl_s: how long an anchor lives without being told again.
    """

    def __init__(self, url: str, cluster: str, *, timeout_s: float, anchor_ttl_s: float) -> None:
        self._urls = [word.strip() for word in url.split(",") if word.strip()]
        self._timeout_s = timeout_s
        self._anchor_ttl_ms = int(anchor_ttl_s * 1000)
        self._tagged = f"fc:{{{cluster}}}:"
        self._anchors = f"fc:{cluster}:a:".encode()
        self._version = b""
        self._client: Any = None  # redis.Redis or redis.RedisCluster: their types do not meet

    async def beat(self, me: Member, ttl_s: float, takeover: bytes, *, members: bool) -> Beat:
        known = b"" if members else self._version
        arguments = [
            *self._member_keys(me), me.incarnation, takeover, me.encode(), int(ttl_s * 1000), me.node_id, known,
            f"{self._tagged}n:",
        ]  # fmt: skip
        # Never asked twice by itself: the second answer would be RENEWED where the lost first one was FRESH.
        reply = await self._ask(lambda client: client.eval(_BEAT, 3, *arguments), tries=1)
        verdict, held, version, *records = reply
        listed = version != known
        self._version = version
        holder = decode_member(held) if _VERDICTS[verdict] is Verdict.TAKEN else None
        if holder is None and _VERDICTS[verdict] is Verdict.TAKEN:
            holder = Member(me.node_id, held[:INCARNATION_BYTES], "")  # of another format: somebody all the same
        everyone = tuple(member for record in records if (member := decode_member(record)) is not None)
        return Beat(_VERDICTS[verdict], holder, everyone if listed else None)

    async def leave(self, me: Member) -> None:
        await self._ask(lambda client: client.eval(_LEAVE, 3, *self._member_keys(me), me.incarnation, me.node_id))

    async def tell(self, me: Member, batch: Batch) -> None:
        def commands(client: Any) -> Awaitable[Any]:
            pipeline = client.pipeline(transaction=False)
            for key in batch.puts:
                name = self._anchor(key)
                pipeline.hset(name, str(me.node_id), me.incarnation[:TAG_BYTES])
                pipeline.pexpire(name, self._anchor_ttl_ms)
            for key in batch.withdrawn:
                pipeline.hdel(self._anchor(key), str(me.node_id))
            return cast("Awaitable[Any]", pipeline.execute())

        await self._ask(commands)

    async def probe(self, keys: Sequence[bytes], *, peer_time_s: float = 0.0) -> list[list[Holder]]:  # noqa: ARG002
        def commands(client: Any) -> Awaitable[Any]:
            pipeline = client.pipeline(transaction=False)
            for key in keys:
                pipeline.hgetall(self._anchor(key))
            return cast("Awaitable[Any]", pipeline.execute())

        found = await self._ask(commands)
        return [[Holder(int(node), tag) for node, tag in entries.items() if node.isdigit()] for entries in found]

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(RedisError, OSError):
                await client.aclose()

    def _member_keys(self, me: Member) -> tuple[str, str, str]:
        return f"{self._tagged}ids", f"{self._tagged}v", f"{self._tagged}n:{me.node_id}"

    def _anchor(self, key: bytes) -> bytes:
        return self._anchors + base64.urlsafe_b64encode(key)[:22]

    async def _connected(self) -> Any:
        """The client, made at the first call that gets an answer: which kind it must be, the server says."""
        if self._client is not None:
            return self._client
        error: Exception = ValueError("redis_url names no server")
        for url in self._urls:
            single = redis.Redis.from_url(url, **self._options())
            try:
                clustered = (await single.info("cluster")).get("cluster_enabled") == 1
            except (RedisError, OSError, TimeoutError) as failure:
                error = failure
                await single.aclose()
                continue
            if clustered:
                await single.aclose()
                self._client = redis.RedisCluster.from_url(url, **self._options())
            else:
                self._client = single
            return self._client
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
        except (RedisError, OSError, TimeoutError, ValueError, EOFError) as error:
            if isinstance(self._client, redis.RedisCluster):
                await self.close()  # who is primary of what may have changed: the next call asks again
            raise Unavailable(f"the directory does not answer: {error or type(error).__name__}") from error
