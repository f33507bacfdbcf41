"""Routes for whoever runs a gateway: is it alive, can it serve, and what are the figures."""

from __future__ import annotations

from aiohttp import web

from pagemill.adapters.http.dashboard import overview_of
from pagemill.adapters.http.gateway import gateway_of
from pagemill.adapters.http.metrics import CONTENT_TYPE
from pagemill.adapters.http.openai_routes import json_response


async def healthz(_: web.Request) -> web.Response:
    """200 while the process answers. Asks nobody."""
    return json_response({"status": "ok"})


async def readyz(request: web.Request) -> web.Response:
    """200 while every queue has an engine whose steps get on; 503 with the reason otherwise, and while leaving."""
    gateway = gateway_of(request)
    if gateway.is_leaving:
        return json_response({"status": "stopping"}, status=503)
    missing = []
    for name, client in gateway.queues.clients.items():
        overview = await overview_of(gateway, name)
        if overview is None:
            return json_response({"status": "redis does not answer"}, status=503)
        if not overview.living(client.config.heartbeat_timeout_s):
            missing.append(name)
    if missing:
        return json_response({"status": "no engine", "queues": missing}, status=503)
    return json_response({"status": "ready"})


async def metrics(request: web.Request) -> web.Response:
    """Prometheus' text format. Without Redis, the gateway's own figures."""
    gateway = gateway_of(request)
    found = {name: await overview_of(gateway, name, fresh=True) for name in gateway.queues.clients}
    known = {name: overview for name, overview in found.items() if overview is not None}
    return web.Response(body=gateway.metrics.render(known), headers={"Content-Type": CONTENT_TYPE})
