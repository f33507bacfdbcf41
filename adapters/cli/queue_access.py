"""A command's work on the queue's server: connected, run, closed, and a server that is away told as such."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

from pagemill.adapters.cli.status import UnreachableError
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.redis import Client, connect_commands, is_unavailable


def on_queue(config: QueueConfig, name: str, work: Callable[[Client], Awaitable[int]]) -> int:
    """Run `work`, which returns an exit status, with a client that the server knows by `name`. Raises
    `UnreachableError`."""

    async def connected() -> int:
        client = connect_commands(config.redis_url, name)
        try:
            return await work(client)
        finally:
            await client.aclose()

    try:
        return asyncio.run(connected())
    except (RedisError, OSError) as error:
        if isinstance(error, RedisError) and not is_unavailable(error):
            raise
        raise UnreachableError(str(error)) from error
