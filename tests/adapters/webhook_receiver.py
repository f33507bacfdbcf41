"""Receivers of webhooks on loopback, and deliveries for them, made as requests make them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from pagemill.adapters.webhook.config import WebhookConfig
from pagemill.adapters.webhook.dispatcher import Dispatcher
from pagemill.adapters.webhook.guard import Lookup
from pagemill.adapters.webhook.secret_store import SecretStore
from pagemill.adapters.webhook.sender import Sender
from pagemill.ingest.client import AsyncClient
from pagemill.ingest.config import QueueConfig
from pagemill.ingest.redis import Client, connect_commands

TAG = "pm:{default.0}"

Answer = Callable[["Receiver", web.Request], Awaitable[web.StreamResponse]]


async def accept(_: Receiver, __: web.Request) -> web.StreamResponse:
    return web.Response(status=204)


@dataclass
class Receiver:
    """Keeps what arrives; `answer` decides what it is answered."""

    answer: Answer = accept
    url: str = ""
    seen: list[tuple[float, dict[str, str], bytes]] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.seen.append((time.time(), {key.lower(): value for key, value in request.headers.items()}, body))
        self.arrived.set()
        return await self.answer(self, request)

    async def wait_for(self, count: int, timeout_s: float = 60) -> None:
        async with asyncio.timeout(timeout_s):
            while len(self.seen) < count:
                self.arrived.clear()
                await self.arrived.wait()


@asynccontextmanager
async def receiving(answer: Answer = accept) -> AsyncIterator[Receiver]:
    receiver = Receiver(answer)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", receiver.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    address: Any = runner.addresses[0]
    receiver.url = f"http://127.0.0.1:{address[1]}/hook"
    try:
        yield receiver
    finally:
        await runner.cleanup()


async def put(
    queue: QueueConfig, url: str, count: int = 1, secret: str | None = None, name: str = "r", tenant: str = "default"
) -> None:
    """Put `count` deliveries into the outbox: requests that are cancelled before anybody has begun them. `url` may have
    a place for the number, `{}`."""
    async with AsyncClient(queue) as client:
        for number in range(count):
            callback = {"url": url.replace("{}", str(number)), "secret": secret}
            about = {"metadata": {"n": str(number)}, "tenant": tenant}
            await client.submit("x", id=f"{name}{number}", callback=callback, **about)
            await client.cancel(f"{name}{number}")


def settings(**changes: Any) -> WebhookConfig:
    quick: dict[str, Any] = {"webhook_poll_ms": 20, "webhook_timeout_s": 2.0, "webhook_delays_s": "0.05,0.1"}
    return WebhookConfig(**{**quick, "webhook_allow": "127.0.0.1", **changes})


@asynccontextmanager
async def dispatching(
    queue: QueueConfig, config: WebhookConfig, secrets: Path, lookup: Lookup | None = None
) -> AsyncIterator[Dispatcher]:
    """A dispatcher at work; stopped cleanly at the end."""
    client = connect_commands(queue.redis_url, "test-webhooks")
    async with Sender(config, lookup=lookup) as sender:
        dispatcher = Dispatcher(client, queue, config, sender, SecretStore(secrets))
        task = asyncio.create_task(dispatcher.run())
        try:
            yield dispatcher
        finally:
            dispatcher.stop()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await client.aclose()


async def record(client: Client, request_id: str) -> dict[str, str]:
    """The delivery of a request, as Redis has it."""
    keys: Any = await client.keys(f"{TAG}:hook:msg_*")
    for key in keys:
        fields: Any = await client.hgetall(key)
        if fields.get(b"request") == request_id.encode():
            return {name.decode(): value.decode() for name, value in fields.items()}
    raise AssertionError(f"no delivery of {request_id}")


async def until_state(client: Client, request_id: str, *states: str, timeout_s: float = 60) -> dict[str, str]:
    async with asyncio.timeout(timeout_s):
        while (found := await record(client, request_id))["state"] not in states:
            await asyncio.sleep(0.01)
    return found
