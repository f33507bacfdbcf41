"""A stream of server-sent events to one client, which may be slow or gone.

Frames are written one by one, each within `write_timeout_s`; aiohttp lets a writer go on while its buffer has room, so
a client that reads nothing is noticed when the buffers are full, and then cut. During silence a comment is sent, so
that proxies and clients do not take the connection for dead. It has no blank line after it: several clients of OpenAI's
API take an empty event for an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Any, Self

import orjson
from aiohttp import web

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache, no-transform",
    "X-Accel-Buffering": "no",
}
DONE = b"data: [DONE]\n\n"
PING = b": ping\n"


class ClientGoneError(Exception):
    """The client has closed the connection, or reads nothing any more."""


class SseStream:
    """An answer of events, begun with `open`. As a context manager it ends the answer properly where nothing failed.

    The connection of a client that cannot be written to is cut, which ends the request's handler too.
    """

    def __init__(self, request: web.Request, *, write_timeout_s: float, ping_s: float, headers: dict[str, str]) -> None:
        self._request = request
        self._response = web.StreamResponse(headers={**HEADERS, **headers})
        self._write_timeout_s = write_timeout_s
        self._ping_s = ping_s
        self._written_at = 0.0
        self._pinging: asyncio.Task[None] | None = None
        self.was_cut = False

    @property
    def request(self) -> web.Request:
        return self._request

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    @property
    def is_open(self) -> bool:
        return self._response.prepared

    async def open(self) -> None:
        """Send the head of the answer, unless that is done."""
        if not self.is_open:
            await self._within(self._response.prepare(self._request))
            self._written_at = asyncio.get_running_loop().time()
            self._pinging = asyncio.create_task(self._ping())

    async def send(self, value: Any, seq: int | None = None) -> None:
        """Send an event with a JSON value, numbered where `seq` is given."""
        head = b"" if seq is None else b"id: %d\n" % seq
        await self.write(b"%sdata: %s\n\n" % (head, orjson.dumps(value)))

    async def event(self, kind: str, value: Any) -> None:
        """Send an event of a named kind."""
        await self.write(b"event: %s\ndata: %s\n\n" % (kind.encode(), orjson.dumps(value)))

    async def write(self, data: bytes) -> None:
        """Send bytes that are whole frames. Raises `ClientGoneError`."""
        await self.open()
        self._written_at = asyncio.get_running_loop().time()
        await self._within(self._response.write(data))

    async def _within(self, writing: Any) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await writing
        except TimeoutError:
            self.was_cut = True
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ClientGoneError("the client reads nothing") from None
        except ConnectionError as error:
            raise ClientGoneError("the client has closed the connection") from error

    async def _ping(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                await asyncio.sleep(max(0.01, self._written_at + self._ping_s - loop.time()))
                if loop.time() >= self._written_at + self._ping_s:
                    await self.write(PING)
        except ClientGoneError:
            return  # the handler learns it from its own next write, or is cancelled with the connection

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pinging is not None:
            self._pinging.cancel()
            await asyncio.gather(self._pinging, return_exceptions=True)
        if error is None and self.is_open:
            # All was told; a client that has closed before it saw the end lacks nothing.
            with contextlib.suppress(ClientGoneError):
                await self._within(self._response.write_eof())
