"""Errors as HTTP answers: OpenAI's body and status codes, and what a client may do about it.

Clients of OpenAI repeat 408, 409, 429 and every 5xx twice by themselves, unless `x-should-retry` says otherwise. Where
work was done already a repetition would do it again, so only what was refused before any work asks for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import web
from redis.exceptions import RedisError

from pagemill.adapters.http.field_names import in_words_of
from pagemill.engine.errors import RequestError
from pagemill.ingest.async_client import QueueUnavailableError
from pagemill.ingest.redis import is_unavailable

RETRY_MS = 1000  # where nobody can say better

# Protocol code -> status, type, OpenAI's code where it has one.
_STATUS: Mapping[str, tuple[int, str, str | None]] = {
    "invalid_request": (400, "invalid_request_error", None),
    "unsupported_model": (404, "invalid_request_error", "model_not_found"),
    "prompt_too_long": (400, "invalid_request_error", "context_length_exceeded"),
    "never_fits": (400, "invalid_request_error", None),
    "too_large": (413, "invalid_request_error", None),
    "duplicate_id": (409, "conflict_error", None),
    "idempotency_conflict": (409, "conflict_error", None),
    "cancelled": (409, "conflict_error", None),
    "queue_full": (503, "server_error", None),
    "no_engine": (503, "server_error", None),
    "deadline_unreachable": (503, "server_error", None),
    "deadline_exceeded": (504, "server_error", None),
    "poison": (500, "server_error", None),
    "request_lost": (500, "server_error", None),
    "engine_error": (500, "server_error", None),
}
_TENANT_CAP = "max_tenant_"


class ApiError(Exception):
    """An answer that says what is wrong. `retry_after_ms`: how long to wait before the same request may succeed;
    without it a repetition does not help."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        kind: str = "invalid_request_error",
        retry_after_ms: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.kind = kind
        self.retry_after_ms = retry_after_ms
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """OpenAI's error object, which an answer and an error frame of a stream both hold."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> web.Response:
        headers = {"x-should-retry": "false" if self.retry_after_ms is None else "true", **self.headers}
        if self.retry_after_ms is not None:
            headers["retry-after-ms"] = str(self.retry_after_ms)
            headers["Retry-After"] = str(-(-self.retry_after_ms // 1000))
        return web.Response(
            status=self.status, body=orjson.dumps(self.body()), content_type="application/json", headers=headers
        )


def not_found(what: str, name: str) -> ApiError:
    """There is no such thing, or it is another tenant's: the two must look alike."""
    return ApiError(404, f"no {what} {name!r}", code="not_found")


def internal_error() -> ApiError:
    """Whatever happened stands in the log, under the request's id."""
    return ApiError(500, "the gateway failed on this request", kind="server_error", code="internal_error")


def as_api_error(error: Exception, path: str) -> ApiError | None:
    """The answer on `path` to what the queue's client raises; None for what nobody expected."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueUnavailableError) or (isinstance(error, RedisError | OSError) and is_unavailable(error)):
        return ApiError(
            503,
            "the queue cannot be reached now",
            kind="server_error",
            code="queue_unavailable",
            retry_after_ms=RETRY_MS,
        )
    if not isinstance(error, RequestError):
        return None
    status, kind, code = _STATUS.get(error.code, (500, "server_error", None))
    if error.code == "queue_full" and _TENANT_CAP in error.message:
        status, kind, code = 429, "rate_limit_error", "rate_limit_exceeded"
    param, message = error.param, error.message
    if param is not None:
        param, message = in_words_of(path, param, message)
    retry_after_ms = error.retry_after_ms
    if retry_after_ms is None and status in (429, 503):
        retry_after_ms = RETRY_MS
    return ApiError(
        status,
        message,
        code=code or error.code,
        param=param,
        kind=kind,
        retry_after_ms=retry_after_ms if status in (429, 503) else None,
    )


def http_error(status: int, reason: str, headers: Mapping[str, str] | None = None) -> ApiError:
    """An error of the HTTP layer itself: no such path or method, a head that cannot be read."""
    codes = {404: "unknown_url", 405: "method_not_allowed", 408: "request_timeout", 413: "too_large"}
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return ApiError(status, reason, code=codes.get(status), kind=kind, headers=headers)
