"""OpenAI's files, for batches: uploaded once, read by any gateway, gone after a while.

A file is a document in pieces of at most 1 MiB, written while it arrives, so that a gateway never holds a whole one.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterable
from typing import Any

import orjson
from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from pagemill.adapters.http.body import as_utf8
from pagemill.adapters.http.errors import ApiError, not_found
from pagemill.adapters.http.gateway import Gateway, gateway_of, tenant_of
from pagemill.adapters.http.openai_routes import json_response
from pagemill.adapters.http.sse import ClientGoneError
from pagemill.engine.errors import invalid
from pagemill.ingest.keys import is_request_id, uuid7_hex

PIECE = 1 << 20  # bytes
MAX_NAME = 256  # characters
PURPOSES = ("batch", "user_data")


class LineTooLongError(Exception):
    """A line has more than `limit` bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"a line has more than {limit} bytes")


class Files:
    """The files of one tenant."""

    def __init__(self, gateway: Gateway, tenant: str) -> None:
        self._shelf = gateway.queues.shelf
        self._tenant = tenant
        self._ttl_s = gateway.config.http_file_ttl_s
        self._longest = gateway.config.http_max_body_bytes
        self._index = f"files:{tenant}"

    async def create(self, name: str, purpose: str, data: AsyncIterable[bytes]) -> dict[str, Any]:
        """Write a file as it comes. Whatever ends the data early leaves nothing behind."""
        file_id = f"file-{uuid7_hex()}"
        size, pieces, buffer = 0, 0, bytearray()
        try:
            async for chunk in data:
                size += len(chunk)
                buffer += chunk
                while len(buffer) >= PIECE:
                    await self._write(file_id, {str(pieces): bytes(buffer[:PIECE])})
                    del buffer[:PIECE]
                    pieces += 1
            if buffer:
                await self._write(file_id, {str(pieces): bytes(buffer)})
                pieces += 1
            now = int(time.time())
            shown = {"id": file_id, "object": "file", "bytes": size, "created_at": now, "filename": name}
            shown |= {"purpose": purpose, "status": "processed", "expires_at": now + int(self._ttl_s)}
            kept = {"shown": shown, "tenant": self._tenant, "pieces": pieces}
            await self._write(file_id, {"meta": orjson.dumps(kept)})
        except BaseException:
            with contextlib.suppress(Exception):
                await asyncio.shield(self._shelf.delete(f"file:{file_id}"))
            raise
        await self._shelf.list_in(self._index, file_id, score=time.time(), ttl_s=self._ttl_s)
        return shown

    async def meta(self, file_id: str) -> dict[str, Any] | None:
        """What is known of a file, None where this tenant has none of that name."""
        if not is_request_id(file_id):
            return None
        (found,) = await self._shelf.read(f"file:{file_id}", "meta")
        meta: dict[str, Any] | None = None if found is None else orjson.loads(found)
        return meta if meta is not None and meta["tenant"] == self._tenant else None

    async def pieces(self, file_id: str, count: int) -> AsyncGenerator[bytes, None]:
        """The content of a file."""
        for number in range(count):
            (piece,) = await self._shelf.read(f"file:{file_id}", str(number))
            if piece is None:
                raise not_found("file", file_id)
            yield piece

    async def lines(self, file_id: str, count: int) -> AsyncGenerator[bytes, None]:
        """The lines of a file, without their ends, without empty ones at the end, and without the mark that some
        editors put before UTF-8. Raises `LineTooLongError` rather than hold a line that no request may have."""
        rest = None
        async for piece in self.pieces(file_id, count):
            *whole, rest = (piece.removeprefix(codecs.BOM_UTF8) if rest is None else rest + piece).split(b"\n")
            if len(rest) > self._longest:
                raise LineTooLongError(self._longest)
            for line in whole:
                yield line
        if rest is not None and rest.strip():
            yield rest

    async def listed(self) -> list[dict[str, Any]]:
        """All files, the newest first. Forgets those that have expired."""
        found = []
        for file_id in reversed(await self._shelf.listed(self._index)):
            meta = await self.meta(file_id)
            if meta is None:
                await self._shelf.unlist(self._index, file_id)
            else:
                found.append(meta["shown"])
        return found

    async def delete(self, file_id: str) -> None:
        await self._shelf.unlist(self._index, file_id)
        await self._shelf.delete(f"file:{file_id}")

    async def _write(self, file_id: str, fields: dict[str, bytes]) -> None:
        await self._shelf.write(f"file:{file_id}", fields, ttl_s=self._ttl_s)


