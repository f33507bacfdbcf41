"""The requests in the queue that one HTTP request makes: put there together, followed together, and not left behind.

Whoever closes the connection does not want the answer any more, so what is unfinished when the HTTP request ends is
cancelled; where the gateway itself dies, the queue's watch lease does it (`on_disconnect`). Not so with an idempotency
key: its client will ask again and wants to find the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from pagemill.adapters.http.body import as_utf8
from pagemill.adapters.http.gateway import Gateway
from pagemill.engine.errors import RequestError, invalid
from pagemill.ingest.async_client import AsyncClient, AsyncHandle
from pagemill.ingest.results import Result
from pagemill.ingest.schema import check_and_encode
from pagemill.ingest.subscription import Event

LATE_S = 10.0  # after the deadline; an engine ends a request at it, and this is for the case that none lives
PENDING = 64  # events read ahead of several requests together

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class Generation:
    """Requests in one queue. Entering submits all of them or none; leaving cancels those that have not ended.

    `bodies`: of the queue's protocol. `key`: the client's idempotency key. `lasting`: they are not cancelled when their
    HTTP request ends. Raises what `AsyncClient.submit` does.
    """

    def __init__(
        self,
        gateway: Gateway,
        client: AsyncClient,
        bodies: Sequence[dict[str, Any]],
        *,
        key: str | None = None,
        traceparent: str | None = None,
        lasting: bool = False,
    ) -> None:
        self._gateway = gateway
        self._client = client
        self._lasting = lasting or key is not None
        unwatched = "continue" if self._lasting else "cancel"
        self._bodies = [{**body, "on_disconnect": unwatched} for body in bodies]
        self._key = key
        self._traceparent = traceparent
        self._submitted: list[str] = []
        self._ended: set[str] = set()
        self.handles: list[AsyncHandle] = []

    @property
    def id(self) -> str:
        """The first request's id, which stands for all."""
        return self.handles[0].request_id

    @property
    def is_replayed(self) -> bool:
        """Whether the idempotency key was known, and these are earlier requests."""
        return any(handle.replayed for handle in self.handles)

    @property
    def timeout_s(self) -> float:
        """How long the requests may take at most."""
        ttl_ms = max(body.get("ttl_ms") or self._client.config.default_ttl_ms for body in self._bodies)
        return float(ttl_ms) / 1000 + LATE_S

    async def __aenter__(self) -> Self:
        if len(self._bodies) > 1:
            # A mistake in the last one must not let the others begin.
            for body in self._bodies:
                check_and_encode(body, self._client.config.max_body_bytes)
        try:
            for number, body in enumerate(self._bodies):
                key = self._key if self._key is None or len(self._bodies) == 1 else f"{self._key}/{number}"
                request_id = self._client.keys.new_id(key)
                self._submitted.append(request_id)
                handle = await self._client.submit(
                    **body, id=request_id, idempotency_key=key, traceparent=self._traceparent
                )
                self._submitted[-1] = handle.request_id
                self.handles.append(handle)
        except BaseException as error:
            if isinstance(error, RequestError):
                self._submitted.pop()  # refused: nothing of it is left
            self._cancel_unfinished()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._cancel_unfinished()

    def _cancel_unfinished(self) -> None:
        if not self._lasting:
            for request_id in self._submitted:
                if request_id not in self._ended:
                    self._gateway.in_background(self._client.cancel(request_id))

    async def events(self) -> AsyncGenerator[tuple[int, Event], None]:
        """The events of all requests, each with its request's number."""
        if len(self.handles) == 1:
            async with contextlib.aclosing(self._events_of(0)) as events:
                async for event in events:
                    yield 0, event
            return
        pending: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue(PENDING)
        tasks = [asyncio.create_task(self._pump(number, pending)) for number in range(len(self.handles))]
        try:
            left = len(tasks)
            while left:
                number, item = await pending.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield number, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, number: int, pending: asyncio.Queue[tuple[int, Event | Exception | None]]) -> None:
        try:
            async with contextlib.aclosing(self._events_of(number)) as events:
                async for event in events:
                    await pending.put((number, event))
        except Exception as error:
            await pending.put((number, error))
        else:
            await pending.put((number, None))

    async def _events_of(self, number: int) -> AsyncGenerator[Event, None]:
        handle = self.handles[number]
        async with contextlib.aclosing(handle.events()) as events:
            async for event in events:
                if event["type"] == "done":
                    self._ended.add(handle.request_id)
                yield event

    async def results(self) -> list[Result]:
        """Wait for the end of all requests. Raises `RequestFailed` as soon as one of them does not complete."""
        async with contextlib.aclosing(self.events()) as events:
            async for number, event in events:
                if event["type"] == "done" and event["state"] != "completed":
                    await self.handles[number].result()
        return [await handle.result() for handle in self.handles]


def deadline_passed() -> RequestError:
    return RequestError("deadline_exceeded", "the request was not finished before its deadline")


def idempotency_key(request: web.Request, body: dict[str, Any]) -> str | None:
    """The key of the header, or of the body. Raises `RequestError` where it cannot be one."""
    given = body.pop("idempotency_key", None)
    header = request.headers.get("Idempotency-Key")
    key = header if header is not None else given
    if header is not None and given is not None and header != given:
        raise invalid("idempotency_key differs from the header Idempotency-Key", "idempotency_key")
    if key is not None and (not isinstance(key, str) or not 1 <= len(key) <= 480):
        raise invalid("an idempotency key must have 1 to 480 characters", "idempotency_key")
    if key is not None and as_utf8(key) != key:  # a header may hold any bytes
        raise invalid("an idempotency key must be UTF-8", "idempotency_key")
    return key


def traceparent(request: web.Request) -> str | None:
    """The caller's trace context, if it is one (W3C Trace Context); anything else is not passed on."""
    given = request.headers.get("traceparent", "")
    return given if _TRACEPARENT.fullmatch(given) else None
