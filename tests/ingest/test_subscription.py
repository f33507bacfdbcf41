"""Reading without a gap, against a real Valkey; the events come from the scripts that an engine uses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from pagemill.engine.errors import RequestError
from pagemill.ingest.client import AsyncClient, RequestFailed
from pagemill.ingest.config import QueueConfig
from tests.ingest.producer import Producer, expected_text

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def test_early_late_and_restarting_readers_see_the_same(queue_config: QueueConfig, run: Run) -> None:
    async def scenario() -> None:
        producer = Producer(queue_config, "a")
        async with AsyncClient(queue_config) as client, AsyncClient(queue_config) as other:
            handle = client.attach("a")
            early = asyncio.create_task(handle.result(timeout=60))
            await producer.begin()
            for _ in range(20):
                await producer.delta()
            middle = asyncio.create_task(other.attach("a").result(timeout=60))

            async def restarting() -> list[int]:
                seen: list[int] = []
                while True:
                    async for item in other.attach("a").events(after=seen[-1] if seen else 0):
                        seen.append(item["seq"])
                        if item["type"] == "done":
                            return seen
                        if len(seen) % 7 == 0:
                            break

            restarted = asyncio.create_task(restarting())
            for _ in range(20):
                await producer.delta()
            await producer.done()
            results = [await early, await middle, await other.attach("a").result(timeout=60)]
            assert [result.text for result in results] == [expected_text(40)] * 3
            assert results[0].token_ids == list(range(1, 41)) and results[0].finish_reason == "stop"
            assert await restarted == list(range(1, 43))
            # The handle keeps the result, and iterating starts again at the first token.
            assert [delta.seq async for delta in handle] == list(range(1, 41))
        await producer.aclose()

    run(scenario())


def test_losing_live_messages_costs_nothing_but_time(
    queue_config: QueueConfig, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagemill.ingest.subscription import Subscription

    lossy = random.Random(1)
    deliver = Subscription.deliver
    lost = 0

    def drop_some(self: Subscription, seq: int, data: bytes) -> None:
        nonlocal lost
        if lossy.random() < 0.4 or seq == 102:  # `done` among them
            lost += 1
        else:
            deliver(self, seq, data)

    monkeypatch.setattr(Subscription, "deliver", drop_some)

    async def scenario() -> None:
        producer = Producer(queue_config, "a")
        async with AsyncClient(queue_config, watchdog_s=0.2) as client:
            reader = asyncio.create_task(collect(client.attach("a").events()))
            await producer.begin()
            for _ in range(100):
                await producer.delta()
            await producer.done()
            async with asyncio.timeout(60):
                assert [item["seq"] for item in await reader] == list(range(1, 103))
        assert lost > 20
        await producer.aclose()

    run(scenario())


async def collect(items: Any) -> list[Any]:
    return [item async for item in items]


def test_a_hole_in_the_live_messages_is_filled_at_once(
    queue_config: QueueConfig, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagemill.ingest.subscription import Subscription

    deliver = Subscription.deliver

    def drop_some(self: Subscription, seq: int, data: bytes) -> None:
        if seq not in (3, 4, 8):
            deliver(self, seq, data)

    monkeypatch.setattr(Subscription, "deliver", drop_some)

    async def scenario() -> None:
        producer = Producer(queue_config, "a")
        async with AsyncClient(queue_config, watchdog_s=600) as client:  # silence is not what brings them
            await producer.begin()
            await producer.delta()
            seen = []
            async with asyncio.timeout(60):
                async for item in client.attach("a").events():
                    seen.append(item["seq"])
                    if item["seq"] == 1:
                        for _ in range(9):
                            await producer.delta()
                        await producer.done()
            assert seen == list(range(1, 13))
        await producer.aclose()

    run(scenario())


def test_a_slow_reader_falls_back_to_the_stream(queue_config: QueueConfig, run: Run) -> None:
    async def scenario() -> None:
        producer = Producer(queue_config, "a")
        await producer.begin()
        await producer.delta()
        async with AsyncClient(queue_config) as client:
            seen = []
            async for item in client.attach("a").events():
                seen.append(item["seq"])
                if item["seq"] == 1:
                    for _ in range(1000):  # more than a reader's buffer holds
                        await producer.delta("x")
                    await producer.done()
            assert seen == list(range(1, 1004))
        await producer.aclose()

    run(scenario())


def test_the_subscription_connection_may_break(queue_config: QueueConfig, run: Run) -> None:
    async def scenario() -> None:
        producer = Producer(queue_config, "a")
        await producer.begin()
        await producer.delta()
        seen = []
        # The watchdog is slow here: only the reconnection itself can bring what was missed.
        async with AsyncClient(queue_config, watchdog_s=600) as client, asyncio.timeout(60):
            async for item in client.attach("a").events():
                seen.append(item["seq"])
                if item["seq"] in (1, 11):
                    assert await producer.redis.client_kill_filter(_type="pubsub") == 1
                if item["seq"] in (1, 11, 21):
                    for _ in range(10):
                        await producer.delta()
                if item["seq"] == 31:
                    await producer.done()
        assert seen == list(range(1, 34))
        await producer.aclose()

    run(scenario())


def test_many_requests_share_one_subscription_connection(queue_config: QueueConfig, run: Run) -> None:
    async def scenario() -> None:
        producers = [Producer(queue_config, f"r{number}") for number in range(20)]
        async with AsyncClient(queue_config) as client:
            readers = [asyncio.create_task(client.attach(p.request_id).result(timeout=60)) for p in producers]
            twin = asyncio.create_task(client.attach("r0").result(timeout=60))
            for producer in producers:
                await producer.begin()
            for _ in range(10):
                await asyncio.gather(*(producer.delta() for producer in producers))
            connections = await producers[0].redis.client_list(_type="pubsub")
            assert len(connections) == 1 and int(connections[0]["sub"]) == 20
            await asyncio.gather(*(producer.done() for producer in producers))
            assert {(await reader).text for reader in readers} == {expected_text(10)}
            assert (await twin).text == expected_text(10)
            async with asyncio.timeout(60):  # nothing is followed any more
                while await producers[0].redis.client_list(_type="pubsub"):
                    await asyncio.sleep(0.01)
        for producer in producers:
            await producer.aclose()

    run(scenario())


def test_requests_that_vanish_are_reported(queue_config: QueueConfig, run: Run) -> None:
    async def scenario() -> None:
        producer = Producer(queue_config, "a")
        async with AsyncClient(queue_config, watchdog_s=0.1, patience_s=0.2) as client:
            with pytest.raises(RequestError) as caught:
                await client.attach("nobody").result(timeout=60)
            assert caught.value.code == "request_lost"

            handle = await client.submit(prompt="x", id="a")
            reader = asyncio.create_task(handle.result(timeout=60))
            await producer.begin()
            await producer.delta()
            await producer.redis.flushall()
            with pytest.raises(RequestError) as caught:
                await reader
            assert caught.value.code == "request_lost"

            # A request that waits in the queue is not lost, however long it waits.
            waiting = await client.submit(prompt="x")
            with pytest.raises(TimeoutError):
                await waiting.result(timeout=0.6)
        await producer.aclose()

    run(scenario())


def test_a_result_outlives_its_events(queue_config: QueueConfig, run: Run) -> None:
    async def scenario() -> None:
        producer = Producer(queue_config, "a")
        await producer.begin()
        for _ in range(5):
            await producer.delta()
        await producer.done()
        await producer.redis.delete(producer.shard.events("a"))
        async with AsyncClient(queue_config) as client:
            result = await client.attach("a").result(timeout=60)
            assert (result.text, result.state) == (expected_text(5), "completed")
            with pytest.raises(RequestError) as caught:
                async for _ in client.attach("a").events(after=3):
                    pass
            assert caught.value.code == "request_lost"
        await producer.aclose()

    run(scenario())


def test_what_does_not_complete_raises(queue_config: QueueConfig, run: Run) -> None:
    async def scenario() -> None:
        producer = Producer(queue_config, "a")
        await producer.begin()
        await producer.delta()
        await producer.done("failed", error={"code": "engine_error", "message": "boom", "param": None})
        async with AsyncClient(queue_config) as client:
            handle = client.attach("a")
            with pytest.raises(RequestFailed, match="boom") as caught:
                async for delta in handle:
                    assert delta.text == "1 "
            assert caught.value.code == "engine_error" and caught.value.result.text == "1 "
            with pytest.raises(RequestFailed):
                await handle.result()
        await producer.aclose()

    run(scenario())


def test_a_burst_of_events_leaves_turns_to_others(queue_config: QueueConfig, run: Run) -> None:
    """An engine tells of all its requests at once; whoever else the process serves does not wait for all of it."""
    turns, taken, count = 0, [], 640

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def scenario() -> None:
        async with AsyncClient(queue_config) as client:
            subscription: Any = await client.follow("a", after=0, expected=True)
            async with asyncio.timeout(60):
                await subscription._confirmed.wait()
            subscription.deliver = lambda seq, data: taken.append(turns)
            task = asyncio.create_task(others())
            publish = "for n = 1, ARGV[1] do redis.call('PUBLISH', KEYS[1], n .. ' {}') end"
            await client._redis.execute_command("EVAL", publish, 1, subscription.channel, count)
            async with asyncio.timeout(60):
                while len(taken) < count:
                    await asyncio.sleep(0.01)
            task.cancel()
            await subscription.aclose()
        assert len(set(taken)) >= count // 16 - 1

    run(scenario())


def test_a_deadline_counts_although_no_engine_lives(queue_config: QueueConfig, run: Run) -> None:
    async def scenario() -> None:
        async with AsyncClient(queue_config, watchdog_s=0.1) as client:
            waits = await client.submit(prompt="x", ttl_ms=150)
            with pytest.raises(RequestFailed) as failed:
                await waits.result(timeout=60)
            assert (failed.value.code, failed.value.result.state) == ("deadline_exceeded", "expired")
            producer = Producer(queue_config, "a")
            await producer.begin()
            await producer.delta()
            await producer.redis.hset(producer.shard.record("a"), "deadline", 1)
            with pytest.raises(RequestError, match="no engine has said"):
                await client.attach("a").result(timeout=60)
            await producer.aclose()

    run(scenario())
