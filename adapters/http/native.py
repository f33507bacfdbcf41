"""Native routes: the queue's own requests and events over HTTP, for answers that outlive a connection.

Events are the protocol's, numbered from 1 without holes, so a client that has lost its connection, or its page, goes on
from the last number that it has; any gateway can answer. Whoever reads is not who asked: leaving cancels nothing,
unless the request says `on_disconnect: "cancel"`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import structlog
from aiohttp import web

from pagemill.adapters.http.body import read_json
from pagemill.adapters.http.errors import ApiError
from pagemill.adapters.http.gateway import gateway_of, tenant_of
from pagemill.adapters.http.generation import idempotency_key, traceparent
from pagemill.adapters.http.openai_routes import json_response
from pagemill.adapters.http.streaming import ending_with_errors, patiently, response_of
from pagemill.engine.errors import RequestError, invalid
from pagemill.ingest.records import Record


async def submit(request: web.Request) -> web.Response:
    """`POST /v1/requests`: a body of the queue's protocol. 202 with the request's id."""
    gateway, tenant = gateway_of(request), tenant_of(request)
    body = await read_json(request, gateway.config.http_read_timeout_s)
    key = idempotency_key(request, body)
    for name in ("self", "traceparent"):  # arguments of the client's `submit` that are no fields
        if name in body:
            raise invalid(f"unknown field {name!r}", name)
    if body.get("tenant") not in (None, tenant):
        raise ApiError(403, f"the API key belongs to tenant {tenant}", param="tenant", code="forbidden_tenant")
    name = body.pop("model", None)
    if name is not None and not isinstance(name, str):
        raise invalid("model must be a string", "model")
    model = await gateway.queues.find(name)
    named = {} if name is None or model.queue_model is None else {"model": model.queue_model}
    async with gateway.limits.generation(tenant):
        handle = await model.client.submit(
            **{**body, **named, "tenant": tenant}, idempotency_key=key, traceparent=traceparent(request)
        )
    structlog.contextvars.bind_contextvars(generation=handle.request_id)
    headers = {"Location": f"/v1/requests/{handle.request_id}"}
    if handle.replayed:
        headers["Idempotent-Replayed"] = "true"
    return json_response({"id": handle.request_id, "object": "request", "state": "queued"}, headers, status=202)


async def show(request: web.Request) -> web.Response:
    """`GET /v1/requests/{id}`: where it stands, and its result once it has ended."""
    _, record = await gateway_of(request).queues.locate(request.match_info["id"], tenant_of(request))
    return json_response(_shown(record))


def _shown(record: Record) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "id": record.request_id,
        "object": "request",
        "state": record.state,
        "attempt": record.attempt,
        "priority": record.priority,
        "seq": record.seq,
        "cancel": record.is_cancelled,
        "created": record.created,
        "deadline": record.deadline,
        "started": record.started,
        "finished": record.finished,
    }
    if record.has_ended:
        shown |= {"choices": record.result or [], "usage": record.usage, "metrics": record.metrics}
        shown["error"] = record.error
    return shown


async def cancel(request: web.Request) -> web.Response:
    """`POST /v1/requests/{id}/cancel`: "cancelled", "requested" (it ends at once), or the state it had ended in."""
    request_id = request.match_info["id"]
    client, _ = await gateway_of(request).queues.locate(request_id, tenant_of(request))
    return json_response({"id": request_id, "object": "request", "state": await client.cancel(request_id)})


async def events(request: web.Request) -> web.StreamResponse:
    """`GET /v1/requests/{id}/events`: its events as they come, from the one after `Last-Event-ID` or `?after=` on.

    204 where nothing comes any more: it tells a browser's EventSource not to ask again.
    """
    gateway = gateway_of(request)
    request_id = request.match_info["id"]
    after = _after(request)
    client, record = await gateway.queues.locate(request_id, tenant_of(request))
    if after > record.seq:
        message = f"after is {after}, and the request has {record.seq} events; read from the start"
        raise ApiError(410, message, param="after", code="request_lost")
    if record.has_ended and after == record.seq:
        return web.Response(status=204)
    subscription = await client.follow(request_id, after=after, expected=True)
    try:
        async with gateway.sse(request) as sse, ending_with_errors(gateway, sse):
            reading = patiently(sse, subscription.events(), gateway.config.http_ping_s)
            try:
                async with contextlib.aclosing(reading) as items:
                    async for item in items:
                        await sse.send(item, seq=item["seq"])
            except RequestError as error:
                if error.code == "request_lost":
                    raise ApiError(410, error.message, code=error.code) from error
                raise
        return response_of(sse)
    finally:
        await subscription.aclose()


def _after(request: web.Request) -> int:
    """The header wins: a browser that comes back sends it with the address that it began with."""
    given = request.headers.get("Last-Event-ID") or request.query.get("after") or "0"
    if not given.isascii() or not given.isdigit() or len(given) > 15:
        raise invalid(f"after must be an event's number, got {given[:32]!r}", "after")
    return int(given)
