"""What an operator or another program may do to the server and the queue's keys: every request ends once even so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pagemill.engine.async_engine import AsyncEngine
from pagemill.ingest.async_client import AsyncClient, AsyncHandle
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.keys import GROUP
from tests.contract.conftest import TAG, TINY, Outside, serving

STREAM = f"{TAG}:in:1"
REQUESTS = 12  # of the client, and as many raw ones


async def pending(redis: Any) -> list[bytes]:
    return [item["message_id"] for item in await redis.xpending_range(STREAM, GROUP, "-", "+", 100)]


async def reload(redis: Any) -> None:
    await redis.execute_command("DEBUG", "RELOAD")


async def forget_scripts(redis: Any) -> None:
    await redis.script_flush()


async def throw_out_clients(redis: Any) -> None:
    await redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


async def throw_out_listeners(redis: Any) -> None:
    await redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")


async def destroy_group(redis: Any) -> None:
    await redis.xgroup_destroy(STREAM, GROUP)


async def move_group_back(redis: Any) -> None:
    await redis.xgroup_setid(STREAM, GROUP, "0")


async def move_group_on(redis: Any) -> None:
    await redis.xgroup_setid(STREAM, GROUP, "$")


async def delete_consumers(redis: Any) -> None:
    for item in await redis.xinfo_consumers(STREAM, GROUP):
        await redis.xgroup_delconsumer(STREAM, GROUP, item["name"])


async def acknowledge(redis: Any) -> None:
    for entry in await pending(redis):
        await redis.xack(STREAM, GROUP, entry)


async def claim(redis: Any) -> None:
    for entry in await pending(redis):
        await redis.xclaim(STREAM, GROUP, "somebody", 0, [entry])


async def delete_what_runs(redis: Any) -> None:
    """Only what has begun: of the others nothing else is known."""
    for entry in await pending(redis):
        for _, fields in await redis.xrange(STREAM, entry, entry):
            if await redis.hget(f"{TAG}:req:{fields[b'id'].decode()}", "state") == b"running":
                await redis.xdel(STREAM, entry)


async def delete_lists(redis: Any) -> None:
    names = [key for pattern in ("to:*", "warm:*") for key in await redis.keys(f"{TAG}:{pattern}")]
    await redis.delete(*names, *(f"{TAG}:{name}" for name in ("hb", "engines", "wait", "load", "delay", "stat")))


ACTS: list[Callable[[Any], Awaitable[None]]] = [
    *(reload, forget_scripts, throw_out_clients, throw_out_listeners, destroy_group, move_group_back, move_group_on),
    *(delete_consumers, acknowledge, claim, delete_what_runs, delete_lists),
]


async def read(handle: AsyncHandle) -> tuple[int, ...]:
    return tuple([token_id async for delta in handle for token_id in delta.token_ids])


@pytest.mark.parametrize("act", ACTS)
def test_every_request_ends_once_whatever_is_done_to_the_queue(
    play: Any, tiny: AsyncEngine, queue_config: QueueConfig, outside: Outside, act: Callable[[Any], Awaitable[None]]
) -> None:
    config = queue_config.replace(heartbeat_timeout_s=2.0)

    async def scenario() -> None:
        async with serving(tiny, config), AsyncClient(config, watchdog_s=1.0) as client:
            handles = [await client.submit(**TINY) for _ in range(REQUESTS)]
            for number in range(REQUESTS):
                await outside.add(f"raw{number}", TINY)
                handles.append(client.attach(f"raw{number}"))
            readers = [asyncio.create_task(read(handle)) for handle in handles]
            await outside.first_delta(handles[0].id)
            for _ in range(3):
                await act(outside.redis)
            async with asyncio.timeout(60):
                (told,) = set(await asyncio.gather(*readers))
            assert len(told) == TINY["max_tokens"]
            for handle in handles:
                ends = [item for item in await outside.events(handle.id) if item["type"] == "done"]
                assert [item["state"] for item in ends] == ["completed"]
            # A consumer that is nobody's, or what was not begun, is found after a lease.
            async with asyncio.timeout(60):
                while await outside.redis.xlen(STREAM) or await pending(outside.redis):
                    await asyncio.sleep(0.01)
        assert await outside.redis.xlen(f"{TAG}:dlq") == 0

    play(scenario())
