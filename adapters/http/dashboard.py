"""The dashboard at `/`: a page that shows what the queues and engines say of themselves, and the figures behind it.

The page holds no figure of its own and needs no key; `/overview.json` has them all and is let in like any other route.
Everything comes from Redis, as for `/metrics`, so every gateway shows the same.
"""

from __future__ import annotations

import asyncio
from importlib import resources
from typing import Any

from aiohttp import web

from pagemill.adapters.http.gateway import Gateway, gateway_of
from pagemill.adapters.http.openai_routes import json_response
from pagemill.ingest.async_client import QueueUnavailableError
from pagemill.ingest.overview import EngineReport, Overview

PATIENCE_S = 2.0
POLICY = "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'"
_PRIORITIES = ("high", "normal", "batch")


async def page(_: web.Request) -> web.Response:
    """`GET /`."""
    return asset("dashboard.html", "text/html")


async def script(_: web.Request) -> web.Response:
    return asset("dashboard.js", "text/javascript")


async def data(request: web.Request) -> web.Response:
    """`GET /overview.json`: every queue of this gateway, with its engines. A queue that cannot be read is null."""
    gateway = gateway_of(request)
    names = list(gateway.queues.clients)
    found = await asyncio.gather(*(overview_of(gateway, name) for name in names))
    queues = {
        name: None if overview is None else _queue(gateway, name, overview)
        for name, overview in zip(names, found, strict=True)
    }
    return json_response({"queues": queues}, {"Cache-Control": "no-store"})


async def overview_of(gateway: Gateway, queue: str, *, fresh: bool = False) -> Overview | None:
    """What a queue says of itself, at most a second old unless `fresh`; None where Redis does not answer soon."""
    queues = gateway.queues
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await (queues.clients[queue].overview() if fresh else queues.overview(queue))
    except (TimeoutError, QueueUnavailableError):
        return None


def asset(name: str, kind: str) -> web.Response:
    """A file of this folder as an answer that a browser asks for again each time."""
    headers = {"Cache-Control": "no-cache"} | ({"Content-Security-Policy": POLICY} if kind == "text/html" else {})
    content = (resources.files("pagemill.adapters.http") / name).read_bytes()
    return web.Response(body=content, content_type=kind, charset="utf-8", headers=headers)


def _queue(gateway: Gateway, name: str, overview: Overview) -> dict[str, Any]:
    timeout_s = gateway.queues.clients[name].config.heartbeat_timeout_s
    engines = sorted(overview.engines, key=lambda engine: engine.name)
    return {
        "outstanding": dict(zip(_PRIORITIES, overview.outstanding, strict=True)),
        "delayed": overview.delayed,
        "dead_letters": overview.dead_letters,
        "hooks": {"due": overview.hooks_due, "dead": overview.hooks_dead},
        "counters": dict(sorted(overview.counters.items())),
        "engines": [_engine(engine, timeout_s) for engine in engines],
    }


def _engine(engine: EngineReport, timeout_s: float) -> dict[str, Any]:
    told = {name: value for name, value in engine.description.items() if name not in ("outlook", "caps")}
    return {**told, "name": engine.name, "age_s": round(engine.age_s, 2), "alive": engine.age_s <= timeout_s}
