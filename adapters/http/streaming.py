"""Streaming a generation: events in, frames out, and a proper end of whatever kind.

The head of the answer is not sent before the first event, within bounds, so that a refusal has its own status. Once it
is sent an error is a frame, and what marks a good end does not follow it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TypeVar

import structlog
from aiohttp import web

from pagemill.adapters.http.errors import RETRY_MS, ApiError, as_api_error, internal_error
from pagemill.adapters.http.gateway import Gateway
from pagemill.adapters.http.half_close import whole_connection
from pagemill.adapters.http.sse import ClientGoneError, SseStream

_log = structlog.get_logger(__name__)
_Item = TypeVar("_Item")


async def patiently(sse: SseStream, items: AsyncGenerator[_Item, None], wait_s: float) -> AsyncGenerator[_Item, None]:
    """The items; if the first takes longer than `wait_s`, the head of the answer is sent meanwhile. Closes `items`."""
    async with contextlib.aclosing(items):
        first = asyncio.ensure_future(anext(items, None))
        try:
            await asyncio.wait({first}, timeout=wait_s)
            if not first.done():
                await sse.open()
            item = await first
        finally:
            if not first.done():
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
        if item is not None:
            yield item
            async for item in items:
                yield item


def leaving_error() -> ApiError:
    return ApiError(
        503, "the gateway is stopping", kind="server_error", code="gateway_stopping", retry_after_ms=RETRY_MS
    )


@contextlib.asynccontextmanager
async def ending_with_errors(gateway: Gateway, sse: SseStream) -> AsyncGenerator[None, None]:
    """Around the writing of a stream: an error becomes an answer while nothing was sent, and a frame afterwards."""
    try:
        async with whole_connection(sse.request):
            yield
    except ClientGoneError:
        if sse.was_cut:
            gateway.metrics.slow_readers.inc()
            _log.info("client cut: it reads nothing")
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if not gateway.is_cutting or task is None:
            raise
        task.uncancel()
        await _tell(sse, leaving_error())
    except Exception as error:
        known = as_api_error(error, sse.request.path)
        if known is None:
            _log.exception("a stream failed")
            known = internal_error()
        await _tell(sse, known)


async def _tell(sse: SseStream, error: ApiError) -> None:
    if not sse.is_open:
        raise error
    with contextlib.suppress(ClientGoneError):
        await sse.send(error.body())


def response_of(sse: SseStream) -> web.StreamResponse:
    """What the handler returns. An answer that was never begun, since its client has gone, is an empty one."""
    return sse.response if sse.is_open else web.Response(status=499)
