"""Clients that close their sending side and go on reading, as `nc -N` does.

The end of what a client sends looks the same whether it has left or only has no more to say. Who has left must not
keep an engine busy, and an answer of one piece would find that out at its end only. So answers that are at hand are
sent, and whoever waits for a generation has to keep the connection whole: a client that keeps half of it is told so,
in place of an empty answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

import structlog
from aiohttp import StreamReader, web

from pagemill.adapters.http.errors import ApiError
from pagemill.adapters.http.gateway import gateway_of


class HalfCloseProtocol(web.RequestHandler):
    """A connection that survives the end of what its client sends, until what came whole is answered."""

    __slots__ = ("_body", "has_ended", "when_ended")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.has_ended = False
        self.when_ended: Callable[[], None] | None = None
        self._body: StreamReader | None = None  # of the request that is being answered
        make_request = self._request_factory
        assert make_request is not None

        def remember(message: Any, body: StreamReader, *rest: Any) -> web.BaseRequest:
            self._body = body
            return make_request(message, body, *rest)

        self._request_factory = remember

    def eof_received(self) -> bool | None:  # type: ignore[override]  # asyncio reads the answer, aiohttp gives none
        if not self._came_whole():
            return None
        self.has_ended = True
        if self.when_ended is not None:
            self.when_ended()
        return True

    def _came_whole(self) -> bool:
        """Whether there is something to answer, and nothing missing from it."""
        if self._messages:
            return bool(self._messages[-1][1].is_eof())
        is_idle = self._waiter is not None
        return not is_idle and self._body is not None and self._body.is_eof()

    async def finish_response(
        self, request: Any, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if self.has_ended and not self._messages:
            resp.force_close()
        return await super().finish_response(request, resp, start_time)


@contextlib.asynccontextmanager
async def whole_connection(request: web.Request) -> AsyncGenerator[None, None]:
    """Around what is done for a client that waits for it. Raises `ApiError` 499 once the client sends no more."""
    protocol, task = request.protocol, asyncio.current_task()
    assert isinstance(protocol, HalfCloseProtocol) and task is not None
    if protocol.has_ended:
        raise _left(request)
    ended = False

    def end() -> None:
        nonlocal ended
        ended = True
        task.cancel()

    protocol.when_ended = end
    try:
        yield
    except asyncio.CancelledError:
        if not ended or task.uncancel() > 0:
            raise
        raise _left(request) from None
    finally:
        protocol.when_ended = None


def _left(request: web.Request) -> ApiError:
    gateway_of(request).metrics.disconnects.inc()
    structlog.contextvars.bind_contextvars(left=True)
    message = "the connection was closed on the client's side; keep it open until the answer is there"
    return ApiError(499, message, code="connection_half_closed")
