"""What happens around every request: who asks, a name for it, one line in the log, figures, and errors as answers."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web

from pagemill.adapters.http.auth import DEFAULT_TENANT
from pagemill.adapters.http.errors import ApiError, as_api_error, http_error, internal_error
from pagemill.adapters.http.gateway import REQUEST_ID, TENANT, Gateway, gateway_of
from pagemill.adapters.http.playground import PATH as PLAYGROUND
from pagemill.adapters.http.streaming import leaving_error
from pagemill.ingest.keys import uuid7_hex

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN_PATHS = frozenset(
    ("/", "/dashboard.js", PLAYGROUND, f"{PLAYGROUND}/", "/playground.js", "/healthz", "/readyz", "/openapi.json")
)
QUIET_PATHS = frozenset(("/healthz", "/readyz", "/metrics", "/overview.json"))
CORS_METHODS = "GET, POST, DELETE, OPTIONS"
CORS_EXPOSED = "x-request-id, x-should-retry, retry-after-ms, Retry-After, Idempotent-Replayed, Location"
CORS_AGE_S = 600
SERVER_NAME = "pagemill"

_GOOD_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_log = structlog.get_logger(__name__)


@web.middleware
async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The outermost: whatever happens inside, there is an answer, a line and a count."""
    gateway = gateway_of(request)
    request_id = request[REQUEST_ID] = _request_id(request)
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(request_id=request_id)
    began, status = time.monotonic(), 499
    gateway.enter()
    try:
        response = await _answered(request, handler)
        status = response.status
        return response
    except asyncio.CancelledError:
        gateway.metrics.disconnects.inc()
        raise
    finally:
        gateway.leave()
        route, seconds = _route(request), time.monotonic() - began
        gateway.metrics.requests.labels(route, str(status)).inc()
        gateway.metrics.seconds.labels(route).observe(seconds)
        say = _log.debug if request.path in QUIET_PATHS else _log.info
        say("request", method=request.method, route=route, status=status, ms=round(seconds * 1000, 1))


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    gateway = gateway_of(request)
    try:
        if request.method == "OPTIONS":
            return preflight(gateway, request)
        _identify(gateway, request)
        return await handler(request)
    except web.HTTPException as error:
        return http_error(error.status, _reason(request, error), _kept_headers(error)).response()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if not gateway.is_cutting or task is None:
            raise
        task.uncancel()
        return leaving_error().response()
    except Exception as error:
        known = as_api_error(error, request.path)
        if known is None:
            _log.exception("a request failed")
            known = internal_error()
        return known.response()


def _identify(gateway: Gateway, request: web.Request) -> None:
    request[TENANT] = DEFAULT_TENANT
    if request.path not in OPEN_PATHS:
        request[TENANT] = gateway.keys.identify(request)
    structlog.contextvars.bind_contextvars(tenant=request[TENANT])


def _request_id(request: web.Request) -> str:
    given = request.headers.get("X-Request-Id", "")
    return given if _GOOD_ID.fullmatch(given) else f"req_{uuid7_hex()}"


def _route(request: web.Request) -> str:
    """The route's pattern: paths themselves would be as many labels as there are ids."""
    resource = request.match_info.route.resource
    return "unknown" if resource is None else resource.canonical.rstrip("/") or "/"


def _reason(request: web.Request, error: web.HTTPException) -> str:
    path = request.path[:128]
    if error.status == 404:
        hint = "" if path.startswith("/v1/") else "; the API's routes begin with /v1"
        if path.startswith("/v1/v1/"):
            hint = "; the client adds /v1 to a base URL that has it already"
        return f"no route {request.method} {path}{hint}"
    if isinstance(error, web.HTTPMethodNotAllowed):
        return f"{request.method} is not allowed on {path}; allowed: {', '.join(sorted(error.allowed_methods))}"
    return error.reason


def _kept_headers(error: web.HTTPException) -> dict[str, str]:
    return {name: error.headers[name] for name in ("Allow", "Location") if name in error.headers}


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Before the head of any answer is sent: the request's name, and what a browser of an allowed origin needs."""
    if REQUEST_ID in request:
        response.headers["x-request-id"] = request[REQUEST_ID]
    response.headers["Server"] = SERVER_NAME
    response.headers["X-Content-Type-Options"] = "nosniff"
    allowed = _allowed_origin(gateway_of(request), request)
    if allowed is not None:
        response.headers["Access-Control-Allow-Origin"] = allowed
        response.headers["Access-Control-Expose-Headers"] = CORS_EXPOSED
        response.headers["Vary"] = "Origin"


def _allowed_origin(gateway: Gateway, request: web.BaseRequest) -> str | None:
    origin = request.headers.get("Origin")
    if origin is None:
        return None
    if "*" in gateway.config.origins:
        return "*"
    return origin if origin in gateway.config.origins else None


def preflight(gateway: Gateway, request: web.Request) -> web.Response:
    """A browser's question before a request of another origin. Without leave of the settings it is 403."""
    if "Origin" in request.headers and _allowed_origin(gateway, request) is None:
        raise ApiError(403, "this origin is not among cors_origins", code="forbidden_origin")
    asked = request.headers.get("Access-Control-Request-Headers", "")
    headers = {"Access-Control-Allow-Methods": CORS_METHODS, "Access-Control-Max-Age": str(CORS_AGE_S)}
    if asked and len(asked) <= 1024:
        headers["Access-Control-Allow-Headers"] = asked
    return web.Response(status=204, headers={**headers, "Allow": CORS_METHODS})
