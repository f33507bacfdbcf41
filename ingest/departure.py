"""Leaving the queue: what an engine holds and does not run is the others' from the moment at which it leaves.

Invariant. Once `hand_on` was answered the engine is brought nothing more: its reads fail, one that waits included. What
it was brought before and has not begun (it was just read, may have ended an engine, waits for others of its tenant, was
offered) is nobody's, due at once, and the others have been told to look. What runs stays its own until it has ended, or
`hand_on` says that this is given back, too.

So nobody waits for an engine that goes on with a long request, nor for the moment at which the others would have looked
anyway; where all others are full, or there are none, whoever has room next finds the entries. What was asked for when
the engine began to leave may be answered afterwards: so it calls `hand_on` again when it asks for nothing any more.
"""

from __future__ import annotations

import asyncio

import structlog
from redis.exceptions import RedisError

from pagemill.ingest import scripts
from pagemill.ingest.keys import PRIORITIES, QueueKeys
from pagemill.ingest.redis import Client

TIMEOUT_S = 3.0  # a server that does not answer keeps no engine from leaving

_log = structlog.get_logger(__name__)


class Departure:
    """How engine `owner` leaves the queue."""

    def __init__(self, client: Client, keys: QueueKeys, owner: str) -> None:
        self._client = client
        self._keys = keys
        self._owner = owner

    async def hand_on(self, *, running: bool = False) -> bool:
        """Give back what has not begun; with `running` what has, too. False: Redis could not be told. Then the others
        find it when this engine has retired, or its heartbeat is old."""
        places = {
            (shard, stream): scripts.FROM_THE_FIRST for shard in self._keys.shards for stream in range(PRIORITIES)
        }
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while places:
                    calls = [
                        scripts.release(shard, stream, self._owner, first, running=running)
                        for (shard, stream), first in places.items()
                    ]
                    replies = await _answers(self._client, calls)
                    places = {place: first for place, first in zip(places, replies, strict=True) if first}
        except (RedisError, OSError) as error:
            _log.warning("requests could not be given back in order", reason=str(error) or type(error).__name__)
            return False
        return True

    async def retire(self) -> bool:
        """Give the lease up: the others may take at once what is left. False: Redis could not be told."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await _answers(self._client, [scripts.retire(shard, self._owner) for shard in self._keys.shards])
        except (RedisError, OSError) as error:
            _log.warning("could not leave the list of engines", reason=str(error) or type(error).__name__)
            return False
        return True


async def _answers(client: Client, calls: list[scripts.Call]) -> list[bytes]:
    replies = await scripts.run(client, calls)
    for reply in replies:
        if isinstance(reply, BaseException):
            raise reply
    return replies
