"""Waiting for results, against a real server: nothing is heard of the tokens, and no end is missed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from pagemill.engine.errors import RequestError
from pagemill.ingest.client import AsyncClient, RequestFailed
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.end_waiter import EndWaiter
from tests.ingest.producer import Producer, expected_text

Run = Callable[[Coroutine[Any, Any, Any]], Any]


async def heard(producer: Producer, channel: str) -> int:
    """Connections that hear a channel."""
    reply: Any = await producer.redis.execute_command("PUBSUB", "NUMSUB", channel)
    return int(reply[1])


async def until_waiting(client: AsyncClient) -> EndWaiter:
    """A client's only follower, once it waits to be told."""
    async with asyncio.timeout(60):
        while True:
            for feed in client._hub._feeds.values():
                for follower in feed.followers():
                    if follower._overdue_at < float("inf"):
                        assert isinstance(follower, EndWaiter)
                        return follower
            await asyncio.sleep(0.005)


def test_a_result_is_waited_for_without_hearing_the_tokens(queue_config: QueueConfig, run: Run) -> None:
    async def scenario() -> None:
        # Silence is not what brings the end.
        async with AsyncClient(queue_config, watchdog_s=600.0) as client, AsyncClient(queue_config) as late:
            handle = await client.submit(prompt="x", metadata={"order": "7"})
            producer = Producer(queue_config, handle.id)
            waiting = asyncio.create_task(handle.result(timeout=60))
            await until_waiting(client)
            await producer.begin()
            for _ in range(30):
                await producer.delta()
            assert await heard(producer, producer.shard.channel(handle.id)) == 0
            assert await heard(producer, producer.shard.end_channel(handle.id)) == 1
            await producer.done(metadata={"order": "7"})
            results = [await waiting, await late.attach(handle.id).result(timeout=60)]
            for result in results:
                assert (result.text, result.token_ids) == (expected_text(30), list(range(1, 31)))
                assert (result.state, result.finish_reason, result.usage) == (
                    "completed",
                    "stop",
                    {"completion_tokens": 30},
                )
                assert result.metadata == {"order": "7"}
            assert await handle.result() is results[0]
            # Whoever reads the events has the same.
            again = late.attach(handle.id)
            assert [delta.token_ids async for delta in again] == [[token] for token in range(1, 31)]
            assert await again.result() == results[0]
            await producer.aclose()

    run(scenario())


def test_an_end_that_was_not_heard_is_found(
    queue_config: QueueConfig, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EndWaiter, "hear", lambda self, message: None)

    async def scenario() -> None:
        async with AsyncClient(queue_config, watchdog_s=0.2) as client:
            handle = await client.submit(prompt="x")
            producer = Producer(queue_config, handle.id)
            waiting = asyncio.create_task(handle.result(timeout=60))
            await until_waiting(client)
            await producer.begin()
            await producer.delta()
            await producer.done()
            assert (await waiting).text == expected_text(1)
            await producer.aclose()

    run(scenario())


def test_an_end_while_the_connection_is_away_is_found_at_once(queue_config: QueueConfig, run: Run) -> None:
    async def scenario() -> None:
        async with AsyncClient(queue_config, watchdog_s=600.0) as client:
            handle = await client.submit(prompt="x")
            producer = Producer(queue_config, handle.id)
            waiting = asyncio.create_task(handle.result(timeout=60))
            await until_waiting(client)
            await producer.begin()
            await producer.delta()
            # In one step, so that nothing connects in between.
            assert await producer.redis.client_kill_filter(_type="pubsub") == 1
            await producer.done()
            assert (await waiting).text == expected_text(1)
            await producer.aclose()

    run(scenario())


def test_ends_without_an_engine_are_told_too(queue_config: QueueConfig, run: Run) -> None:
    async def scenario() -> None:
        async with AsyncClient(queue_config, watchdog_s=600.0) as client:
            handle = await client.submit(prompt="x", metadata={"order": "8"})
            waiting = asyncio.create_task(handle.result(timeout=60))
            await until_waiting(client)
            assert await client.cancel(handle.id) == "cancelled"
            with pytest.raises(RequestFailed) as failed:
                await waiting
            assert (failed.value.code, failed.value.result.choices) == ("cancelled", [])

    run(scenario())


@pytest.mark.parametrize(
    ("field", "value"), [("result", "[7]"), ("result", "no JSON"), ("usage", "{"), ("deadline", "soon")]
)
def test_a_result_that_cannot_be_read_is_lost_by_name(
    queue_config: QueueConfig, run: Run, field: str, value: str
) -> None:
    async def scenario() -> None:
        producer = Producer(queue_config, "a")
        await producer.begin()
        await producer.delta()
        await producer.done()
        await producer.redis.hset(producer.shard.record("a"), field, value)
        async with AsyncClient(queue_config) as client:
            with pytest.raises(RequestError) as caught:
                await client.attach("a").result(timeout=60)
            assert caught.value.code == "request_lost"
        await producer.aclose()

    run(scenario())
