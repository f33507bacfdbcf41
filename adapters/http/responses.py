"""OpenAI's Responses API, for text and calls of tools: ask, in the background if wanted; look, follow, go on following;
go on from an earlier one; cancel, forget.

What the queue does not keep of a body (its instructions, say) lies in a note beside the request, so any gateway can
show and resume any response.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Mapping
from typing import Any

import orjson
import structlog
from aiohttp import web

from pagemill.adapters.http.body import read_json
from pagemill.adapters.http.conversations import TURNS, History, keep, recall
from pagemill.adapters.http.errors import ApiError, not_found
from pagemill.adapters.http.gateway import Gateway, gateway_of, tenant_of
from pagemill.adapters.http.generation import Generation, deadline_passed, idempotency_key, traceparent
from pagemill.adapters.http.half_close import whole_connection
from pagemill.adapters.http.item_references import with_references
from pagemill.adapters.http.openai_routes import json_response
from pagemill.adapters.http.queues import Model
from pagemill.adapters.http.responses_body import AskedResponse, read_response
from pagemill.adapters.http.responses_fold import (
    ResponseFold,
    request_id_of,
    response_id,
    response_object,
    response_of_record,
)
from pagemill.adapters.http.responses_items import add_item
from pagemill.adapters.http.streaming import ending_with_errors, patiently, response_of
from pagemill.engine.errors import RequestError, invalid
from pagemill.ingest.async_client import AsyncClient
from pagemill.ingest.records import Record

CANCEL_PATIENCE_S = 5.0
PREVIOUS = "previous_response_id"
_NUMBER = re.compile(r"-1|[0-9]{1,12}")


async def create(request: web.Request) -> web.StreamResponse:
    """`POST /v1/responses`."""
    gateway, tenant = gateway_of(request), tenant_of(request)
    body = await read_json(request, gateway.config.http_read_timeout_s)
    key = idempotency_key(request, body)
    body["input"] = await with_references(body.get("input"), lambda name: _output_of(request, name))
    asked = read_response(body)
    model = await gateway.queues.find(asked.model)
    named = {} if model.queue_model is None else {"model": model.queue_model}
    history = await _history(request, asked.previous)
    fields = {**asked.request(history.messages), **named, "tenant": tenant, "stream": asked.stream}
    async with gateway.limits.generation(tenant):
        generation = Generation(
            gateway, model.client, [fields], key=key, traceparent=traceparent(request), lasting=asked.background
        )
        async with generation:
            structlog.contextvars.bind_contextvars(generation=generation.id)
            headers = {"Idempotent-Replayed": "true"} if generation.is_replayed else {}
            note = await _note(gateway, model, generation, asked, history)
            if asked.stream:
                return await _stream(gateway, request, model.client, generation.id, note, headers=headers)
            if asked.background:
                return json_response(response_object(generation.id, note), headers)
            try:
                async with asyncio.timeout(generation.timeout_s), whole_connection(request):
                    await generation.results()
            except TimeoutError:
                raise deadline_passed() from None
            record = await model.client.record(generation.id)
            if record is None:
                raise RequestError("request_lost", "the request's record is gone")
            return json_response(response_of_record(record, note), headers)


async def _note(
    gateway: Gateway, model: Model, generation: Generation, asked: AskedResponse, history: History
) -> dict[str, Any]:
    """What a response object repeats, and its conversation; kept beside the request, unless it is not to be stored."""
    client = model.client
    if generation.is_replayed and (kept := await client.note(generation.id)) is not None:
        note: dict[str, Any] = orjson.loads(kept)
        return note
    note = {**asked.shown, "model": asked.model or model.name, "created_at": int(time.time())}
    if asked.store:
        ttl_s = generation.timeout_s + client.config.result_ttl_s
        turns = await keep(gateway.queues.shelf, history, generation.id, asked.messages, ttl_s=ttl_s)
        await client.keep_note(generation.id, orjson.dumps({**note, TURNS: turns}), ttl_ms=int(ttl_s * 1000))
    return note


async def _history(request: web.Request, previous: str | None) -> History:
    """The conversation up to and with an earlier response. Raises `ApiError` 400 where it is not there any more, or
    has no proper end."""
    if previous is None:
        return History()
    try:
        _, record, note = await _find(request, previous)
    except ApiError as error:
        raise _no_previous(previous) from error
    if record.state != "completed":
        state = record.state if record.has_ended else "not finished"
        message = f"previous response {previous[:128]!r} is {state}; only one that has completed can be gone on from"
        raise ApiError(400, message, param=PREVIOUS, code="previous_response_not_completed")
    told = await recall(gateway_of(request).queues.shelf, note[TURNS])
    if told is None:
        raise _no_previous(previous)
    latest: list[dict[str, Any]] = []
    for number, item in enumerate(response_of_record(record, note)["output"]):
        add_item(latest, f"output[{number}]", item)
    return History(note[TURNS], told, latest)


def _no_previous(previous: str) -> ApiError:
    message = f"previous response {previous[:128]!r} is not there; it may have expired, or was not stored"
    return ApiError(400, message, param=PREVIOUS, code="previous_response_not_found")


async def _output_of(request: web.Request, request_id: str) -> list[dict[str, Any]]:
    """The items of a stored response; none where there is no such response."""
    try:
        _, record, note = await _find(request, response_id(request_id))
    except ApiError:
        return []
    output: list[dict[str, Any]] = response_of_record(record, note)["output"]
    return output


async def show(request: web.Request) -> web.StreamResponse:
    """`GET /v1/responses/{id}`, with `?stream=true` its events, after number `starting_after`."""
    client, record, note = await _find(request)
    if request.query.get("stream", "").lower() in ("true", "1"):
        after = request.query.get("starting_after", "-1")
        if not _NUMBER.fullmatch(after):
            raise invalid(f"starting_after must be an event's number, got {after[:32]!r}", "starting_after")
        return await _stream(gateway_of(request), request, client, record.request_id, note, after=int(after))
    return json_response(response_of_record(record, note))


async def cancel(request: web.Request) -> web.Response:
    """`POST /v1/responses/{id}/cancel`: the response as it is then, which is at its end unless no engine answers."""
    client, record, note = await _find(request)
    if not record.has_ended:
        await client.cancel(record.request_id)
        with contextlib.suppress(TimeoutError, RequestError):
            await client.attach(record.request_id).result(timeout=CANCEL_PATIENCE_S)
        record = await client.record(record.request_id) or record
    return json_response(response_of_record(record, note))


async def delete(request: web.Request) -> web.Response:
    """`DELETE /v1/responses/{id}`: it is not there any more, and what still ran of it is cancelled."""
    client, record, _ = await _find(request)
    if not record.has_ended:
        await client.cancel(record.request_id)
    await client.drop_note(record.request_id)
    return json_response({"id": request.match_info["id"], "object": "response", "deleted": True})


async def _find(request: web.Request, given: str | None = None) -> tuple[AsyncClient, Record, dict[str, Any]]:
    name = request.match_info["id"] if given is None else given
    request_id = request_id_of(name)
    if request_id is not None:
        with contextlib.suppress(ApiError):
            client, record = await gateway_of(request).queues.locate(request_id, tenant_of(request))
            kept = await client.note(request_id)
            if kept is not None:
                return client, record, orjson.loads(kept)
    raise not_found("response", name[:128])


async def _stream(
    gateway: Gateway,
    request: web.Request,
    client: AsyncClient,
    request_id: str,
    note: Mapping[str, Any],
    *,
    after: int = -1,
    headers: dict[str, str] | None = None,
) -> web.StreamResponse:
    """The response's events with numbers above `after`."""
    fold = ResponseFold(request_id, note)
    subscription = await client.follow(request_id, after=0, expected=True)
    try:
        async with gateway.sse(request, headers) as sse, ending_with_errors(gateway, sse):
            pending = fold.accepted()
            if note["background"]:
                await sse.open()
            async with contextlib.aclosing(patiently(sse, subscription.events(), gateway.config.http_ping_s)) as events:
                async for event in events:
                    if event["type"] in ("delta", "choice") and event["seq"] == 1 and after >= 0:
                        raise ApiError(410, "the response's events have expired; get it whole", code="request_lost")
                    if event["type"] == "done" and event["state"] == "rejected" and not sse.is_open:
                        raise _refused(event)
                    if event["type"] == "rewind":
                        message = "after a failure the text could not be continued as it was sent; get it whole"
                        raise RequestError("engine_error", message)
                    for item in (*pending, *fold.add(event)):
                        if item["sequence_number"] > after:
                            await sse.event(item["type"], item)
                    pending = []
        return response_of(sse)
    finally:
        await subscription.aclose()


def _refused(done: Mapping[str, Any]) -> RequestError:
    """What an engine has refused is answered as such while that can be done."""
    error = done.get("error") or {}
    return RequestError(
        error.get("code", "engine_error"), error.get("message", "the request was refused"), param=error.get("param")
    )
