"""One request through all roles: every line that concerns it says whose it is and which."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
from aiohttp import ClientSession, web

from pagemill.adapters.webhook.secret_store import SecretStore
from tests.adapters.deployment import Role
from tests.adapters.webhook_receiver import Receiver, receiving
from tests.chaos.model import make_model


def test_every_line_that_concerns_a_request_names_it(run: Any, redis_url: str, tmp_path: Path) -> None:
    async def busy_at_first(receiver: Receiver, request: web.Request) -> web.StreamResponse:
        return web.Response(status=503 if len(receiver.seen) == 1 else 200)

    async def scenario() -> None:
        model, secrets = tmp_path / "model", tmp_path / "secrets.json"
        await asyncio.to_thread(make_model, model)
        SecretStore(secrets).rotate("default")
        hooks = ("--webhook-secrets", str(secrets), "--webhook-allow", "127.0.0.1", "--webhook-delays-s", "0.05")
        small = ("--model", str(model), "--num-blocks-override", "64", "--threads", "1", "--dtype", "float32")
        roles: list[Role] = await asyncio.gather(
            Role.start("gateway", redis_url, "--http-port", "0", PAGEMILL_API_KEYS="shop=key-of-shop"),
            Role.start("engine", redis_url, *small),
            Role.start("webhooks", redis_url, *hooks),
        )
        gateway, engine, webhooks = roles
        try:
            async with receiving(busy_at_first) as receiver, ClientSession() as session:
                body = {"prompt": "a queue", "max_tokens": 3, "ignore_eos": True, "callback": {"url": receiver.url}}
                headers = {"Authorization": "Bearer key-of-shop", "X-Request-Id": "web-1"}
                async with session.post(f"{gateway.url}/v1/requests", json=body, headers=headers) as answer:
                    assert answer.status == 202, await answer.text()
                    name = (await answer.json())["id"]
                delivered = await webhooks.until_logged("webhook delivered")
            failed = await webhooks.until_logged("webhook failed and is tried again")
            ended = await engine.until_logged("request ended")
            answered = await gateway.until_logged("request")
            for line in (delivered, failed, ended):
                assert (line["request_id"], line["tenant"]) == (name, "shop"), line
            assert (ended["state"], ended["completion_tokens"], ended["attempts"]) == ("completed", 3, 1)
            assert (delivered["tries"], failed["status"]) == (2, 503)
            assert (answered["request_id"], answered["tenant"], answered["generation"]) == ("web-1", "shop", name)
            for role in roles:
                about = [line for line in role.log if name in orjson.dumps(line).decode()]
                assert about and all({"request_id", "tenant"} <= set(line) for line in about)
                assert not any("key-of-shop" in orjson.dumps(line).decode() for line in role.log)
        finally:
            await asyncio.gather(*(role.kill() for role in roles))

    run(scenario())