async def upload(request: web.Request) -> web.Response:
    """`POST /v1/files`: a form with `purpose` and `file`, in this order or the other."""
    gateway = gateway_of(request)
    if request.content_type != "multipart/form-data":
        raise ApiError(415, "a file is sent as multipart/form-data", code="unsupported_media_type")
    purpose, shown = None, None
    files = Files(gateway, tenant_of(request))
    try:
        async for part in _parts(request):
            if part.name == "purpose":
                purpose = (await _small(part)).decode("utf-8", "replace")
            elif part.name == "file" and shown is None:
                name = as_utf8(part.filename or "upload")[:MAX_NAME]
                shown = await files.create(name, purpose or PURPOSES[0], _arriving(gateway, part))
            elif part.name in ("expires_after[anchor]", "expires_after[seconds]"):
                await _small(part)
            else:
                unknown = as_utf8(str(part.name))[:64]
                raise invalid(f"unknown field {unknown!r}", unknown)
        if shown is None:
            raise invalid("file is needed", "file")
        if purpose not in PURPOSES:
            raise invalid(f"purpose must be one of {', '.join(PURPOSES)}", "purpose")
    except BaseException as error:
        if shown is not None:
            gateway.in_background(files.delete(shown["id"]))
        if isinstance(error, ValueError | HttpProcessingError | web.RequestPayloadError):
            raise ApiError(400, "the form cannot be read", param="body", code="invalid_body") from error
        raise
    return json_response({**shown, "purpose": purpose})


async def _parts(request: web.Request) -> AsyncGenerator[BodyPartReader, None]:
    """The fields of the form."""
    form = await request.multipart()
    while True:
        try:
            part = await form.next()
        except RuntimeError as error:  # what aiohttp says of a `_charset_` that is too long to be one
            raise ValueError(str(error)) from error
        if part is None:
            return
        if not isinstance(part, BodyPartReader):
            raise invalid("the form holds a form", "file")
        yield part


async def _arriving(gateway: Gateway, part: BodyPartReader) -> AsyncGenerator[bytes, None]:
    limit, size = gateway.config.http_max_file_bytes, 0
    while True:
        try:
            async with asyncio.timeout(gateway.config.http_read_timeout_s):
                chunk = await part.read_chunk(256 << 10)
        except TimeoutError:
            raise ApiError(408, "the file did not arrive", code="request_timeout") from None
        if not chunk:
            return
        size += len(chunk)
        if size > limit:
            raise ApiError(413, f"a file may have at most {limit} bytes", param="file", code="too_large")
        yield bytes(chunk)


async def _small(part: BodyPartReader) -> bytes:
    data = bytes(await part.read_chunk(1024))
    if await part.read_chunk(1024):
        raise invalid(f"{part.name} is too long", str(part.name)[:64])
    return data


async def _found(request: web.Request) -> tuple[Files, dict[str, Any]]:
    files = Files(gateway_of(request), tenant_of(request))
    meta = await files.meta(request.match_info["id"])
    if meta is None:
        raise not_found("file", request.match_info["id"][:128])
    return files, meta


async def list_files(request: web.Request) -> web.Response:
    found = await Files(gateway_of(request), tenant_of(request)).listed()
    purpose = request.query.get("purpose")
    return json_response(page(request, [item for item in found if purpose in (None, item["purpose"])]))


async def show(request: web.Request) -> web.Response:
    _, meta = await _found(request)
    return json_response(meta["shown"])


async def content(request: web.Request) -> web.StreamResponse:
    files, meta = await _found(request)
    answer = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
    answer.content_length = meta["shown"]["bytes"]
    await answer.prepare(request)
    timeout_s = gateway_of(request).config.http_write_timeout_s
    async for piece in files.pieces(meta["shown"]["id"], meta["pieces"]):
        try:
            async with asyncio.timeout(timeout_s):
                await answer.write(piece)
        except (TimeoutError, ConnectionError) as error:
            if request.transport is not None:
                request.transport.abort()
            raise ClientGoneError("the client reads nothing") from error
    return answer


async def delete(request: web.Request) -> web.Response:
    files, meta = await _found(request)
    await files.delete(meta["shown"]["id"])
    return json_response({"id": meta["shown"]["id"], "object": "file", "deleted": True})


def page(request: web.Request, items: list[dict[str, Any]]) -> dict[str, Any]:
    """OpenAI's page of a list: at most `limit` items, from the one behind `after` on."""
    limit, after = request.query.get("limit", "20"), request.query.get("after")
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= 10_000:
        raise invalid("limit must be an integer in [1, 10000]", "limit")
    if after is not None:
        names = [item["id"] for item in items]
        if after not in names:
            raise invalid(f"after names nothing in the list: {after[:64]!r}", "after")
        items = items[names.index(after) + 1 :]
    shown = items[: int(limit)]
    ends = {"first_id": shown[0]["id"] if shown else None, "last_id": shown[-1]["id"] if shown else None}
    return {"object": "list", "data": shown, **ends, "has_more": len(items) > len(shown)}
