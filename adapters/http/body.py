"""Reading a request's JSON body, with an answer for everything that can be wrong with it.

The content type has to say JSON: a web page of anywhere may send other types to any address without asking first.
Unpacking (gzip, deflate) is aiohttp's, and the limit counts what comes out of it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from pagemill.adapters.http.errors import ApiError
from pagemill.ingest.schema import MAX_DEPTH

_ENCODINGS = ("", "identity", "gzip", "x-gzip", "deflate")
_CHARSETS = ("utf-8", "utf8", "us-ascii", "ascii")


async def read_json(request: web.Request, timeout_s: float) -> dict[str, Any]:
    """The body as an object. Raises `ApiError`: 400, 408, 413 or 415."""
    _check_type(request)
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in _ENCODINGS:
        raise bad_encoding(repr(encoding[:64]))
    data = await read_bytes(request, timeout_s)
    if not data:
        raise ApiError(400, "the body is empty; a JSON object is needed", param="body", code="invalid_json")
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error}", param="body", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", param="body", code="invalid_json")
    _check_depth(value)
    return value


async def read_bytes(request: web.Request, timeout_s: float) -> bytes:
    """The body, unpacked. Raises `ApiError`: 400, 408 or 413."""
    limit = request.client_max_size
    if request.content_length is not None and request.content_length > limit:
        raise _too_large(limit)
    try:
        async with asyncio.timeout(timeout_s):
            return await request.read()
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {timeout_s:g} s", code="request_timeout", headers=_CLOSE
        ) from None
    except web.HTTPRequestEntityTooLarge:
        raise _too_large(limit) from None
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise ApiError(
            400, f"the body cannot be read: {_first_line(error)}", param="body", code="invalid_body", headers=_CLOSE
        ) from None


def as_utf8(text: str) -> str:
    """A header's text with replacements for the bytes that are no UTF-8. aiohttp keeps these as lone surrogates, which
    neither JSON nor Redis takes."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def bad_encoding(given: str) -> ApiError:
    message = f"a body may be packed by gzip or deflate, or not at all; got {given}"
    return ApiError(415, message, param="Content-Encoding", code="unsupported_encoding", headers=_CLOSE)


_CLOSE = {"Connection": "close"}  # what is left of the body is not read


def _first_line(error: Exception) -> str:
    cause = error.__cause__ or error.__context__ or error
    return (str(getattr(cause, "message", "") or cause).strip().splitlines() or [type(cause).__name__])[0]


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body has more than {limit} bytes", param="body", code="too_large", headers=_CLOSE)


def _check_type(request: web.Request) -> None:
    kind = request.content_type.lower()
    given = request.headers.get("Content-Type")
    if given is None or not (kind == "application/json" or kind.endswith("+json")):
        shown = "none" if given is None else repr(given[:64])
        raise ApiError(415, f"the content type must be application/json, got {shown}", code="unsupported_media_type")
    charset = request.charset
    if charset is not None and charset.lower() not in _CHARSETS:
        raise ApiError(415, f"the body must be UTF-8, got {charset[:64]!r}", code="unsupported_media_type")


def _check_depth(value: Any) -> None:
    """As the queue does, so that nothing deep is walked through before it is refused there."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        nested = (item.values() if isinstance(item, dict) else item for item in level)
        level = [child for items in nested for child in items if isinstance(child, dict | list) and child]
        if not level:
            return
    raise ApiError(400, f"the body is nested deeper than {MAX_DEPTH} levels", param="body", code="invalid_json")
