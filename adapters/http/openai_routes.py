"""OpenAI's routes for models, completions and chat completions."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import orjson
import structlog
from aiohttp import web

from pagemill.adapters.http.body import read_json
from pagemill.adapters.http.errors import not_found
from pagemill.adapters.http.gateway import Gateway, gateway_of, tenant_of
from pagemill.adapters.http.generation import Generation, deadline_passed, idempotency_key, traceparent
from pagemill.adapters.http.half_close import whole_connection
from pagemill.adapters.http.openai_answers import Answer, ChatAnswer, CompletionAnswer
from pagemill.adapters.http.openai_fields import Asked, read_chat, read_completion
from pagemill.adapters.http.sse import DONE
from pagemill.adapters.http.streaming import ending_with_errors, patiently, response_of


async def list_models(request: web.Request) -> web.Response:
    models = await gateway_of(request).queues.models()
    return json_response({"object": "list", "data": [_model(model.name) for model in models]})


async def get_model(request: web.Request) -> web.Response:
    name = request.match_info["model"]
    for model in await gateway_of(request).queues.models():
        if model.name == name:
            return json_response(_model(name))
    error = not_found("model", name[:128])
    error.code = "model_not_found"
    raise error


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "pagemill"}


async def completions(request: web.Request) -> web.StreamResponse:
    return await _generate(request, read_completion, CompletionAnswer)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    return await _generate(request, read_chat, ChatAnswer)


async def _generate(
    request: web.Request, read: Callable[[Mapping[str, Any]], Asked], shape: type[Answer]
) -> web.StreamResponse:
    gateway, tenant = gateway_of(request), tenant_of(request)
    body = await read_json(request, gateway.config.http_read_timeout_s)
    key = idempotency_key(request, body)
    asked = read(body)
    model = await gateway.queues.find(asked.model)
    named = {} if model.queue_model is None else {"model": model.queue_model}
    bodies = [{**fields, **named, "tenant": tenant} for fields in asked.bodies]
    async with (
        gateway.limits.generation(tenant),
        Generation(gateway, model.client, bodies, key=key, traceparent=traceparent(request)) as generation,
    ):
        structlog.contextvars.bind_contextvars(generation=generation.id)
        answer = shape(asked, generation.id, int(time.time() * 1000))
        headers = {"Idempotent-Replayed": "true"} if generation.is_replayed else {}
        if asked.stream:
            return await _stream(gateway, request, generation, answer, headers)
        try:
            async with asyncio.timeout(generation.timeout_s), whole_connection(request):
                results = await generation.results()
        except TimeoutError:
            raise deadline_passed() from None
        return json_response(answer.whole(results, model.name), headers)


async def _stream(
    gateway: Gateway, request: web.Request, generation: Generation, answer: Answer, headers: dict[str, str]
) -> web.StreamResponse:
    began, has_text = time.monotonic(), False
    async with gateway.sse(request, headers) as sse, ending_with_errors(gateway, sse):
        try:
            async with (
                asyncio.timeout(generation.timeout_s),
                contextlib.aclosing(patiently(sse, generation.events(), gateway.config.http_ping_s)) as events,
            ):
                async for number, event in events:
                    for chunk in answer.chunks(number, event):
                        await sse.send(chunk)
                    if not has_text and event["type"] == "delta":
                        has_text = True
                        gateway.metrics.first_token.observe(time.monotonic() - began)
        except TimeoutError:
            raise deadline_passed() from None
        last = answer.last_chunk()
        if last is not None:
            await sse.send(last)
        await sse.write(DONE)
    return response_of(sse)


def json_response(value: Any, headers: Mapping[str, str] | None = None, status: int = 200) -> web.Response:
    return web.Response(
        status=status, body=orjson.dumps(value), content_type="application/json", headers=dict(headers or {})
    )
