"""The outbox of webhooks: however a request ends, its callback lies in `hook:due` from the same moment on."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from pagemill.engine.async_engine import AsyncEngine
from pagemill.ingest.client import AsyncClient
from pagemill.ingest.config import QueueConfig
from tests.contract.conftest import TAG, Outside, serving

HOOK = {"url": "https://example.com/hook"}
ALL = {**HOOK, "events": ["started", "completed", "failed", "cancelled"], "secret": "shop"}


async def hooks(outside: Outside) -> dict[tuple[str, str], dict[str, Any]]:
    """Deliveries in the outbox by request and type, their data read."""
    found = {}
    for name in await outside.redis.zrange(f"{TAG}:hook:due", 0, -1):
        fields = await outside.redis.hgetall(f"{TAG}:hook:{name.decode()}")
        told = {key.decode(): value.decode() for key, value in fields.items()}
        assert await outside.redis.pttl(f"{TAG}:hook:{name.decode()}") > 600_000_000
        found[told["request"], told["type"].removeprefix("request.")] = {**told, "data": orjson.loads(told["data"])}
    return found


def test_every_end_puts_one_webhook_into_the_outbox(
    play: Any, engine: AsyncEngine, queue_config: QueueConfig, outside: Outside
) -> None:
    base = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, "callback": HOOK, "metadata": {"order": "9"}}

    async def scenario() -> None:
        async with AsyncClient(queue_config) as client:
            # Ended by scripts alone: nobody serves the queue yet.
            await client.submit("Hello", id="early", **{**base, "metadata": {"order": '"1"'}})
            await client.cancel("early")
            await client.submit("Hello", id="silent", **{**base, "callback": {**HOOK, "events": ["completed"]}})
            await client.cancel("silent")
            early = (await hooks(outside))["early", "cancelled"]
            assert early["data"]["metadata"] == {"order": '"1"'}
            assert early["data"]["error"]["code"] == "cancelled" and early["data"]["choices"] == []
            async with serving(engine, queue_config):
                whole = await client.submit("Hello", id="whole", **{**base, "callback": ALL})
                text = (await whole.result(60)).text
                await outside.add("raw", {"prompt": "Hello", **base, "stream": False})
                await outside.add("wrong", {"prompt": "Hello", **base, "temperature": "hot"})
                await outside.add("long", {"prompt": "Hello " * 600, **base, "callback": ALL})
                running = await client.submit("Hello", id="stopped", **{**base, "max_tokens": 200, "callback": ALL})
                await outside.first_delta("stopped")
                await running.cancel()
                for request_id in ("raw", "wrong", "long", "stopped"):
                    await outside.done(request_id)
        found = await hooks(outside)
        assert set(found) == {
            ("early", "cancelled"),
            ("whole", "started"),
            ("whole", "completed"),
            ("raw", "completed"),
            ("wrong", "failed"),
            ("long", "failed"),
            ("stopped", "started"),
            ("stopped", "cancelled"),
        }
        data = found["whole", "completed"]["data"]
        assert (data["id"], data["state"], data["metadata"]) == ("whole", "completed", {"order": "9"})
        assert data["choices"] == [{"index": 0, "text": text, "finish_reason": "length", "stop_reason": None}]
        assert data["usage"]["completion_tokens"] == 3 and data["metrics"]["attempts"] == 1 and data["error"] is None
        assert found["whole", "started"]["data"]["state"] == "running"
        assert found["whole", "started"]["secret"] == "shop" and found["raw", "completed"]["secret"] == "default"
        assert found["long", "failed"]["data"]["error"]["code"] == "prompt_too_long"
        assert found["wrong", "failed"]["data"]["error"]["param"] == "temperature"
        assert found["stopped", "cancelled"]["data"]["error"]["code"] == "cancelled"

    play(scenario())


def test_a_repeated_end_writes_no_second_webhook(play: Any, queue_config: QueueConfig, outside: Outside) -> None:
    async def scenario() -> None:
        async with AsyncClient(queue_config) as client:
            await client.submit("Hello", id="a", callback=HOOK)
            await asyncio.gather(*(client.cancel("a") for _ in range(5)))
        assert len(await hooks(outside)) == 1

    play(scenario())
