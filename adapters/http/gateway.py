"""What all handlers share: settings, keys, queues, limits, figures, and the work that outlives a request."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog
from aiohttp import web

from pagemill.adapters.http.auth import ApiKeys
from pagemill.adapters.http.config import GatewayConfig
from pagemill.adapters.http.limits import TenantLimits
from pagemill.adapters.http.metrics import GatewayMetrics
from pagemill.adapters.http.queues import Queues
from pagemill.adapters.http.sse import SseStream
from pagemill.ingest.config import QueueConfig

_log = structlog.get_logger(__name__)


class Gateway:
    """The state of one gateway. Make it where the event loop runs.

    `is_leaving`: told to stop, so readiness says no. `is_cutting`: requests that are still open are ended now, by
    cancelling their tasks; their clients are told. `batch_wanted`: a batch was made or changed here.
    """

    def __init__(self, config: GatewayConfig, queue: QueueConfig) -> None:
        self.config = config
        self.keys = ApiKeys.of(config)
        self.queues = Queues(config, queue)
        self.limits = TenantLimits(
            config.http_tenant_requests_per_minute,
            config.http_tenant_requests,
            self.queues.allowances,
            self.in_background,
        )
        self.metrics = GatewayMetrics()
        self.is_leaving = False
        self.is_cutting = False
        self.batch_wanted = asyncio.Event()
        self._open: set[asyncio.Task[Any]] = set()
        self._emptied = asyncio.Event()
        self._background: set[asyncio.Task[Any]] = set()

    def enter(self) -> None:
        """The running task answers a request; it is waited for on leaving."""
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        self.metrics.open.inc()

    def leave(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.discard(task)
        self.metrics.open.dec()
        if not self._open:
            self._emptied.set()

    def in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do something that must be done although the request that wants it may be cancelled."""
        task = asyncio.get_running_loop().create_task(self._logged(work))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _logged(self, work: Coroutine[Any, Any, Any]) -> None:
        try:
            await work
        except Exception as error:
            _log.warning("work after a request failed", reason=str(error) or type(error).__name__)

    def sse(self, request: web.Request, headers: dict[str, str] | None = None) -> SseStream:
        return SseStream(
            request,
            write_timeout_s=self.config.http_write_timeout_s,
            ping_s=self.config.http_ping_s,
            headers=headers or {},
        )

    async def drain(self, timeout_s: float) -> None:
        """Let open requests end, for so long; then tell the rest and end them."""
        self.is_leaving = True
        self._emptied.clear()
        if self._open:
            _log.info("waiting for open requests", open=len(self._open))
        try:
            async with asyncio.timeout(timeout_s):
                while self._open:
                    self._emptied.clear()
                    await self._emptied.wait()
        except TimeoutError:
            self.cut()

    def cut(self) -> None:
        """End open requests now; their clients are told."""
        self.is_cutting = True
        for task in set(self._open):
            task.cancel()

    async def aclose(self) -> None:
        """Finish what is left to do and close the connections to Redis."""
        while self._background:
            await asyncio.wait(set(self._background), timeout=10)
        await self.queues.aclose()


GATEWAY = web.AppKey("gateway", Gateway)
TENANT = web.RequestKey("tenant", str)
REQUEST_ID = web.RequestKey("request_id", str)


def gateway_of(request: web.Request) -> Gateway:
    return request.app[GATEWAY]


def tenant_of(request: web.Request) -> str:
    """The tenant that the middleware has found out."""
    return request[TENANT]
