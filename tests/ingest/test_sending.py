"""What a client sends in one go, over connections that it keeps."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.exceptions import ResponseError

from pagemill.ingest.redis import connect_commands


def test_replies_come_in_order_and_an_error_stands_in_its_place(any_redis_url: str, run: Any) -> None:
    async def scenario() -> None:
        client = connect_commands(any_redis_url, "test")
        replies = await client.send([("SET", "a", 1, "EX", 60), ("LPUSH", "a", b"x"), ("GET", "a"), ("ECHO", b"")])
        assert (replies[0], *replies[2:]) == (b"OK", b"1", b"")
        assert isinstance(replies[1], ResponseError)
        await client.aclose()

    run(scenario())


def test_a_reply_that_nobody_waits_for_any_more_is_not_anothers(any_redis_url: str, run: Any) -> None:
    async def scenario() -> None:
        client, other = connect_commands(any_redis_url, "test"), connect_commands(any_redis_url, "other")
        await client.send([("PING",)])
        waits = asyncio.create_task(client.send([("BLPOP", "list", 0)]))
        async with asyncio.timeout(60):
            while not (await other.info("clients"))["blocked_clients"]:
                await asyncio.sleep(0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        await other.rpush("list", "late")
        await other.delete("list")
        assert await client.send([("ECHO", "mine")]) == [b"mine"]
        await client.aclose()
        await other.aclose()

    run(scenario())


def test_a_connection_that_the_server_has_closed_is_made_anew(any_redis_url: str, run: Any) -> None:
    async def scenario() -> None:
        client, other = connect_commands(any_redis_url, "test"), connect_commands(any_redis_url, "other")
        await asyncio.gather(*(client.send([("PING",)]) for _ in range(3)))
        await other.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert await asyncio.gather(*(client.send([("ECHO", n)]) for n in range(5))) == [[b"%d" % n] for n in range(5)]
        await client.aclose()
        found: Any = await other.client_list()
        assert [line["name"] for line in found] == ["other"], "a client that is closed leaves no connection"
        await other.aclose()

    run(scenario())
