"""Clients on bad connections: replies that are lost, calls that are cancelled, more calls than connections."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis.asyncio as aioredis
from redis._parsers.base import BaseParser
from redis.exceptions import ClusterError

from pagemill.engine.errors import RequestError
from pagemill.ingest.client import AsyncClient, AsyncHandle, Client, QueueUnavailableError
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.embedded import EmbeddedServer
from pagemill.ingest.redis import CONNECTIONS, connect_commands, is_unavailable
from tests.chaos.fault_proxy import FaultProxy
from tests.ingest.producer import Producer

Run = Callable[[Coroutine[Any, Any, Any]], Any]
STREAM = "pm:{default.0}:in:1"


@pytest.fixture
def port(valkey: EmbeddedServer, redis_url: str) -> int:
    """The TCP port of an empty server, for a proxy."""
    assert urlsplit(redis_url).scheme in ("redis", "unix") and valkey.port
    return valkey.port


def test_more_calls_than_connections_wait_for_one(redis_url: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    # What has a connection may be slow where others use the machine.
    monkeypatch.setattr("pagemill.ingest.redis.REPLY_TIMEOUT_S", 60.0)

    async def scenario() -> None:
        async with AsyncClient(redis_url) as client, aioredis.Redis.from_url(redis_url, protocol=2) as plain:

            async def connections() -> int:
                return sum(told["name"] == f"pagemill-client-{os.getpid()}" for told in await plain.client_list())

            handles = await asyncio.gather(*(client.submit(prompt="x") for _ in range(400)))
            assert len({handle.id for handle in handles}) == await plain.xlen(STREAM) == 400
            # They stay open. The server may still have to notice that one is gone, and that of a test before.
            async with asyncio.timeout(60):
                while not 0 < await connections() <= CONNECTIONS:
                    await asyncio.sleep(0.01)

    run(scenario())


def test_what_sends_nothing_takes_no_connection_away(redis_url: str, run: Run) -> None:
    async def scenario() -> None:
        client = connect_commands(redis_url, "test")
        (first,) = await client.send([("CLIENT", "ID")])
        assert await client.run_pipeline(client.pipeline(transaction=False)) == []
        assert await client.send([("CLIENT", "ID")]) == [first]
        await client.aclose()

    run(scenario())


def test_a_submission_whose_reply_is_lost_is_there_once(port: int, redis_url: str, run: Run) -> None:
    """redis-py repeats it by itself, and a caller that was told nothing repeats it with the same key."""

    async def scenario() -> None:
        async with (
            FaultProxy(port, random.Random(1)) as proxy,
            AsyncClient(proxy.url) as client,
            aioredis.Redis.from_url(redis_url, protocol=2) as plain,
        ):
            told: list[str] = []
            for number in range(60):
                if number % 3:
                    proxy.lose_replies(1.0)
                while True:
                    try:
                        handle = await client.submit(prompt="x", idempotency_key=str(number))
                        break
                    except QueueUnavailableError:
                        await asyncio.sleep(0.01)
                told.append(handle.id)
            entries = await plain.xrange(STREAM)
            assert [fields[b"id"].decode() for _, fields in entries] == told and len(set(told)) == 60

    run(scenario())


def test_cancelled_calls_leave_no_connection_behind_and_no_answer_to_others(redis_url: str, run: Run) -> None:
    """1,000 tasks cancelled at random moments of a call, while others ask what only they know."""
    rng = random.Random(2)

    async def scenario() -> None:
        async with AsyncClient(redis_url) as client, aioredis.Redis.from_url(redis_url, protocol=2) as plain:
            others = (await plain.info("clients"))["connected_clients"]
            commands = client._redis

            async def asks(number: int) -> None:
                assert await commands.execute_command("ECHO", f"{number}") == b"%d" % number
                await client.submit(prompt="x", id=f"s{number}")

            async def cancelled(number: int) -> None:
                task = asyncio.create_task(asks(number))
                await asyncio.sleep(rng.random() * 0.004)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                assert task.cancelled() or task.exception() is None

            for start in range(0, 1000, 100):
                await asyncio.gather(*(cancelled(number) for number in range(start, start + 100)))
                await asyncio.gather(*(asks(10_000 + number) for number in range(start, start + 40)))
            async with asyncio.timeout(60):
                await asyncio.gather(*(commands.execute_command("ECHO", "1") for _ in range(CONNECTIONS)))
            assert commands.connection_pool._in_use_connections == set(commands._kept)
            assert (await plain.info("clients"))["connected_clients"] <= others + CONNECTIONS + 5

    run(scenario())


async def read(handle: AsyncHandle) -> str:
    """The text, as its deltas come."""
    return "".join([delta.text async for delta in handle])


def test_subscribing_while_connections_break(port: int, queue_config: QueueConfig, run: Run) -> None:
    """Every reader is subscribed on the connection that is made anew: none has to wait for its watchdog."""

    async def scenario() -> None:
        producers = [Producer(queue_config, f"a{number}") for number in range(20)]
        for producer in producers:
            await producer.begin()
        async with FaultProxy(port, random.Random(3)) as proxy, AsyncClient(proxy.url, watchdog_s=600) as client:
            readings = []
            for producer in producers:
                readings.append(asyncio.create_task(read(client.attach(producer.request_id))))
                await asyncio.sleep(random.Random(producer.request_id).random() * 0.05)
                proxy.cut(1.0)
                await producer.delta()
            async with asyncio.timeout(60):  # all are subscribed again
                while sum(count for _, count in await _subscribers(producers)) < len(producers):
                    await asyncio.sleep(0.01)
            for producer in producers:
                await producer.delta()
                await producer.done()
            async with asyncio.timeout(60):
                assert set(await asyncio.gather(*readings)) == {"1 2 "}
        for producer in producers:
            await producer.aclose()

    async def _subscribers(producers: list[Producer]) -> list[tuple[bytes, int]]:
        channels = [producer.shard.channel(producer.request_id) for producer in producers]
        counts: list[tuple[bytes, int]] = await producers[0].redis.execute_command("PUBSUB NUMSUB", *channels)
        return counts

    run(scenario())


def test_closing_a_client_ends_the_calls_of_other_threads(redis_url: str) -> None:
    client = Client(redis_url)
    handle = client.submit(prompt="x")
    told: list[BaseException] = []
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        try:
            handle.result()
        except RuntimeError as error:
            told.append(error)

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
        assert waiting.wait(60)
        waiting.clear()
    client.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert len(told) == 4 and all("closed" in str(error) for error in told)


def test_threads_share_a_client(redis_url: str) -> None:
    with Client(redis_url) as client:
        ids: list[str] = []

        def send() -> None:
            ids.extend(client.submit(prompt="x").id for _ in range(20))

        threads = [threading.Thread(target=send) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(set(ids)) == 160
        assert all(client.cancel(request_id) == "cancelled" for request_id in ids[:10])


DAMAGE: dict[str, dict[str, Any]] = {
    "record": {"state": "running", "seq": "x", "deadline": "y", "attempt": "z"},
    "event": {"state": "running", "seq": "1", "deadline": "9999999999999", "attempt": "1"},
}


@pytest.mark.parametrize(
    "event", [b"no json", b"[]", b"{}", b'{"seq":1}', b'{"seq":1,"attempt":1,"type":"delta"}', None]
)
def test_what_cannot_be_read_is_told_by_name(queue_config: QueueConfig, run: Run, event: bytes | None) -> None:
    async def scenario() -> None:
        async with AsyncClient(queue_config, watchdog_s=0.1) as client:
            plain: Any = client._redis
            record, events = "pm:{default.0}:req:a", "pm:{default.0}:ev:a"
            await plain.hset(record, mapping=DAMAGE["record" if event is None else "event"])
            await plain.expire(record, 60)
            if event is not None:
                await plain.xadd(events, {"e": event}, id="1-0")
                await plain.expire(events, 60)
            with pytest.raises(RequestError) as lost:
                async with asyncio.timeout(60):
                    await read(client.attach("a"))
            assert lost.value.code == "request_lost"
            if event is None:
                with pytest.raises(RequestError, match="damaged"):
                    await client.attach("a").result(timeout=60)
                with pytest.raises(RequestError, match="damaged"):
                    await client.record("a")
            for call in (
                lambda: client.submit(prompt="x", id="b"),
                lambda: client.cancel("b"),
                lambda: client.record("b"),
            ):
                await plain.set("pm:{default.0}:req:b", "a string", ex=60)
                with pytest.raises(RequestError, match="something else"):
                    await call()
            with pytest.raises(RequestError, match="something else"):
                await client.attach("b").result(timeout=60)

    run(scenario())


@pytest.mark.parametrize(
    "message", [b"junk", b"1 junk", b"1 []", b'1 {"seq":1}', b"9 {}", b'99999999999999999999 {"seq":1}']
)
def test_messages_of_others_on_the_channel_change_nothing(queue_config: QueueConfig, run: Run, message: bytes) -> None:
    async def scenario() -> None:
        producer = Producer(queue_config, "a")
        async with AsyncClient(queue_config, watchdog_s=60) as client:
            await producer.begin()
            reading = asyncio.create_task(read(client.attach("a")))
            waiting = asyncio.create_task(client.attach("a").result(timeout=60))
            channels = producer.shard.channel("a"), producer.shard.end_channel("a")
            async with asyncio.timeout(60):
                for channel in channels:
                    while not await producer.redis.publish(channel, message):
                        await asyncio.sleep(0.01)
            for _ in range(3):
                await producer.delta()
                for channel in channels:
                    await producer.redis.publish(channel, message)
            assert not waiting.done()
            await producer.done()
            async with asyncio.timeout(60):
                assert await reading == "1 2 3 " and (await waiting).token_ids == [1, 2, 3]
        await producer.aclose()

    run(scenario())


def test_a_full_server_takes_nothing_and_recovers(port: int, redis_url: str, run: Run) -> None:
    async def scenario() -> None:
        async with AsyncClient(redis_url) as client, aioredis.Redis.from_url(redis_url, protocol=2) as plain:
            first = await client.submit(prompt="x")
            await plain.config_set("maxmemory", 1)
            try:
                for body in ({"prompt": "x"}, {"prompt": "x" * 100_000}, {"prompt": "x", "idempotency_key": "k"}):
                    with pytest.raises(QueueUnavailableError):
                        await client.submit(**body)
                assert await plain.xlen(STREAM) == 1
                assert await first.cancel() == "cancelled", "what frees memory is let through"
            finally:
                await plain.config_set("maxmemory", 0)
            assert (await client.submit(prompt="x", idempotency_key="k")).replayed is False

    run(scenario())


def test_which_errors_mean_that_the_server_cannot_serve_now() -> None:
    """redis-py cuts the first word off what it has a class for."""
    now = (
        "CLUSTERDOWN x",
        "ASK 1 h:1",
        "MOVED 1 h:1",
        "TRYAGAIN x",
        "READONLY x",
        "MASTERDOWN x",
        "OOM x",
        "MISCONF x",
    )
    now += ("LOADING x", "NOREPLICAS x", "BUSY x", "UNKILLABLE x", "NOSCRIPT x")
    assert all(is_unavailable(BaseParser.parse_error(message)) for message in now)
    assert is_unavailable(ClusterError("TTL exhausted."))
    never = ("WRONGTYPE x", "ERR x", "NOPERM x", "UNBLOCKED x", "NOGROUP x")
    assert not any(is_unavailable(BaseParser.parse_error(message)) for message in never)
