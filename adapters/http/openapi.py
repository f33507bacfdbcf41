"""The OpenAPI document of the gateway (OpenAPI 3.1), served at /openapi.json and tried against it by a test."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from aiohttp import web

from pagemill.adapters.http import openapi_schemas as schemas
from pagemill.adapters.http.openai_routes import json_response

Schema = dict[str, Any]

_STREAM: Schema = {"type": "string", "description": "server-sent events"}
_STATUS: dict[str, str] = {
    "400": "a field is wrong; param names it",
    "401": "no API key, or an unknown one",
    "403": "not allowed",
    "404": "no such thing",
    "408": "the body did not arrive in time",
    "409": "a conflict: the idempotency key had another body, or the generation was cancelled",
    "410": "events that have expired",
    "413": "the body is too large",
    "415": "the body is of another type",
    "429": "a limit of the tenant",
    "500": "the generation failed",
    "503": "not now; retry-after-ms says when",
    "504": "the deadline passed",
}


def _object(kind: str, *names: str) -> Schema:
    return schemas.shown({"id": {"type": "string"}, "object": {"const": kind}, **{name: {} for name in names}})


_COMPLETION = _object("text_completion", "created", "model", "choices", "usage")
_CHAT = _object("chat.completion", "created", "model", "choices", "usage")
_RESPONSE = _object("response", "created_at", "status", "model", "output", "usage", "error")
_MODEL = _object("model", "created", "owned_by")
_REQUEST = _object("request", "state")
_FILE = _object("file", "bytes", "created_at", "filename", "purpose")
_BATCH = _object("batch", "endpoint", "status", "request_counts", "input_file_id")
_DELETED = schemas.shown({"id": {"type": "string"}, "deleted": {"const": True}})


def _list_of(item: Schema) -> Schema:
    return schemas.shown({"object": {"const": "list"}, "data": {"type": "array", "items": item}})


def _operation(
    name: str,
    summary: str,
    answer: Schema | None,
    *statuses: str,
    body: Schema | None = None,
    form: Schema | None = None,
    good: str = "200",
    media: str = "application/json",
    streams: bool = False,
    parameters: tuple[Schema, ...] = (),
) -> Schema:
    content: Schema = {} if answer is None else {media: {"schema": answer}}
    if streams:
        content["text/event-stream"] = {"schema": _STREAM}
    wrong = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    expected = {*statuses, "401", "403", "503", *(("400", "408", "413", "415") if body or form else ())}
    operation: Schema = {
        "operationId": name,
        "summary": summary,
        "responses": {
            good: {"description": "as asked for", "content": content},
            **{status: {"description": _STATUS[status], "content": wrong} for status in sorted(expected)},
        },
    }
    if parameters:
        operation["parameters"] = list(parameters)
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    if form is not None:
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
    return operation


def _parameter(name: str, place: str, schema: Schema, required: bool = False) -> Schema:
    return {"name": name, "in": place, "required": required, "schema": schema}


_ID = _parameter("id", "path", {"type": "string", "minLength": 1}, required=True)
_KEY = _parameter("Idempotency-Key", "header", {"type": "string", "minLength": 1, "maxLength": 480})
_LIMIT = _parameter("limit", "query", {"type": "integer", "minimum": 1, "maximum": 10_000})
_AFTER = _parameter("after", "query", {"type": "string"})
_FAILURES = ("404", "409", "429", "500", "504")


def document() -> Schema:
    """The whole document."""
    generate: Schema = {"streams": True, "parameters": (_KEY,)}
    listing: Schema = {"parameters": (_LIMIT, _AFTER)}
    one: Schema = {"parameters": (_ID,)}
    numbers = (
        _parameter("after", "query", {"type": "integer", "minimum": 0}),
        _parameter("Last-Event-ID", "header", {"type": "string", "pattern": "^[0-9]{1,15}$"}),
    )
    resume = (
        _parameter("stream", "query", {"enum": ["true", "false"]}),
        _parameter("starting_after", "query", {"type": "integer", "minimum": 0, "maximum": 10**9}),
    )
    model = _parameter("model", "path", {"type": "string", "minLength": 1}, required=True)
    events = _operation(
        "requestEvents", "events of a request", _STREAM, "400", "404", "410", media="text/event-stream",
        parameters=(_ID, *numbers),
    )  # fmt: skip
    events["responses"]["204"] = {"description": "nothing comes any more"}
    figures = {"text/plain": {"schema": {"type": "string"}}}
    status = {"application/json": {"schema": {"type": "object"}}}
    paths: Schema = {
        "/v1/models": {"get": _operation("listModels", "models that are served", _list_of(_MODEL))},
        "/v1/models/{model}": {"get": _operation("getModel", "one model", _MODEL, "404", parameters=(model,))},
        "/v1/completions": {
            "post": _operation(
                "complete", "go on with text", _COMPLETION, *_FAILURES, body=schemas.COMPLETION, **generate
            )
        },
        "/v1/chat/completions": {
            "post": _operation("chat", "answer messages", _CHAT, *_FAILURES, body=schemas.CHAT_COMPLETION, **generate)
        },
        "/v1/responses": {
            "post": _operation("respond", "answer input", _RESPONSE, *_FAILURES, body=schemas.RESPONSE, **generate)
        },
        "/v1/responses/{id}": {
            "get": _operation(
                "getResponse", "a response, or its events", _RESPONSE, "400", "404", "410", streams=True,
                parameters=(_ID, *resume),
            ),
            "delete": _operation("deleteResponse", "forget a response", _DELETED, "404", **one),
        },
        "/v1/responses/{id}/cancel": {"post": _operation("cancelResponse", "stop a response", _RESPONSE, "404", **one)},
        "/v1/requests": {
            "post": _operation(
                "submit", "put a request into the queue", _REQUEST, "404", "409", "429", body=schemas.REQUEST,
                good="202", parameters=(_KEY,),
            )
        },
        "/v1/requests/{id}": {"get": _operation("getRequest", "where a request stands", _REQUEST, "404", **one)},
        "/v1/requests/{id}/events": {"get": events},
        "/v1/requests/{id}/cancel": {"post": _operation("cancelRequest", "cancel a request", _REQUEST, "404", **one)},
        "/v1/files": {
            "get": _operation("listFiles", "files", _list_of(_FILE), "400", **listing),
            "post": _operation("uploadFile", "upload a file", _FILE, form=schemas.FILE),
        },
        "/v1/files/{id}": {
            "get": _operation("getFile", "a file", _FILE, "404", **one),
            "delete": _operation("deleteFile", "remove a file", _DELETED, "404", **one),
        },
        "/v1/files/{id}/content": {
            "get": _operation(
                "fileContent", "what is in a file", {"type": "string", "format": "binary"}, "404",
                media="application/octet-stream", **one,
            )
        },
        "/v1/batches": {
            "get": _operation("listBatches", "batches", _list_of(_BATCH), "400", **listing),
            "post": _operation("createBatch", "run a file of requests", _BATCH, body=schemas.BATCH),
        },
        "/v1/batches/{id}": {"get": _operation("getBatch", "where a batch stands", _BATCH, "404", **one)},
        "/v1/batches/{id}/cancel": {"post": _operation("cancelBatch", "stop a batch", _BATCH, "404", **one)},
        "/overview.json": {"get": _operation("overview", "what the dashboard shows", {"type": "object"})},
        "/healthz": {"get": _open("health", "is the process alive", status)},
        "/readyz": {"get": _open("ready", "can it serve", status)},
        "/metrics": {"get": {**_open("metrics", "figures for Prometheus", figures), "security": [{"key": []}]}},
    }  # fmt: skip
    return {
        "openapi": "3.1.0",
        "info": {"title": "Pagemill", "version": metadata.version("pagemill")},
        "paths": paths,
        "components": {
            "schemas": {"Error": schemas.ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _open(name: str, summary: str, content: Schema) -> Schema:
    answers = {status: {"description": summary, "content": content} for status in ("200", "503")}
    return {"operationId": name, "summary": summary, "security": [], "responses": answers}


async def openapi(_: web.Request) -> web.Response:
    return json_response(document())
