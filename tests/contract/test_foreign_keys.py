"""Another program's key in the place of a stream: an engine says so and leaves, it neither spins nor dies unnamed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import redis.asyncio as aioredis

from pagemill.engine.async_engine import AsyncEngine
from pagemill.engine.errors import ConfigError
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.worker import Worker
from tests.contract.conftest import TAG


@pytest.mark.parametrize("later", [False, True], ids=["at start", "while it serves"])
def test_a_key_that_is_no_stream_is_named(
    engine: AsyncEngine, redis_url: str, play: Callable[[Coroutine[Any, Any, None]], None], later: bool
) -> None:
    async def scenario() -> None:
        key = f"{TAG}:in:0"
        worker = Worker(engine, QueueConfig(redis_url=redis_url, block_ms=50))
        async with aioredis.Redis.from_url(redis_url, protocol=2) as client, asyncio.timeout(60):
            if not later:
                await client.set(key, "mine", ex=60)
            running = asyncio.create_task(worker.run())
            if later:
                await worker.ready.wait()
                await client.set(key, "mine", ex=60)
            with pytest.raises(ConfigError, match=r"in:0 .*key_prefix"):
                await running

    play(scenario())
