"""Documents and files that adapters keep beside the queue, so that every replica sees them and a restart loses none.

A document is a hash of named fields, an index a sorted set of names. Each has a time to live that every write renews.
Redis and not a folder: replicas share no folder, and what is here is as safe as the queue itself. It costs memory, so
whoever takes documents from outside limits their size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from redis.exceptions import ResponseError

from pagemill.ingest.keys import QueueKeys
from pagemill.ingest.redis import Client


class Shelf:
    """Documents of one queue. Names are the adapters' own, as `file:<id>`. Every method raises redis-py's errors."""

    def __init__(self, client: Client, keys: QueueKeys) -> None:
        self._client = client
        self._keys = keys

    async def write(self, name: str, fields: Mapping[str, bytes], *, ttl_s: float) -> None:
        """Set fields of a document, which is made where there is none."""
        key = self._key(name)
        flat = [part for pair in fields.items() for part in pair]
        await self._send(("HSET", key, *flat), ("PEXPIRE", key, int(ttl_s * 1000)))

    async def read(self, name: str, *fields: str) -> list[bytes | None]:
        """Fields of a document, None for each that is not there."""
        found: list[bytes | None] = await self._client.execute_command("HMGET", self._key(name), *fields)
        return found

    async def read_each(self, names: Sequence[str], field: str) -> list[bytes | None]:
        """One field of several documents, None for each that is not there."""
        return await self._send(*(("HGET", self._key(name), field) for name in names))

    async def renew(self, names: Sequence[str], *, ttl_s: float) -> None:
        """Keep documents for at least so long from now."""
        await self._send(*(("PEXPIRE", self._key(name), int(ttl_s * 1000), "GT") for name in names))

    async def fields(self, name: str) -> list[str]:
        """The names of a document's fields."""
        found: Sequence[bytes] = await self._client.execute_command("HKEYS", self._key(name))
        return [field.decode() for field in found]

    async def delete(self, name: str) -> bool:
        """Remove a document. False: there was none."""
        return bool(await self._client.execute_command("UNLINK", self._key(name)))

    async def claim(self, name: str, owner: str, *, ttl_ms: int) -> bool:
        """Be the one who works on something, or go on being it. Only a hint: two may believe it for a moment."""
        key = self._key(name)
        if await self._client.execute_command("SET", key, owner, "NX", "PX", ttl_ms):
            return True
        try:
            holder = await self._client.execute_command("GET", key)
        except ResponseError:
            return False
        if holder != owner.encode():
            return False
        await self._client.execute_command("PEXPIRE", key, ttl_ms)
        return True

    async def list_in(self, index: str, name: str, *, score: float, ttl_s: float) -> None:
        """Put a name into an index."""
        key = self._key(index)
        await self._send(("ZADD", key, score, name), ("PEXPIRE", key, int(ttl_s * 1000)))

    async def unlist(self, index: str, name: str) -> None:
        await self._client.execute_command("ZREM", self._key(index), name)

    async def listed(self, index: str) -> list[str]:
        """The names in an index, lowest score first."""
        found: Sequence[bytes] = await self._client.execute_command("ZRANGE", self._key(index), 0, -1)
        return [name.decode() for name in found]

    async def _send(self, *commands: Sequence[Any]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        replies = await self._client.run_pipeline(pipeline)
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
        return replies

    def _key(self, name: str) -> str:
        return self._keys.shard_of(name).document(name)
