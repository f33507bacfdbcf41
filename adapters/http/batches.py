"""OpenAI's batches: a file of requests, worked off in the background, with progress, and results as files.

The routes only write down what is wanted; `BatchRunner` does it, on whatever gateway.
"""

from __future__ import annotations

import time
from typing import Any

import orjson
from aiohttp import web

from pagemill.adapters.http.body import read_json
from pagemill.adapters.http.errors import not_found
from pagemill.adapters.http.files import Files, page
from pagemill.adapters.http.gateway import Gateway, gateway_of, tenant_of
from pagemill.adapters.http.openai_routes import json_response
from pagemill.engine.errors import invalid
from pagemill.engine.values import shown
from pagemill.ingest.keys import is_request_id, uuid7_hex
from pagemill.ingest.schema import RequestBody

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
WINDOW_S = 86_400
DATES = (
    *("in_progress_at", "finalizing_at", "completed_at", "failed_at"),
    *("expired_at", "cancelling_at", "cancelled_at"),
)
OPEN = "batches-open"  # index of those that are not at their end
FINAL = frozenset(("completed", "failed", "expired", "cancelled"))


class Batches:
    """What is written down of batches. A batch's document has `shown` (what clients see), `tenant`, and `cancel` once
    that is wanted; fields that the runner and the routes write are not the same."""

    def __init__(self, gateway: Gateway) -> None:
        self._shelf = gateway.queues.shelf
        self._ttl_s = gateway.config.http_file_ttl_s

    async def create(self, tenant: str, batch: dict[str, Any]) -> None:
        await self._shelf.write(
            _name(batch), {"tenant": tenant.encode(), "shown": orjson.dumps(batch)}, ttl_s=self._ttl_s
        )
        await self._shelf.list_in(f"batches:{tenant}", batch["id"], score=time.time(), ttl_s=self._ttl_s)
        await self._shelf.list_in(OPEN, batch["id"], score=time.time(), ttl_s=self._ttl_s)

    async def save(self, batch: dict[str, Any]) -> None:
        """Write down where a batch stands; a final one is open no more."""
        await self._shelf.write(_name(batch), {"shown": orjson.dumps(batch)}, ttl_s=self._ttl_s)
        if batch["status"] in FINAL:
            await self._shelf.unlist(OPEN, batch["id"])

    async def load(self, batch_id: str) -> tuple[str, dict[str, Any]] | None:
        """Tenant and batch, where there is one."""
        if not is_request_id(batch_id):
            return None
        tenant, found, cancel = await self._shelf.read(f"batch:{batch_id}", "tenant", "shown", "cancel")
        if tenant is None or found is None:
            return None
        batch: dict[str, Any] = orjson.loads(found)
        if cancel is not None and batch["status"] not in FINAL:
            batch |= {"status": "cancelling", "cancelling_at": int(cancel)}
        return tenant.decode(), batch

    async def cancel(self, batch: dict[str, Any]) -> None:
        await self._shelf.write(_name(batch), {"cancel": b"%d" % time.time()}, ttl_s=self._ttl_s)

    async def listed(self, tenant: str) -> list[dict[str, Any]]:
        """A tenant's batches, the newest first."""
        found = []
        for batch_id in reversed(await self._shelf.listed(f"batches:{tenant}")):
            loaded = await self.load(batch_id)
            if loaded is None:
                await self._shelf.unlist(f"batches:{tenant}", batch_id)
            else:
                found.append(loaded[1])
        return found


def _name(batch: dict[str, Any]) -> str:
    return f"batch:{batch['id']}"


async def create(request: web.Request) -> web.Response:
    """`POST /v1/batches`."""
    gateway, tenant = gateway_of(request), tenant_of(request)
    body = await read_json(request, gateway.config.http_read_timeout_s)
    for name in body:
        if name not in ("input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after"):
            raise invalid(f"unknown field {shown(name)}", name[:64])
    if body.get("endpoint") not in ENDPOINTS:
        raise invalid(f"endpoint must be one of {', '.join(ENDPOINTS)}", "endpoint")
    if body.get("completion_window") != "24h":
        raise invalid('completion_window must be "24h"', "completion_window")
    metadata = body.get("metadata")
    RequestBody.from_mapping({"prompt": "x", "metadata": metadata})  # the queue's rules for metadata
    file_id = body.get("input_file_id")
    if not isinstance(file_id, str) or await Files(gateway, tenant).meta(file_id) is None:
        raise invalid(f"no file {shown(file_id)}", "input_file_id")
    now = int(time.time())
    batch = {
        "id": f"batch_{uuid7_hex()}",
        "object": "batch",
        "endpoint": body["endpoint"],
        "errors": None,
        "input_file_id": file_id,
        "completion_window": "24h",
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + WINDOW_S,
        **dict.fromkeys(DATES),
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": metadata,
    }
    await Batches(gateway).create(tenant, batch)
    gateway.batch_wanted.set()
    return json_response(batch)


async def list_batches(request: web.Request) -> web.Response:
    return json_response(page(request, await Batches(gateway_of(request)).listed(tenant_of(request))))


async def show(request: web.Request) -> web.Response:
    return json_response(await _found(request))


async def cancel(request: web.Request) -> web.Response:
    """`POST /v1/batches/{id}/cancel`: what is done so far will be in its files."""
    gateway, batch = gateway_of(request), await _found(request)
    if batch["status"] not in FINAL:
        await Batches(gateway).cancel(batch)
        gateway.batch_wanted.set()
    return json_response(await _found(request))


async def _found(request: web.Request) -> dict[str, Any]:
    loaded = await Batches(gateway_of(request)).load(request.match_info["id"])
    if loaded is None or loaded[0] != tenant_of(request):
        raise not_found("batch", request.match_info["id"][:128])
    return loaded[1]
