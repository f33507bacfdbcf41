"""Limits of a tenant hold at all gateways together, and what a dead gateway had open does not count for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import orjson
import pytest

from pagemill.adapters.http.errors import ApiError
from pagemill.adapters.http.limits import TenantLimits
from pagemill.ingest.allowances import LEASE_MS, Allowances
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.keys import QueueKeys
from pagemill.ingest.redis import Client, connect_commands
from tests.adapters.http_gateway import ENDLESS, Web, gateway

KEY = {"Authorization": "Bearer key-of-a"}


def together(any_redis_url: str, run: Any, scenario: Callable[[Client, Any], Coroutine[Any, Any, None]]) -> None:
    """Runs a scenario with a maker of limits as two gateways have them."""

    async def playing() -> None:
        client = connect_commands(any_redis_url, "test")

        def made(per_minute: int | None, at_once: int | None) -> TenantLimits:
            loop = asyncio.get_running_loop()
            shared = Allowances(client, QueueKeys("pm", "default", 2))
            return TenantLimits(per_minute, at_once, shared, lambda work: ended.append(loop.create_task(work)))

        ended: list[asyncio.Task[None]] = []
        await scenario(client, made)
        await asyncio.gather(*ended)
        await client.aclose()

    run(playing())


async def refused(limits: TenantLimits, tenant: str) -> ApiError:
    with pytest.raises(ApiError) as caught:
        async with limits.generation(tenant):
            pass
    return caught.value


def test_so_many_at_once(any_redis_url: str, run: Any) -> None:
    async def scenario(client: Client, made: Any) -> None:
        first, second = made(None, 2), made(None, 2)
        async with first.generation("a"), second.generation("a"), first.generation("b"):
            for limits in (first, second):
                error = await refused(limits, "a")
                assert (error.status, error.retry_after_ms) == (429, 1000) and "2 generations are open" in error.message
                assert error.response().headers["x-should-retry"] == "true"
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            while await client.keys("pm:*open:*"):
                await asyncio.sleep(0.01)
        # A gateway that has died gives nothing back: its lease runs out, unless it is renewed.
        shared = first._allowances
        for name in ("dead", "alive"):
            assert await shared.take("a", name, per_minute=None, at_once=2) is None
        assert await shared.take("a", "next", per_minute=None, at_once=2) is not None
        (key,) = await client.keys("pm:*open:*")
        for renewed in ([("a", "alive")], []):  # two times half a lease passes
            for name in ("dead", "alive"):
                await client.zincrby(key, -LEASE_MS / 2, name)
            await shared.renew(renewed)
        assert await shared.take("a", "next", per_minute=None, at_once=2) is None
        error = await refused(second, "a")
        assert "2 generations" in error.message, "the living one and the next"

    together(any_redis_url, run, scenario)


def test_so_many_a_minute(any_redis_url: str, run: Any) -> None:
    async def scenario(client: Client, made: Any) -> None:
        first, second = made(2, None), made(2, None)
        for limits in (first, second):
            async with limits.generation("a"):
                pass
        error = await refused(first, "a")
        assert 10_000 < (error.retry_after_ms or 0) <= 30_000 and "per_minute is 2" in error.message
        async with first.generation("b"):
            pass
        (bucket,) = await client.keys("pm:*rate:a")
        assert 0 < await client.pttl(bucket) <= 120_000
        await client.hincrby(bucket, "at", -30_000)  # half a minute later
        async with second.generation("a"):
            pass
        assert (await refused(second, "a")).status == 429

    together(any_redis_url, run, scenario)


def test_two_gateways_and_one_key(tried: Any, queue_config: QueueConfig) -> None:
    settings = {"api_keys": "a=key-of-a", "http_tenant_requests": 1}

    async def scenario(first: Web) -> None:
        body = {**ENDLESS, "stream": True}
        async with gateway(queue_config, **settings) as second:
            async with first.session.post(f"{first.url}/v1/completions", json=body, headers=KEY) as answer:
                chunk = await answer.content.readuntil(b"\n\n")
                assert "choices" in orjson.loads(chunk.removeprefix(b"data: "))
                for web in (first, second):
                    other = await web.post("/v1/completions", body, headers=KEY)
                    assert (other.status, other.error["code"]) == (429, "rate_limit_exceeded")
            async with asyncio.timeout(60):  # whoever left has made room
                while (await second.post("/v1/completions", {**ENDLESS, "max_tokens": 2}, headers=KEY)).status == 429:
                    await asyncio.sleep(0.05)

    tried(scenario, **settings)
